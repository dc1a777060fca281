"""Sampled weights: the same model in any dtype passes, another tune does not."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.artifacts.identity import compare_weights, sample_weights
from hf_kvret.saved.identity import SAMPLED_NUMBERS, SAMPLED_PARAMETERS
from hf_kvret.testing import MODELS

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


def _cast(model: PreTrainedModel, *dtypes: torch.dtype) -> PreTrainedModel:
    model = copy.deepcopy(model)
    for dtype in dtypes:
        model = model.to(dtype)
    return model


def _tune(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """A copy whose matrices moved by a share of their spread."""
    tune = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in tune.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(share * parameter.std() * noise)
    return tune


def test_a_sample_is_the_same_at_every_call(llama: PreTrainedModel) -> None:
    sample = sample_weights(llama)
    assert sample == sample_weights(MODELS["llama"].build())
    assert {len(part.values) for part in sample} == {SAMPLED_NUMBERS}
    key = next(part for part in sample if part.name == "layers.0.self_attn.k_proj.weight")
    weight = llama.model.layers[0].self_attn.k_proj.weight.detach().flatten()
    nearest = (torch.tensor(key.values)[:, None] - weight).abs().amin(dim=1)
    # Six digits are kept.
    assert bool((nearest <= 1e-6 * weight.abs().max()).all())
    assert len(set(key.values)) > SAMPLED_NUMBERS // 2
    # A decoder alone has the same names.
    report = compare_weights(sample, llama.model)
    assert report.compared and not report.skipped and not report.differing


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl", "gpt2", "mixtral", "lfm2"])
def test_any_kind_of_model_is_sampled_in_32_parameters_at_most(kind: str) -> None:
    model = MODELS[kind].build()
    sample = sample_weights(model)
    assert 10 < len(sample) <= SAMPLED_PARAMETERS
    report = compare_weights(sample, model)
    assert report.compared == len(sample) and not report.differing


@pytest.mark.parametrize(
    ("made_in", "used_in"),
    [
        (FLOAT, (HALF,)),
        (BFLOAT, (FLOAT,)),
        (HALF, (BFLOAT,)),
        # A copy of the repository in fp16, loaded in bf16, beside the original in bf16.
        (BFLOAT, (HALF, BFLOAT)),
        (torch.float64, (BFLOAT, FLOAT)),
    ],
)
def test_the_same_weights_in_another_dtype_pass(
    llama: PreTrainedModel, made_in: torch.dtype, used_in: tuple[torch.dtype, ...]
) -> None:
    sample = sample_weights(_cast(llama, made_in))
    report = compare_weights(sample, _cast(llama, *used_in))
    assert report.compared == len(sample) and report.differing == ()


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF])
def test_a_tune_that_moves_weights_by_a_hundredth_is_found_everywhere(
    llama: PreTrainedModel, dtype: torch.dtype
) -> None:
    sample = sample_weights(llama)
    report = compare_weights(sample, _cast(_tune(llama, 0.01), dtype))
    # Half of the numbers move beyond a cast, so a matrix with 16 of them has one.
    assert set(report.differing) == {part.name for part in sample if len(part.shape) == 2}
    assert report.example.startswith(report.differing[0])


def test_a_small_tune_another_training_and_nan_are_found(llama: PreTrainedModel) -> None:
    sample = sample_weights(_cast(llama, BFLOAT))
    assert len(compare_weights(sample, _cast(_tune(llama, 0.001), BFLOAT)).differing) >= 5
    other = dataclasses.replace(MODELS["llama"], seed=77).build()
    assert len(compare_weights(sample, other).differing) > len(sample) // 2
    broken = copy.deepcopy(llama)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    assert compare_weights(sample, broken).differing == ("norm.weight",)
    with pytest.raises(ValueError, match=r"norm\.weight of the model holds NaN or infinity"):
        sample_weights(broken)


class _Wrapped(torch.Tensor):
    """A tensor that is more than numbers, as quantized and sharded ones are."""


def test_what_cannot_be_read_is_skipped_with_its_reason(llama: PreTrainedModel) -> None:
    sample = sample_weights(llama)
    model = copy.deepcopy(llama)
    first, second = (layer.self_attn for layer in model.model.layers)
    first.k_proj.weight = torch.nn.Parameter(
        torch.zeros(32, 64, dtype=torch.uint8), requires_grad=False
    )
    first.q_proj.weight = torch.nn.Parameter(first.q_proj.weight.detach()[:32])
    second.k_proj = torch.nn.Identity()
    wrapped = second.q_proj.weight.detach().as_subclass(_Wrapped)
    second.q_proj.weight = torch.nn.Parameter(wrapped)
    second.v_proj.weight = torch.nn.Parameter(second.v_proj.weight.detach().to("meta"))
    report = compare_weights(sample, model)
    assert report.skipped == {
        "layers.0.self_attn.k_proj.weight": "quantized (uint8)",
        "layers.0.self_attn.q_proj.weight": "of shape [32, 64], sampled with [64, 64]",
        "layers.1.self_attn.k_proj.weight": "not in this model",
        "layers.1.self_attn.q_proj.weight": "kept as _Wrapped",
        "layers.1.self_attn.v_proj.weight": "offloaded",
    }
    assert report.compared == len(sample) - 5 and report.differing == ()
    names = {part.name for part in sample_weights(model)}
    assert names.isdisjoint(set(report.skipped) - {"layers.0.self_attn.q_proj.weight"})
