"""``hf-kvret bench`` end to end on a CPU: rows, resuming, scaling, memory that runs out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import cache_utils

from hf_kvret.lab.bench import limits, memory
from hf_kvret.lab.bench.decode import Decode
from hf_kvret.lab.bench.memory import Memory
from hf_kvret.lab.bench.opponents import PreallocatedCache
from hf_kvret.lab.bench.shapes import load_shape
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.measurement import attempt
from hf_kvret.lab.report.results import Results

SMALL = "dense_below=0:recent=64:flush=64"
ALL = f"full,dense,static,flat:{SMALL},paris:{SMALL}:store=host"
HAS_FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")
QUICK = ["--context", "256", "--steps", "3", "--warmup", "1"]


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    """Rows by the values of their cells, joined by blanks."""
    return {
        " ".join(str(value) for value in cell.values()): row for cell, row in Results.load(file)
    }


def note_batches(monkeypatch: pytest.MonkeyPatch, batches: list[int]) -> None:
    """``batches`` grows by the batch size of every memory turn."""
    once = Memory.once

    def noting(self: Memory, turn: Any) -> Any:
        batches.append(turn.batch)
        return once(self, turn)

    monkeypatch.setattr(Memory, "once", noting)


def test_decode_measures_every_cache(bench: Callable[..., int], tmp_path: Path) -> None:
    file, picture, table = (tmp_path / name for name in ("d.json", "d.png", "d.md"))
    files = ["--json", str(file), "--plot", str(picture), "--table", str(table)]
    arguments = ["--caches", ALL, "--batch", "1,2", "--rounds", "2", "--fill", "random"]
    assert bench("decode", "--context", "512", *QUICK[2:], *arguments, *files) == 0
    rows = rows_of(file)
    assert len(rows) == 10
    for row in rows.values():
        assert row["timed"] == 6 and row["fill"] == "random" and "scaled" not in row
        low, high = row["seconds_quartiles"]
        assert 0 < low <= row["seconds"] <= high
        assert row["time_over_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"])
        assert row["full_bytes"] in (2 * 2 * 2 * 256 * 516, 2 * 2 * 2 * 2 * 256 * 516)
    assert rows["dense 512 2"]["check"].startswith("equal within")
    flat, paris = rows[f"flat:{SMALL} 512 1"], rows[f"paris:{SMALL}:store=host 512 1"]
    # 256 rows in two layers with two KV heads.
    assert flat["selected_rows"] == paris["selected_rows"] == 4 * 256
    assert paris["host_bytes"] > 0 and paris["floor_host_bytes"] == 4 * 256 * 512
    assert rows["full 512 2"]["tokens_per_second"] == pytest.approx(
        2 / rows["full 512 2"]["seconds"]
    )
    assert table.read_text().count("\n| ") == 1 + 10 and picture.stat().st_size > 1000


@pytest.mark.skipif(not HAS_FP8, reason="transformers before 5.23 has no fp8 cache")
@pytest.mark.parametrize("fill", ["prefill", "random"])
def test_quantized_opponents_are_measured(
    fill: str, bench: Callable[..., int], tmp_path: Path
) -> None:
    file = tmp_path / "d.json"
    arguments = ["--caches", "quantized:backend=fp8", "--rounds", "1", "--fill", fill]
    assert bench("decode", *QUICK, *arguments, "--json", str(file)) == 0
    row = rows_of(file)["quantized:backend=fp8 256 1"]
    assert row["check"].startswith("finite") and row["device_bytes"] < row["full_bytes"] // 2


def test_flushes_within_the_timed_steps_are_counted(
    bench: Callable[..., int], tmp_path: Path
) -> None:
    file = tmp_path / "d.json"
    caches = "flat:dense_below=0:recent=16:flush=4"
    arguments = ["--context", "128", "--steps", "12", "--warmup", "0", "--rounds", "1"]
    assert bench("decode", *arguments, "--caches", caches, "--json", str(file)) == 0
    row = next(iter(rows_of(file).values()))
    # In each of two layers steps 5 and 9 move four tokens.
    assert row["flushed_tokens"] == 2 * 2 * 4


def test_prefill_measures_the_first_token(bench: Callable[..., int], tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    arguments = ["--context", "256,512", "--caches", f"full,paris:{SMALL}", "--rounds", "2"]
    assert bench("prefill", *arguments, "--json", str(file)) == 0
    rows = rows_of(file)
    assert len(rows) == 4
    for row in rows.values():
        assert row["timed"] == 2 and row["fill"] == "prefill" and row["seconds"] > 0
    # Twice the tokens are twice the bytes of a cache that holds nothing else.
    assert rows["full 512 1"]["device_bytes"] == 2 * rows["full 256 1"]["device_bytes"]


def test_memory_says_what_fits(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.json"
    arguments = ["--caches", f"full,paris:{SMALL}:store=host", "--device-memory", "100MB"]
    assert bench("memory", *QUICK, *arguments, "--json", str(file)) == 0
    rows = rows_of(file)
    full = rows["full 256 1"]
    # Two layers, two KV heads, keys and values of 64 in fp32, 256 tokens and four steps.
    sequence = 2 * 2 * 2 * 256 * 260
    assert full["device_peak_bytes"] == full["device_bytes"] == sequence
    assert full["device_peak_is"] == "cache bytes"
    fit = rows["full 256 [1, 2] 100000000"]
    weights = full["weight_bytes"]
    assert fit["per_sequence_bytes"] == pytest.approx(sequence)
    assert fit["batch"] == (100_000_000 - weights) // sequence and fit["how"] == "computed"
    assert rows[f"paris:{SMALL}:store=host 256 [1, 2] 100000000"]["batch"] > fit["batch"]
    assert "largest batch" in capsys.readouterr().out


def test_fewer_layers_are_measured_and_scaled_apart(
    bench: Callable[..., int],
    six_layers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "d.json"
    part = ["--shape", str(six_layers), "--layers", "4"]
    assert bench("decode", *QUICK, *part, "--caches", "dense", "--json", str(file)) == 0
    row = rows_of(file)["dense 256 1"]
    scaled = row["scaled"]
    assert (row["layers"], row["of_layers"], scaled["from_layers"]) == (4, 6, [2, 4])
    # Bytes do lie on a line: a layer of the cache, a layer of weights.
    assert scaled["device_bytes"] == pytest.approx(row["device_bytes"] * 6 / 4)
    capsys.readouterr()
    whole = tmp_path / "whole.json"
    arguments = ["--shape", str(six_layers), "--caches", "dense", "--json", str(whole)]
    assert bench("decode", *QUICK, *arguments) == 0
    measured = rows_of(whole)["dense 256 1"]
    assert scaled["floor_device_bytes"] == pytest.approx(measured["floor_device_bytes"])
    assert "scaled" not in measured and "scaled" not in capsys.readouterr().out
    if scaled["seconds"] is not None:
        line = scaled["seconds_per_layer"] * 6 + scaled["seconds_rest"]
        assert scaled["seconds"] == pytest.approx(line)
    text = Decode.table(Results.load(file))
    assert "4 of 6 layers" in text and "scaled ms a step" in text


def test_memory_of_fewer_layers_is_scaled(
    bench: Callable[..., int], six_layers: Path, tmp_path: Path
) -> None:
    part, whole = tmp_path / "part.json", tmp_path / "whole.json"
    arguments = ["--shape", str(six_layers), "--caches", f"full,flat:{SMALL}"]
    arguments += ["--device-memory", "200MB", "--context", "160"]
    assert bench("memory", *arguments, "--layers", "4", "--json", str(part)) == 0
    assert bench("memory", *arguments, "--json", str(whole)) == 0
    scaled, measured = rows_of(part), rows_of(whole)
    for name in ("full 160 [1, 2] 200000000", f"flat:{SMALL} 160 [1, 2] 200000000"):
        assert scaled[name]["how"] == "scaled, computed"
        assert scaled[name]["batch"] == measured[name]["batch"] > 0


def test_a_need_beyond_the_memory_is_a_row_and_allocates_nothing(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.json"
    made: list[int] = []
    note_batches(monkeypatch, made)
    # The weights take 6.8 MB, a sequence 0.5 MB.
    monkeypatch.setattr(limits, "available_host_memory", lambda: 20_000_000)
    arguments = ["--caches", "full", "--batch", "1,64", "--device-memory", "1GB"]
    assert bench("memory", *QUICK, *arguments, "--json", str(file)) == 0
    rows = rows_of(file)
    assert made == [1]
    assert "out of memory (predicted" in rows["full 256 64"]["out_of_memory"]
    fit = rows["full 256 [1, 64] 1000000000"]
    assert fit["batch"] is None and "batch 64: out of memory" in fit["why"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("pinning failed"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_is_a_row_and_the_others_go_on(
    error: Exception,
    bench: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "d.json"
    once = Decode.once

    def failing(self: Decode, turn: Any) -> Any:
        if turn.choice.name == "full":
            raise error
        return once(self, turn)

    monkeypatch.setattr(Decode, "once", failing)
    arguments = ["--context", "128", "--caches", "full,dense", "--json", str(file)]
    assert bench("decode", *arguments, "--rounds", "1") == 0
    rows = rows_of(file)
    assert str(error) in rows["full 128 1"]["out_of_memory"] and rows["dense 128 1"]["seconds"] > 0
    assert "out of memory" in capsys.readouterr().out


def test_other_errors_are_not_taken_for_memory() -> None:
    def broken() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        attempt(broken)
    assert attempt(lambda: 3) == (3, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--caches", "nothing"], "unknown cache 'nothing'.*dense-graph"),
        (["--caches", "full,full"], "the same cache twice"),
        (["--caches", ","], "no cache named"),
        (["--caches", "dense:x=1"], "takes no options"),
        (["--caches", "dense-graph"], "CUDA graphs need a CUDA device"),
        (["--caches", "offloaded"], "offloads from a CUDA device only"),
        (["--shape", "gpt-17"], "neither a known shape"),
        (["--layers", "3"], "1 to 2 to build"),
        (["--layers", "1"], "scaling takes two runs"),
        (["--context", "32"], "at least 64 tokens"),
        (["--context", "1K", "--caches", "flat"], "flat attends to everything below 2000"),
        (["--context", "100", "--caches", f"flat:{SMALL}"], "everything below 129"),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str], message: str, bench: Callable[..., int]
) -> None:
    with pytest.raises(ValueError, match=message):
        bench("decode", *arguments)


def test_mistakes_of_memory_and_layers_are_refused(
    bench: Callable[..., int], six_layers: Path
) -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        bench("memory", "--batch", "2", "--device-memory", "1GB")
    with pytest.raises(ValueError, match="dense-graph is a way to decode"):
        prefill_with_a_graph(bench)
    with pytest.raises(ValueError, match="store=auto decides by the number of layers"):
        part = ["--shape", str(six_layers), "--layers", "4"]
        bench("decode", *part, "--caches", f"flat:{SMALL}:store=auto", "--context", "1K")
    with pytest.raises(ValueError, match="its weights take"):
        bench("decode", "--shape", "llama-3.1-70b", "--dtype", "float32", "--caches", "full")


def prefill_with_a_graph(bench: Callable[..., int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        graph = {"dense-graph": CacheChoice("dense-graph", PreallocatedCache)}
        patch.setattr(
            "hf_kvret.lab.bench.model_measurement.choose_bench_caches", lambda *arguments: graph
        )
        bench("prefill", "--caches", "dense-graph")


def test_a_batch_that_fits_is_confirmed_or_refuted_by_a_run(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_large_enough", lambda device, limit: True)
    tried: list[int] = []
    note_batches(monkeypatch, tried)
    file = tmp_path / "m.json"
    arguments = ["--context", "256", "--caches", "full", "--json", str(file)]
    assert bench("memory", *arguments, "--device-memory", "10MB") == 0
    fit = rows_of(file)["full 256 [1, 2] 10000000"]
    assert tried == [1, 2, fit["batch"]] and fit["how"] == "confirmed"
    assert fit["run_bytes"] <= 10_000_000 < fit["run_bytes"] + fit["per_sequence_bytes"]

    def full(self: Memory, turn: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(Memory, "once", full)
    assert bench("memory", *arguments, "--device-memory", "12MB") == 0
    assert rows_of(file)["full 256 [1, 2] 12000000"]["how"] == "refuted"


def test_all_caches_take_turns_in_every_round(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    once = Decode.once

    def noting(self: Decode, turn: Any) -> Any:
        order.append(turn.choice.name)
        return once(self, turn)

    monkeypatch.setattr(Decode, "once", noting)
    assert bench("decode", "--context", "64", "--caches", "full,dense", "--rounds", "3") == 0
    assert order == ["full", "dense"] * 3


def test_a_preallocated_cache_is_rewound_and_hybrids_refuse() -> None:
    cache = PreallocatedCache(load_shape("tiny").config, 8)
    rows = torch.randn(1, 2, 6, 64)
    for number in range(2):
        keys, values = cache.update(rows, -rows, number)
        assert torch.equal(keys, rows) and torch.equal(values, -rows)
    cache.rewind(2)
    keys, _ = cache.update(rows[:, :, :1], rows[:, :, :1], 0)
    assert torch.equal(keys, rows[:, :, [0, 1, 0]]) and cache.get_seq_length(0) == 3
    sliding = load_shape("mistral-7b-v0.3").config
    sliding.sliding_window = 4
    with pytest.raises(ValueError, match="only layers of full attention"):
        PreallocatedCache(sliding, 8).rewind(0)


def test_results_name_what_was_measured(bench: Callable[..., int], tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    assert bench("decode", "--context", "64", "--caches", "full", "--json", str(file)) == 0
    content = json.loads(file.read_text())
    assert content["name"] == "bench decode"
    setup = content["setup"]
    assert (setup["shape"], setup["layers"], setup["of_layers"]) == ("tiny", 2, 2)
    assert {"dtype", "device", "seed", "top_k", "store", "fill", "steps"} <= set(setup)


@pytest.mark.gpu
def test_a_captured_step_gives_the_logits_of_an_eager_one() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from hf_kvret.lab.bench.checks import Checker
    from hf_kvret.lab.bench.opponents import choose_bench_caches
    from hf_kvret.lab.bench.shapes import random_model

    model = random_model(load_shape("tiny").config, torch.bfloat16, "cuda", seed=0)
    choice = choose_bench_caches(["dense-graph"], {}, "cuda")["dense-graph"]
    assert Checker(model, None, seed=0).check(choice, 512, 2, "prefill").startswith("equal within")
