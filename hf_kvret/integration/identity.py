"""CacheIdentity: the model that filled a cache, so that another one is not taken for it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_kvret.integration.adapters import AdapterHash, active_adapters, base_parameters, stamp
from hf_kvret.integration.model_facts import in_words, model_facts
from hf_kvret.integration.weights import (
    WeightSample,
    compare_weights,
    decoder_of,
    sample_weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

# What of a quantization's settings changes the numbers that a model computes.
_QUANTIZATION = (
    *("quant_method", "bits", "group_size", "sym", "zero_point", "version", "fmt"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    *("activation_scheme", "weight_block_size", "weights", "quant_type"),
)


@dataclass(frozen=True)
class CacheIdentity:
    """The model that filled a cache.

    Attributes:
        name: hub id or name of the model, for display only.
        facts: facts that must agree, by name: type, counts and widths, kinds of layers, RoPE,
            ``dtype`` and ``quantization.<setting>``. Plain JSON.
        adapters: active ones.
        weights: sampled numbers of the base model.
    """

    name: str
    facts: Mapping[str, Any]
    adapters: tuple[AdapterHash, ...] = ()
    weights: tuple[WeightSample, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return {
            "name": self.name,
            "facts": dict(self.facts),
            "adapters": [asdict(adapter) for adapter in self.adapters],
            "weights": [sample.as_json() for sample in self.weights],
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> CacheIdentity:
        """The inverse of ``to_json``; KeyError, TypeError or ValueError for anything else."""
        facts = {str(name): value for name, value in dict(plain["facts"]).items()}
        adapters = tuple(
            AdapterHash(str(adapter["name"]), str(adapter["sha256"]))
            for adapter in plain["adapters"]
        )
        weights = tuple(WeightSample.from_json(sample) for sample in plain["weights"])
        return cls(str(plain["name"]), facts, adapters, weights)

    def difference(self, other: CacheIdentity) -> str:
        """In words, what ``other`` has otherwise but for weights; empty if nothing."""
        for name in [*self.facts, *(name for name in other.facts if name not in self.facts)]:
            theirs, ours = self.facts.get(name), other.facts.get(name)
            if theirs != ours:
                return in_words(name, theirs, ours)
        hashes = [sorted(one.sha256 for one in part) for part in (self.adapters, other.adapters)]
        if hashes[0] == hashes[1]:
            return ""
        theirs, ours = _adapters_in_words(self), _adapters_in_words(other)
        return f"filled with {theirs}, this model has {ours}" + (
            " of other weights" if theirs == ours else ""
        )


@dataclass(frozen=True)
class _Known:
    """Identity of a decoder, and what tells that it is still the same."""

    identity: CacheIdentity
    # The sampled parameters: their modules, and their names in these.
    watched: tuple[tuple[weakref.ref[nn.Module], str], ...]
    stamps: tuple[Any, ...]


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def identity_of(model: PreTrainedModel) -> CacheIdentity:
    """The identity of ``model`` as it is now; the same object as long as nothing changes.

    The first call for a model reads a few hundred numbers of its weights and all weights of active
    adapters. Later calls look at the version counters of these, so weights written through
    ``parameter.data`` go unseen.
    """
    decoder = decoder_of(model)
    adapters = active_adapters(decoder)
    known = _known.get(decoder)
    if known is None or known.stamps != _stamps(known.watched):
        known = _known[decoder] = _examine(model, decoder, adapters)
    elif known.identity.adapters != adapters:
        identity = replace(known.identity, adapters=adapters)
        known = _known[decoder] = replace(known, identity=identity)
    return known.identity


def check_identity(identity: CacheIdentity, model: PreTrainedModel, owner: str) -> CacheIdentity:
    """The identity of ``model``, which must be the one that filled a cache.

    Logs a warning of what can't be compared.

    Args:
        identity: of the model that filled it.
        model: that is to use it.
        owner: the cache, in messages.

    Raises:
        ValueError: another model, other adapters or other weights.
    """
    current = identity_of(model)
    if current is identity:
        return current
    report = compare_weights(identity.weights, model)
    why = identity.difference(current)
    if not why and report.differing:
        why = (
            f"filled by other weights: {len(report.differing)} of {report.compared} sampled "
            f"parameters differ, {report.example}"
        )
    if why:
        raise ValueError(
            f"{owner} was {why}. Use the model that filled it ({identity.name}), or fill a new "
            "cache; cache.forget_origin() makes it go on with any model of this shape, whose "
            "tokens may then be wrong"
        )
    if report.skipped or not report.compared:
        reasons = dict.fromkeys(report.skipped.values())
        _log.warning(
            "%s: %d of %d sampled parameters of the model could not be compared%s",
            owner,
            len(report.skipped),
            len(identity.weights),
            f" ({', '.join(reasons)})" if reasons else "; check yourself that it filled the cache",
        )
    return current


def _examine(
    model: PreTrainedModel, decoder: nn.Module, adapters: tuple[AdapterHash, ...]
) -> _Known:
    facts = {name: fact for name, fact in model_facts(model.config).items() if name != "vocab_size"}
    facts["dtype"] = str(model.dtype).removeprefix("torch.")
    facts |= _quantization(model)
    try:
        weights = sample_weights(model)
    except ValueError:
        # They hold NaN: `generate` says so by itself, and a sample of it compares with nothing.
        weights = ()
    name = getattr(model.config, "_name_or_path", "") or model.config.model_type
    if Path(name).exists():
        name = Path(name).resolve().name
    parameters = base_parameters(decoder)
    sampled = {id(parameters[sample.name]) for sample in weights}
    watched = tuple(
        (weakref.ref(module), name)
        for module in decoder.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in sampled
    )
    return _Known(CacheIdentity(name, facts, adapters, weights), watched, _stamps(watched))


def _stamps(watched: tuple[tuple[weakref.ref[nn.Module], str], ...]) -> tuple[Any, ...]:
    parameters = (getattr(module(), name, None) for module, name in watched)
    return tuple(None if parameter is None else stamp(parameter) for parameter in parameters)


def _quantization(model: PreTrainedModel) -> dict[str, Any]:
    """Settings of the model's quantization that count, by dotted name; empty without."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return {}
    settings = config if isinstance(config, Mapping) else config.to_dict()
    plain = (bool, int, float, str)
    return {
        f"quantization.{name}": str(value) if not isinstance(value, plain) else value
        for name, value in settings.items()
        if name in _QUANTIZATION and value is not None
    }


def _adapters_in_words(identity: CacheIdentity) -> str:
    names = [adapter.name for adapter in identity.adapters]
    if not names:
        return "no adapter"
    return ("the adapter " if len(names) == 1 else "the adapters ") + ", ".join(names)
