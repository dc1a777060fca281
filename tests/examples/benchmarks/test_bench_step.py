"""``hf-kvret bench step``: parts of a step, launches, and no waits in a decode step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from step_ops import counted_ops
from step_parts import (
    ATTENTION,
    CACHE,
    MERGE,
    NORMS,
    OTHER,
    SELECT,
    STORE,
    WEIGHTS,
    WINDOW,
    Parts,
    part_times,
    profile,
)
from transformers import DynamicCache

from hf_kvret.benchmark.filling import feed, prefill, random_tokens, serving
from hf_kvret.benchmark.opponents import choose_bench_caches
from hf_kvret.benchmark.shapes import load_shape, random_model
from hf_kvret.evaluation.results import Results
from hf_kvret_kernels._dispatch import interpreted, prefer

SMALL = "dense_below=0:recent=16:flush=16:sink=2:top_k=8"
# Methods whose decode steps ask nothing of the host, on stores whose rows a device reads.
METHODS = ("flat", "paris", "lrqk", "lrqk:factors=als", "ctkvr", "h2o")
STORES = ("device", "host", "resident", "higgs", "split:device_budget=20KB")
# The interpreter takes seconds for each.
QUICK = {(METHODS[0], store) for store in STORES[:3]} | {(METHODS[1], STORES[0])}
COMBINATIONS = [
    pytest.param(
        method,
        store,
        marks=() if (method, store) in QUICK else pytest.mark.slow,
    )
    for method in METHODS
    for store in STORES
]


def event(kind: str, name: str, start: float, length: float, **more: object) -> dict[str, object]:
    """A complete event of a Chrome trace."""
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, **more}


def part_range(name: str, start: float, length: float) -> dict[str, object]:
    return event("user_annotation", f"hf_kvret.part/{name}", start, length, pid=1, tid=1)


def launch(number: int, start: float, kind: str = "cuda_runtime") -> dict[str, object]:
    return event(kind, "launch", start, 1.0, pid=1, tid=1, args={"correlation": number})


def kernel(number: int, length: float, kind: str = "kernel") -> dict[str, object]:
    return event(kind, "k", 500.0, length, pid=0, tid=7, args={"correlation": number})


def test_kernels_belong_to_the_innermost_range_that_launched_them() -> None:
    times = part_times(
        [
            part_range(CACHE, 10, 100),
            part_range(SELECT, 20, 30),
            launch(1, 12),
            launch(2, 25, "cuda_driver"),
            launch(3, 60),
            launch(4, 200),
            kernel(1, 5),
            kernel(2, 7),
            kernel(3, 11, "gpu_memcpy"),
            kernel(4, 13, "gpu_memset"),
            # Launched before the trace began.
            kernel(9, 17),
            event("cpu_op", "aten::mm", 21, 2, pid=1, tid=1),
            {"ph": "i", "cat": "other", "name": "mark"},
        ]
    )
    found = {name: (round(1e6 * part.seconds), part.launches) for name, part in times.items()}
    assert found == {CACHE: (5 + 11, 2), SELECT: (7, 1), OTHER: (13 + 17, 2)}


def test_without_kernels_operations_count_without_those_inside_them() -> None:
    times = part_times(
        [
            part_range(WEIGHTS, 0, 50),
            event("cpu_op", "aten::linear", 5, 40, pid=1, tid=1),
            event("cpu_op", "aten::addmm", 10, 30, pid=1, tid=1),
            event("cpu_op", "aten::add", 60, 8, pid=1, tid=1),
            # Another thread, at the same time.
            event("cpu_op", "aten::mul", 10, 4, pid=1, tid=2),
            event("cpu_op", "profiler::_record_function_enter_new", 1, 3, pid=1, tid=1),
        ]
    )
    found = {name: (round(1e6 * part.seconds), part.launches) for name, part in times.items()}
    assert found == {WEIGHTS: (10 + 30, 2), OTHER: (8 + 4, 2)}


@torch.inference_mode()
def test_a_real_profile_finds_the_models_parts() -> None:
    model = random_model(load_shape("tiny").config, torch.float32, "cpu", seed=0)
    cache, parts = DynamicCache(config=model.config), Parts()
    feed(model, cache, random_tokens(model, 1, 32, 0), 0)
    token = random_tokens(model, 1, 1, 0)
    with parts.watching(model, cache):
        times = part_times(profile(lambda: feed(model, cache, token, 32), torch.device("cpu")))
    assert {WEIGHTS, NORMS, ATTENTION, OTHER} == set(times)
    assert all(part.seconds > 0 and part.launches > 0 for part in times.values())
    # Afterwards the model has its own forward methods again.
    assert not any("forward" in vars(module) for module in model.modules())


@torch.inference_mode()
def test_a_cache_without_an_index_has_parts_too() -> None:
    model = random_model(load_shape("tiny").config, torch.float32, "cpu", seed=0)
    choice = choose_bench_caches(
        [f"aqua:predictor=none:{SMALL.removesuffix(':top_k=8')}"], {}, "cpu"
    )
    chosen = next(iter(choice.values()))
    cache, parts = chosen.make(model.config, 128), Parts()
    with serving(model, cache):
        prefill(model, chosen, cache, random_tokens(model, 1, 96, 1))
        token = random_tokens(model, 1, 1, 0)
        with parts.watching(model, cache):
            times = part_times(profile(lambda: feed(model, cache, token, 96), torch.device("cpu")))
    assert times[STORE].seconds > 0


def counted_step(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Launches by part and waits of one decode step with Triton's kernels, between two flushes.

    Of one layer, for the interpreter is slow.
    """
    config = load_shape("tiny").with_layers(1)
    model = random_model(config, torch.float32, "cpu", seed=0)
    choice = choose_bench_caches([text], {}, "cpu")[text]
    cache, parts = choice.make(model.config, 128), Parts()
    with torch.inference_mode(), serving(model, cache):
        token = prefill(model, choice, cache, random_tokens(model, 1, 96, 1))[:, -1:].argmax(-1)
        # The first step finishes what the prompt left to do.
        for place in (96, 97):
            token = feed(model, cache, token, place).argmax(-1)
        with prefer("triton"), parts.watching(model, cache), counted_ops(lambda: parts.now) as ops:
            feed(model, cache, token, 98)
    return dict(ops.launches), dict(ops.waits)


@pytest.mark.skipif(not interpreted(), reason="counting needs Triton's interpreter")
@pytest.mark.parametrize(("method", "store"), COMBINATIONS)
def test_a_decode_step_never_waits_for_the_device(method: str, store: str) -> None:
    name, *options = method.split(":")
    launches, waits = counted_step(":".join([name, SMALL, *options, f"store={store}"]))
    assert waits == {}
    # Eight matrices: four of the attention, three of the MLP, the head.
    assert launches[WEIGHTS] == 8
    assert launches[SELECT] >= 1 and launches[STORE] >= 1
    # What the store left is merged by the launch that attends to the window.
    assert launches[WINDOW] == 1 and MERGE not in launches


def test_what_waits_is_counted_with_its_place() -> None:
    numbers = torch.arange(6.0)
    mask = numbers > 2

    def noisy() -> None:
        numbers[0].item()
        numbers[mask]
        numbers.nonzero()
        torch.tensor([1.0, 2.0])
        numbers.repeat_interleave(torch.full((6,), 2))

    with counted_ops(lambda: OTHER) as ops:
        noisy()
        # Known sizes, views and masks without an index wait for nothing.
        numbers.view(2, 3).masked_fill(mask.view(2, 3), 0.0)
        numbers.repeat_interleave(2)
    operations = sorted(place.partition(" at ")[0] for place in ops.waits)
    assert "repeat_interleave" in operations and "index" in operations
    assert {"_local_scalar_dense", "nonzero", "lift_fresh"} <= set(operations)
    assert sum(ops.waits.values()) == 5
    with counted_ops(lambda: OTHER) as ops:
        numbers.view(2, 3).masked_fill(mask.view(2, 3), 0.0)
        torch.empty(3).view(3, 1)
    assert not ops.waits and ops.launches == {OTHER: 1}


def test_the_command_tells_parts_launches_and_waits(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "s.json", tmp_path / "s.png"
    caches = f"dense,flat:{SMALL}"
    arguments = ["--context", "96", "--steps", "2", "--warmup", "1", "--caches", caches]
    arguments += ["--batch", "2", "--plot", str(picture), "--json", str(file)]
    assert bench("step", *arguments) == 0
    rows = {(cell["cache"], cell["batch"]): row for cell, row in Results.load(file)}
    assert len(rows) == 2
    dense, flat = rows["dense", 2], rows[f"flat:{SMALL}", 2]
    assert set(dense["parts"]) == {WEIGHTS, NORMS, ATTENTION, OTHER}
    assert set(flat["parts"]) == {*dense["parts"], WINDOW, SELECT, STORE, CACHE}
    for row in rows.values():
        assert row["waits"] == row["later_waits"] == 0 and row["later_kind"] == "eager"
        assert row["launches_a_layer"] == row["launches"] / 2 > 15
        busy = sum(part["seconds"] for part in row["parts"].values())
        assert row["busy_seconds"] == pytest.approx(busy) and row["seconds"] > 0
    assert "cpu" in flat["not_replayed"] and dense["not_replayed"] is None
    assert picture.stat().st_size > 1000
    assert "launches a layer" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_replayed_step_does_not_wait_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from step_ops import counted_waits

    from hf_kvret.benchmark.stepping import make_steps

    model = random_model(load_shape("tiny").config, torch.bfloat16, "cuda", seed=0)
    text = f"paris:{SMALL}"
    choice = choose_bench_caches([text], {"store": "device"}, "cuda")[text]
    cache = choice.make(model.config, 128)
    with torch.inference_mode(), serving(model, cache):
        token = prefill(model, choice, cache, random_tokens(model, 1, 96, 1))[:, -1:].argmax(-1)
        steps = make_steps(choice, model, cache, 96)
        for _ in range(4):
            token = steps.take(token)[0].argmax(-1)
        with counted_waits() as waits:
            _, taken = steps.take(token)
    assert taken.kind == "replay" and not waits
