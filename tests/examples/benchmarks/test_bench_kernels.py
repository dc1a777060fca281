"""``bench_kernels.py``: rows, turns, cold caches, wrong ways, floors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kernel_clock
import pytest
import torch
from bench_kernels import OPS, Kernels, choose_ops
from kernel_clock import time_calls

from hf_kvret.lab.bench.kernel_work import NEEDS, Rates, Work, method_shape
from hf_kvret.lab.report.results import Results
from hf_kvret_kernels.catalog import Call, Draw, KernelOp
from hf_kvret_kernels.host_library import why_not

SHAPE = method_shape(
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
    "higgs.gather_attention": Work(60 * 4 + 60 * 20 + 12 * 32, 12 * 17 * 4, 2 * 120 * 16),
    "gather_attention": Work(60 * 4 + 120 * 32 + 12 * 32, 12 * 17 * 4, 2 * 120 * 16),
    "gather_scores": Work(60 * 4 + 60 * 32 + 12 * 32, 120 * 4, 120 * 16),
    "prompt_attention": Work(1200 * 32 + 12 * 32 + 200, 12 * 17 * 4, 2 * 1200 * 16),
}


def test_floors_are_the_bytes_and_products_counted_by_hand() -> None:
    assert {name: needs.work(SHAPE) for name, needs in NEEDS.items()} == COUNTED


@pytest.mark.parametrize("name", COUNTED)
def test_all_counted_bytes_are_written_and_a_wrong_way_fails_its_check(name: str) -> None:
    call = OPS[name].prepare(SHAPE, Draw(CPU, 0))
    want = call.run("naive")
    assert sum(one.nbytes for one in want) == COUNTED[name].written_bytes
    # No hole among ids: all of what is counted was written.
    assert all(one.isfinite().all() for one in want)
    assert all(one.is_floating_point() or int(one.min()) >= 0 for one in want)
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
