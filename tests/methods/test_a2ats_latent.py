"""A2ATS on latent attention: rows before RoPE, absorbed queries at a distance, many heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import A2ATSCache
from hf_kvret.artifacts.shared import shared_artifact
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.study import Corpus, calibrate
from hf_kvret.lab.calibrate.taps import before_rope
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.methods.a2ats.learned import at_distance, learned_layer
from hf_kvret.testing import LATENT_MODELS
from hf_kvret.testing.scenario import prompt
from hf_kvret_kernels import codebook
from hf_kvret_model_patches import latent
from hf_kvret_model_patches.rope import Rope

from ..lab.calibrate.test_taps import tapped

RANK, TOKENS, WINDOW = 16, 40, 32
SLOW = pytest.mark.slow
FAMILIES = [
    "deepseek_v3",
    *(pytest.param(name, marks=SLOW) for name in ("deepseek_v2", "mistral4", "kimi_linear")),
]


def made(
    name: str, folder: Path, **options: Any
) -> tuple[PreTrainedModel, torch.Tensor, A2ATSCache]:
    """A model, three sequences of 40 tokens, and a cache whose codewords are all of their rows."""
    model = LATENT_MODELS[name].build()
    ids = prompt(3, TOKENS)
    settings = {"codewords": 3 * TOKENS, "distance": WINDOW, "rounds": 1}
    settings |= {"codeword_dtype": "float32"} | options
    corpus = Corpus(list(ids), 0, {"text": "random"})
    calibrate(model, corpus, A2ATSCalibration(**settings), folder, progress=False)
    return model, ids, A2ATSCache(model.config, artifact=str(folder))


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_every_head_at_the_fixed_distance(name: str, tmp_path: Path) -> None:
    """Of expanded keys before RoPE, for a codeword for each token; nothing is absorbed here."""
    model, ids, cache = made(name, tmp_path)
    artifact = shared_artifact(cache.options.artifact, None, "a2ats")
    positions = torch.arange(TOKENS)[None].expand(3, -1)
    for layer, tokens in tapped(model, ids).items():
        module = tokens.latent
        rope = Rope.of(model.config, layer)
        before = before_rope(tokens.key, rope)
        with torch.no_grad():
            keys, _ = latent.expand(module, before[..., :RANK], before[..., RANK:])
            absorbed = ModuleHeads(module).absorb(tokens.query)
        query = at_distance(before_rope(tokens.query, rope), rope, WINDOW)
        expected = query.double() @ keys.double().mT
        learned = learned_layer(artifact, layer, torch.device("cpu"))
        codes = learned.encode(tokens.key, positions)
        scores = codebook.lookup(learned.table(absorbed, positions, 1.0, None), codes)
        size = query.norm(dim=-1).amax() * keys.norm(dim=-1).amax()
        # fp32, through L and its inverse, which together may lose three digits.
        assert ((scores - expected).abs() <= 1e-3 * size).all()
        # In the first layer a row before RoPE is that of its token, but for rounding.
        distinct = ids.unique() if layer == 0 else codes
        assert len(codes.unique()) >= len(distinct.flatten())


def test_the_metric_is_that_of_absorbed_queries(tmp_path: Path) -> None:
    model, ids, cache = made("deepseek_v3", tmp_path)
    artifact = shared_artifact(cache.options.artifact, None, "a2ats")
    for layer in (0, 1):
        moments = torch.zeros(24, 24, dtype=torch.float64)
        for row in ids:
            tokens = tapped(model, row[None])[layer]
            rope = Rope.of(model.config, layer)
            with torch.no_grad():
                query = ModuleHeads(tokens.latent).absorb(before_rope(tokens.query, rope))
            query = at_distance(query, rope, WINDOW)[0].flatten(0, 1).double()
            moments += query.mT @ query
        moments /= moments.square().mean().sqrt()
        factor = artifact.tensors[f"layers.{layer}.metric"].double()
        assert factor.shape == (1, 24, 24)
        torch.testing.assert_close((factor @ factor.mT)[0], moments, rtol=1e-4, atol=1e-4)
        assert artifact.options["layers"][str(layer)]["last"] is True
