"""CacheIdentity: the model that filled a cache, so that another one is not taken for it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_kvret.integration.adapters import (
    AdapterHash,
    active_adapters,
    base_buffers,
    base_parameters,
    stamp,
)
from hf_kvret.integration.model_facts import in_words, model_facts, printable
from hf_kvret.integration.sampled_tensors import plain_parts, sampled_bytes
from hf_kvret.integration.stored_weights import stored_tensors
from hf_kvret.integration.weights import (
    SAMPLED_PARAMETERS,
    WeightSample,
    chosen,
    compare_samples,
    compare_weights,
    sample_bytes,
    sample_numbers,
    sample_weights,
    tower_parameters,
    without_wrapper,
)
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


@dataclass(frozen=True)
class CacheIdentity:
    """The model that filled a cache.

    Attributes:
        name: hub id or name of the model, for display only.
        facts: facts that must agree, by name: type, counts and widths, kinds of layers, RoPE,
            ``dtype`` and ``quantization.<setting>``. Plain JSON.
        adapters: active ones.
        weights: sampled numbers of the base model, and bytes of what it keeps in another form.
        towers: the same of what makes hidden states of pictures and sounds, names seen from the
            model; empty for a text model.
        left_out: reasons why weights of the base model could not be read, by name of some.
    """

    name: str
    facts: Mapping[str, Any]
    adapters: tuple[AdapterHash, ...] = ()
    weights: tuple[WeightSample, ...] = ()
    towers: tuple[WeightSample, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON."""
        return {
            "name": self.name,
            "facts": dict(self.facts),
            "adapters": [asdict(adapter) for adapter in self.adapters],
            "weights": [sample.as_json() for sample in self.weights],
            **({"towers": [sample.as_json() for sample in self.towers]} if self.towers else {}),
            **({"left_out": dict(self.left_out)} if self.left_out else {}),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> CacheIdentity:
        """The inverse of ``to_json``; KeyError, TypeError or ValueError for anything else."""
        facts = {str(name): value for name, value in dict(plain["facts"]).items()}
        adapters = tuple(
            AdapterHash(
                str(adapter["name"]), str(adapter["sha256"]), bool(adapter.get("merged", False))
            )
            for adapter in plain["adapters"]
        )
        weights, towers = (
            tuple(WeightSample.from_json(sample) for sample in samples)
            for samples in (plain["weights"], plain.get("towers", ()))
        )
        left_out = {
            str(name): str(reason) for name, reason in dict(plain.get("left_out", {})).items()
        }
        return cls(str(plain["name"]), facts, adapters, weights, towers, left_out)

    def difference(self, other: CacheIdentity) -> str:
        """In words, what ``other`` has otherwise but for weights; empty if nothing."""
        for name in [*self.facts, *(name for name in other.facts if name not in self.facts)]:
            theirs, ours = self.facts.get(name), other.facts.get(name)
            if theirs != ours:
                return in_words(name, theirs, ours)
        both = self.adapters, other.adapters
        # Where some could not be read, only their number is compared.
        unread = any(not one.sha256 for part in both for one in part)
        contents = [len(part) if unread else sorted(one.content for one in part) for part in both]
        if contents[0] == contents[1]:
            return ""
        theirs, ours = _adapters_in_words(self), _adapters_in_words(other)
        return f"filled with {theirs}, this model has {ours}" + (
            " of other weights" if theirs == ours else ""
        )


class Meeting:
    """The model that a cache last met, not kept alive; a copy of another process met none.

    Attributes:
        identity: of the model, as it went through.
    """

    def __init__(
        self, model: PreTrainedModel | None = None, identity: CacheIdentity | None = None
    ) -> None:
        self.identity = identity
        self._model = None if model is None else weakref.ref(model)
        self._decoder = None if model is None else weakref.ref(decoder_of(model))

    def whole(self, module: Any) -> Any:
        """The model that was met, if ``module`` is that, in PEFT's or not, or its text model."""
        if self._model is None or self._decoder is None:
            return None
        model = self._model()
        is_same = module is self._decoder() or without_wrapper(module) is without_wrapper(model)
        return model if is_same else None

    def __reduce__(self) -> tuple[type[Meeting], tuple[()]]:
        return Meeting, ()


@dataclass(frozen=True)
class _Known:
    """Identity of a decoder, and what tells that it is still the same."""

    identity: CacheIdentity
    # The sampled tensors: their modules, their names in these, and of which of their parts.
    watched: tuple[tuple[weakref.ref[nn.Module], str, str], ...]
    stamps: tuple[Any, ...]
    numbers: bytes
    # Whether the model around the decoder was looked at.
    is_whole: bool


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def identity_of(model: PreTrainedModel, read: bool = True) -> CacheIdentity:
    """The identity of ``model`` as it is now; the same object as long as nothing changes.

    The first call for a model reads a few hundred numbers of its weights and all weights of active
    adapters. Later calls look at the version counters of these.

    Args:
        model: to look at.
        read: read these numbers, and some of the adapters', again: only so it is seen that weights
            were written through ``parameter.data``.
    """
    model = without_wrapper(model)
    decoder = decoder_of(model)
    adapters = active_adapters(decoder, read)
    known = _known.get(decoder)
    is_whole = model is not decoder
    if (
        known is None
        or (is_whole and not known.is_whole)
        or known.stamps != _stamps(known.watched)
        or (read and known.numbers != _numbers(known.watched))
    ):
        known = _known[decoder] = _examine(model, decoder, adapters)
    elif known.identity.adapters != adapters:
        identity = replace(known.identity, adapters=adapters)
        known = _known[decoder] = replace(known, identity=identity)
    return known.identity


def check_identity(
    identity: CacheIdentity, model: PreTrainedModel, owner: str, read: bool = True
) -> CacheIdentity:
    """The identity of ``model``, which must be the one that filled a cache.

    Logs a warning of what can't be compared.

    Args:
        identity: of the model that filled it.
        model: that is to use it.
        owner: the cache, in messages.
        read: as of ``identity_of``.

    Raises:
        ValueError: another model, other adapters or other weights.
    """
    model = without_wrapper(model)
    current = identity_of(model, read)
    if current is identity:
        return current
    report = compare_weights(identity.weights, model)
    # A text model alone goes on with a cache that one with a vision tower filled.
    is_composite = bool(tower_parameters(model, decoder_of(model)))
    towers = compare_samples(identity.towers if is_composite else (), model)
    why = identity.difference(current)
    for part, kind in ((report, "weights"), (towers, "weights of its vision or audio tower")):
        if not why and part.differing:
            why = (
                f"filled by other {kind}: {len(part.differing)} of {part.compared} sampled "
                f"parameters differ, {part.example}"
            )
    if why:
        raise ValueError(
            f"{owner} was {why}. Use the model that filled it ({printable(identity.name)}), or "
            "fill a new cache; cache.forget_origin(), of one loaded without model=, makes it go on "
            "with any model of this shape and dtype, whose tokens may then be wrong"
        )
    skipped = {**report.skipped, **towers.skipped}
    if skipped or not report.compared:
        reasons = dict.fromkeys(skipped.values())
        _log.warning(
            "%s: %d of %d sampled parameters of the model could not be compared%s",
            owner,
            len(skipped),
            len(identity.weights) + len(identity.towers),
            f" ({', '.join(reasons)})" if reasons else "; check yourself that it filled the cache",
        )
    unread = {one.name for one in (*identity.adapters, *current.adapters) if not one.sha256}
    if unread:
        _log.warning(
            "%s: weights of the adapters %s could not be read (offloaded or in shards), so they "
            "are not compared. Check yourself that they are those that filled it",
            owner,
            ", ".join(sorted(unread)),
        )
    if identity.left_out:
        _log.warning(
            "%s: parameters of the model that filled it could not be read, so they are not "
            "compared: %s (%s). Check yourself that this model has the same",
            owner,
            printable(", ".join(list(identity.left_out)[:3]))
            + (", ..." * (len(identity.left_out) > 3)),
            printable(", ".join(dict.fromkeys(identity.left_out.values()))),
        )
    return current


def _examine(
    model: PreTrainedModel, decoder: nn.Module, adapters: tuple[AdapterHash, ...]
) -> _Known:
    facts = {name: fact for name, fact in model_facts(model.config).items() if name != "vocab_size"}
    facts["dtype"] = str(decoder.dtype).removeprefix("torch.")
    facts |= _quantization(model)
    packed, reasons = stored_tensors(decoder)
    try:
        weights = sample_weights(model)
    except ValueError:
        # They hold NaN: `generate` says so by itself, and a sample of it compares with nothing.
        weights = ()
    weights += sample_bytes(packed, SAMPLED_PARAMETERS)
    outer = tower_parameters(model, decoder)
    towers: tuple[WeightSample, ...] = ()
    with suppress(ValueError):
        towers = sample_numbers(outer, SAMPLED_PARAMETERS // 2)
    left_out = {name: reasons[name] for name in chosen(reasons, SAMPLED_PARAMETERS)}
    name = getattr(model.config, "_name_or_path", "") or model.config.model_type
    if Path(name).exists():
        name = Path(name).resolve().name
    base = {**base_parameters(decoder), **base_buffers(decoder)}
    sampled = [_source(sample, base) for sample in weights]
    sampled += [(outer[sample.name], "") for sample in towers]
    places = {
        id(tensor): (weakref.ref(module), name)
        for module in model.modules()
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        )
    }
    watched = tuple((*places[id(tensor)], part) for tensor, part in sampled)
    return _Known(
        CacheIdentity(name, facts, adapters, weights, towers, left_out),
        watched,
        _stamps(watched),
        _numbers(watched),
        model is not decoder,
    )


def _source(sample: WeightSample, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, str]:
    """The tensor of ``tensors`` that a sample was read from, and of which of its parts."""
    name, part = sample.name, ""
    while name not in tensors:
        name, _, inner = name.rpartition(".")
        part = f"{inner}.{part}" if part else inner
    return tensors[name], part


def _current(watched: tuple[weakref.ref[nn.Module], str, str]) -> torch.Tensor | None:
    module, name, _ = watched
    return getattr(module(), name, None)


def _stamps(watched: tuple[tuple[weakref.ref[nn.Module], str, str], ...]) -> tuple[Any, ...]:
    tensors = (_current(one) for one in watched)
    return tuple(None if tensor is None else stamp(tensor) for tensor in tensors)


def _numbers(watched: tuple[tuple[weakref.ref[nn.Module], str, str], ...]) -> bytes:
    """Bytes of the sampled tensors, read from their devices."""
    parts = []
    for one in watched:
        tensor = _current(one)
        plain = {} if tensor is None else plain_parts(tensor)
        if one[-1] in plain:
            parts.append(plain[one[-1]])
    return sampled_bytes(parts)


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
    names = [str(adapter) for adapter in identity.adapters]
    if not names:
        return "no adapter"
    return ("the adapter " if len(names) == 1 else "the adapters ") + printable(", ".join(names))
