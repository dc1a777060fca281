"""``bench_kernels.py``: rows, turns, cold caches, wrong ways, floors, calls as of caches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import kernel_clock
import pytest
import torch
from bench_kernels import OPS, Kernels, choose_ops
from kernel_clock import time_calls

from hf_kvret import registered_methods
from hf_kvret.lab.bench.kernel_work import (
    Call,
    Draw,
    KernelOp,
    KernelShape,
    Rates,
    Work,
)
from hf_kvret.lab.report.results import Results
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt, ragged
from hf_kvret_kernels._dispatch import prefer
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_kernels.host_attention import why_not
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.paris import ParisCodes

SHAPE = KernelShape(
    length=100,
    batch=2,
    heads=3,
    group=2,
    head_dim=16,
    dtype=torch.bfloat16,
    top_k=10,
    codewords=32,
    rank=4,
)
CPU = torch.device("cpu")

# 6 KV heads of both sequences, 12 query heads, 600 tokens of all KV heads, 32 bytes a vector.
COUNTED = {
    "codebook.encode": Work(
        600 * 64 + 3 * 32 * 32 + 3 * 32 * 4,  # keys in fp32, codewords, half norms
        600 * 2,
        600 * 32 * 16,
    ),
    "codebook.score_table": Work(12 * 64 + 3 * 32 * 32, 12 * 32 * 4, 12 * 32 * 16),
    "codebook.lookup": Work(12 * 32 * 4 + 600 * 2 + 200, 1200 * 4),
    "codebook.lookup_scores": Work(12 * 32 * 4 + 600 * 2 + 200, 600 * 4),
    "proxy.top_indices": Work(600 * 8 + 12 * 16 + 200, 60 * 4, 1200 * 4),
    "top_k": Work(600 * 4, 60 * 4),
    # 6 centroids of 2 heads for each KV head, lists of 25.
    "centroid.top_keys": Work(600 * 32 + 72 * 32 + 200, 36 * 25 * 4, 72 * 100 * 16),
    "centroid.similarity": Work(72 * 32 + 12 * 32 + 72 * 4, 36 * 4, 72 * 16),
    # A code has 2 bytes of signs, 6 of magnitudes and two weights of 2.
    "paris.encode": Work(600 * 32 + 6 * 16 * 4 + 16 * 4, 600 * 12),
    # Queries, and how many tokens have each of 256 patterns in each of two subspaces.
    # Half of the tokens are candidates.
    "paris.search": Work(
        600 * 2 + 300 * 12 + 12 * 32 + 16 * 4 + 12 * 256 * 4 + 8 * 4 + 200, 60 * 4, 600 * 16
    ),
    "paris.candidates": Work(600 * 2 + 12 * 16 * 4 + 12 * 256 * 4 + 200, 300 * 4),
    "paris.rerank": Work(300 * (4 + 12) + 12 * 16 * 4 + 8 * 4, 600 * 4, 600 * 16),
    "relevance.best_ids": Work(300 * (4 + 2 * 4), 60 * 4),
    # Coded at 4 bits with one scale, a vector has 10 bytes.
    "higgs.encode": Work(600 * 32, 600 * 10),
    "higgs.decode": Work(600 * 10, 600 * 32),
    "higgs.attend": Work(60 * 4 + 60 * 20 + 12 * 32, 12 * 17 * 4, 2 * 120 * 16),
    "gather_attention": Work(60 * 4 + 120 * 32 + 12 * 32, 12 * 17 * 4, 2 * 120 * 16),
    "gather_scores": Work(60 * 4 + 60 * 32 + 12 * 32, 120 * 4, 120 * 16),
    "prompt_attention": Work(1200 * 32 + 12 * 32 + 200, 12 * 17 * 4, 2 * 1200 * 16),
}


def test_floors_are_the_bytes_and_products_counted_by_hand() -> None:
    assert {name: op.work(SHAPE) for name, op in OPS.items()} == COUNTED


@pytest.mark.parametrize("name", COUNTED)
def test_written_bytes_are_those_of_what_the_call_returns(name: str) -> None:
    returned = OPS[name].prepare(SHAPE, Draw(CPU, 0)).run("naive")
    assert sum(one.nbytes for one in returned) == OPS[name].work(SHAPE).written_bytes
    # No hole among ids: all of what is counted was written.
    assert all(one.is_floating_point() or int(one.min()) >= 0 for one in returned)
    assert all(one.isfinite().all() for one in returned)


@pytest.mark.parametrize("name", COUNTED)
def test_a_way_that_swaps_rows_or_leaves_some_unwritten_fails_its_check(name: str) -> None:
    call = OPS[name].prepare(SHAPE, Draw(CPU, 0))
    want = call.run("naive")
    assert call.error(want, want) == 0.0
    for dim in (0, 1):
        # Not for what rounding explains, and not for NaN either.
        assert not call.error([one.roll(1, dim) for one in want], want) <= call.tolerance
    results = [one.clone() for one in want]
    for one in results:
        hole = one.select(1, -1)
        hole.fill_(float("nan") if one.is_floating_point() else 0)
    assert not call.error(results, want) <= call.tolerance


def test_top_k_may_choose_among_equal_scores_but_not_twice_nor_out_of_range() -> None:
    call = OPS["top_k"].prepare(SHAPE, Draw(CPU, 0))
    (want,) = call.run("naive")
    assert call.error([want.flip(-1)], [want]) == 0.0
    twice = want.clone()
    twice[..., 0] = twice[..., 1]
    assert not call.error([twice], [want]) <= call.tolerance
    outside = want.clone()
    outside[0, 0, 0, 0] = -1
    assert not call.error([outside], [want]) <= call.tolerance


def test_the_higher_floor_binds() -> None:
    work = Work(read_bytes=300, written_bytes=100, multiply_adds=6000)
    slow_memory = Rates(100.0, {"float32": 1000.0, "bfloat16": 3000.0})
    assert work.moved_bytes == 400
    assert (work.byte_seconds(slow_memory), work.product_seconds(slow_memory)) == (4.0, 2.0)
    assert (work.seconds(slow_memory), work.bound(slow_memory)) == (4.0, "bytes")
    slow_products = Rates(100.0, {"float32": 1000.0})
    assert (work.seconds(slow_products), work.bound(slow_products)) == (6.0, "products")


def test_a_folder_names_all_its_operations() -> None:
    assert list(choose_ops(["codebook", "gather_scores"])) == [
        "codebook.encode",
        "codebook.score_table",
        "codebook.lookup",
        "codebook.lookup_scores",
        "gather_scores",
    ]
    # No prefix of a name, and nothing twice.
    for expected, message in (
        (["code"], r"--ops code: choose of codebook\.encode, .*prompt_attention"),
        (["codebook", "codebook.lookup"], "codebook.lookup is named twice"),
        ([], "--ops is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_ops(expected)


ArtifactOptions = Callable[[str, str], dict[str, str]]

RANK = 4
KERNELS, CODEC = "hf_kvret_kernels.", "hf_kvret_kernels.higgs.codec.HiggsCodec."
BENCH = "hf_kvret.lab.bench.kernel_ops."

# A cache that calls the operation, and the names by which it and the command look it up.
CALLERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{
        f"codebook.{name}": ("a2ats", {}, (f"{KERNELS}codebook.{name}",))
        for name in ("encode", "score_table", "lookup_scores")
    },
    "codebook.lookup": ("a2ats", {"budget_of": "union"}, (f"{KERNELS}codebook.lookup",)),
    "proxy.top_indices": ("lrqk", {"rank": RANK}, (f"{KERNELS}proxy.top_indices",)),
    "top_k": (
        "a2ats",
        {},
        ("hf_kvret.methods.a2ats.index.top_k", f"{BENCH}top_k"),
    ),
    "centroid.top_keys": ("ctkvr", {}, (f"{KERNELS}centroid.key_lists",)),
    "centroid.similarity": ("ctkvr", {}, (f"{KERNELS}centroid.similarity",)),
    "paris.encode": ("paris", {}, (f"{KERNELS}paris.encode",)),
    "paris.search": ("paris", {}, (f"{KERNELS}paris.search_unchecked", f"{KERNELS}paris.search")),
    **{
        f"paris.{name}": (
            "paris",
            {},
            (f"{KERNELS}paris.selection.{name}", f"{KERNELS}paris.{name}"),
        )
        for name in ("candidates", "rerank")
    },
    "relevance.best_ids": (
        "paris",
        {},
        (f"{KERNELS}paris.selection.best_ids", f"{KERNELS}relevance.best_ids"),
    ),
    "higgs.encode": ("flat", {"store": "higgs"}, (f"{CODEC}encode",)),
    "higgs.decode": ("flat", {"store": "higgs"}, (f"{CODEC}decode",)),
    # Caches leave pieces unmerged.
    "higgs.attend": (
        "paris",
        {"store": "higgs"},
        (f"{KERNELS}higgs.attend_partials", f"{KERNELS}higgs.attention.attend_partials"),
    ),
    "gather_attention": (
        "paris",
        {"store": "device"},
        ("hf_kvret.stores.paged.gather_partials", f"{KERNELS}gather_attention.gather_partials"),
    ),
    "gather_scores": (
        "ctkvr",
        {"store": "device"},
        ("hf_kvret.stores.paged.gather_scores", f"{BENCH}gather_scores"),
    ),
    "prompt_attention": (
        "paris",
        {},
        ("hf_kvret.layer.exact_attention.prompt_attention", f"{BENCH}prompt_attention"),
    ),
}


def kind(value: Any) -> Any:
    """What must be alike of an argument, not how long it is or what stands in it."""
    match value:
        case torch.Tensor():
            return value.dtype, value.ndim
        case PagedRows():
            return kind(value.chunks[0]), kind(value.table), value.key_dim
        case ParisCodes():
            return kind(value.sign), kind(value.magnitude), kind(value.weight)
        case HiggsCodec() | torch.dtype() | None:
            return value
        case _ if callable(value):
            return kind(next(iter(value()))[1])
        case _:
            return type(value)


def recording(called: Callable[..., Any], calls: list[dict[str, Any]]) -> Callable[..., Any]:
    signature = inspect.signature(called)

    @wraps(called)
    def record(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = {name: kind(value) for name, value in bound.arguments.items() if name != "backend"}
        calls.append(given)
        return called(*arguments, **named)

    return record


def use_cache(method: str, dtype: torch.dtype, options: dict[str, Any]) -> KernelShape:
    """A padded prompt, some steps, a second prompt and a step; the sizes of the model."""
    model = MODELS["llama"].build().to(dtype)
    few = {"top_k": 8, "sink": 2, "recent": 8, "flush": 4, "max_draft": 6, "dense_below": 0}
    cache = registered_methods()[method](config=model.config, **{**few, **options})
    ids, mask = ragged((90, 71))
    for more in (0, 20):
        ids = torch.cat([ids, prompt(2, more)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        ids = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False
        )
    heads = model.config.num_key_value_heads
    return KernelShape(
        length=64,
        batch=2,
        heads=heads,
        group=model.config.num_attention_heads // heads,
        head_dim=model.config.head_dim,
        dtype=dtype,
        top_k=8,
        codewords=32,
        rank=RANK,
    )


@pytest.mark.parametrize("name", OPS)
def test_an_operation_is_measured_as_a_cache_calls_it(
    name: str,
    artifact_options: ArtifactOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, options, places = CALLERS[name]
    options = options | artifact_options(method, "llama")
    calls: list[dict[str, Any]] = []
    for place in places:
        monkeypatch.setattr(place, recording(resolve_name(place), calls))
    # In one call of the CPU library there are no operations to see.
    with prefer("naive"):
        shape = use_cache(method, torch.bfloat16, options)
    # A call that takes several kinds, as those of prompts and of steps, may be given any of them.
    called = [call for number, call in enumerate(calls) if call not in calls[:number]]
    calls.clear()
    OPS[name].prepare(shape, Draw(torch.device("cpu"), 0)).run("naive")
    (measured,) = calls
    assert measured in called


SIZES = {"heads": 2, "group": 2, "head-dim": 16, "top-k": 8, "codewords": 16, "rank": 4}
SMALL = [f"--{name}={value}" for name, value in (SIZES | {"repeats": 3}).items()]
Run = Callable[..., int]


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick, and nothing here looks at how true a time is."""
    monkeypatch.setattr(kernel_clock, "_CPU_FLUSH_BYTES", 1 << 16)
    monkeypatch.setattr(kernel_clock, "_CPU_SIDE", 32)


@pytest.fixture
def measure(bench: Run) -> Run:
    return partial(bench, "kernels", *SMALL)


def rows_of(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(cell.values()): row for cell, row in Results.load(file)}


def test_smallest_run_has_rows_with_floors_a_table_and_a_picture(smallest: Any) -> None:
    rows, table = smallest(Kernels)
    assert list(dict.fromkeys(op for op, *_ in rows)) == list(OPS)
    for row in rows.values():
        moved = row["read_bytes"] + row["written_bytes"]
        assert row["bytes_per_second"] == pytest.approx(moved / row["seconds"])
        assert row["byte_floor_seconds"] == pytest.approx(moved / row["bandwidth"])
        rate = max(row["product_rates"].values())
        assert row["product_floor_seconds"] == pytest.approx(row["multiply_adds"] / rate)
        floors = {"bytes": row["byte_floor_seconds"], "products": row["product_floor_seconds"]}
        assert row["floor_seconds"] == floors[row["bound"]] == max(floors.values())
    assert "1 KV heads of 32 with 4 query heads each, bfloat16; 1 thread." in table


@pytest.mark.skipif(bool(why_not()), reason="the compiled library was not built")
def test_auto_is_the_library_where_an_operation_has_it_and_torch_stands_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measure: Run
) -> None:
    file = tmp_path / "k.json"
    ops = ["--ops", "gather_attention,codebook.lookup", "--context", "64", "--json", str(file)]
    assert measure(*ops) == 0
    rows = rows_of(file)
    assert [key[:2] for key in rows] == [
        ("gather_attention", "cpp"),
        ("gather_attention", "naive"),
        ("codebook.lookup", "naive"),
    ]
    errors = [row["error"] for row in rows.values()]
    assert 0 <= errors[0] < 2**-6 and errors[1:] == [None, None]
    line = next(line for line in capsys.readouterr().out.splitlines() if "| cpp " in line)
    cpp, naive = (rows["gather_attention", way, 1, 64]["seconds"] for way in ("cpp", "naive"))
    assert line.split("|")[7].strip() == f"{naive / cpp:.3g}"
    # Operations without that backend are left out.
    assert measure(*ops[:2], "--context", "64", "--backends", "cpp") == 0
    assert "codebook" not in capsys.readouterr().out


def test_nothing_is_reported_of_a_way_that_is_wrong_and_others_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    measure: Run,
) -> None:
    file, name = tmp_path / "k.json", "codebook.lookup_scores"
    prepare = KernelOp.prepare
    worse = {"naive": 1.0, "other": 1.01}

    def wrong(self: KernelOp, shape: Any, draw: Any) -> Call:
        call = prepare(self, shape, draw)
        if self.name != name:
            return Call(lambda way: call.run("naive"), call.error, call.tolerance)
        return Call(
            lambda way: tuple(worse[way] * one for one in call.run("naive")),
            call.error,
            call.tolerance,
        )

    monkeypatch.setattr(KernelOp, "prepare", wrong)
    monkeypatch.setattr(KernelOp, "backends", lambda self, device: ("other", "naive"))
    arguments = ["--ops", f"{name},top_k", "--context", "64", "--json", str(file)]
    assert measure(*arguments, "--plot", str(tmp_path / "k.png")) == 1
    said = capsys.readouterr().out
    assert "other and naive differ by 1.0e-02" in said and "Nothing was reported" in said
    rows = rows_of(file)
    assert {op for op, *_ in rows} == {"top_k"}
    assert all("seconds" in row for row in rows.values())
    worse["other"] = 1.0
    assert measure(*arguments) == 0
    assert all("seconds" in row for row in rows_of(file).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "cuda"], "--backends: unknown: cuda; choose among auto, naive, triton"),
        (["--ops", "codebook", "--backends", "cpp"], "--backends cpp: on cpu these operations"),
        (["--context", "4"], "--top-k 8 with --context 4"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    lengths = [] if "--context" in arguments else ["--context", "64"]
    assert message in refused("kernels", *SMALL, *lengths, *arguments)


def test_calls_take_turns_each_with_cold_caches_of_its_own() -> None:
    done: list[str] = []
    calls: dict[str, Callable[[], Any]] = {name: partial(done.append, name) for name in "abc"}
    repeats = {"a": 3, "b": 1, "c": 3}
    seconds = time_calls(calls, repeats, partial(done.append, "-"), CPU)
    assert "".join(done) == "-a-b-c" + "-c-a" + "-c-a"
    assert {name: len(taken) for name, taken in seconds.items()} == repeats
