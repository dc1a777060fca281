"""Every study on its smallest setting, and its mathematics against loops and whole matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aqua_ablation import AquaAblation, PrunedCache, TwoLayerCalibration, kept_shares
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

from hf_kvret import H2OCache, RetrievalCache
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.study import Corpus
from hf_kvret.lab.evaluate.needles import NeedleLanguage
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.evaluate.texts import read_text, token_ids

HEADS, DIM = 2, 16


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_similarity_is_the_papers_whatever_order_and_length() -> None:
    """Equation 7, by loops, for codebooks of different sizes."""
    first, second = _draw(0, 2, 5, 3), _draw(1, 2, 7, 3)
    for head, value in enumerate(similarity(first, second).tolist()):
        halves = []
        for one, other in ((first[head], second[head]), (second[head], first[head])):
            best = [max(float(a @ b / a.norm() / b.norm()) for b in other) for a in one]
            halves.append(sum(best) / len(best))
        assert value == pytest.approx(sum(halves) / 2, abs=1e-5)
    assert similarity(first, 3.0 * first.flip(1)).tolist() == pytest.approx([1.0, 1.0])


def test_contexts_begin_where_the_calibration_ends(tiny_model_dir: Path, tiny_text: Path) -> None:
    subject = load_subject(str(tiny_model_dir))
    ids = token_ids(subject.tokenizer, read_text(tiny_text))
    sizes: dict[str, Any] = {"calibration_tokens": 600, "calibration_length": 150}
    texts = AquaAblation(text=tiny_text, new_tokens=10, windows=2, **sizes)
    corpus = texts.corpus(subject)
    assert [len(one) for one in corpus.sequences] == [150, 150, 150, 150]
    assert corpus.held_out == 1 and torch.equal(torch.cat(corpus.sequences), ids[:600])
    first, second = texts.contexts(subject, "pruned", 190)
    assert torch.equal(torch.cat([first, second]), torch.cat([ids[:1], ids[600:999]]))
    for text, message in ((None, "give --text too"), (tiny_text, "is --text, too")):
        with pytest.raises(ValueError, match=message):
            AquaAblation(text=text, calibration_text=tiny_text)


Rows = dict[tuple[Any, ...], dict[str, Any]]
Run = Callable[..., tuple[Rows, str]]


@pytest.fixture
def smallest(smallest: Run) -> Run:
    """As there, without the cache of a cell, which comes first."""

    def run(study: Any, *more: str) -> tuple[Rows, str]:
        rows, table = smallest(study, *more)
        return {cell[1:]: row for cell, row in rows.items()}, table

    return run


class _UndecodedCache(PrunedCache):
    @classmethod
    def make_store(cls, *how: Any) -> Any:
        return super().make_store(*how).codes


@pytest.mark.slow
def test_pruned_rows_are_those_that_h2o_keeps() -> None:
    """Uncoded the cache is H2O's; coded, rows that are kept decoded give the same as codes."""
    model = load_subject("needle").model
    tokens = torch.randint(0, NeedleLanguage().vocab_size, (1, 150))
    usual = {"top_k": 0.2, "recent": 16, "flush": 16, "dense_below": 0, "sink": 4}
    plain = {"predictor": "none", **usual}

    def logits(cache: RetrievalCache) -> torch.Tensor:
        passes = [tokens[:, :120], *tokens[:, 120:].split(1, dim=1)]
        with torch.inference_mode():
            return torch.cat([model(x, past_key_values=cache).logits[:, -1] for x in passes])

    h2o = logits(H2OCache(config=model.config, **usual))
    pruned = PrunedCache(config=model.config, bits=16, **plain)
    torch.testing.assert_close(logits(pruned), h2o, rtol=0, atol=1e-4)
    shares = kept_shares(pruned)
    assert 0.15 < shares["kept"] < 0.3 and shares["kept"] < shares["needed"] <= 1.0
    for options in ({"bits": 2, **plain}, {"bits": 2, **usual}):
        codes, rows = (
            logits(cls(config=model.config, **options)) for cls in (_UndecodedCache, PrunedCache)
        )
        torch.testing.assert_close(codes, rows, rtol=0, atol=1e-4)
        assert (codes - h2o).abs().max() > 1e-3


def test_predictors_of_two_layers_read_two_layers(tmp_path: Path) -> None:
    """From the second predicted layer on: one more input of keys, and one more of values."""
    model, ids = load_subject("needle").model, torch.randint(0, 100, (400,))
    corpus = Corpus([ids[:200], ids[200:300], ids[300:]], 1, {})
    options: dict[str, Any] = {"bits": 16, "first_bits": 16}
    one, two = (
        calibrate(model, corpus, cls(**options), tmp_path, progress=False).tensors
        for cls in (AquaCalibration, TwoLayerCalibration)
    )
    width = one["layers.1.key.weight"].shape[1]
    assert two["layers.1.key.weight"].shape[1] == width
    assert two["layers.2.key.weight"].shape[1] == 2 * width
    wider = two["layers.2.value.weight"].shape[1]
    assert wider == 3 * width == one["layers.2.value.weight"].shape[1] + width


@pytest.mark.slow
def test_aqua(smallest: Run) -> None:
    rows, table = smallest(AquaAblation)
    bits = {name: row for (part, name, *_), row in rows.items() if part == "bits"}
    full = bits["full"]
    assert full["bits"] == full["full_bits"] == 32.0
    # Two bits, a scale for each group, and a first layer of four.
    assert 2.0 < bits["aqua, 2 bits"]["bits"] < 4.0
    losses = [abs(bits[f"higgs, {count} bits"]["nats"] - full["nats"]) for count in (2, 4)]
    assert losses[0] > losses[1]
    assert bits["aqua, 2 bits"]["predictor_bytes"] > 0 == bits["higgs, 2 bits"]["predictor_bytes"]
    explained = rows["variance", "exact"]["layers"]
    assert all(one["key_explained"] <= 1.0 for one in explained if one.get("key_explained"))
    assert "bits a value" in table and "keys explained, layer" in table
    pruned = {name: row for (part, name, *_), row in rows.items() if part == "pruned"}
    assert len(pruned) == 6 and "kept" not in pruned["full"]
    assert 0.0 < pruned["h2o"]["kept"] <= pruned["h2o"]["needed"] <= 1.0
    assert len(rows["depth", "all rows"]["rows"]) == 4 and "values: error, layer" in table


def _layer(seed: int, count: int = 256) -> dict[str, torch.Tensor]:
    queries, keys, values = (_draw(seed + n, HEADS, count, DIM) for n in range(3))
    places = {f"queries {place}": queries for place in (AFTER, BEFORE)}
    return {**places, f"keys {AFTER}": keys, f"keys {BEFORE}": keys, "values": values}


def test_queries_that_turn_with_their_distance_are_less_alike() -> None:
    turns = torch.arange(256)[None, :, None] * 0.01
    queries = torch.cat([turns.cos(), turns.sin()], dim=-1)
    layer = _layer(1) | {f"keys {AFTER}": _draw(4, 1, 256, 2), f"queries {AFTER}": queries}
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
        noise = 0.5 * _draw(seed + 5, HEADS, 256, DIM)
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
    layer[f"keys {AFTER}"] = _draw(31, HEADS, 256, DIM) + torch.arange(256)[:, None].ge(128) * 5.0
    errors = drift([[layer]], 0, AFTER)
    later, prompt = (errors[f"centroids of prompt, {keys} keys"] for keys in ("later", "prompt"))
    assert later > 1.1 * prompt and errors["centroids of all, later keys"] < later
    assert max(errors["ParisKV, prompt keys"], errors["ParisKV, later keys"]) < prompt / 2


@pytest.mark.slow
def test_assumptions(smallest: Run, refused: Callable[..., str], tiny_text: Path) -> None:
    rows, table = smallest(Assumptions)
    assert all(len(row["layers"]) == 3 for row in rows.values()) and len(rows) == 9
    before, after = (rows["a2ats", place, 300]["layers"] for place in (BEFORE, AFTER))
    assert all(one["own"] < one["other"] for one in before + after)
    assert "layer -1" not in rows["aqua", "keys", 300]["layers"][0]
    assert "| ctkvr: cosine of two queries, after RoPE, 300 tokens; layer | 1 " in table
    words = ["--model", "reference", "--text", str(tiny_text), "--context", "4K"]
    assert "--windows 9: --text has" in refused(Assumptions, *words, "--windows", "9")
