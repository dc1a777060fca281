"""``hf-kvret bench index-build``: indexes of drawn prompts, beside the products that they took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from bench_index_build import IndexBuild, Products, draw_prompt

from hf_kvret.lab.report.results import Results

Bench = Callable[..., int]


def test_every_method_is_built_and_finds_more_than_chance(bench: Bench, tmp_path: Path) -> None:
    path, picture = tmp_path / "build.json", tmp_path / "build.png"
    words = (*IndexBuild.smallest.split(), "--json", str(path), "--plot", str(picture))
    assert bench("index-build", *words) == 0 and picture.is_file()
    results = Results.load(path)
    rows = {cell["cache"]: row for cell, row in results}
    assert list(rows) == ["paris", "lrqk", "ctkvr", "a2ats"]
    for name, row in rows.items():
        steps = sum(row[f"{step}_seconds"] for step in ("prompt", "add", "build"))
        assert abs(steps - row["seconds_least"]) < 1e-9, name
        # The drawn codewords of a2ats know nothing of the keys.
        assert row["recall"] > (0.0 if name == "a2ats" else 0.5), name
    for name in ("lrqk", "ctkvr", "a2ats"):
        assert rows[name]["floor"] > 0 and rows[name]["operations"] > 0
    tokens, dim, heads = 3072, 32, 2
    # Each score once; and un-rotated keys by the metric, then by the codewords.
    centroids = tokens // 16
    assert rows["ctkvr"]["operations"] == 2 * heads * 2 * centroids * tokens * dim
    assert rows["a2ats"]["operations"] == 2 * heads * tokens * dim * (dim + 64)
    assert IndexBuild.table(results).count("| 3,072") == 4


def test_a_wrong_option_is_refused(refused: Callable[..., str]) -> None:
    assert "--methods flat: choose of paris" in refused("index-build", "--methods", "flat")
    assert "--dim 5" in refused("index-build", "--dim", "5")


def test_products_are_counted_in_their_forms() -> None:
    a, b, c = torch.randn(3, 4), torch.randn(5, 4), torch.randn(2, 3, 4)
    with Products() as products:
        a @ b.T
        torch.mm(a, b.T, out=torch.empty(3, 5))
        torch.baddbmm(torch.zeros(3), c, torch.randn(2, 4, 3))
        torch.addmm(torch.zeros(5), a, b.T)
    assert products.operations == 2 * 3 * (3 * 4 * 5) + 2 * (2 * 3 * 4 * 3)
    assert len(products._counts) == 2 and products.seconds() > 0


def test_a_prompt_has_the_shapes_of_a_layer() -> None:
    prompt = draw_prompt(2, 3, 8, 50, torch.bfloat16, 1, 10)
    assert prompt.queries.shape == (1, 6, 50, 8) and prompt.keys.shape == (1, 2, 50, 8)
    assert prompt.asked.shape[2] == prompt.asked_positions.shape[1]
    assert len(prompt.cold) == 50 and prompt.cold.budget == 10
    (chunk,) = prompt.cold.store.key_chunks()
    assert torch.equal(chunk[1], prompt.keys)
