"""``hf-kvret bench host-attention``: ways that agree, rows, wrong ways, clear refusals."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bench_host_attention as bench_module
import host_ways
import kernel_clock
import pytest
import torch
from bench_host_attention import HostAttention
from host_ways import (
    TOLERANCES,
    WARMUP,
    Way,
    check_ways,
    make_rows,
    make_ways,
    random_row_bandwidth,
    time_ways,
)
from kernel_inputs import PAGE_LEN, Draw, KernelShape

from hf_kvret.evaluation.measurement import CheckFailed
from hf_kvret.evaluation.report import write_report
from hf_kvret.evaluation.results import Results
from hf_kvret_kernels import host_attention as host
from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.paged import PagedRows

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
SHAPE = KernelShape(
    length=200, batch=3, heads=2, group=3, head_dim=16, dtype=torch.float32, top_k=50
)
CPU = torch.device("cpu")
SIZES = {"tokens": 256, "heads": 2, "group": 2, "dim": 16, "repeats": 3, "threads": 1}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]
Run = Callable[..., int]
WAYS = ("cpp", "sdpa", "sdpa-apart", "sdpa-by-head", "naive")


@pytest.fixture(autouse=True)
def no_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls follow each other at once: quick, and few tests look at how true a time is."""
    monkeypatch.setattr(kernel_clock, "CALM_SECONDS", 0.0)
    monkeypatch.setattr(host_ways, "_RANDOM_BYTES", 1 << 21)


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """None where the library is there already; else the path of one built from these sources."""
    if host.available():
        return None
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed: the library can't be built")
    folder = tmp_path_factory.mktemp("bench_host_attention")
    for command in (["-S", str(KERNELS), "-B", str(folder)], ["--build", str(folder), "-j2"]):
        done = subprocess.run(
            ["cmake", *command], capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
    file = folder / library.FILE_NAME
    if not file.exists():
        pytest.skip("no C++ compiler: the library can't be built")
    return str(file)


@pytest.fixture
def compiled(host_library: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if host_library is not None:
        monkeypatch.setenv(library.PATH_VARIABLE, host_library)


@pytest.fixture
def measure(bench: Run) -> Run:
    return partial(bench, "host-attention", *SMALL)


def rows_of(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(cell.values()): row for cell, row in Results.load(file)}


def inputs(shape: KernelShape, sequences: int = 2) -> tuple[torch.Tensor, PagedRows, torch.Tensor]:
    draw = Draw(CPU, 0)
    rows = make_rows(shape, sequences, draw)
    return draw.query(shape), rows, draw.ids(shape, shape.top_k)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("count", [1, 37, 200])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_all_ways_give_the_same(
    compiled: None, dtype: torch.dtype, count: int, sequences: int
) -> None:
    shape = replace(SHAPE, dtype=dtype, top_k=count)
    query, rows, ids = inputs(shape, sequences)
    ways = make_ways(shape, 1)
    errors = check_ways(ways, query, rows, ids)
    assert set(errors) == {"sdpa", "sdpa-apart", "sdpa-by-head", "naive"}
    keys, values = rows.gather(ids, backend="naive")
    grouped = query.double().view(3, 2, 3, 16)
    weights = (grouped @ keys[:, :, 0].double().transpose(-1, -2) / 4).softmax(-1)
    want = (weights @ values[:, :, 0].double()).view(3, 6, 1, 16)
    torch.testing.assert_close(ways["cpp"](query, rows, ids).double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", WAYS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_a_way_that_swaps_two_heads_fails_the_check(
    compiled: None, wrong: str, dtype: torch.dtype
) -> None:
    shape = replace(SHAPE, batch=2, dtype=dtype)
    given, ways = inputs(shape), make_ways(shape, 1)
    right = ways[wrong]
    ways[wrong] = lambda *given: right(*given)[:, [0, 2, 1, 3, 4, 5]]
    with pytest.raises(CheckFailed, match="differ by"):
        check_ways(ways, *given)
    ways[wrong] = lambda *given: right(*given) * float("nan")
    with pytest.raises(CheckFailed, match="differ by inf"):
        check_ways(ways, *given)


def test_ids_are_distinct_inside_a_head_and_new_for_each_call() -> None:
    draw = Draw(CPU, 0)
    first, second = (draw.ids(replace(SHAPE, batch=2), 150) for _ in range(2))
    assert first.shape == (2, 2, 1, 150) and first.dtype == torch.int32
    assert all(len(set(one.tolist())) == 150 for one in first.flatten(0, 2))
    assert int(first.min()) >= 0 and int(first.max()) < SHAPE.length
    assert not torch.equal(first, second) and not torch.equal(first[0, 0], first[0, 1])


@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_sequences_share_pages_only_where_memory_is_short(sequences: int) -> None:
    _, rows, _ = inputs(replace(SHAPE, batch=5, dtype=torch.float16), sequences)
    assert rows.table.shape == (5, 4) and rows.page_len == PAGE_LEN
    # Four pages of 64 rows a head, each of 32 halves.
    assert sum(chunk.nbytes for chunk in rows.chunks) == sequences * 4 * 64 * 2 * 64
    assert len(rows.table.unique()) == 4 * sequences == len(rows.chunks[0])
    assert torch.equal(rows.table[sequences:], rows.table[: 5 - sequences])


def test_rows_lie_in_the_memory_of_a_store() -> None:
    shape = replace(SHAPE, length=1 << 14, batch=1, group=1)
    rows = make_rows(shape, 1, Draw(CPU, 0))
    assert rows.chunks[0].nbytes == 4 << 20
    assert rows.chunks[0].data_ptr() % (2 << 20) == 0, "not where huge pages begin"


def test_ways_take_turns_and_warm_up_calls_do_not_count() -> None:
    called: list[str] = []
    seen: list[int] = []
    numbers = iter(range(1000))

    def note(name: str, query: Any, rows: Any, ids: torch.Tensor) -> torch.Tensor:
        called.append(name)
        seen.append(int(ids))
        return ids

    ways = {name: partial(note, name) for name in "abc"}
    rows = make_rows(replace(SHAPE, batch=1), 1, Draw(CPU, 1))
    seconds = time_ways(ways, rows.chunks[0], rows, lambda: torch.tensor(next(numbers)), 4)
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 4, "b": 4, "c": 4}
    turns = ["".join(called[start : start + 3]) for start in range(0, len(called), 3)]
    assert len(turns) == WARMUP + 4 and turns[WARMUP:] == ["abc", "bca", "cab", "abc"]
    assert len(set(seen)) == len(seen)


def test_a_slow_way_takes_part_in_one_turn_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_ways, "SLOW_SECONDS", 0.02)
    rows = make_rows(replace(SHAPE, batch=1), 1, Draw(CPU, 1))

    def sleep(duration: float, *given: Any) -> torch.Tensor:
        time.sleep(duration)
        return torch.empty(0)

    ways = {"slow": partial(sleep, 0.03), "quick": partial(sleep, 0.0)}
    seconds = time_ways(ways, rows.chunks[0], rows, lambda: torch.empty(0), 6)
    assert {name: len(taken) for name, taken in seconds.items()} == {"slow": 2, "quick": 6}


def test_a_call_waits_until_threads_of_the_one_before_are_calm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks: list[float] = []

    def mark(*given: Any) -> torch.Tensor:
        marks.append(time.perf_counter())
        return torch.empty(0)

    monkeypatch.setattr(kernel_clock, "CALM_SECONDS", 0.02)
    rows = make_rows(replace(SHAPE, batch=1), 1, Draw(CPU, 1))
    ways = {"a": mark, "b": mark}
    seconds = time_ways(ways, rows.chunks[0], rows, lambda: torch.empty(0), 2)
    assert all(later - one >= 0.02 for one, later in itertools.pairwise(marks))
    # The wait is not in the time.
    assert max(seconds["a"] + seconds["b"]) < 0.02


def test_every_size_has_a_row_a_table_and_a_page(
    compiled: None, tmp_path: Path, measure: Run
) -> None:
    file, picture, table = (tmp_path / name for name in ("h.json", "h.png", "h.md"))
    files = ["--json", str(file), "--plot", str(picture), "--table", str(table)]
    assert measure("--k", "16,64", "--batch", "1,2", "--dtypes", "float32,bfloat16", *files) == 0
    rows = rows_of(file)
    assert list(rows) == [
        (way, dtype, batch, k)
        for dtype in ("float32", "bfloat16")
        for batch in (1, 2)
        for k in (16, 64)
        for way in WAYS
    ]
    for (way, dtype, batch, k), row in rows.items():
        low, high = row["seconds_quartiles"]
        assert 0 < row["seconds_least"] <= low <= row["seconds"] <= high and row["timed"] == 3
        assert row["row_bytes"] == batch * 2 * k * 32 * (4 if dtype == "float32" else 2)
        assert row["bytes_per_second"] == pytest.approx(row["row_bytes"] / row["seconds"])
        assert row["of_sequential"] == pytest.approx(
            row["bytes_per_second"] / row["sequential_bandwidth"]
        )
        assert row["random_row_bandwidth"] > 0 and row["sequences_held"] == batch
        assert (row["error"] is None) == (way == "cpp")
    text = table.read_text()
    assert text.count(f"{host.paths()[0]} ") == 8 and "256 tokens, 2 KV heads of 16" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    table.unlink()
    write_report(tmp_path, {"bench host-attention": HostAttention})
    page = (tmp_path / "h.md").read_text()
    assert "torch / cpp" in page and "bench host-attention" in page and "tokens 256" in page
    assert "cpp, sdpa, sdpa-apart, sdpa-by-head, naive" in (tmp_path / "overview.md").read_text()


def test_the_table_holds_the_quickest_way_in_torch(
    compiled: None, tmp_path: Path, measure: Run
) -> None:
    file = tmp_path / "h.json"
    assert measure("--k", "16", "--dtypes", "float32", "--json", str(file)) == 0
    results = Results.load(file)
    for (cell, row), seconds in zip(results, (0.002, 0.007, 0.006, 0.005, 0.009), strict=True):
        results.add(cell, row | {"seconds": seconds, "seconds_least": seconds - 0.001})
    line = HostAttention.table(results).splitlines()[-1]
    cells = [cell.strip() for cell in line.split("|")]
    assert (cells[4], cells[6], cells[8]) == ("2", "5", "sdpa-by-head")
    assert cells[9:12] == ["2.50", "4.00", "9"]


def test_where_memory_is_short_sequences_share_rows_and_the_table_says_so(
    compiled: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], measure: Run
) -> None:
    file = tmp_path / "h.json"
    # A sequence takes 64 KiB, the work space 120 KiB.
    arguments = ["--k", "32", "--batch", "5", "--dtypes", "float32", "--memory", "200KiB"]
    assert measure(*arguments, "--json", str(file)) == 0
    assert {row["sequences_held"] for row in rows_of(file).values()} == {1}
    assert "| 5 (rows of 1) |" in capsys.readouterr().out


def test_rows_that_do_not_fit_are_refused(
    compiled: None, tmp_path: Path, refused: Callable[..., str]
) -> None:
    file = tmp_path / "h.json"
    arguments = ["--k", "32", "--memory", "60KiB", "--json", str(file)]
    said = refused("host-attention", *SMALL, *arguments)
    assert "rows of 256 tokens" in said and "fewer --tokens" in said
    assert not file.exists()


def test_nothing_is_reported_of_a_library_that_is_wrong_and_other_sizes_go_on(
    compiled: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    measure: Run,
) -> None:
    file = tmp_path / "h.json"
    right: Callable[..., dict[str, Way]] = bench_module.make_ways

    def wrong(shape: KernelShape, threads: int) -> dict[str, Way]:
        ways, factor = right(shape, threads), 1.1 if shape.top_k == 16 else 1.0
        return ways | {"cpp": lambda *inputs: factor * ways["cpp"](*inputs)}

    arguments = ["--k", "16,32", "--dtypes", "float32", "--json", str(file)]
    with monkeypatch.context() as patched:
        patched.setattr(bench_module, "make_ways", wrong)
        assert measure(*arguments, "--plot", str(tmp_path / "h.png")) == 1
    said = capsys.readouterr()
    assert "Nothing was reported" in said.err and "sdpa and cpp differ by" in said.out
    rows = rows_of(file)
    assert [key[3] for key, row in rows.items() if "check_failed" in row] == [16] * 5
    assert [key[3] for key, row in rows.items() if "seconds" in row] == [32] * 5
    assert measure(*arguments) == 0
    assert all("seconds" in row for row in rows_of(file).values())


def test_without_the_library_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setenv(library.PATH_VARIABLE, "/nowhere/library.so")
    said = refused("host-attention", *SMALL, "--k", "16")
    assert "/nowhere/library.so could not be loaded" in said and library.PATH_VARIABLE in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "1K"], "can't choose more than --tokens 256"),
        (["--k", "16", "--heads", "0"], "--heads: '0' is no whole number from 1"),
        (["--k", "16", "--repeats", "0"], "--repeats: '0' is no whole number from 1"),
        (["--k", "16", "--threads", "100000"], "--threads: '100000' is no whole number from 1 to"),
        (["--k", "16", "--dtypes", "float64"], "--dtypes: unknown: float64; choose among float32"),
        (["--k", "16", "--dtypes", ","], "--dtypes: none is named"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused("host-attention", *SMALL, *arguments)


def test_torch_has_its_threads_back_afterwards(compiled: None, measure: Run) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert measure("--k", "16", "--dtypes", "float32") == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_random_row_bandwidth_counts_the_bytes_that_it_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    select = torch.index_select

    def counting(*given: Any, out: torch.Tensor) -> torch.Tensor:
        read.append(select(*given, out=out).nbytes)
        return out

    ticks = iter(range(100))
    monkeypatch.setattr(torch, "index_select", counting)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    rows = make_rows(replace(SHAPE, batch=1), 1, Draw(CPU, 1))
    found = random_row_bandwidth(rows, torch.Generator().manual_seed(0))
    # Ten rounds of a second each.
    assert found == sum(read) / 10 == 2**21
