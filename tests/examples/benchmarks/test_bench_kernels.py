"""``hf-kvret bench kernels``: rows, turns, cold caches, wrong ways, clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kernel_clock
import pytest
import torch
from bench_kernels import OPS, Kernels
from kernel_clock import time_calls
from kernel_work import Call, KernelOp

from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Results
from hf_kvret_kernels.host_attention import why_not

SIZES = {"heads": 2, "group": 2, "head-dim": 16, "top-k": 8, "codewords": 16, "rank": 4}
SMALL = [f"--{name}={value}" for name, value in (SIZES | {"repeats": 3}).items()]
CPU = torch.device("cpu")
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


def test_smallest_run_has_rows_with_floors_a_table_and_a_picture(tmp_path: Path) -> None:
    file, picture, table = (tmp_path / name for name in ("k.json", "k.png", "k.md"))
    files = ["--json", str(file), "--plot", str(picture), "--table", str(table)]
    assert run_script(Kernels, ["--smallest", *files]) == 0
    rows = rows_of(file)
    assert list(dict.fromkeys(op for op, *_ in rows)) == list(OPS)
    for row in rows.values():
        moved = row["read_bytes"] + row["written_bytes"]
        assert row["bytes_per_second"] == pytest.approx(moved / row["seconds"])
        assert row["byte_floor_seconds"] == pytest.approx(moved / row["bandwidth"])
        rate = max(row["product_rates"].values())
        assert row["product_floor_seconds"] == pytest.approx(row["multiply_adds"] / rate)
        floors = {"bytes": row["byte_floor_seconds"], "products": row["product_floor_seconds"]}
        assert row["floor_seconds"] == floors[row["bound"]] == max(floors.values())
    assert "1 KV heads of 32 with 4 query heads each, bfloat16; 1 thread." in table.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


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
    said = capsys.readouterr()
    assert "other and naive differ by 1.0e-02" in said.err and "Nothing was reported" in said.err
    assert "other and naive differ by 1.0e-02" in said.out
    rows = rows_of(file)
    assert [list(row) for row in rows.values()][:2] == [["check_failed"]] * 2
    assert all("seconds" in row for row in list(rows.values())[2:])
    worse["other"] = 1.0
    assert measure(*arguments) == 0
    assert all("seconds" in row for row in rows_of(file).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "codebook.encod"], "--ops codebook.encod: choose of codebook.encode, "),
        (["--ops", ","], "--ops is empty"),
        (["--ops", "proxy,proxy.top_indices"], "proxy.top_indices is named twice"),
        (["--backends", "cuda"], "--backends: unknown: cuda; choose among auto, naive, triton"),
        (["--backends", ","], "--backends: none is named"),
        (["--backends", "triton"], "--backends triton: on cpu these operations have "),
        (["--ops", "codebook", "--backends", "cpp"], "--backends cpp: on cpu these operations"),
        (["--context", "4"], "--top-k 8 with --context 4"),
        (["--heads", "0"], "--heads: '0' is no whole number from 1"),
        (["--head-dim", "0"], "--head-dim: '0' is no whole number from 1"),
        (["--repeats", "0"], "--repeats: '0' is no whole number from 1"),
        (["--threads", "100000"], "--threads: '100000' is no whole number from 1 to "),
        pytest.param(
            ["--device", "cuda"],
            "no CUDA device here; use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
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
