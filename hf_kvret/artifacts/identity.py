"""Which model an artifact is of: facts of its configuration, and a sample of the weights.

A cache tells exactly the weights that filled it. An artifact serves its model in other dtypes too,
so it keeps numbers, and compares them with a tolerance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.saved.folder import plain_bytes
from hf_kvret.saved.identity import (
    SAMPLED_NUMBERS,
    SAMPLED_PARAMETERS,
    base_parameters,
    facts_difference,
    model_facts,
    model_name,
    sample,
)
from hf_kvret_model_patches.decoders import decoder_of

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Two casts of the same number differ by at most one step of the coarser dtype, bfloat16: 2^-7 of
# the number. Below 6e-5 float16 has absolute steps of 2^-24. A tune that moves the weights by a
# thousandth of their spread moves one sampled number in twelve by more than that, because many
# weights are much smaller than the spread; a lighter one leaves the keys nearly what they were.
_RELATIVE, _ABSOLUTE = 2.0**-7, 2.0**-24


@dataclass(frozen=True)
class WeightSample:
    """Some elements of one parameter.

    Attributes:
        name: of the parameter, seen from the decoder.
        shape: of the parameter.
        values: 16 elements at fixed indices, with six digits.
    """

    name: str
    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class ModelIdentity:
    """The model that something was learned from.

    Attributes:
        name: hub id or name of the model, for display only.
        facts: facts that must agree, by name: ``model_type``, counts and widths,
            kinds of layers, and RoPE under ``rope.<parameter>``, or
            ``rope.<kind of layer>.<parameter>``. Plain JSON.
        weights: sampled numbers.
    """

    name: str
    facts: Mapping[str, Any]
    weights: tuple[WeightSample, ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel, name: str | None = None) -> ModelIdentity:
        """The identity of ``model``.

        Args:
            model: reads a few hundred numbers of its weights.
            name: as in ``ModelIdentity``; None for where the model was loaded from. Of a folder
                on this machine only the last part is taken, because artifacts are shared.

        Raises:
            ValueError: the weights hold NaN or infinity.
        """
        return cls(model_name(model, name), model_facts(model.config), sample_weights(model))

    @property
    def sha256(self) -> str:
        """Hex digest of the facts, equal for all models of an architecture. Weights are left out,
        because the same weights may be in another dtype."""
        return hashlib.sha256(plain_bytes(self.facts)).hexdigest()

    def difference(self, config: PreTrainedConfig) -> str:
        """The first fact in which the model with ``config`` differs, in words; empty if none."""
        return facts_difference(self.facts, model_facts(config))

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON, with the digest."""
        return json.loads(json.dumps({**asdict(self), "sha256": self.sha256}))

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ModelIdentity:
        """The inverse of ``as_json``."""
        weights = (
            WeightSample(one["name"], tuple(one["shape"]), tuple(one["values"]))
            for one in plain["weights"]
        )
        return cls(plain["name"], plain["facts"], tuple(weights))


def sample_weights(model: PreTrainedModel) -> tuple[WeightSample, ...]:
    """Elements of up to 32 parameters of ``model``'s decoder, the same at every call.

    Parameters with fewer than 16 elements and those that are quantized, sharded or offloaded are
    left out. Reads a few hundred elements from the model's devices.

    Raises:
        ValueError: the weights hold NaN or infinity.
    """
    parameters = {
        name: parameter
        for name, parameter in base_parameters(decoder_of(model)).items()
        if _is_readable(parameter) and parameter.numel() >= SAMPLED_NUMBERS
    }
    samples = []
    for name, elements in sample(parameters, SAMPLED_PARAMETERS).items():
        if not bool(elements.isfinite().all()):
            raise ValueError(
                f"{name} of the model holds NaN or infinity: load the model anew, in a dtype that "
                "holds its weights (bfloat16 or float32)"
            )
        values = tuple(float(f"{value:.6g}") for value in elements.float().tolist())
        samples.append(WeightSample(name, tuple(parameters[name].shape), values))
    return tuple(samples)


def compare_weights(
    samples: tuple[WeightSample, ...], model: PreTrainedModel
) -> tuple[int, dict[str, str]]:
    """Compare ``samples`` with ``model``, in fp32, tolerating casts to bf16 and fp16.

    Returns:
        how many could be compared; and, by the name of each parameter that is not the same, the
        first number that differs, in words.
    """
    shapes = {one.name: one.shape for one in samples}
    readable = {
        name: parameter
        for name, parameter in base_parameters(decoder_of(model)).items()
        if _is_readable(parameter) and tuple(parameter.shape) == shapes.get(name)
    }
    elements = sample(readable, len(readable))
    pairs = ((one, elements[one.name].float()) for one in samples if one.name in readable)
    return len(readable), {one.name: why for one, x in pairs if (why := _difference(one, x))}


def _difference(sampled: WeightSample, values: torch.Tensor) -> str:
    """The first number that differs by more than a cast, in words; empty if none does."""
    expected = torch.tensor(sampled.values, device="cpu")
    scale = torch.maximum(expected.abs(), values.abs())
    # Compared in this way round, a NaN in the model is a difference; infinity, which is near
    # everything, is one too.
    wrong = ~((expected - values).abs() <= _RELATIVE * scale + _ABSOLUTE) | ~scale.isfinite()
    if not wrong.any():
        return ""
    index = int(wrong.nonzero()[0])
    return f"{sampled.name} has {values[index]:.4g} where {expected[index]:.4g} was sampled"


def _is_readable(parameter: torch.Tensor) -> bool:
    """Whether it has plain numbers here: neither quantized nor in shards nor offloaded."""
    is_plain = type(parameter) in (nn.Parameter, torch.Tensor)
    return is_plain and parameter.dtype in _FLOATS and not parameter.is_meta
