"""Behind the tables of aqua-ablation: bits on paper and of tensors, shares, variants."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import aqua_variants
import pytest
from aqua_ablation import MEASUREMENT
from aqua_measures import (
    KINDS,
    PREDICTORS,
    PUBLISHED_TOKENS,
    SHAPES,
    Shape,
    bits_measured,
    bits_on_paper,
    measure,
)
from aqua_variants import ablation_rows, ablation_variants, bit_variants

from hf_kvret.evaluation.results import Results

SMALL = Shape(layers=3, heads=2, dim=32)


def _rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _read(ppl: float, bits: float = 2.25, predictor_bytes: int = 0) -> dict[str, Any]:
    return {
        "ppl": ppl,
        # Two windows, one as good as full attention is in both.
        "window_nats": [math.log(10.0), 2 * math.log(ppl) - math.log(10.0)],
        "bits": bits,
        "full_bits": 32,
        "held_ratio": 0.125,
        "predictor_bytes": predictor_bytes,
    }


@pytest.mark.parametrize(
    ("shape", "predictors", "expected"),
    [
        # 2 + 16 / 1024 + 2 / L, and 24 * 1024 / n of predictors in bf16: the method's own figures.
        ("8B", "bf16", 2 + 1 / 64 + 2 / 32 + 31 / 32 * 24 * 1024 / PUBLISHED_TOKENS),
        ("70B", "bf16", 2 + 1 / 64 + 2 / 80 + 79 / 80 * 24 * 1024 / PUBLISHED_TOKENS),
        ("8B", "4 bits", 2 + 1 / 64 + 2 / 32 + 31 / 32 * 6 * 1.0625 * 1024 / PUBLISHED_TOKENS),
    ],
)
def test_bits_on_paper_are_the_published_ones(shape: str, predictors: str, expected: float) -> None:
    found = bits_on_paper(SHAPES[shape], PUBLISHED_TOKENS, predictors)
    # Positions and biases are ours.
    assert found["all"] == pytest.approx(expected, abs=1e-3)
    assert found["all"] == pytest.approx(sum(found[kind] for kind in KINDS))
    if predictors == "4 bits":
        assert found["all"] <= 2.2


@pytest.mark.parametrize("predictors", list(PREDICTORS))
def test_tensors_take_what_stands_on_paper(predictors: str) -> None:
    tokens = 1024
    found = measure(predictors, tokens, SMALL.layers, SMALL.heads, SMALL.dim)
    real = bits_measured(SMALL, found, tokens)
    paper = bits_on_paper(SMALL, tokens, predictors)
    for kind in ("codes and scales", "first layer", "positions"):
        assert real[kind] == pytest.approx(paper[kind], rel=1e-9), kind
    # GPTQ's groups are smaller than 128 in a matrix of 64 columns, that of keys; and there are
    # frequencies.
    more = {"bf16": 0, "4 bits": 2 * 64**2 * 32 * (1 / 64 - 1 / 128)}[predictors]
    frequencies = 3 * 32 * SMALL.dim // 2
    rest = (more + frequencies) / (2 * SMALL.width * SMALL.layers * tokens)
    assert real["predictors"] == pytest.approx(paper["predictors"] + rest, rel=1e-9)
    # All that the cache says it holds, but its windows: 68 tokens of bf16 in each layer.
    window = SMALL.layers * 2 * SMALL.width * 2 * 68
    held = real["all"] * 2 * SMALL.width * SMALL.layers * tokens / 8
    assert found["memory_bytes"] >= held + window
    assert found["memory_bytes"] <= 1.6 * (held + window)
    assert [layer["bits"] for layer in found["layers"]] == [4, 2, 2]


@pytest.mark.slow
def test_a_layer_of_8b_takes_at_most_2_2_bits(measured: Any, tmp_path: Path) -> None:
    arguments = ["--model", "needle", "--parts", "memory", "--memory-tokens", "4K"]
    found = measured(MEASUREMENT, tmp_path / "m.json", *arguments)
    assert set(found) == {("memory", predictors) for predictors in PREDICTORS}
    bits = bits_measured(SHAPES["8B"], found["memory", "4 bits"], PUBLISHED_TOKENS)
    assert bits["all"] == pytest.approx(2.127, abs=2e-3)


def test_caches_of_others_are_rows_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = ["full"]
    for bits in (2, 3, 4):
        methods = ("aqua", "higgs", "round-to-nearest", "kivi")
        known += [f"{name}, {bits} bits" for name in methods]
    monkeypatch.setattr(aqua_variants, "_works", lambda cache: False)
    assert list(bit_variants()) == known
    monkeypatch.setattr(aqua_variants, "_works", lambda cache: True)
    others = {name: one.other for name, one in bit_variants().items() if name not in known}
    assert others == {
        # quanto has no 3 bits.
        **{f"quanto, {n} bits": f"quantized:backend=quanto:nbits={n}" for n in (2, 4)},
        **{f"hqq, {n} bits": f"quantized:backend=hqq:nbits={n}" for n in (2, 3, 4)},
    }


def test_the_usual_variant_is_measured_once_and_shown_in_every_group() -> None:
    rows = ablation_rows()
    assert {cell for _, _, cell, _ in rows} | {"full"} == set(ablation_variants())
    usual = [group for group, _, cell, _ in rows if cell == "aqua"]
    assert usual == list(dict.fromkeys(group for group, *_ in rows))


def test_tables_tell_rises_and_their_shares(tmp_path: Path) -> None:
    results = Results("eval aqua-ablation", {})
    place = {"cache": "aqua", "length": 2048}
    for name, ppl in (
        ("full", 10.0),
        ("aqua, 2 bits", 10.5),
        ("higgs, 2 bits", 12.0),
        ("aqua, 3 bits", 10.1),
        ("higgs, 3 bits", 9.9),
        ("aqua, 4 bits", 10.0),
    ):
        results.add({**place, "part": "bits", "variant": name}, _read(ppl))
    for name, ppl in (("full", 10.0), ("aqua", 10.5), ("sinks: 0", 11.0)):
        results.add({**place, "part": "parts", "variant": name}, _read(ppl, 2.5, 2048))
    anchor = {"layer": 0, "key_explained": None, "value_explained": None}
    anchor |= {f"{side}_error": 0.01 for side in ("key", "value")}
    layer = {"layer": 1, "key_explained": 0.75, "value_explained": 0.5, "key_error": 0.02}
    layer |= {"value_error": 0.03, "key_error_unpredicted": 0.1, "value_error_unpredicted": 0.1}
    for name in ("exact", "2 bits", "from keys"):
        cell = {"cache": "aqua", "part": "variance", "variant": name}
        results.add(cell, {"layers": [anchor, layer]})
    full, alone = ({"ppl": ppl, "window_nats": [math.log(ppl)]} for ppl in (10.0, 10.2))
    cell = {**place, "part": "layers", "variant": "higgs, 2 bits"}
    layers = [{"layer": 0, **full}, {"layer": 1, **alone}]
    results.add(cell, {"full": full, "layers": layers})
    table = MEASUREMENT.table(results)
    rows = _rows(table)
    shown = {(row[2], row[3]): row[6:] for row in rows[2:8]}
    assert shown["full", "32"] == ["10.000", "+0.00% ± 0.00%", "-", "+0.0%"]
    assert shown["aqua", "2"] == ["10.500", "+5.00% ± 5.12%", "25%", "+2.0%"]
    assert shown["higgs", "2"] == [
        "12.000",
        "+20.00% ± 21.88%",
        "100%",
        "+5.0%",
    ]
    # What costs nothing leaves nothing to save, and what was not run has no share.
    assert shown["aqua", "3"] == ["10.100", "+1.00% ± 1.00%", "-", "+0.5%"]
    assert shown["aqua", "4"] == ["10.000", "+0.00% ± 0.00%", "-", "+0.0%"]
    assert table.count("of what higgs's does") == 1
    assert "at 2 bits aqua's perplexity rises by 25% of what higgs's does (aim: at most" in table
    parts = [row for row in rows if row[0] == "aqua" and row[5] == "2"]
    assert [
        "sinks",
        "0",
        "2.500",
        "2",
        "11.000",
        "+10.00% ± 10.48%",
        "7.15",
    ] in [row[2:] for row in parts]
    usual = [row[2:4] for row in parts if row[3].endswith("(usual)")]
    assert ["sinks", "4 (usual)"] in usual and len(usual) == 8
    by_layer = rows[rows.index(next(row for row in rows if row[0] == "keys explained, layer")) :]
    assert by_layer[0][1:] == ["exact", "2 bits"]
    # Nothing explains an anchor.
    assert by_layer[2:4] == [["1", "0.750", "0.750"], ["mean", "0.750", "0.750"]]
    assert by_layer[4][1:] == ["exact", "2 bits", "from keys"]
    assert rows[-2][3:] == ["0", "10.000", "+0.00%", "-", "-", "-", "0.010"]
    assert rows[-1][3:] == ["1", "10.200", "+2.00%", "0.750", "0.500", "0.100", "0.020"]
    rows = rows[:-4]
    assert rows[-3] == ["0", "0.0100", "-", "0.0100", "-"]
    assert rows[-2] == ["1", "0.0200", "0.1000", "0.0300", "0.1000"]
    MEASUREMENT.plot(tmp_path / "p.png", results)
    names = ["p-layers.png", "p-parts.png", "p-variance.png", "p.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_memory_is_told_for_both_shapes(tmp_path: Path) -> None:
    results = Results("eval aqua-ablation", {})
    anchor = {"rows": 1028.0, "positions": 4.0, "held": 1032.5, "predictors": 256}
    other = {"rows": 516.0, "positions": 0.0, "held": 516.0, "predictors": 2**20}
    found = {"tokens": 64, "memory_bytes": 1, "layers": [anchor, other, other]}
    results.add({"cache": "aqua", "part": "memory", "variant": "4 bits"}, found)
    rows = _rows(MEASUREMENT.table(results))[2:]
    assert [row[:3] for row in rows] == [
        [shape, "4 bits", how]
        for shape in SHAPES
        for how in ("on paper", "measured, 3 layers, 64 tokens")
    ]
    assert rows[0][3:6] == rows[1][3:6] == ["2.0156", "0.0625", "0.0005"]
    # 0.5 bytes a token in one of 32 layers, and 31 MiB of predictors.
    assert rows[1][6] == f"{0.5 * 8 / (2048 * 32):.4f}"
    assert rows[1][7] == f"{31 * 2**23 / (2048 * 32 * PUBLISHED_TOKENS):.4f}"
    assert rows[1][9].endswith("of 16") and rows[3][9].endswith("of 40")
    MEASUREMENT.plot(tmp_path / "p.png", results)
    assert (tmp_path / "p.png").stat().st_size > 1000
