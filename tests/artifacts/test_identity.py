"""An artifact knows its model: by facts of the configuration, and by a sample of the weights."""

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig, PreTrainedModel

from hf_kvret.artifacts import CalibrationArtifact, ModelIdentity
from hf_kvret.artifacts.identity import compare_weights, sample_weights
from hf_kvret.saved.identity import SAMPLED_NUMBERS, SAMPLED_PARAMETERS, model_facts
from hf_kvret.testing import MODELS

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, "model_type=llama, this model has mistral"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=2, this model has 3"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=2, this model has 1"),
        ({"head_dim": 32}, "head_dim=16, this model has 32"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers=none, this model has [1, 0]"),
        ({"rope": {"rope_theta": 5e5}}, "rope.rope_theta=10000.0, this model has 500000.0"),
        ({"rope": {"low_freq_factor": None}}, "rope.low_freq_factor=1.0, this model has none"),
        ({"use_cache": False, "dtype": "bfloat16", "max_position_embeddings": 4096}, ""),
        # Other words for the same.
        ({"layer_types": ["full_attention", "full_attention"]}, ""),
        ({"rope": {"rope_theta": 10_000, "type": "llama3", "partial_rotary_factor": 1.0}}, ""),
    ],
    ids=str,
)
def test_the_first_difference_that_matters_is_named(
    llama: PreTrainedModel, identity: ModelIdentity, changes: dict[str, Any], words: str
) -> None:
    config = copy.deepcopy(llama.config)
    config.rope_parameters = {**config.rope_parameters, **changes.get("rope", {})}
    for name in changes.keys() - {"rope"}:
        setattr(config, name, changes[name])
    assert identity.difference(config) == (f"made for {words}" if words else "")
    is_same = ModelIdentity("other name", model_facts(config)).sha256 == identity.sha256
    assert is_same == (not words)


def test_layers_of_another_type_are_named_by_their_number() -> None:
    config = MODELS["gemma3"].config()
    gemma = ModelIdentity("gemma", model_facts(config))
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    words = "made for layer_types[2]=full_attention, this model has sliding_attention"
    assert gemma.difference(config) == words


def test_facts_are_plain_json_and_those_of_the_text_model(
    llama: PreTrainedModel, identity: ModelIdentity, tmp_path: Path
) -> None:
    assert ModelIdentity.from_json(json.loads(json.dumps(identity.as_json()))) == identity
    text = Gemma3TextConfig(num_hidden_layers=2)
    assert model_facts(Gemma3Config(text_config=text.to_dict())) == model_facts(text)
    with pytest.raises(TypeError, match=r"config is a Linear: pass model\.config"):
        model_facts(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    # The folder of a model is nobody else's business.
    (tmp_path / "my-llama").mkdir()
    assert ModelIdentity.of(llama, str(tmp_path / "my-llama")).name == "my-llama"


def test_another_architecture_and_other_weights_are_refused(
    artifact: CalibrationArtifact, llama: PreTrainedModel
) -> None:
    artifact.check(llama.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert artifact.check_weights(llama) == len(artifact.model.weights) > 10
    config = copy.deepcopy(llama.config)
    config.num_key_value_heads = 4
    with pytest.raises(ValueError, match=r"of meta/tiny-llama was made for num_key.*calibrate"):
        artifact.check(config)
    tune = copy.deepcopy(llama)
    with torch.no_grad():
        tune.model.layers[1].self_attn.k_proj.weight.add_(0.01)
    words = r"other weights: 1 of \d+ .*layers.1.self_attn.k_proj.weight has .*make an artifact of "
    with pytest.raises(ValueError, match=words):
        artifact.check_weights(tune)
    with torch.device("meta"):
        offloaded = type(llama)(llama.config)
    with pytest.warns(UserWarning, match=r"can't be compared .*offloaded"):
        assert artifact.check_weights(offloaded) == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_sample_is_the_same_at_every_call_and_small(name: str) -> None:
    model = MODELS[name].build()
    sample = sample_weights(model)
    assert sample == sample_weights(MODELS[name].build())
    assert 10 < len(sample) <= SAMPLED_PARAMETERS
    assert {len(part.values) for part in sample} == {SAMPLED_NUMBERS}
    assert compare_weights(sample, model) == (len(sample), {})


def _cast(model: PreTrainedModel, *dtypes: torch.dtype) -> PreTrainedModel:
    model = copy.deepcopy(model)
    for dtype in dtypes:
        model = model.to(dtype)
    return model


def _tuned(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """A copy whose matrices moved by a share of their spread."""
    tune = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in tune.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(share * parameter.std() * noise)
    return tune


@pytest.mark.parametrize(
    ("made_in", "used_in"),
    [(FLOAT, (HALF,)), (BFLOAT, (FLOAT,)), (HALF, (BFLOAT,)), (BFLOAT, (HALF, BFLOAT))],
)
def test_the_same_weights_in_another_dtype_pass(
    llama: PreTrainedModel, made_in: torch.dtype, used_in: tuple[torch.dtype, ...]
) -> None:
    sample = sample_weights(_cast(llama, made_in))
    assert compare_weights(sample, _cast(llama, *used_in)) == (len(sample), {})


def test_tunes_other_trainings_and_nan_are_found(llama: PreTrainedModel) -> None:
    sample = sample_weights(llama)
    matrices = {part.name for part in sample if len(part.shape) == 2}
    # Half of the numbers move beyond a cast, so a matrix with 16 of them has one.
    for dtype in (FLOAT, BFLOAT, HALF):
        assert compare_weights(sample, _cast(_tuned(llama, 0.01), dtype))[1].keys() == matrices
    assert len(compare_weights(sample, _tuned(llama, 0.001))[1]) >= 5
    other = dataclasses.replace(MODELS["llama"], seed=77).build()
    assert len(compare_weights(sample, other)[1]) > len(sample) // 2
    broken = copy.deepcopy(llama)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    assert list(compare_weights(sample, broken)[1]) == ["norm.weight"]
    with pytest.raises(ValueError, match=r"norm\.weight of the model holds NaN or infinity"):
        sample_weights(broken)


class _Wrapped(torch.Tensor):
    """A tensor that is more than numbers, as quantized and sharded ones are."""


def test_what_cannot_be_read_is_left_out(llama: PreTrainedModel) -> None:
    sample = sample_weights(llama)
    model = copy.deepcopy(llama)
    first, second = (layer.self_attn for layer in model.model.layers)
    codes = torch.zeros(32, 64, dtype=torch.uint8)
    first.k_proj.weight = torch.nn.Parameter(codes, requires_grad=False)
    first.q_proj.weight = torch.nn.Parameter(first.q_proj.weight.detach()[:32])
    second.k_proj = torch.nn.Identity()
    wrapped = second.q_proj.weight.detach().as_subclass(_Wrapped)
    second.q_proj.weight = torch.nn.Parameter(wrapped)
    second.v_proj.weight = torch.nn.Parameter(second.v_proj.weight.detach().to("meta"))
    assert compare_weights(sample, model) == (len(sample) - 5, {})
