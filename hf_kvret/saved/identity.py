"""CacheIdentity: the model that filled a cache, so that another one is not taken for it."""

from __future__ import annotations

import hashlib
import logging
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_kvret.saved.model_facts import facts_difference, model_facts, model_name, printable
from hf_kvret_model_patches.decoders import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

# What of a quantization's settings changes the numbers that a model computes.
_QUANTIZATION = (
    *("quant_method", "bits", "group_size", "sym", "zero_point", "version", "fmt"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    *("activation_scheme", "weight_block_size", "weights", "quant_type"),
)
SAMPLED_PARAMETERS, SAMPLED_NUMBERS = 32, 16
# Prime of Knuth's multiplicative hash: its multiples modulo the size are spread evenly.
_STRIDE = 2_654_435_761
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The newest identity of each model and decoder.
_newest: weakref.WeakKeyDictionary[nn.Module, CacheIdentity] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class CacheIdentity:
    """The model that filled a cache, as plain JSON.

    Attributes:
        name: hub id or name of the model, for display only.
        facts: facts that must agree, by name: type, counts and widths, kinds of layers, RoPE,
            ``dtype``, ``quantization.<setting>``, and ``adapters`` that are active.
        weights: digests of 16 numbers each, or of codes of quantized weights, by parameter.
    """

    name: str
    facts: Mapping[str, Any]
    weights: Mapping[str, str]

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> CacheIdentity:
        """The inverse of ``asdict``; KeyError, TypeError or ValueError for anything else."""
        return cls(str(plain["name"]), dict(plain["facts"]), dict(plain["weights"]))

    def difference(self, other: CacheIdentity) -> str:
        """In words, what ``other`` has otherwise; empty if nothing."""
        if why := facts_difference(self.facts, other.facts):
            return why
        names = self.weights.keys() & other.weights.keys()
        unequal = [name for name in sorted(names) if self.weights[name] != other.weights[name]]
        if not unequal:
            return ""
        return (
            f"filled by other weights: {len(unequal)} of {len(names)} sampled parameters differ, "
            f"{printable(unequal[0])} is the first"
        )


def identity_of(model: PreTrainedModel) -> CacheIdentity:
    """The identity of ``model`` as it is now; the same object as long as nothing changes.

    Reads a few hundred numbers of its weights, among them those of active adapters.
    """
    model = without_wrapper(model)
    decoder = decoder_of(model)
    facts = {name: fact for name, fact in model_facts(model.config).items() if name != "vocab_size"}
    facts |= {"dtype": str(decoder.dtype).removeprefix("torch."), **_quantization(model)}
    if adapters := _active_adapters(decoder):
        facts["adapters"] = sorted(set(adapters.values()))
    identity = CacheIdentity(model_name(model), facts, _weights(model, decoder, tuple(adapters)))
    if _newest.get(model) != identity:
        _newest[model] = _newest[decoder] = identity
    return _newest[model]


def newest_identity(module: nn.Module) -> CacheIdentity | None:
    """What ``identity_of`` last gave for a model or its decoder; None if it was not asked."""
    return _newest.get(without_wrapper(module))


def check_identity(identity: CacheIdentity, current: CacheIdentity, owner: str) -> None:
    """ValueError where the ``current`` model is not the one that filled a cache, ``owner``.

    A warning tells which weights can't be compared.
    """
    if why := identity.difference(current):
        raise ValueError(
            f"{owner} was {why}. Use the model that filled it ({printable(identity.name)}), or "
            "fill a new cache; cache.forget_origin(), of one loaded without model=, makes it go on "
            "with any model of this shape and dtype, whose tokens may then be wrong"
        )
    missing = identity.weights.keys() - current.weights.keys()
    if missing or not identity.weights:
        _log.warning(
            "%s: %d of %d sampled parameters of the model that filled it could not be compared, as "
            "they are offloaded or in shards: check yourself that it is the same",
            *(owner, len(missing), len(identity.weights)),
        )


def _quantization(model: PreTrainedModel) -> dict[str, Any]:
    """Settings of the model's quantization that count, by dotted name; empty without."""
    config = getattr(model.config, "quantization_config", None) or {}
    settings = config if isinstance(config, Mapping) else config.to_dict()
    names = [name for name in _QUANTIZATION if settings.get(name) is not None]
    return {f"quantization.{name}": str(settings[name]) for name in names}


def _active_adapters(decoder: nn.Module) -> dict[str, str]:
    """Name, scaling and state of adapters that layers compute with, by prefix of parameters."""
    adapters = {}
    for path, layer in adapter_layers(decoder).items():
        merged, active = getattr(layer, "merged_adapters", ()), layer.active_adapters
        scaling = getattr(layer, "scaling", None)
        # Where some are merged, a layer computes with these alone.
        for name in merged or ([active] if isinstance(active, str) else active):
            scale = scaling.get(name) if isinstance(scaling, Mapping) else scaling
            for part in layer.adapter_layer_names:
                if not layer.disable_adapters and name in (getattr(layer, part, None) or ()):
                    words = f"{name}{' (merged)' * bool(merged)}, scaled by {scale}"
                    adapters[f"{path}.{part}.{name}."] = words
    return adapters


def _weights(
    model: PreTrainedModel, decoder: PreTrainedModel, adapters: tuple[str, ...]
) -> dict[str, str]:
    """Digests of weights of the decoder, seen from it, of others, and of active adapters.

    The head is left out: nothing of it is in a cache.
    """
    head = model.get_output_embeddings()
    inner = {id(one) for part in (decoder, head) if part is not None for one in part.parameters()}
    base = {name: one for name, one in base_parameters(model).items() if id(one) not in inner}
    base |= base_parameters(decoder)
    # GPTQ and AWQ keep their codes in buffers.
    buffers = decoder.named_buffers()
    base |= {name: one for name, one in buffers if one.ndim > 1 and not one.is_floating_point()}
    named = decoder.named_parameters() if adapters else ()
    own = {name: one for name, one in named if f"{name}.".startswith(adapters)}
    return _digests(base, 2 * SAMPLED_PARAMETERS) | _digests(own, SAMPLED_PARAMETERS)


def _digests(tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, str]:
    """Hex digests of 16 elements of up to ``count`` of ``tensors``, of those that can be read."""
    plain = ((name, plain_tensor(tensor)) for name, tensor in tensors.items())
    parts = {name: part for name, part in plain if part is not None}
    digests = {}
    for name in chosen(parts, count):
        part = parts[name]
        digest = hashlib.sha256(f"{part.dtype} {tuple(part.shape)}".encode())
        digest.update(sampled(part.view(_INTEGERS[part.element_size()])).cpu().numpy().tobytes())
        digests[name] = digest.hexdigest()[:16]
    return digests


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """The first plain tensor that holds ``tensor``; None if none can be read.

    Shards are not read: they differ by rank.
    """
    if hasattr(tensor, "device_mesh"):
        return None
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name, None) for name in tensor.__tensor_flatten__()[0])
        plain = (plain_tensor(one) for one in inner if isinstance(one, torch.Tensor))
        return next((one for one in plain if one is not None), None)
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wraps or not tensor.numel() or tensor.is_meta or tensor.layout != torch.strided:
        return None
    return tensor.detach().as_subclass(torch.Tensor)


def chosen(names: Iterable[str], count: int) -> list[str]:
    """Up to ``count`` of ``names``, sorted; the same ones at every call."""
    # Ordered by the hash of the name: 32 of some hundred then cover all kinds of layers.
    by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return sorted(by_hash[:count])


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """``[16]`` elements of a plain tensor, at fixed places."""
    places = torch.arange(1, SAMPLED_NUMBERS + 1, device=tensor.device) * _STRIDE
    return tensor.take(places % tensor.numel())


def base_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of ``module`` without those of adapters, by the names they have without these."""
    own = tuple(
        f"{path}.{attribute}."
        for path, layer in adapter_layers(module).items()
        for attribute in layer.adapter_layer_names
    )
    return {
        # Under these names PEFT keeps the module that it wraps.
        name.replace(".base_layer.", ".").replace(".original_module.", "."): parameter
        for name, parameter in module.named_parameters()
        if not name.startswith(own)
    }


def adapter_layers(module: nn.Module) -> dict[str, Any]:
    """Modules in ``module`` that PEFT put around others, by path."""
    if "peft" not in sys.modules:
        return {}
    return {
        path: layer
        for path, layer in module.named_modules()
        if hasattr(layer, "adapter_layer_names") and hasattr(layer, "active_adapters")
    }


def without_wrapper(model: Any) -> Any:
    """The model of transformers in a PeftModel, whose names begin otherwise; others as they are."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
