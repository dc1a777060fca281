"""Models whose weights torchao keeps in 8 or 4 bits: caches give what full attention gives them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret.artifacts.identity import ModelIdentity, compare_weights
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

quantization = pytest.importorskip("torchao.quantization", reason="no torchao: extra test")
int4 = pytest.importorskip("torchao.prototype.quantization.int4", reason="torchao before 0.18")

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
# The narrowest map of the model has 64 inputs, one has 96: groups of 32 divide both.
GROUP = 32


def quantized(bits: str) -> PreTrainedModel:
    model = MODELS["llama"].build()
    if bits == "int8":
        config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        config = int4.PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    quantization.quantize_(model, config)
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {
        "plain": MODELS["llama"].build(),
        **{name: quantized(name) for name in ("int8", "int4")},
    }


@pytest.mark.parametrize(("bits", "method"), [("int4", "a2ats"), ("int8", "flat")])
def test_tokens_are_those_of_the_models_full_attention(
    bits: str, method: str, models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    model, cls = models[bits], hf_kvret.registered_methods()[method]
    artifact = {}
    if cls.needs_artifact:
        # Learned from the quantized model itself.
        artifact["artifact"] = tiny_artifact(model, method, tmp_path / "artifact")
    cache = cls(config=model.config, **COVERING_OPTIONS, **artifact)
    answer = model.generate(prompt(1, 50), past_key_values=cache, **RUN)
    assert torch.equal(answer, model.generate(prompt(1, 50), **RUN))
    cache.save_pretrained(tmp_path / "saved")

    def load() -> hf_kvret.RetrievalCache:
        return cls.from_pretrained(tmp_path / "saved", model.config, **artifact)

    ids = torch.cat([answer, prompt(1, 20, salt=1)], dim=1)
    expected = model.generate(ids, **RUN)
    for one in (cache, load()):
        assert torch.equal(model.generate(ids, past_key_values=one, **RUN), expected)
    with pytest.raises(ValueError, match="was filled by other weights"):
        models["plain"].generate(ids, past_key_values=load(), **RUN)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_codes_made_again_are_the_same_model(bits: str, models: dict[str, PreTrainedModel]) -> None:
    model, plain = models[bits], models["plain"]
    caches = [hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS) for _ in range(2)]
    answer = model.generate(prompt(1, 50), past_key_values=caches[0], **RUN)
    again = quantized(bits).generate(answer, past_key_values=caches[0], **RUN)
    assert torch.equal(again, model.generate(answer, **RUN))
    answer = plain.generate(prompt(1, 50), past_key_values=caches[1], **RUN)
    with pytest.raises(ValueError, match="was filled by other weights"):
        model.generate(answer, past_key_values=caches[1], **RUN)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_an_artifact_compares_plain_weights(bits: str, models: dict[str, PreTrainedModel]) -> None:
    samples = ModelIdentity.of(models["plain"]).weights
    count, differences = compare_weights(samples, models[bits])
    assert not differences and 0 < count < len(samples)
    coded = ModelIdentity.of(models[bits])
    assert len(coded.weights) == count
    assert compare_weights(coded.weights, models["plain"])[0] == count
