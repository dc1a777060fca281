"""``hf-kvret bench kernels``: rows, turns, cold caches, wrong ways, clear refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench_kernels
import kernel_clock
import pytest
import torch
from bench_kernels import OPS, Kernels
from kernel_clock import CacheFlush, measure_products, time_calls, time_once
from kernel_work import Call, KernelOp

from hf_kvret.evaluation.report import write_report
from hf_kvret.evaluation.results import Results
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


def test_every_operation_has_a_row_a_table_and_a_page(tmp_path: Path, measure: Run) -> None:
    file, picture, table = (tmp_path / name for name in ("k.json", "k.png", "k.md"))
    files = ["--json", str(file), "--plot", str(picture), "--table", str(table)]
    assert measure("--context", "64,128", "--batch", "1,2", "--backends", "naive", *files) == 0
    rows = rows_of(file)
    assert list(rows) == [
        (op, "naive", batch, length) for op in OPS for batch in (1, 2) for length in (64, 128)
    ]
    for row in rows.values():
        low, high = row["seconds_quartiles"]
        assert 0 < row["seconds_least"] <= low <= row["seconds"] <= high and row["timed"] == 3
        moved = row["read_bytes"] + row["written_bytes"]
        assert row["bytes_per_second"] == pytest.approx(moved / row["seconds"])
        assert row["of_bandwidth"] == pytest.approx(row["bytes_per_second"] / row["bandwidth"])
        assert row["byte_floor_seconds"] == pytest.approx(moved / row["bandwidth"])
        rate = max(row["product_rates"].values())
        assert set(row["product_rates"]) == {"bfloat16", "float32"}
        assert row["product_floor_seconds"] == pytest.approx(row["multiply_adds"] / rate)
        assert row["of_products"] == pytest.approx(row["product_floor_seconds"] / row["seconds"])
        floors = {"bytes": row["byte_floor_seconds"], "products": row["product_floor_seconds"]}
        assert row["floor_seconds"] == floors[row["bound"]] == max(floors.values())
        assert row["error"] is None
    text = table.read_text()
    assert "2 KV heads of 16 with 2 query heads each, bfloat16; 1 thread." in text
    assert text.count("| naive |") == 4 * len(OPS) and "| 16 codewords" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    table.unlink()
    write_report(tmp_path, {"bench kernels": Kernels})
    page = (tmp_path / "k.md").read_text()
    assert "of bandwidth" in page and "bench kernels" in page and "codewords 16" in page
    assert "bench kernels" in (tmp_path / "overview.md").read_text()


def test_bytes_grow_with_batch_and_length(tmp_path: Path, measure: Run) -> None:
    file = tmp_path / "k.json"
    assert (
        measure("--ops", "top_k", "--context", "64,128", "--batch", "1,2", "--json", str(file)) == 0
    )
    read = {key[2:]: row["read_bytes"] for key, row in rows_of(file).items()}
    assert read == {(1, 64): 512, (1, 128): 1024, (2, 64): 1024, (2, 128): 2048}


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


def test_a_slow_way_is_timed_as_often_as_the_limit_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Run
) -> None:
    file = tmp_path / "k.json"
    monkeypatch.setattr(bench_kernels, "time_once", lambda call, device: (call(), 0.4))
    arguments = ["--ops", "codebook.lookup", "--context", "64", "--backends", "naive"]
    assert measure(*arguments, "--limit", "0.9", "--json", str(file)) == 0
    assert [row["timed"] for row in rows_of(file).values()] == [2]
    assert measure(*arguments, "--limit", "0.1", "--json", str(tmp_path / "other.json")) == 0
    assert [row["timed"] for row in rows_of(tmp_path / "other.json").values()] == [1]


def test_what_does_not_fit_into_memory_has_a_row_that_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    measure: Run,
) -> None:
    file = tmp_path / "k.json"
    monkeypatch.setattr(kernel_clock, "available_host_memory", lambda: 10_000)
    arguments = ["--ops", "top_k", "--context", "64,1K", "--json", str(file)]
    assert measure(*arguments, "--plot", str(tmp_path / "k.png")) == 0
    small, large = rows_of(file).values()
    assert "seconds" in small and "seconds" not in large
    assert "out of memory (predicted" in large["out_of_memory"]
    assert "out of memory (predicted" in capsys.readouterr().out


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
        (["--ops", "proxy,proxy.top_places"], "proxy.top_places is named twice"),
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


def test_torch_has_its_threads_back_afterwards(
    monkeypatch: pytest.MonkeyPatch, measure: Run
) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    monkeypatch.setattr(
        bench_kernels,
        "CacheFlush",
        lambda device: seen.append(torch.get_num_threads()) or CacheFlush(device),
    )
    torch.set_num_threads(2)
    try:
        assert measure("--ops", "codebook.lookup", "--context", "64") == 0
        assert torch.get_num_threads() == 2 and seen == [1]
    finally:
        torch.set_num_threads(before)


def test_calls_take_turns_each_with_cold_caches_of_its_own() -> None:
    done: list[str] = []
    calls: dict[str, Callable[[], Any]] = {name: partial(done.append, name) for name in "abc"}
    repeats = {"a": 3, "b": 1, "c": 3}
    seconds = time_calls(calls, repeats, partial(done.append, "-"), CPU)
    assert "".join(done) == "-a-b-c" + "-c-a" + "-c-a"
    assert {name: len(taken) for name, taken in seconds.items()} == repeats


def test_flushing_is_not_in_the_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    calls: dict[str, Callable[[], Any]] = {"a": partial(take, 1.0), "b": partial(take, 8.0)}
    seconds = time_calls(calls, {"a": 3, "b": 2}, partial(take, 64.0), CPU)
    assert seconds == {"a": [1.0, 1.0, 1.0], "b": [8.0, 8.0]}


def test_a_flush_writes_the_whole_buffer() -> None:
    flush = CacheFlush(CPU)
    assert flush._buffer.nbytes == 1 << 16
    flush()
    flush()
    assert flush._buffer.eq(2).all()


def test_a_flush_on_several_threads_waits_until_they_are_calm() -> None:
    before = torch.get_num_threads()
    flush = CacheFlush(CPU)
    torch.set_num_threads(2)
    try:
        _, seconds = time_once(flush, CPU)
    finally:
        torch.set_num_threads(before)
    assert seconds >= kernel_clock.CALM_SECONDS


def test_products_are_counted_by_the_quickest_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(calls: Any, repeats: Any, flush: Any, device: Any) -> dict[str, Sequence[float]]:
        return {name: [4.0, 2.0, 3.0] for name in calls}

    monkeypatch.setattr(kernel_clock, "time_calls", timed)
    assert measure_products(CPU, torch.bfloat16) == dict.fromkeys(("bfloat16", "float32"), 16384.0)
    assert list(measure_products(CPU, torch.float32)) == ["float32"]


def test_the_picture_prefers_our_ways_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Run
) -> None:
    file = tmp_path / "k.json"
    assert (
        measure(
            "--ops",
            "codebook.lookup,top_k",
            "--context",
            "64,128",
            "--backends",
            "naive",
            "--json",
            str(file),
        )
        == 0
    )
    results = Results.load(file)
    for cell, row in list(results):
        results.add(cell, row | {"seconds": 0.001, "floor_seconds": 0.0001})
        if cell["op"] == "codebook.lookup" and cell["length"] == 128:
            ours = row | {"seconds": 0.002, "floor_seconds": 0.0001}
            results.add(cell | {"cache": "triton"}, ours)
    drawn: dict[str, Any] = {}

    def draw(path: Path, groups: list[str], bars: dict[str, Any], **rest: Any) -> None:
        drawn.update(groups=groups, bars=bars)

    monkeypatch.setattr("bench_kernels.plot_groups", draw)
    Kernels.plot(tmp_path / "k.png", results)
    assert drawn["groups"] == [
        "codebook.\nlookup\nnaive",
        "top_k\nnaive",
        "codebook.\nlookup\ntriton",
    ]
    assert drawn["bars"] == {
        "64 tokens, batch 1": [pytest.approx(10), pytest.approx(10), None],
        "128 tokens, batch 1": [None, pytest.approx(10), pytest.approx(5)],
    }
