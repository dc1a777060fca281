"""``hf-kvret bench kernels --compile-only``: rows, table, page, and clear refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bench_kernels
import bench_machine_code
import compile_step
import pytest
import step_kernels
from bench_machine_code import MachineCodeOfStep
from kernel_launch import Block, Launch
from step_kernels import LEAST_CONTEXT, StepShape

from hf_kvret.config import RetrievalConfig
from hf_kvret.evaluation.report import write_report
from hf_kvret.evaluation.results import Results
from hf_kvret.methods.a2ats import A2ATSConfig
from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.lrqk import LRQKConfig
from hf_kvret.methods.paris import ParisConfig

Run = Callable[..., int]
SMALL = ["--parts", "merge,count", "--context", "128K", "--batch", "1"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int, int]]:
    """Nothing is compiled: kernels that might have been; returns what was asked for."""
    asked = []
    kernels = {"merge": "merge.merge", "count": "relevance.count"}

    def compile_parts(names: list[str], context: int, batch: int) -> list[Launch]:
        asked.append((tuple(names), context, batch))
        straight = Block(100, {"other": 100.0}, 4, 3, 2, {"16": 2, "4": 1})
        loop = Block(10, {"other": 10.0}, 1, 1, 1, {"16": 1})
        sizes = (1, (32, 2, 1), 4, 40, 8, 2048, 16)
        return [
            Launch(name, context, batch, kernels[name], *sizes, straight, [loop]) for name in names
        ]

    monkeypatch.setattr(bench_machine_code, "compile_parts", compile_parts)
    monkeypatch.setattr(bench_machine_code, "check_tools", lambda: None)
    versions = {"triton": "3.9.0", "ptxas": "13.4"}
    monkeypatch.setattr(bench_machine_code, "tool_versions", lambda: versions)
    return asked


def test_rows_table_picture_and_page(tmp_path: Path, bench: Run, compiled: list) -> None:
    file, picture, table = (tmp_path / name for name in ("k.json", "k.png", "k.md"))
    files = ["--json", str(file), "--plot", str(picture), "--table", str(table)]
    assert bench("machine-code", *SMALL[:4], "--batch", "1,8", *files) == 0
    assert compiled == [(("merge", "count"), 131_072, batch) for batch in (1, 8)]
    results = Results.load(file)
    assert [tuple(cell.values()) for cell, _ in results] == [
        (part, 131_072, batch) for batch in (1, 8) for part in ("merge", "count")
    ]
    kernel = results.find({"cache": "merge", "context": 131_072, "batch": 1})["kernels"][0]
    assert kernel["kernel"] == "merge.merge" and kernel["ctas"] == 64
    assert (kernel["instructions"], kernel["loop_instructions"]) == (110, 10)
    assert (kernel["shuffles"], kernel["shared_stores"], kernel["barriers"]) == (5, 4, 3)
    assert kernel["load_widths"] == {"16": 3, "4": 1}
    # 64 CTAs of four warps: a warp for each scheduler of their multiprocessors.
    assert kernel["issue_seconds"] == pytest.approx(110 / results.setup["clock"])
    moved = kernel["read_bytes"] + kernel["written_bytes"]
    assert kernel["dram_seconds"] == pytest.approx(moved / results.setup["bandwidth"])
    lines = [line for line in table.read_text().splitlines() if "| merge.merge " in line]
    words = [word.strip() for word in lines[0].split("|")]
    assert words[1:8] == ["merge", "131,072", "1", "merge.merge", "32x2x1", "64", "4"]
    assert words[8:14] == ["40", "8", "2", "12", "16", "16: 3, 4: 1"]
    assert words[14:19] == ["110 / 10", "", "5 / 1", "4 / 1", "3 / 1"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    table.unlink()
    write_report(tmp_path, {"bench machine-code": MachineCodeOfStep})
    page = (tmp_path / "k.md").read_text()
    assert "modelled, not measured" in page and "triton 3.9.0 and ptxas 13.4" in page


def test_finished_sizes_are_not_compiled_again(tmp_path: Path, bench: Run, compiled: list) -> None:
    file = str(tmp_path / "k.json")
    assert bench("machine-code", *SMALL, "--json", file) == 0
    assert bench("machine-code", *SMALL[:4], "--batch", "1,8", "--json", file) == 0
    assert [batch for *_, batch in compiled] == [1, 8]


def test_times_of_an_earlier_run_stand_beside(tmp_path: Path, bench: Run, compiled: list) -> None:
    old, new, table = (str(tmp_path / name) for name in ("old.json", "new.json", "new.md"))
    assert bench("machine-code", "--parts", "merge", *SMALL[2:], "--json", old) == 0
    results = Results.load(Path(old))
    next(iter(results))[1]["kernels"][0]["issue_seconds"] = 0.25
    results.save(Path(old))
    assert bench("machine-code", *SMALL, "--before", old, "--json", new, "--table", table) == 0
    rows = {cell["cache"]: row["kernels"][0] for cell, row in Results.load(Path(new))}
    assert rows["merge"]["issue_seconds_before"] == 0.25
    assert rows["merge"]["dram_seconds_before"] == rows["merge"]["dram_seconds"]
    assert rows["count"]["issue_seconds_before"] is None
    header, *lines = [line for line in Path(table).read_text().splitlines() if line[:1] == "|"]
    assert [word.strip() for word in header.split("|")[-3:-1]] == [
        "issue us before",
        "DRAM us before",
    ]
    assert [line.split("|")[-3].strip() for line in lines[1:]] == ["2.5e+05", "-"]


def test_earlier_results_of_another_model_or_bench_are_refused(
    tmp_path: Path, bench: Run, compiled: list
) -> None:
    old = tmp_path / "old.json"
    assert bench("machine-code", *SMALL, "--json", str(old)) == 0
    whole = Results.load(old)
    for name, setup, message in (
        (whole.name, whole.setup | {"clock": 1.0}, "other figures of the chip"),
        ("bench kernels", whole.setup, "holds bench kernels: give bench machine-code"),
    ):
        other = Results(name, setup)
        for cell, row in whole:
            other.add(cell, row)
        other.save(old)
        with pytest.raises(ValueError, match=message):
            bench("machine-code", *SMALL, "--before", str(old))


def test_compile_only_is_this_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Run, compiled: list
) -> None:
    few = partial(MachineCodeOfStep, parts=("merge", "count"))
    monkeypatch.setattr(bench_kernels, "load_measurement", {"bench machine-code": few}.get)
    file = tmp_path / "k.json"
    assert bench("kernels", "--compile-only", "--json", str(file)) == 0
    content = json.loads(file.read_text())
    assert content["name"] == "bench machine-code"
    assert [(context, batch) for _, context, batch in compiled] == [
        (context, batch) for context in (131_072, 1 << 20) for batch in (1, 8)
    ]


def test_compile_only_takes_no_options_of_measuring(bench: Run) -> None:
    for option in (["--context", "4K"], ["--ops", "codebook"], ["--device", "cuda"]):
        with pytest.raises(ValueError, match=rf"{option[0]} with --compile-only: .*leave it out"):
            bench("kernels", "--compile-only", *option)


def test_a_short_context_and_unknown_parts_are_refused(
    bench: Run, capsys: pytest.CaptureFixture[str], compiled: list
) -> None:
    with pytest.raises(ValueError, match="--context 4096: give at least 32,768 tokens"):
        bench("machine-code", "--context", "4K")
    with pytest.raises(SystemExit):
        bench("machine-code", "--parts", "merge,rivers")
    assert "unknown: rivers; choose among paris, lrqk" in capsys.readouterr().err
    assert compiled == []


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_step, "_tool", lambda name: tmp_path / name)
    monkeypatch.setattr(compile_step, "find_spec", lambda name: object())
    with pytest.raises(FileNotFoundError, match=r"cuobjdump, which comes with triton's wheels"):
        compile_step.check_tools()
    monkeypatch.setattr(compile_step, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        compile_step.check_tools()


def test_the_step_has_the_methods_own_numbers() -> None:
    for context in (LEAST_CONTEXT, 131_072, 1 << 20):
        paris, shape = ParisConfig(), StepShape(context, 1)
        length = shape.cold_len
        beta, rho = paris.ratios(length)
        assert (math.ceil(beta * length), rho) == (shape.candidates, step_kernels.PARIS_RHO)
        assert paris.tiers_for(16) == step_kernels.PARIS_SHARES and paris.subspace_dim == 8
        assert paris.tiers_for(43) == step_kernels.PARIS_LONG_ROW_SHARES
        ctkvr = CTkvrConfig()
        assert ctkvr.list_len(length, 1024) == step_kernels.LIST_LEN
        assert ctkvr.nprobe == step_kernels.NPROBE
    assert CTkvrConfig().centroids_for(131_072) == step_kernels.CENTROIDS
    assert RetrievalConfig.bits == step_kernels.HIGGS_BITS
    assert A2ATSConfig().top_k == step_kernels.A2ATS_RATIO
    assert LRQKConfig().budget(StepShape(131_072, 1).cold_len) == step_kernels.LRQK_K
    sizes = RetrievalConfig.sink + RetrievalConfig.recent + RetrievalConfig.flush
    assert sizes == step_kernels.WINDOW_LEN
