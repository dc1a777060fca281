"""``bench_kernels.py``: floors, rows, turns, cold caches, and ways that are wrong."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_kernels import OPS, Kernels, choose_ops
from kernel_clock import time_calls
from kernel_work import NEEDS, count, method_shape

from hf_kvret.lab.evaluate.measurement import run_script
from hf_kvret.lab.report.results import Results
from hf_kvret_kernels.catalog import Call, Draw, KernelOp
from hf_kvret_kernels.host_library import why_not

SHAPE = method_shape(
    **{"length": 100, "batch": 2, "heads": 3, "group": 2, "head_dim": 16, "top_k": 10},
    **{"dtype": torch.bfloat16, "codewords": 32, "rank": 4},
)
CPU = torch.device("cpu")

# Bytes that are read, and multiply-adds: 6 KV heads of both sequences, 12 query heads, 600 tokens
# of all KV heads, 32 bytes a vector.
COUNTED = {
    # Keys in fp32, codewords, half norms.
    "codebook.encode": (600 * 64 + 3 * 32 * 32 + 3 * 32 * 4, 600 * 32 * 16),
    "codebook.score_table": (12 * 64 + 3 * 32 * 32, 12 * 32 * 16),
    "codebook.lookup": (12 * 32 * 4 + 600 * 2 + 200, 0),
    "codebook.lookup_scores": (12 * 32 * 4 + 600 * 2 + 200, 0),
    "proxy.top_indices": (600 * 4 + 12 * 32 + 6 * 64 * 4 + 200, 1200 * 4),
    "top_k": (600 * 4, 0),
    # 12 centroids of 2 heads for each KV head, lists of 25.
    "centroid.top_keys": (600 * 32 + 144 * 32 + 200, 144 * 100 * 16),
    "centroid.similarity": (144 * 32 + 12 * 32 + 144 * 4, 144 * 16),
    # A code has 2 bytes of signs, 6 of magnitudes and two of weights.
    "paris.encode": (600 * 32 + 6 * 16 * 4 + 16 * 4, 0),
    # Queries, and how many tokens have each of 256 patterns in each of two subspaces.
    # Half of the tokens are candidates.
    "paris.search": (600 * 2 + 300 * 10 + 12 * 32 + 16 * 4 + 12 * 256 * 4 + 8 * 4 + 200, 600 * 16),
    "relevance.best_ids": (300 * (4 + 2 * 4), 0),
    # Coded at 4 bits with one scale, a vector has 10 bytes.
    "higgs.encode": (600 * 32, 0),
    "higgs.decode": (600 * 10, 0),
    "higgs.gather_attention": (60 * 4 + 60 * 20 + 12 * 32, 2 * 120 * 16),
    "gather_attention": (60 * 4 + 120 * 32 + 12 * 32, 2 * 120 * 16),
    "gather_scores": (60 * 4 + 60 * 32 + 12 * 32, 120 * 16),
    "prompt_attention": (1200 * 32 + 12 * 32 + 200, 2 * 1200 * 16),
}


def test_floors_are_the_bytes_and_products_counted_by_hand() -> None:
    assert {
        name: (count(SHAPE, needs.read), count(SHAPE, needs.products))
        for name, needs in NEEDS.items()
    } == COUNTED


@pytest.mark.parametrize("name", COUNTED)
def test_a_wrong_way_fails_its_check(name: str) -> None:
    """Not for what rounding explains: rows that changed places, a hole of NaN or of one id."""
    call = OPS[name].prepare(SHAPE, Draw(CPU, 0))
    want = call.run("naive")
    assert call.error(want, want) == 0.0
    holes = [one.clone() for one in want]
    for one in holes:
        one.select(1, -1).fill_(float("nan") if one.is_floating_point() else 0)
    for wrong in (*([one.roll(1, dim) for one in want] for dim in (0, 1)), holes):
        assert not call.error(wrong, want) <= call.tolerance


def test_top_k_may_choose_among_equal_scores_but_not_twice_nor_out_of_range() -> None:
    call = OPS["top_k"].prepare(SHAPE, Draw(CPU, 0))
    (want,) = call.run("naive")
    assert call.error([want.flip(-1)], [want]) == 0.0
    for wrong in (want[..., 1], -1):
        ids = want.clone()
        ids[..., 0] = wrong
        assert not call.error([ids], [want]) <= call.tolerance


def test_a_folder_names_all_its_operations() -> None:
    assert list(choose_ops(["codebook", "gather_scores"])) == [
        *(f"codebook.{name}" for name in ("encode", "score_table", "lookup", "lookup_scores")),
        "gather_scores",
    ]
    # No prefix of a name, and nothing twice.
    for names, message in (
        (["code"], r"--ops code: choose of codebook\.encode, .*prompt_attention"),
        (["codebook", "codebook.lookup"], "codebook.lookup is named twice"),
        ([], "--ops is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_ops(names)


SIZES = {"heads": 2, "group": 2, "head-dim": 16, "top-k": 8, "codewords": 16, "rank": 4}
SMALL = ["--device=cpu", "--context=64", "--repeats=3"]
SMALL += [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.fixture
def measure(tmp_path: Path) -> Callable[..., Any]:
    """Rows of a run by the values of their cells, after its status; the file is gone on with."""

    def run(*arguments: str) -> tuple[int, dict[tuple[Any, ...], dict[str, Any]]]:
        file = tmp_path / "k.json"
        status = run_script(Kernels, [*SMALL, "--json", str(file), *arguments])
        return status, {tuple(cell.values()): row for cell, row in Results.load(file)}

    return run


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
    # 512 scores of one head, of which it takes 16.
    top_k = rows["top_k", "naive", 1, 512]
    assert (top_k["read_bytes"], top_k["written_bytes"]) == (512 * 4, 16 * 4)
    assert "1 KV heads of 32 with 4 query heads each, bfloat16; 1 thread." in table


@pytest.mark.skipif(bool(why_not()), reason="the compiled library was not built")
def test_auto_is_the_library_where_an_operation_has_it_and_torch_stands_beside(
    capsys: pytest.CaptureFixture[str], measure: Callable[..., Any]
) -> None:
    _, rows = measure("--ops", "gather_attention,codebook.lookup")
    ways = [
        ("gather_attention", "cpp"),
        ("gather_attention", "naive"),
        ("codebook.lookup", "naive"),
    ]
    assert [key[:2] for key in rows] == ways
    errors = [row["error"] for row in rows.values()]
    assert 0 <= errors[0] < 2**-6 and errors[1:] == [None, None]
    line = next(line for line in capsys.readouterr().out.splitlines() if "| cpp " in line)
    cpp, naive = (rows["gather_attention", way, 1, 64]["seconds"] for way in ("cpp", "naive"))
    assert line.split("|")[7].strip() == f"{naive / cpp:.3g}"
    # Operations without a backend are left out.
    some = Kernels(device="cpu", ops="gather_attention,top_k", backends=("cpp",)).cells()
    assert {cell["op"] for cell in some} == {"gather_attention"}


def test_nothing_is_reported_of_a_way_that_is_wrong_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measure: Callable[..., Any]
) -> None:
    name, prepare = "codebook.lookup_scores", KernelOp.prepare
    worse = {"naive": 1.0, "other": 1.01}

    def wrong(self: KernelOp, shape: Any, draw: Any) -> Call:
        call = prepare(self, shape, draw)

        def run(way: str) -> tuple[torch.Tensor, ...]:
            factor = worse[way] if self.name == name else 1
            return tuple(factor * one for one in call.run("naive"))

        return Call(run, call.error, call.tolerance)

    monkeypatch.setattr(KernelOp, "prepare", wrong)
    monkeypatch.setattr(KernelOp, "backends", lambda self, device: ("other", "naive"))
    status, rows = measure("--ops", f"{name},top_k")
    said = capsys.readouterr().out
    assert "other and naive differ by 1.0e-02" in said and "Nothing was reported" in said
    assert status == 1 and {op for op, *_ in rows} == {"top_k"}
    worse["other"] = 1.0
    status, rows = measure("--ops", f"{name},top_k")
    assert status == 0 and len(rows) == 4 and all("seconds" in row for row in rows.values())


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
    assert message in refused(Kernels, *SMALL, *arguments)


def test_calls_take_turns_each_with_cold_caches_of_its_own() -> None:
    done: list[str] = []
    calls: dict[str, Callable[[], Any]] = {name: partial(done.append, name) for name in "abc"}
    repeats = {"a": 3, "b": 1, "c": 3}
    seconds = time_calls(calls, repeats, partial(done.append, "-"), CPU)
    assert "".join(done) == "-a-b-c" + "-c-a" + "-c-a"
    assert {name: len(taken) for name, taken in seconds.items()} == repeats
