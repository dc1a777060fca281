"""A sample of a model's weights: enough numbers to tell a base model from its instruct tune.

Names are relative to the decoder (``layers.0.mlp.up_proj.weight``), so the same text model inside
another class is compared too. With adapters of PEFT they are those of the base model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_kvret.integration.adapters import base_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED_PARAMETERS = 32
SAMPLED_NUMBERS = 16

# Two casts of the same number differ by at most one step of the coarser dtype, bfloat16: 2^-7 of
# the number. Below 6e-5 float16 has absolute steps of 2^-24. A tune that moves the weights by a
# thousandth of their spread moves one sampled number in twelve by more than that, because many
# weights are much smaller than the spread; a lighter one leaves the keys nearly what they were.
_RELATIVE, _ABSOLUTE = 2.0**-7, 2.0**-24

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Prime of Knuth's multiplicative hash: its multiples modulo the size are spread evenly.
_STRIDE = 2_654_435_761


@dataclass(frozen=True)
class WeightSample:
    """Some numbers of one parameter.

    Attributes:
        name: of the parameter, seen from the decoder.
        shape: of the parameter.
        values: 16 numbers at fixed places, with six digits.
    """

    name: str
    shape: tuple[int, ...]
    values: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return {"name": self.name, "shape": list(self.shape), "values": list(self.values)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> WeightSample:
        """The inverse of ``as_json``; KeyError, TypeError or ValueError for anything else."""
        shape = tuple(int(size) for size in plain["shape"])
        values = tuple(float(value) for value in plain["values"])
        if not shape or min(shape) < 1 or len(values) != SAMPLED_NUMBERS:
            raise ValueError(f"weights sample of {plain['name']!r}: {len(values)} values, {shape}")
        return cls(str(plain["name"]), shape, values)


@dataclass(frozen=True)
class WeightsReport:
    """Result of a comparison of weights.

    Attributes:
        compared: how many sampled parameters could be compared.
        differing: names of those that are not the same, in the order of the sample.
        skipped: name and reason of those that could not be compared.
        example: the first number that differs, in words; empty where none does.
    """

    compared: int
    differing: tuple[str, ...]
    skipped: Mapping[str, str]
    example: str = ""


def sample_weights(model: PreTrainedModel) -> tuple[WeightSample, ...]:
    """Numbers of up to 32 parameters of ``model``'s decoder, the same at every call.

    Parameters with fewer than 16 numbers and those that are quantized, sharded or offloaded are
    left out. Reads a few hundred numbers from the model's devices.

    Raises:
        ValueError: the weights hold NaN or infinity.
    """
    parameters = {
        name: parameter
        for name, parameter in base_parameters(decoder_of(model)).items()
        if not _unreadable(parameter) and parameter.numel() >= SAMPLED_NUMBERS
    }
    # Ordered by the hash of the name: 32 of some hundred then cover all kinds of layers.
    names = sorted(parameters, key=lambda name: hashlib.sha256(name.encode()).digest())
    samples = []
    for name in sorted(names[:SAMPLED_PARAMETERS]):
        numbers = _numbers(parameters[name])
        if not bool(numbers.isfinite().all()):
            raise ValueError(
                f"{name} of the model holds NaN or infinity: load the model anew, in a dtype that "
                "holds its weights (bfloat16 or float32)"
            )
        values = tuple(float(f"{value:.6g}") for value in numbers.tolist())
        samples.append(WeightSample(name, tuple(parameters[name].shape), values))
    return tuple(samples)


def compare_weights(samples: tuple[WeightSample, ...], model: PreTrainedModel) -> WeightsReport:
    """Compare ``samples`` with ``model``, in fp32, tolerating casts to bf16 and fp16."""
    parameters = base_parameters(decoder_of(model))
    count, differences, reasons, example = 0, [], {}, ""
    for sample in samples:
        parameter = parameters.get(sample.name)
        reason = "not in this model" if parameter is None else _unreadable(parameter)
        if not reason and parameter is not None and tuple(parameter.shape) != sample.shape:
            reason = f"of shape {list(parameter.shape)}, sampled with {list(sample.shape)}"
        if reason or parameter is None:
            reasons[sample.name] = reason
            continue
        count += 1
        expected_values, values = torch.tensor(sample.values), _numbers(parameter)
        scale = torch.maximum(expected_values.abs(), values.abs())
        # Not `>`: a NaN in the model counts as a difference.
        wrong = ~((expected_values - values).abs() <= _RELATIVE * scale + _ABSOLUTE)
        if wrong.any():
            differences.append(sample.name)
            place = int(wrong.nonzero()[0])
            example = example or (
                f"{sample.name} has {values[place]:.4g} where {expected_values[place]:.4g} was "
                "sampled"
            )
    return WeightsReport(count, tuple(differences), reasons, example)


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The text model in ``model``, which may be that itself."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _unreadable(parameter: torch.Tensor) -> str:
    """Why single numbers of a parameter can't be read; empty if they can."""
    if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
        return f"kept as {type(parameter).__name__}"
    if parameter.dtype not in _FLOATS:
        return f"quantized ({str(parameter.dtype).removeprefix('torch.')})"
    if parameter.device.type == "meta":
        return "offloaded"
    return ""


def _numbers(parameter: torch.Tensor) -> torch.Tensor:
    """``[16]`` numbers of a parameter, fp32, on the CPU."""
    places = torch.arange(1, SAMPLED_NUMBERS + 1) * _STRIDE % parameter.numel()
    return parameter.detach().take(places.to(parameter.device)).float().cpu()
