"""The trial of RoPE: it finds every model's rotation, and notices one that isn't the config's."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvret.lab.calibrate.taps import check_rope, input_device
from hf_kvret.testing.models import MODELS, spread_weights
from hf_kvret_model_patches.rope import Rope

from ...patches import test_rope


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """`model` as if loaded in `dtype`, which leaves frequencies in fp32."""
    kept = {name: b.clone() for name, b in model.named_buffers() if name.endswith("inv_freq")}
    model.to(dtype)
    for name, buffer in kept.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, buffer)
    return model


def llama(**rope: Any) -> PreTrainedModel:
    """A small Llama with the RoPE parameters `rope`."""
    model = AutoModelForCausalLM.from_config(test_rope.llama(**rope))
    spread_weights(model, 0)
    return model


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": test_rope.YARN,
    "yarn with a large factor": {**test_rope.YARN, "attention_factor": 3.0},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_every_model_is_reproduced(name: str) -> None:
    model = MODELS[name].build()
    found = check_rope(model)
    assert set(MODELS[name].full_attention) <= set(found)
    assert list(found) == sorted(found)
    for layer, rope in found.items():
        said = Rope.of(model.config, layer)
        assert (rope.layout, rope.rotary_dim) == (said.layout, said.rotary_dim)
        assert torch.equal(rope.inv_freq, said.inv_freq)


@pytest.mark.parametrize("name", SCALED)
def test_scaled_rope_is_reproduced_in_half_precision(name: str) -> None:
    found = check_rope(in_dtype(llama(**SCALED[name]), torch.bfloat16))
    assert [rope.layout for rope in found.values()] == ["half", "half"]


def test_the_layout_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the code of a model can't be looked at."""
    monkeypatch.delattr("hf_kvret_model_patches.rope._layout")
    assert check_rope(MODELS["cohere"].build())[1].layout == "interleaved"
    assert check_rope(MODELS["llama"].build())[1].layout == "half"


def test_a_rotation_of_another_kind_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = importlib.import_module(type(model).__module__)
    original = home.apply_rotary_pos_emb

    def backwards(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return original(q, k, cos, -sin)

    monkeypatch.setattr(home, "apply_rotary_pos_emb", backwards)
    with pytest.raises(ValueError, match=r"layer 0: .* off by .* \(half\).* keeps rotated"):
        check_rope(model)


def test_frequencies_of_another_model_are_refused(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 1.02
    with pytest.raises(ValueError, match="its RoPE is not the one of its config"):
        check_rope(model)


def test_frequencies_rounded_with_the_weights_are_refused() -> None:
    """They only show at large positions."""
    model = llama(rope_type="default", rope_theta=1e6)
    model.config.max_position_embeddings = 8192
    with pytest.raises(ValueError, match=r"model\.to\(dtype\) rounds the frequencies"):
        check_rope(model.to(torch.bfloat16))


def test_rope_that_changes_with_the_length_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_type='dynamic' in layer 0"):
        check_rope(llama(rope_type="dynamic", factor=2.0))


@pytest.mark.parametrize("offloaded", ["cpu", "embedding on disk"])
def test_offloaded_models_are_tried_where_they_compute(offloaded: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="offloading is accelerate's")
    model = MODELS["llama"].build()
    expected = check_rope(model)
    cpu = torch.device("cpu")
    if offloaded == "cpu":
        accelerate.cpu_offload(model, cpu)
    else:
        parts = {"model.embed_tokens": "disk", "model": "cpu", "lm_head": "cpu"}
        accelerate.dispatch_model(model, parts, main_device="cpu", offload_dir=tmp_path)
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert input_device(model) == cpu
    found = check_rope(model)
    assert list(found) == list(expected)
    for layer, rope in found.items():
        assert rope.layout == expected[layer].layout
        assert torch.equal(rope.inv_freq, expected[layer].inv_freq)


def test_attention_past_the_registered_function_is_refused() -> None:
    config = MODELS["gpt2"].config()
    config.reorder_and_upcast_attn = True
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match="layer 0 attends without the registered function"):
        check_rope(model)
