"""``hf-kvret calibrate`` on a model of latent attention, from its folder to ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_kvret
from hf_kvret import A2ATSCache, AquaKVCache
from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS
from hf_kvret.testing.scenario import prompt

from ...artifacts.artifact_folder import save_model, write_text

SHORT = ("--tokens", "400", "--length", "100", "--uuid-tokens", "100")
# Options of each calibration, and those that make its cache exact.
METHODS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "a2ats": (A2ATSCache, ("--codewords", "8", "--distance", "64", "--rounds", "3"), {}),
    "aqua": (AquaKVCache, ("--bits", "4"), {"bits": 16, "first_bits": 16}),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random DeepSeek-V3 of two layers and the tokenizer of the reference model."""
    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek"
    return save_model(folder, LATENT_MODELS["deepseek_v3"].config())


@pytest.mark.parametrize("method", METHODS)
def test_from_a_folder_to_generate(
    method: str, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_class, more, exact = METHODS[method]
    text = write_text(tmp_path / "river.txt")
    out = model_dir / method
    where = ["--model", str(model_dir), "--text", str(text), "--out", str(out)]
    assert main(["calibrate", method, *where, *more, *SHORT]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    artifact = CalibrationArtifact.from_pretrained(out, method=method)
    facts = artifact.model.facts
    assert (facts["kv_lora_rank"], facts["head_dim"]) == (16, 24)
    assert len(artifact.quality) == 2
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    greedy = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(prompt(2, 120), **greedy)
    # The artifact is found in the model's own folder.
    cache = cache_class(model.config, **COVERING_OPTIONS, **exact)
    assert torch.equal(model.generate(prompt(2, 120), past_key_values=cache, **greedy), expected)
    assert all(layer.selected for layer in cache.retrieval_layers)
    by_name = model.generate(
        prompt(2, 120),
        cache_implementation=method,
        cache_config=COVERING_OPTIONS | exact,
        **greedy,
    )
    assert torch.equal(by_name, expected)
    hf_kvret.restore(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_b_proj.weight.mul_(1.5)
        model.model.layers[1].self_attn.kv_b_proj.weight.mul_(1.5)
        model.model.layers[1].self_attn.o_proj.weight.mul_(1.5)
    other = cache_class(model.config, **COVERING_OPTIONS)
    with pytest.raises(ValueError, match=r"other weights|sampled parameters differ"):
        other.check_model(model)
    # Rows of as many numbers, which mean something else.
    plain = {name: value for name, value in model.config.to_dict().items() if name != "head_dim"}
    for changes, message in (
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 16}, "made for kv_lora_rank=16, this model has 8"),
        ({"qk_nope_head_dim": 24}, "made for qk_nope_head_dim=16, this model has 24"),
        ({"rope_interleave": False}, "made for rope_interleave=True, this model has False"),
    ):
        with pytest.raises(ValueError, match=message):
            cache_class(type(model.config).from_dict(plain | changes), artifact=str(out))
