"""A2ATS and AQUA-KV are what renderings of their papers make of the same numbers.

The renderings, ``literal_a2ats`` and ``literal_aqua``, share no code with the library.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import literal_a2ats as a2ats
import literal_aqua as aqua
import pytest
import torch
from literal import VARIANTS, Literal, codebooks_of, joined, literal_attention
from transformers import AttentionInterface

from hf_kvret.artifacts.shared import shared_artifact
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration, k_means, query_metric
from hf_kvret.lab.calibrate.study import Corpus, calibrate
from hf_kvret.lab.calibrate.taps import LayerTokens, before_rope, tap_attention
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.methods.a2ats import A2ATSCache
from hf_kvret.methods.a2ats.learned import at_distance, learned_layer
from hf_kvret.methods.aqua import AquaKVCache
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_kernels.higgs.naive import grid_points
from hf_kvret_model_patches.rope import Rope

from ...methods.codebooks import normal

CPU = torch.device("cpu")
LAYERS, SINKS = 3, aqua.SINK_TOKENS


def _distinct(count: int) -> torch.Tensor:
    """Different tokens of the needle model."""
    return 2 + torch.randperm(500, generator=torch.Generator().manual_seed(11))[:count]


def _higgs(bits: int, width: int) -> aqua.Higgs:
    signs = HiggsCodec(bits, aqua.group_size(width)).sign_tensor(CPU)
    return aqua.Higgs(grid_points(bits, CPU).double(), signs.double())


def test_codebooks_are_those_of_the_equations() -> None:
    """Same seeds of k-means; the library divides H by the root mean square of its entries."""
    rope, keys, queries = (
        Rope(500.0 ** -(torch.arange(8) / 8)),
        normal(0, 300, 16),
        normal(1, 900, 16),
    )
    far = a2ats.windowed_query(queries, rope.inv_freq)
    ours = at_distance(queries[None, None], rope, a2ats.FIXED_DISTANCE)[0, 0]
    torch.testing.assert_close(ours, far, rtol=0, atol=1e-5)
    moment = a2ats.second_moment(far.double())
    metric = query_metric(moment[None])[0][0]
    expected = a2ats.cholesky_factor(moment / moment.square().mean().sqrt()).float()
    torch.testing.assert_close(metric, expected, rtol=0, atol=1e-5)
    z = keys @ metric
    seeds, words = (k_means(z[None], 32, rounds=n, tolerance=0, seed=3)[0] for n in (0, 30))
    torch.testing.assert_close(words, a2ats.k_means(z, seeds, 30), rtol=0, atol=1e-5)


def test_grids_are_as_good_as_those_of_lloyds_iteration() -> None:
    pairs = normal(5, 20_000, 2).double()
    grids = grid_points(2, CPU).double(), aqua.gaussian_grid(16, samples=20_000, rounds=60)
    errors = [torch.cdist(pairs, grid).amin(1).square().mean() for grid in grids]
    assert errors[0] == pytest.approx(float(errors[1]), rel=0.02)


def test_a_model_attends_to_what_the_equations_select(tmp_path: Path) -> None:
    """Queries behind a prompt, by steps of the library and in one pass of the rendering.

    Each token has a codeword of its own: those that share one tie, and either may be selected.
    """
    model, ids = load_subject("needle").model, _distinct(304)
    learner = A2ATSCalibration(codewords=304, rounds=0, codeword_dtype="float32")
    artifact = calibrate(model, Corpus([ids], 0, {}), learner, tmp_path, progress=False)
    cache = A2ATSCache(model.config, preset="paper", top_k=20, artifact=str(tmp_path))
    books = {n: codebooks_of(learned_layer(artifact, n, CPU)) for n in range(LAYERS)}
    ropes = {n: Rope.of(model.config, n) for n in range(LAYERS)}
    AttentionInterface.register("literal", literal_attention(books, ropes, first=300, top_k=10))
    before = model.config._attn_implementation
    with torch.no_grad():
        passes = [ids[:300], *ids[300:].split(1)]
        logits = torch.cat([model(x[None], past_key_values=cache).logits[:, -1] for x in passes])
        full = model(ids[None], logits_to_keep=5, use_cache=False).logits[0]
        model.set_attn_implementation("literal")
        literal = model(ids[None], logits_to_keep=5, use_cache=False).logits[0]
        model.set_attn_implementation(before)
    torch.testing.assert_close(logits, literal, rtol=0, atol=1e-4)
    assert (full[1:] - literal[1:]).abs().max() > 1e-2


def test_a_cache_holds_what_the_algorithms_reconstruct() -> None:
    """Predictors of the same artifact; a prompt in one pass is coded but for its newest token."""
    model, ids = load_subject("needle").model, _distinct(270)[None]
    artifact = shared_artifact(str(BUNDLED_MODEL / "aqua"), None, "aqua")
    exact: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(layer: int, tokens: LayerTokens) -> None:
        keys = before_rope(tokens.key, Rope.of(model.config, layer))
        exact.append((joined(keys[0]), joined(tokens.value[0])))

    cache = AquaKVCache(model.config, preset="paper", artifact=str(BUNDLED_MODEL / "aqua"))
    with torch.no_grad(), tap_attention(model, take):
        model.get_decoder()(ids, use_cache=False)
    with torch.no_grad():
        model(ids, past_key_values=cache)

    def linear(layer: int, side: str) -> aqua.Linear:
        weight, bias = (artifact.tensors[f"layers.{layer}.{side}.{x}"] for x in ("weight", "bias"))
        # The paper has values before keys, the library keys before values.
        inputs = weight.float().T
        return aqua.Linear(inputs if side == "key" else inputs.roll(width, 0), bias)

    width = exact[0][0].shape[1]
    predictors = [(linear(n, "key"), linear(n, "value")) for n in range(1, LAYERS)]
    q, q_first = (_higgs(bits, width) for bits in (aqua.BITS, aqua.FIRST_LAYER_BITS))
    rebuilt = aqua.reconstruct(exact, predictors, q, q_first)
    for n, (layer, rows) in enumerate(zip(cache.retrieval_layers, rebuilt, strict=True)):
        parts = [(keys, values) for _, keys, values in layer.kv.store.chunks()]
        keys, values = (torch.cat(side, dim=2) for side in zip(*parts, strict=True))
        cold = keys.shape[2]
        assert cold == ids.shape[1] - 1
        before = before_rope(keys, Rope.of(model.config, n))
        for x, y in zip((before, values), rows, strict=True):
            torch.testing.assert_close(joined(x[0])[SINKS:], y[SINKS:cold], rtol=0, atol=1e-3)


@pytest.mark.slow
def test_the_study_shows_no_difference(
    smallest: Callable[..., tuple[dict[tuple[Any, ...], dict[str, Any]], str]],
) -> None:
    rows, table = smallest(Literal)
    assert len(rows) == sum(map(len, VARIANTS.values()))
    nats = {cell[2]: row["nats"] for cell, row in rows.items() if cell[1] == "text"}
    assert nats["literal"] == pytest.approx(nats["library"], rel=0.02) and "rank" in table
