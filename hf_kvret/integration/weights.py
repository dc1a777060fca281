"""A sample of a model's weights: enough numbers to tell a base model from its instruct tune.

Names are relative to the decoder (``layers.0.mlp.up_proj.weight``), so the same text model inside
another class is compared too. With adapters of PEFT they are those of the base model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_kvret.integration.adapters import base_parameters
from hf_kvret.integration.sampled_tensors import (
    SAMPLED_NUMBERS,
    some_bytes,
    some_numbers,
    unreadable,
)
from hf_kvret.integration.stored_weights import stored_tensors
from hf_kvret_model_patches.decoders import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED_PARAMETERS = 32

# Two casts of the same number differ by at most one step of the coarser dtype, bfloat16: 2^-7 of
# the number. Below 6e-5 float16 has absolute steps of 2^-24. A tune that moves the weights by a
# thousandth of their spread moves one sampled number in twelve by more than that, because many
# weights are much smaller than the spread; a lighter one leaves the keys nearly what they were.
_RELATIVE, _ABSOLUTE = 2.0**-7, 2.0**-24


@dataclass(frozen=True)
class WeightSample:
    """Some numbers of one parameter, or some bytes of one in another form.

    Attributes:
        name: of the parameter, seen from the decoder.
        shape: of the parameter.
        values: 16 numbers at fixed places, with six digits; or 16 bytes.
        dtype: in which the tensor is stored that has these bytes; empty for numbers.
    """

    name: str
    shape: tuple[int, ...]
    values: tuple[float, ...]
    dtype: str = ""

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON."""
        plain = {"name": self.name, "shape": list(self.shape), "values": list(self.values)}
        return {**plain, "dtype": self.dtype} if self.dtype else plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> WeightSample:
        """The inverse of ``as_json``; KeyError, TypeError or ValueError for anything else."""
        shape = tuple(int(size) for size in plain["shape"])
        values = tuple(float(value) for value in plain["values"])
        if not shape or min(shape) < 1 or len(values) != SAMPLED_NUMBERS:
            raise ValueError(f"weights sample of {plain['name']!r}: {len(values)} values, {shape}")
        return cls(str(plain["name"]), shape, values, str(plain.get("dtype", "")))


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
    return sample_numbers(base_parameters(decoder_of(model)), SAMPLED_PARAMETERS)


def sample_numbers(parameters: Mapping[str, torch.Tensor], count: int) -> tuple[WeightSample, ...]:
    """Numbers of up to ``count`` of ``parameters``, as ``sample_weights``."""
    parameters = {
        name: parameter
        for name, parameter in parameters.items()
        if not unreadable(parameter) and parameter.numel() >= SAMPLED_NUMBERS
    }
    samples = []
    for name in chosen(parameters, count):
        numbers = some_numbers(parameters[name])
        if not bool(numbers.isfinite().all()):
            raise ValueError(
                f"{name} of the model holds NaN or infinity: load the model anew, in a dtype that "
                "holds its weights (bfloat16 or float32)"
            )
        values = tuple(float(f"{value:.6g}") for value in numbers.tolist())
        samples.append(WeightSample(name, tuple(parameters[name].shape), values))
    return tuple(samples)


def sample_bytes(tensors: Mapping[str, torch.Tensor], count: int) -> tuple[WeightSample, ...]:
    """Bytes of up to ``count`` of ``tensors``, which are plain: see ``stored_tensors``."""
    return tuple(
        WeightSample(
            name, tuple(tensor.shape), tuple(some_bytes(tensor).tolist()), _dtype_of(tensor)
        )
        for name, tensor in ((name, tensors[name]) for name in chosen(tensors, count))
    )


def chosen(names: Iterable[str], count: int) -> list[str]:
    """Up to ``count`` of ``names``, sorted; the same ones at every call."""
    # Ordered by the hash of the name: 32 of some hundred then cover all kinds of layers.
    by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return sorted(by_hash[:count])


def compare_weights(samples: tuple[WeightSample, ...], model: PreTrainedModel) -> WeightsReport:
    """Compare ``samples`` with ``model``, in fp32, tolerating casts to bf16 and fp16."""
    return compare_samples(samples, decoder_of(model))


def compare_samples(samples: tuple[WeightSample, ...], module: torch.nn.Module) -> WeightsReport:
    """As ``compare_weights``, with names seen from ``module``; bytes must be the same."""
    parameters: dict[str, torch.Tensor] = base_parameters(module)
    packed = stored_tensors(module)[0] if any(sample.dtype for sample in samples) else {}
    count, differences, reasons, example = 0, [], {}, ""
    for sample in samples:
        tensor = (packed if sample.dtype else parameters).get(sample.name)
        reason = _obstacle(sample, tensor)
        if reason or tensor is None:
            reasons[sample.name] = reason
            continue
        count += 1
        expected = torch.tensor(sample.values, device="cpu")
        values = some_bytes(tensor).float() if sample.dtype else some_numbers(tensor)
        scale = torch.maximum(expected.abs(), values.abs())
        tolerance = 0.0 if sample.dtype else _RELATIVE * scale + _ABSOLUTE
        # Not `>`: a NaN in the model counts as a difference, and so does infinity, which is near
        # everything.
        wrong = ~((expected - values).abs() <= tolerance) | ~scale.isfinite()
        if wrong.any():
            differences.append(sample.name)
            place = int(wrong.nonzero()[0])
            kind = "byte " if sample.dtype else ""
            example = example or (
                f"{sample.name} has {kind}{values[place]:.4g} where {expected[place]:.4g} was "
                "sampled"
            )
    return WeightsReport(count, tuple(differences), reasons, example)


def without_wrapper(model: Any) -> Any:
    """The model of transformers in a PeftModel, whose names begin otherwise; others as they are."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def tower_parameters(model: PreTrainedModel, decoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of a composite model beside its text model, by the names they have in the model.

    Empty for a text model. The head is left out: nothing of it is in a cache.
    """
    if model is decoder or model.config is model.config.get_text_config(decoder=True):
        return {}
    head = model.get_output_embeddings()
    own = {id(one) for part in (decoder, head) if part is not None for one in part.parameters()}
    return {
        name: parameter
        for name, parameter in base_parameters(model).items()
        if id(parameter) not in own
    }


def _obstacle(sample: WeightSample, tensor: torch.Tensor | None) -> str:
    """Why a sample can't be compared with a tensor; empty if it can."""
    if tensor is None:
        return "not in this model" + (f" as {sample.dtype}" if sample.dtype else "")
    if sample.dtype and sample.dtype != _dtype_of(tensor):
        return f"stored as {_dtype_of(tensor)}, sampled as {sample.dtype}"
    if not sample.dtype and (reason := unreadable(tensor)):
        return reason
    if tuple(tensor.shape) != sample.shape:
        return f"of shape {list(tensor.shape)}, sampled with {list(sample.shape)}"
    return ""


def _dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
