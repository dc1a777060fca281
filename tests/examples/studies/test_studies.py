"""Every study on its smallest setting, and its mathematics against loops and whole matrices."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from assumptions import (
    AFTER,
    BEFORE,
    Assumptions,
    drift,
    energies,
    explained,
    query_cosines,
    similarity,
)
from paris_stages import ParisStages

from ...methods.codebooks import normal

HEADS, DIM = 2, 16


def test_similarity_is_the_papers_whatever_order_and_length() -> None:
    """Equation 7, by loops, for codebooks of different sizes."""
    first, second = normal(0, 2, 5, 3), normal(1, 2, 7, 3)
    for head, value in enumerate(similarity(first, second).tolist()):
        halves = []
        for one, other in ((first[head], second[head]), (second[head], first[head])):
            best = [max(float(a @ b / a.norm() / b.norm()) for b in other) for a in one]
            halves.append(sum(best) / len(best))
        assert value == pytest.approx(sum(halves) / 2, abs=1e-5)
    assert similarity(first, 3.0 * first.flip(1)).tolist() == pytest.approx([1.0, 1.0])


Rows = dict[tuple[Any, ...], dict[str, Any]]
Run = Callable[..., tuple[Rows, str]]


@pytest.fixture
def smallest(smallest: Run) -> Run:
    """As there, without the cache of a cell, which comes first."""

    def run(study: Any, *more: str) -> tuple[Rows, str]:
        rows, table = smallest(study, *more)
        return {cell[1:]: row for cell, row in rows.items()}, table

    return run


def _layer(seed: int, count: int = 256) -> dict[str, torch.Tensor]:
    queries, keys, values = (normal(seed + n, HEADS, count, DIM) for n in range(3))
    places = {f"queries {place}": queries for place in (AFTER, BEFORE)}
    return {**places, f"keys {AFTER}": keys, f"keys {BEFORE}": keys, "values": values}


def test_queries_that_turn_with_their_distance_are_less_alike() -> None:
    turns = torch.arange(256)[None, :, None] * 0.01
    queries = torch.cat([turns.cos(), turns.sin()], dim=-1)
    layer = _layer(1) | {f"keys {AFTER}": normal(4, 1, 256, 2), f"queries {AFTER}": queries}
    means = query_cosines([[layer]], 0, AFTER)
    for distance in (1, 4, 16, 64):
        assert means[str(distance)] == pytest.approx(math.cos(0.01 * distance), abs=1e-5)
    assert "256" not in means and means["correlation"] > 0.8


def test_energies_are_those_of_the_singular_values() -> None:
    layer = _layer(5)
    queries, keys = (layer[f"{name} {AFTER}"] for name in ("queries", "keys"))
    means = energies([[layer]], 0, AFTER)
    for name, matrix in (("keys", keys), ("scores", queries @ keys.mT)):
        squares = torch.linalg.svdvals(matrix.double()).square()
        share = squares[:, : DIM // 4].sum(-1) / squares.sum(-1)
        assert means[f"{name}, 1/4"] == pytest.approx(float(share.mean()), abs=1e-4)


def test_what_follows_from_the_layer_below_is_explained() -> None:
    texts = []
    for seed in (10, 20):
        below = _layer(seed)
        noise = 0.5 * normal(seed + 5, HEADS, 256, DIM)
        texts.append([below, _layer(seed + 6) | {f"keys {BEFORE}": below["values"] + noise}])
        texts[-1][0] |= {f"keys {BEFORE}": below["values"]}
    shares = explained(texts, 1, "keys")
    assert shares["layer -1"] == pytest.approx(0.8, abs=0.1)
    assert max(shares["token -1"], shares["own values"]) < 0.1 and "layer -2" not in shares
    for text in texts:
        text[1][f"keys {BEFORE}"] = _walk(text[1]["values"])
    assert explained(texts, 1, "keys")["token -1"] > 0.6


def _walk(draws: torch.Tensor) -> torch.Tensor:
    """A random walk that forgets a tenth of itself a step."""
    rows = [draws[:, 0]]
    for step in range(1, draws.shape[1]):
        rows.append(0.9 * rows[-1] + 0.3 * draws[:, step])
    return torch.stack(rows, dim=1)


def test_centroids_of_a_prompt_miss_keys_of_another_kind() -> None:
    layer = _layer(30)
    layer[f"keys {AFTER}"] = normal(31, HEADS, 256, DIM) + torch.arange(256)[:, None].ge(128) * 5.0
    errors = drift([[layer]], 0, AFTER)
    later, prompt = (errors[f"centroids of prompt, {keys} keys"] for keys in ("later", "prompt"))
    assert later > 1.1 * prompt and errors["centroids of all, later keys"] < later
    assert max(errors["ParisKV, prompt keys"], errors["ParisKV, later keys"]) < prompt / 2


def test_stages_bound_what_is_selected(smallest: Run, refused: Callable[..., str]) -> None:
    caches = [f"paris:dense_below=0:recent=16:flush=8:per_selected={n}" for n in (1, 99)]
    usual, whole = (smallest(ParisStages, "--caches", x)[0][(400,)]["layers"] for x in caches)
    for some, every in zip(usual, whole, strict=True):
        assert some["candidates"] < 1 and 0.5 < some["overlap"] <= some["first"]
        assert every["candidates"] == every["first"] == 1.0
        assert every["overlap"] == pytest.approx(every["second"])
    assert "flat searched nothing" in refused(ParisStages, "--smallest", "--caches", "flat")


@pytest.mark.slow
def test_assumptions(smallest: Run, refused: Callable[..., str], tiny_text: Path) -> None:
    rows, table = smallest(Assumptions)
    assert all(len(row["layers"]) == 6 for row in rows.values()) and len(rows) == 9
    before, after = (rows["a2ats", place, 300]["layers"] for place in (BEFORE, AFTER))
    assert all(one["own"] < one["other"] for one in before + after)
    assert "layer -1" not in rows["aqua", "keys", 300]["layers"][0]
    assert "| ctkvr: cosine of two queries, after RoPE, 300 tokens; layer | 1 " in table
    words = ["--model", "reference", "--text", str(tiny_text), "--context", "4K"]
    assert "--windows 9: --text has" in refused(Assumptions, *words, "--windows", "9")
