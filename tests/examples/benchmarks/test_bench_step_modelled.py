"""``hf-kvret bench step --modelled``: its arithmetic, its tables of parts, files and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import bench_machine_code
import bench_step
import bench_step_modelled
import compile_step
import pytest
import step_kernels
import step_model
import torch
from bench_machine_code import MachineCodeOfStep, chip_figures
from bench_step_modelled import ModelledStep
from kernel_launch import Block, Launch
from machine_model import ASSUMPTIONS, H200, QUICK, SLOW, Pace
from step_kernels import ATTENDED, PARTS, STEPS, StepShape, told_steps
from step_model import FIRST_LAUNCHES, ModelSizes, full_row, step_row
from step_ops import counted_ops
from transformers.models.llama import modeling_llama

from hf_kvret.benchmark.opponents import bench_caches
from hf_kvret.benchmark.shapes import load_shape, weight_bytes
from hf_kvret.config import RetrievalConfig
from hf_kvret.evaluation.report import write_report
from hf_kvret.evaluation.results import Results
from hf_kvret.methods.a2ats.index import A2ATSIndex
from hf_kvret.methods.ctkvr.index import CTkvrIndex
from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.index import LRQKIndex
from hf_kvret.methods.paris.config import ParisConfig
from hf_kvret.methods.paris.index import ParisIndex

Run = Callable[..., int]
CONTEXT = 131_072
TINY = ModelSizes(layers=2, hidden=8, intermediate=16, vocabulary=32, queries=8, keys=4)
# A gap of 1, at least 10, half of the bandwidth, a byte of the bus a second.
PACE = Pace(1.0, 10.0, 0.5, 1.0)


def kernels_file(
    path: Path, seconds: float = 1e-5, steps: dict[str, Any] | None = None, without: str = ""
) -> Path:
    """Results of ``bench machine-code``: each part one kernel of ``seconds``, issued in half."""
    setup = chip_figures() | {"triton": "3.9.0", "ptxas": "13.4"}
    results = Results(
        MachineCodeOfStep.title(), setup | ({} if steps is None else {"steps": steps}), path
    )
    for part in PARTS:
        if part != without:
            kernel = {"kernel": f"{part}.one", "launches": 1, "dram_seconds": seconds}
            row = {"kernels": [kernel | {"issue_seconds": seconds / 2}]}
            results.add({"cache": part, "context": CONTEXT, "batch": 1}, row)
    return path


def tells(*parts: str, torch_launches: int = 0) -> dict[str, Any]:
    """What results tell of a step."""
    none = {"torch_bytes": 0, "torch_token_bytes": 0}
    return {"parts": list(parts), "torch_launches": torch_launches} | none


def cells(file: Path) -> dict[str, dict[str, Any]]:
    return {cell["cache"]: row for cell, row in Results.load(file)}


@pytest.mark.parametrize(
    ("launches", "dram", "issue", "seconds"),
    [(1, 2.0, 3.0, 11.0), (2, 2.0, 30.0, 32.0), (3, 20.0, 30.0, 43.0), (0, 0.0, 0.0, 0.0)],
)
def test_a_kernel_takes_the_longest_of_three_and_a_gap(
    launches: int, dram: float, issue: float, seconds: float
) -> None:
    assert PACE.kernel_seconds(launches, dram, issue) == seconds
    assert PACE.bus_seconds(7) == 7.0


def test_the_slow_end_of_every_assumption_is_slower() -> None:
    for work in ((1, 0.0, 0.0), (1, 1e-3, 0.0), (1, 0.0, 1e-3)):
        assert SLOW.kernel_seconds(*work) > QUICK.kernel_seconds(*work)
    assert SLOW.bus_seconds(1e9) > QUICK.bus_seconds(1e9)
    assert all(one.source.startswith("assumed") for one in ASSUMPTIONS.values())


def test_matrices_and_small_kernels_of_a_tiny_model() -> None:
    assert sum(TINY.matrices().values()) == 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16 + 8 * 32
    weights = {one.name: one for one in TINY.weights()}
    assert (weights["k"].launches, weights["head"].launches) == (2, 1)
    assert weights["k"].dram_seconds == 2 * 2 * 32 / H200.bandwidth
    small = {one.name: one for one in TINY.small(batch=3)}
    assert {name: one.launches for name, one in small.items()} == {
        "norms": 2 * 16 + 8,
        "rotations": 2 * 10 + 9,
        "activation": 4,
        "residual sums": 4,
        "append": 4,
        "token": 3,
    }
    assert small["activation"].dram_seconds == pytest.approx(3 * 2 * 160 / H200.bandwidth)


def test_a_step_of_full_attention_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_model, "QUICK", PACE)
    monkeypatch.setattr(step_model, "SLOW", replace(PACE, gap_seconds=2.0))
    row = full_row(TINY, context=1000, batch=3)
    # 7 matrices in each of two layers, and the head: all far below the least time.
    assert row["weight_seconds"] == [15 * 11, 15 * 12]
    assert row["norm_seconds"] == [69 * 11, 69 * 12]
    assert row["other_seconds"] == [15 * 11, 15 * 12]
    assert row["kernel_seconds"] == [4 * 11, 4 * 12] and row["torch_seconds"] == [0, 0]
    assert row["launches"] == 15 + 69 + 15 + 4 and row["launches_a_layer"] == 2
    assert row["seconds"] == [103 * 11, 103 * 12]
    assert row["seconds_without_norms"] == [34 * 11, 34 * 12]
    # Keys and values of all tokens in two layers, in 16 bits.
    moved = 2 * 2 * 4 * 1000 * 3 * 2
    assert TINY.full_attention(1000, 3).dram_seconds == moved / H200.bandwidth


def test_a_step_of_a_method_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step_model, "QUICK", PACE)
    kernels = Results.load(kernels_file(tmp_path / "k.json", seconds=40.0))
    shape = StepShape(CONTEXT, 1)
    row = step_row("lrqk", kernels, TINY, shape)
    assert row is not None
    # Five parts, a kernel each in two layers: 80 seconds at half of the bandwidth, and two gaps.
    assert row["kernel_seconds"][0] == 5 * (160 + 2) and row["launches_a_layer"] == 5
    assert row["torch_seconds"][0] == 2 * STEPS["lrqk"].launched.torch_launches * 11
    assert row["host_bytes"] == 2 * 8 * 2048 * 512 and row["replayed"]
    assert row["host_seconds"][0] == row["seconds"][0] + row["host_bytes"]
    # Half of the rows that the part attends to; keys of the others are compared.
    ctkvr = step_row("ctkvr", kernels, TINY, shape)
    assert ctkvr is not None and ctkvr["kernel_seconds"][0] == 4 * (160 + 2) + 80 + 2
    assert ctkvr["host_bytes"] == 2 * 8 * (1024 * 512 + step_kernels.RECALLED * 256)
    # Keys: read, written, read; scores: written, read and written twice, those of heads read.
    moved = shape.cold_len * (8 * 128 * 10 + 32 * 4 * 5 + 8 * 4 * 5)
    bare = Pace(0.0, 0.0, 1.0, 1.0)
    monkeypatch.setattr(step_model, "QUICK", bare)
    row = step_row("flat", kernels, TINY, shape)
    assert row is not None and row["torch_seconds"][0] == pytest.approx(2 * moved / H200.bandwidth)
    higgs = step_row("lrqk:store=higgs", kernels, TINY, shape)
    assert higgs is not None and "host_seconds" not in higgs


def test_matrices_are_the_weights_that_a_step_reads() -> None:
    config = load_shape("llama-3.1-8b").config
    sizes = ModelSizes.of(config)
    numbers = {name: count for name, count in sizes.matrices().items() if name != "head"}
    read = sizes.layers * sum(numbers.values()) + sizes.matrices()["head"]
    norms = (2 * sizes.layers + 1) * sizes.hidden
    assert 2 * (read + norms) == weight_bytes(config, torch.bfloat16).read
    assert (sizes.queries, sizes.keys) == (4096, 1024)


def test_small_kernels_are_what_transformers_launches() -> None:
    """Operations in 16 bits; where gradients are just off, conversions of a dtype show too."""
    norm = modeling_llama.LlamaRMSNorm(16).bfloat16()
    heads = torch.randn(2, 1, 4, 1, 16, dtype=torch.bfloat16)
    angles = torch.randn(1, 1, 16, dtype=torch.bfloat16)
    config = load_shape("tiny").config
    mlp = modeling_llama.LlamaMLP(config).bfloat16()
    row = torch.randn(1, 1, config.hidden_size, dtype=torch.bfloat16)
    where = torch.tensor([[5]])
    table = modeling_llama.LlamaRotaryEmbedding(config)
    for work, launches in (
        (lambda: norm(heads), 8),
        (lambda: modeling_llama.apply_rotary_pos_emb(*heads, angles, angles), 10),
        # Three products of matrices.
        (lambda: mlp(row), 3 + 2),
        (lambda: table(row, where), 9),
    ):
        with torch.no_grad(), counted_ops(lambda: "all") as ops:
            work()
        assert ops.launches["all"] == launches


def test_every_part_is_in_a_step_or_of_stores_that_none_has() -> None:
    named = {part for step in STEPS.values() for part in step.launched.parts}
    assert set(PARTS) - named == {"resident", "count", "window", "merge"}
    assert named <= set(PARTS)
    # One part of each step attends to what was selected, also in earlier results.
    for launched in (*(step.launched for step in STEPS.values()), *FIRST_LAUNCHES.values()):
        assert len(set(launched.parts) & set(ATTENDED)) == 1
    assert all(name.partition(":")[0] in bench_caches() for name in (*STEPS, *FIRST_LAUNCHES))


def test_steps_have_the_methods_own_numbers() -> None:
    for context in (131_072, 1 << 20):
        shape = StepShape(context, 1)
        assert STEPS["paris"].selected(shape) == ParisConfig.paper().budget(shape.cold_len)
        assert STEPS["lrqk"].selected(shape) == LRQKConfig().budget(shape.cold_len)
    assert STEPS["flat"].selected(shape) == STEPS["ctkvr"].selected(shape) == RetrievalConfig.top_k
    for name, index in {
        "paris": ParisIndex,
        "lrqk": LRQKIndex,
        "a2ats": A2ATSIndex,
        "ctkvr": CTkvrIndex,
        "flat": FlatIndex,
    }.items():
        assert STEPS[name].replayed == (not index.capture_obstacle), name


def test_rows_table_picture_and_page(tmp_path: Path, bench: Run) -> None:
    new = kernels_file(tmp_path / "new.json", 1e-5, {"paris": tells("paris", "window")})
    old = kernels_file(tmp_path / "old.json", 2e-5)
    (pages := tmp_path / "pages").mkdir()
    file = pages / "step.json"
    files = ["--kernels", str(new), "--before", str(old), "--json", str(file)]
    wanted = ["--caches", "static,paris", "--context", "128K", *files]
    assert bench("step", "--modelled", *wanted) == 0
    rows = cells(file)
    assert list(rows) == ["static", "paris"]
    # The earlier results don't say which parts their steps have: the first ones.
    assert rows["paris"]["launches_a_layer"] == 2
    assert rows["paris"]["before"]["launches_a_layer"] == 5
    assert rows["static"]["before"]["seconds"] == rows["static"]["seconds"]
    least, most = rows["paris"]["seconds"]
    assert least < most < rows["paris"]["before"]["seconds"][0]
    write_report(pages, {"bench step-modelled": ModelledStep})
    page = (pages / "step.md").read_text()
    assert "Modelled, not measured; its error is unknown" in page.splitlines()[2]
    assert f"| paris  | 131,072 | 1     | {1e3 * least:.3g} to {1e3 * most:.3g} " in page
    assert "| 1.4 us   | 2 us" in page and "a layer before" in page
    assert (pages / "images" / "step.png").read_bytes().startswith(b"\x89PNG")


def test_another_file_of_kernels_is_not_gone_on_with(tmp_path: Path, bench: Run) -> None:
    kernels, file = tmp_path / "k.json", tmp_path / "step.json"
    wanted = ["--caches", "paris", "--context", "128K", "--json", str(file)]
    assert bench("step-modelled", *wanted, "--kernels", str(kernels_file(kernels))) == 0
    kernels.unlink()
    with pytest.raises(ValueError, match="another set-up"):
        bench("step-modelled", *wanted, "--kernels", str(kernels_file(kernels, 2e-5)))


def test_parts_are_compiled_where_no_file_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Run
) -> None:
    kernels = {
        "paris": "paris.bonus",
        "attend-100": "gather_attention.attend",
        "finish-100": "step_attention.finish",
    }
    asked = []

    def compile_parts(names: list[str], context: int, batch: int) -> list[Launch]:
        asked.append((tuple(names), context, batch))
        block = Block(100, {"other": 100.0}, 0, 0, 0, {"16": 1})
        return [
            Launch(name, context, batch, kernels[name], 2, (1, 1, 1), 4, 40, 0, 0, 16, block, [])
            for name in names
        ]

    monkeypatch.setattr(bench_step_modelled, "compile_parts", compile_parts)
    monkeypatch.setattr(bench_step_modelled, "check_tools", lambda: None)
    versions = {"triton": "3.9.0", "ptxas": "13.4"}
    monkeypatch.setattr(bench_step_modelled, "tool_versions", lambda: versions)
    file = tmp_path / "step.json"
    assert bench("step", "--modelled", "--caches", "paris", "--json", str(file)) == 0
    assert asked == [(STEPS["paris"].launched.parts, context, 1) for context in (131_072, 1 << 20)]
    results = Results.load(file)
    assert results.setup["triton"] == "3.9.0" and results.setup["kernels"] is None
    assert all(row["launches_a_layer"] == 6 for _, row in results)


def test_machine_code_tells_the_parts_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_machine_code, "tool_versions", dict)
    told = MachineCodeOfStep().setup()["steps"]
    assert told == told_steps() == json.loads(json.dumps(told))
    results = Results("any", {"steps": told})
    for name, step in STEPS.items():
        assert step_model.launches_of(results, name) == step.launched
    assert step_model.launches_of(results, "static") is None


def test_what_a_file_lacks_is_named(tmp_path: Path, bench: Run) -> None:
    file = str(kernels_file(tmp_path / "k.json"))
    lacks = (
        r"--kernels .*k.json: no machine code of paris at 1,048,576 tokens, batch 1, .*there is "
    )
    with pytest.raises(ValueError, match=lacks + "131,072 tokens at batch 1: make .* again"):
        bench("step", "--modelled", "--caches", "paris", "--kernels", file)
    part = str(kernels_file(tmp_path / "p.json", without="merge"))
    with pytest.raises(ValueError, match=r"--before .*p.json: no machine code of merge at 131,072"):
        bench("step", "--modelled", "--context", "128K", "--kernels", file, "--before", part)
    few = str(kernels_file(tmp_path / "f.json", steps={"lrqk": tells("lrqk")}))
    with pytest.raises(
        ValueError, match=r"f.json does not tell what a step of paris, flat launches"
    ):
        bench("step-modelled", "--caches", "paris,lrqk,flat", "--kernels", few)
    # An earlier version may have had no such method.
    wanted = ["--caches", "paris,lrqk", "--context", "128K", "--kernels", file, "--before", few]
    table = tmp_path / "t.md"
    assert bench("step-modelled", *wanted, "--table", str(table)) == 0
    (paris,) = [line for line in table.read_text().splitlines() if line.startswith("| paris")]
    assert [word.strip() for word in paris.split("|")[-5:-1]] == ["-"] * 4


def test_other_options_and_files_are_refused(tmp_path: Path, bench: Run) -> None:
    file = kernels_file(tmp_path / "k.json")
    for option in (["--steps", "9"], ["--dtype", "bfloat16"], ["--shape", "llama-3.1-8b"]):
        with pytest.raises(ValueError, match=rf"{option[0]} with --modelled: .*leave it out"):
            bench("step", "--modelled", *option)
    for name in ("--kernels", "--before"):
        with pytest.raises(ValueError, match=f"{name} goes with --modelled"):
            bench("step", name, str(file), "--device", "cpu")
    with pytest.raises(
        ValueError, match="--caches paris,h2o: steps are described of static, paris"
    ):
        bench("step", "--modelled", "--caches", "paris,h2o", "--kernels", str(file))
    with pytest.raises(ValueError, match="--context 4000: give at least 32,768 tokens"):
        bench("step", "--modelled", "--context", "4000", "--kernels", str(file))
    whole = Results.load(file)
    for name, setup, option, message in (
        (whole.name, whole.setup | {"clock": 1.0}, "--kernels", "other figures of the chip"),
        ("bench kernels", whole.setup, "--before", "holds bench kernels: give bench machine-code"),
    ):
        other = Results(name, setup)
        for cell, row in whole:
            other.add(cell, row)
        other.save(file)
        with pytest.raises(ValueError, match=f"{option} .*{message}"):
            bench("step", "--modelled", "--caches", "static", option, str(file))


def test_without_triton_the_remedies_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: Run
) -> None:
    monkeypatch.setattr(compile_step, "find_spec", lambda name: None)
    remedies = "pip install triton.*--kernels docs/results/kernels_sm90.json"
    with pytest.raises(ModuleNotFoundError, match=remedies):
        bench("step", "--modelled")
    # Nothing of these is compiled.
    assert bench("step", "--modelled", "--caches", "static") == 0
    file = str(kernels_file(tmp_path / "k.json"))
    assert bench("step", "--modelled", "--context", "128K", "--kernels", file) == 0


def test_the_option_takes_the_same_names_as_the_script() -> None:
    shared = {one.name for one in fields(ModelledStep)}
    assert shared == {"caches", "context", "batch", "kernels", "before"}
    assert shared < {one.name for one in fields(bench_step.Step)}
