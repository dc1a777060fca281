"""``hf-kvret bench machine-code``: the smallest run, and the sizes of its step."""

from __future__ import annotations

import math
from pathlib import Path

import bench_machine_code
import machine_code
import pytest
import step_kernels
from bench_machine_code import MachineCodeOfStep
from machine_code import Launch
from step_kernels import LEAST_CONTEXT, StepShape

from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Results
from hf_kvret.methods.a2ats import A2ATSConfig
from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.lrqk import LRQKConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.options.config import RetrievalConfig

COUNTS = {"instructions": 110, "shuffles": 5, "shared_stores": 4, "barriers": 3}
IN_LOOPS = {"instructions": 10, "shuffles": 1, "shared_stores": 1, "barriers": 1}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int, int]]:
    """Nothing is compiled: a kernel that might have been; returns what was asked for."""
    asked = []

    def compile_parts(names: list[str], context: int, batch: int) -> list[Launch]:
        asked.append((tuple(names), context, batch))
        sizes = (1, (32, 2, 1), 4, 2048, 40, 8, 16, {"16": 3, "4": 1}, 1, COUNTS, IN_LOOPS)
        return [Launch(name, context, batch, "merge.merge", *sizes) for name in names]

    monkeypatch.setattr(bench_machine_code, "compile_parts", compile_parts)
    monkeypatch.setattr(bench_machine_code, "check_tools", lambda: None)
    versions = {"triton": "3.9.0", "ptxas": "13.4"}
    monkeypatch.setattr(bench_machine_code, "tool_versions", lambda: versions)
    return asked


def test_smallest_run_has_a_row_a_table_and_a_picture(tmp_path: Path, compiled: list) -> None:
    file, picture, table = (str(tmp_path / name) for name in ("k.json", "k.png", "k.md"))
    files = ["--json", file, "--plot", picture, "--table", table]
    assert run_script(MachineCodeOfStep, ["--smallest", *files]) == 0
    assert compiled == [(("merge",), 131_072, 1)]
    ((_, row),) = Results.load(Path(file))
    (kernel,) = row["kernels"]
    assert kernel["ctas"] == 64 and kernel["ctas_at_once"] == 12
    assert (kernel["instructions"], kernel["loop_instructions"]) == (110, 10)
    moved = kernel["read_bytes"] + kernel["written_bytes"]
    assert kernel["floor_seconds"] == pytest.approx(moved / 4.3e12)
    (line,) = [line for line in Path(table).read_text().splitlines() if "| merge.merge " in line]
    words = [word.strip() for word in line.split("|")]
    assert words[1:8] == ["merge", "131,072", "1", "merge.merge", "32x2x1", "64", "4"]
    assert words[8:14] == ["40", "8", "2", "12", "16", "16: 3, 4: 1"]
    assert words[14:18] == ["110 / 10", "5 / 1", "4 / 1", "3 / 1"]
    assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_a_short_context_is_refused(compiled: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_script(MachineCodeOfStep, ["--smallest", "--context", "4K"]) == 2
    assert "--context 4096: give at least 32,768 tokens" in capsys.readouterr().err
    assert compiled == []


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_code, "_tool", lambda name: tmp_path / name)
    monkeypatch.setattr(machine_code, "find_spec", lambda name: object())
    with pytest.raises(FileNotFoundError, match=r"cuobjdump, which comes with triton's wheels"):
        machine_code.check_tools()
    monkeypatch.setattr(machine_code, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        machine_code.check_tools()


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
