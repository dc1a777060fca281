"""Facts of a model and a sample of its weights, so that another one is not taken for it.

A hook, a function in place of another one or a router's ``top_k``, which no configuration shows,
may leave rows as they are, or make them another model's. So the first tokens are read again, and
compared, where modules changed and where a cache comes from a file.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_kvret.models.compatibility import by_layer, is_latent, layer_shapes, one_or_all, text_key
from hf_kvret.models.exact_chunks import depends_on_length, why_whole
from hf_kvret.models.kept_state import read_state, write_state
from hf_kvret.models.ranks import is_split
from hf_kvret.models.versions import cache_name_of
from hf_kvret.saved.token_record import UNKNOWN, ids_of_pictures
from hf_kvret_model_patches.decoders import decoder_of

_log = logging.getLogger(__name__)

# These settings of a quantization change what a model computes.
_QUANTIZATION = (
    *("quant_method", "bits", "group_size", "sym", "zero_point", "version", "fmt"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    *("activation_scheme", "weight_block_size", "weights", "quant_type"),
)
# What a configuration says beside the computation of keys and values. The weights tell their
# dtype and the vocabulary.
_HARMLESS = {
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"),
    *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("id2label", "label2id", "problem_type", "bos_token_id", "eos_token_id"),
    *("vocab_size", "tie_word_embeddings"),
}
# There are facts of these, which are the same in all versions of transformers.
_HAVE_FACTS = {"rope_parameters", "quantization_config", "layer_types", "no_rope_layers"}
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "rope_interleave")
SAMPLED_PARAMETERS, SAMPLED_NUMBERS = 32, 16
# Prime of Knuth's multiplicative hash: its multiples modulo the size are spread evenly.
_STRIDE = 2_654_435_761
# Tokens that are read again where modules compute by more than a configuration shows.
_TOKENS = 16
# Other sizes of passes, kernels and devices move rows by about a rounding error a layer.
_ROUNDINGS, _LEAST_TOLERANCE = 8, 2.0**-8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The newest identity of each model and decoder, and the state of their modules then.
_newest: weakref.WeakKeyDictionary[nn.Module, tuple[CacheIdentity, int]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class CacheIdentity:
    """The model that filled a cache, as plain JSON.

    Attributes:
        name: hub id or name of the model, for display only.
        facts: facts that must agree, by name: all of the text model's configuration that is not
            known to be harmless, ``dtype``, ``quantization.<setting>``, and ``adapters`` that are
            active, or that a call names.
        weights: digests of 16 elements each, or of codes of quantized weights, by parameter; of a
            weight in shards that of this process' shard, by parameter and place. And a digest of
            the configuration around a text model.
    """

    name: str
    facts: Mapping[str, Any]
    weights: Mapping[str, str]

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

    Reads a few hundred elements of its weights, among them those of active adapters.
    """
    model = without_wrapper(model)
    decoder = decoder_of(model)
    _lay_out_codes(decoder)
    facts = facts_of(model.config)
    facts["dtype"] = str(decoder.dtype).removeprefix("torch.")
    if adapters := _active_adapters(decoder):
        facts["adapters"] = sorted(set(adapters.values()))
    weights = _weights(model, decoder, tuple(adapters)) | around_text(model.config)
    identity = CacheIdentity(model_name(model), facts, weights)
    newest = identity, modules_state(decoder)
    if _newest.get(model) != newest:
        _newest[model] = _newest[decoder] = newest
    return _newest[model][0]


def _lay_out_codes(decoder: PreTrainedModel) -> None:
    """Have 4-bit weights of bitsandbytes stand on a CPU as their first pass leaves them."""
    modules: Any = decoder.modules()
    for module in (one for one in modules if getattr(one, "support_avx512bf16_for_cpu", False)):
        state = getattr(module.weight, "quant_state", None)
        if module.weight.is_cpu and not getattr(state, "packing_format_for_cpu", False):
            type(module).forward(module, torch.zeros(1, module.in_features, dtype=decoder.dtype))


def newest_identity(module: nn.Module) -> CacheIdentity | None:
    """The last result of ``identity_of`` for a model or its decoder; None without one."""
    return _newest.get(without_wrapper(module), (None,))[0]


def check_filler(cache: Any, model: PreTrainedModel, current: CacheIdentity, owner: str) -> None:
    """ValueError where ``model`` is not the one that filled a ``RetrievalCache``.

    A warning tells which weights can't be compared.

    Args:
        cache: that holds tokens and knows whose.
        model: that is to use it.
        current: its identity.
        owner: the cache, in messages.
    """
    identity = cache.identity
    if why := identity.difference(current):
        raise ValueError(
            f"{owner} was {why}. Use the model that filled it ({printable(identity.name)}), or "
            "fill a new cache; cache.forget_origin(), of one loaded without model=, makes it go on "
            "with any model of this shape and dtype, whose tokens may then be wrong"
        )
    missing = identity.weights.keys() - current.weights.keys()
    if missing or not identity.weights:
        _log.warning(
            "%s: %d of %d digests of weights of the model that filled it could not be compared, as "
            "they are offloaded or in shards: check yourself that it is the same",
            *(owner, len(missing), len(identity.weights)),
        )
    check_rows(cache, model, owner)


def facts_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What ``config`` says of keys and values: ``model_facts``, then settings by dotted name."""
    facts = {name: fact for name, fact in model_facts(config).items() if name != "vocab_size"}
    settings = _settings(config.get_text_config(decoder=True), _HAVE_FACTS).items()
    facts |= {name: value for name, value in settings if facts.get(name) != value}
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    named = {name: quantization.get(name) for name in _QUANTIZATION}
    return facts | {f"quantization.{name}": str(x) for name, x in named.items() if x is not None}


def around_text(config: PreTrainedConfig) -> dict[str, str]:
    """A digest of the settings of a model around a text model, by a name; empty without."""
    if config.get_text_config(decoder=True) is config:
        return {}
    settings = _settings(config, {text_key(config), "quantization_config"})
    plain = json.dumps([config.model_type, settings], sort_keys=True)
    return {"the configuration around it": hashlib.sha256(plain.encode()).hexdigest()[:16]}


def _settings(config: PreTrainedConfig, but: set[str]) -> dict[str, Any]:
    """All that ``config`` says that could matter, by dotted name, without names in ``but``.

    Its class' own values are left out: one version of transformers writes them, another doesn't.
    """
    cls: Any = type(config)
    settings = {name: value for name, value in config.to_dict().items() if name not in but}
    defaults = _defaults(cls)
    return {name: value for name, value in _flat(settings) if value != defaults.get(name)}


@functools.cache
def _defaults(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Settings of a new configuration; empty where it can't be made without arguments."""
    with suppress(TypeError, ValueError):
        return dict(_flat(cls().to_dict()))
    return {}


def _flat(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and plain values of all settings that could matter, None left out."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and name not in _HARMLESS:
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and name not in _HARMLESS:
            yield f"{prefix}{name}", _plain(value)


def _active_adapters(decoder: nn.Module) -> dict[str, str]:
    """Name, scaling and state of adapters that layers compute with, by prefix of parameters."""
    adapters = {}
    for path, layer in adapter_layers(decoder).items():
        merged, active = getattr(layer, "merged_adapters", ()), layer.active_adapters
        scaling = getattr(layer, "scaling", None)
        # While a call names adapters by sequence, or says where one begins, PEFT has a hook here.
        hooks = layer._forward_pre_hooks.values()
        calls = [hook.keywords for hook in hooks if isinstance(hook, functools.partial)]
        named = [name for call in calls for name in call.get("adapter_names", ())]
        # Where some are merged, a layer computes with these alone.
        for name in named or merged or ([active] if isinstance(active, str) else active):
            scale = scaling.get(name) if isinstance(scaling, Mapping) else scaling
            for part in layer.adapter_layer_names:
                if not layer.disable_adapters and name in (getattr(layer, part, None) or ()):
                    words = f"{name}{' (merged)' * bool(merged)}, scaled by {scale}"
                    adapters[f"{path}.{part}.{name}."] = ", ".join([words, *map(str, calls)])
    return adapters


def _weights(
    model: PreTrainedModel, decoder: PreTrainedModel, adapters: tuple[str, ...]
) -> dict[str, str]:
    """Digests of weights of the decoder, seen from it, of others, and of active adapters.

    The head is left out: nothing of it is in a cache.
    """
    head = model.get_output_embeddings()
    inner = {id(one) for part in (decoder, head) if part is not None for one in part.parameters()}
    outer = {name: one for name, one in base_parameters(model).items() if id(one) not in inner}
    # GPTQ and AWQ keep their codes in buffers, routers their corrections.
    base = base_parameters(decoder) | {
        _own_name(f"{path}.{name}"): buffer
        for path, module in decoder.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    named = decoder.named_parameters() if adapters else ()
    own = {name: one for name, one in named if f"{name}.".startswith(adapters)}
    return _digests(outer | base, 2 * SAMPLED_PARAMETERS) | _digests(own, SAMPLED_PARAMETERS)


def _digests(tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, str]:
    """Hex digests of 16 elements of up to ``count`` of ``tensors``, of those that can be read."""
    local = dict(_local(name, tensor) for name, tensor in tensors.items())
    plain = ((name, _plain_tensor(tensor)) for name, tensor in local.items())
    readable = {name: tensor for name, tensor in plain if tensor is not None}
    digests = {}
    for name, elements in sample(readable, count).items():
        tensor = readable[name]
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(elements.view(torch.uint8).numpy().tobytes())
        digests[name] = digest.hexdigest()[:16]
    return digests


def _local(name: str, tensor: Any) -> tuple[str, torch.Tensor]:
    """``tensor`` by its name; of one in shards this process' own, by a name that says which."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return name, tensor
    where = ", ".join(map(str, mesh.get_coordinate()))
    return f"{name} at {where} of {', '.join(map(str, mesh.shape))}", tensor.detach().to_local()


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """The first plain tensor that holds ``tensor``; None if none can be read."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name, None) for name in tensor.__tensor_flatten__()[0])
        plain = (_plain_tensor(one) for one in inner if isinstance(one, torch.Tensor))
        return next((one for one in plain if one is not None), None)
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wraps or not tensor.numel() or tensor.is_meta or tensor.layout != torch.strided:
        return None
    return tensor.detach().as_subclass(torch.Tensor)


def sample(tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """``[16]`` elements on the CPU of up to ``count`` plain tensors, the same at every call."""
    # Ordered by the hash of the name: 32 of some hundred then cover all types of layers.
    by_hash = sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).digest())
    elements = {}
    for name in sorted(by_hash[:count]):
        tensor = tensors[name].detach()
        positions = torch.arange(1, SAMPLED_NUMBERS + 1, device=tensor.device) * _STRIDE
        # Not every dtype can be taken from by itself.
        integers = tensor.view(_INTEGERS[tensor.element_size()])
        elements[name] = integers.take(positions % tensor.numel()).view(tensor.dtype).cpu()
    return elements


def base_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of ``module`` without those of adapters, by the names they have without these."""
    own = tuple(
        f"{path}.{attribute}."
        for path, layer in adapter_layers(module).items()
        for attribute in layer.adapter_layer_names
    )
    return {
        _own_name(name): parameter
        for name, parameter in module.named_parameters()
        if not name.startswith(own)
    }


def _own_name(name: str) -> str:
    """``name`` without those under which PEFT keeps the module that it wraps."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


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


def model_facts(config: PreTrainedConfig) -> dict[str, Any]:
    """Facts that must agree between two models for one to use the other's artifact.

    Heads and widths of heads are lists with a number for each layer where layers differ.
    Plain JSON, the same in all supported versions of transformers, and the same for a text model
    alone and inside a multimodal one. Parameters that are None count as absent.

    Raises:
        TypeError: ``config`` is not a transformers configuration.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config is a {type(config).__name__}: pass model.config")
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None) or []
    shapes, latent = layer_shapes(config), is_latent(config)
    facts: dict[str, Any] = {
        "model_type": text.model_type,
        "num_hidden_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "num_attention_heads": one_or_all([shape.heads for shape in shapes]),
        "num_key_value_heads": one_or_all([shape.kv_heads for shape in shapes]),
        "head_dim": one_or_all([shape.head_dim for shape in shapes]),
        # Some versions list the types of layers where all have full attention, others don't.
        "layer_types": list(types) if set(types) - {"full_attention"} else None,
        "no_rope_layers": list(getattr(text, "no_rope_layers", None) or ()) or None,
        **_rope_facts(text),
        "vocab_size": text.vocab_size,
        # How a row is divided, what heads make of it, and in which order RoPE leaves its elements.
        **({name: one_or_all(by_layer(text, name)) for name in _LATENT} if latent else {}),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _rope_facts(text: PreTrainedConfig) -> dict[str, Any]:
    """RoPE parameters by dotted name, numbers as floats, defaults that not all versions write
    left out."""
    rope = getattr(text, "rope_parameters", None) or {}
    by_type = {type_: x for type_, x in rope.items() if isinstance(x, Mapping)}
    by_type[""] = {name: value for name, value in rope.items() if name not in by_type}
    facts = {}
    for type_, parameters in sorted(by_type.items()):
        prefix = f"rope.{type_}." if type_ else "rope."
        for name, value in sorted(parameters.items()):
            default = name == "partial_rotary_factor" and value == 1
            # `type` is the old name of `rope_type`, which transformers always sets.
            if value is not None and name != "type" and not default:
                facts[prefix + name] = _plain(value)
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, bool | str | None):
        return value
    is_finite = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_finite else str(value)


def facts_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The first fact in which a model (``ours``) is another one, in words; empty if none."""
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        one, other = theirs.get(name), ours.get(name)
        if one != other:
            if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
                i = next(i for i in range(len(one)) if one[i] != other[i])
                name, one, other = f"{name}[{i}]", one[i], other[i]
            return f"made for {_shown(name)}={_shown(one)}, this model has {_shown(other)}"
    return ""


def model_name(model: PreTrainedModel, name: str | None = None) -> str:
    """``name``, or where a model was loaded from, or its type; of a folder only the last part."""
    name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
    return Path(name).resolve().name if Path(name).exists() else name


def _shown(value: Any) -> str:
    return "none" if value is None else printable(str(value)[:80])


def printable(text: str) -> str:
    """``text`` with what could command a terminal, or end the line, spelled out."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def modules_state(decoder: nn.Module) -> int:
    """A hash of all of ``decoder``'s modules: equal, in this process, as long as nothing changes.

    It covers classes, functions put in place of others, hooks but for ours and PEFT's (adapters
    have facts of their own), numbers such as a router's ``top_k``, and buffers such as frequencies.
    """
    return hash(tuple(mark for module in decoder.modules() for mark in _marks(module)))


def _marks(module: Any) -> Iterator[Any]:
    yield type(module)
    yield type(module).forward
    for name, value in vars(module).items():
        if isinstance(value, int | float | str):
            yield name, value
        elif callable(value):
            yield name, id(value)
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        home = getattr(getattr(hook, "func", hook), "__module__", None) or ""
        if home.split(".")[0] not in ("hf_kvret", "peft"):
            yield id(hook)
    for buffer in module._buffers.values():
        if buffer is not None:
            yield buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version


def check_rows(cache: Any, model: PreTrainedModel, owner: str) -> None:
    """ValueError where ``model`` makes other rows of the first tokens than a filled cache holds.

    They are compared with a tolerance for rounding. Nothing is compared where the beginning of a
    text alone does not tell its rows: padding, embeddings, pictures, a model that reads a prompt as
    a whole, dropout, weights elsewhere.

    Args:
        cache: a ``RetrievalCache`` that holds tokens.
        model: that is to use it.
        owner: the cache, in the message.
    """
    config, decoder, ids = model.config, decoder_of(model), _first_ids(cache, model.config)
    is_here = not is_split(model) and not any(one.is_meta for one in decoder.parameters())
    is_exact = not (why_whole(config) or depends_on_length(config) or decoder.training)
    cls: Any = type(decoder)
    parameters = inspect.signature(cls.forward).parameters
    # Such a decoder may not read text alone.
    is_text = not (cache.tokens.passes and "pixel_values" in parameters)
    # A pass that broke off in the middle left some layers without its rows; the next one says so.
    is_whole = len({one.kv and one.kv.length for one in cache.retrieval_layers}) == 1
    if ids is None or not ids.shape[1] or not (is_here and is_exact and is_text and is_whole):
        return
    read, kept = DynamicCache(config=config), read_state(model)
    inputs: dict[str, Any] = {"input_ids": ids.to(decoder.device), "use_cache": True}
    # As `generate` counts them, where a model would count from its padding id.
    if "position_ids" in parameters:
        inputs["position_ids"] = torch.arange(ids.shape[1], device=decoder.device)[None]
    try:
        with torch.no_grad():
            decoder(**inputs, **{cache_name_of(cls): read})
    finally:
        write_state(model, kept)
    for layer in cache.retrieval_layers:
        number = layer.layer_info.number
        now: Any = read.layers[number]
        pairs = zip(layer.rows_of(now.keys, now.values), layer.kv.rows(ids.shape[1]), strict=True)
        for new, held in pairs:
            tolerance = max(_ROUNDINGS * torch.finfo(held.dtype).eps, _LEAST_TOLERANCE)
            error, size = (one.float().norm(dim=(1, 3)) for one in (new - held, held))
            is_same = error <= tolerance * size
            # Of a few tokens a router may choose other experts by rounding alone.
            if int(is_same.sum()) * 2 <= is_same.numel():
                raise ValueError(
                    f"{owner} was filled by another computation: layer {number} of the model now "
                    f"makes other rows of its first {ids.shape[1]} tokens. Take away what changed "
                    "its modules (hooks, functions, attributes), or fill a new cache; "
                    "cache.forget_origin(), of one loaded without model=, goes on with these rows"
                )


def _first_ids(cache: Any, config: Any) -> torch.Tensor | None:
    """``[B, n]``, the first tokens whose keys a cache holds as they came, as far as they are text.

    None where nobody saw the tokens, or a sequence may begin with padding.
    """
    layer, ids = cache.retrieval_layers[0], cache.input_ids
    text = config.get_text_config(decoder=True)
    kv, slots = layer.kv, layer.kv.window.sink_slots
    # A layer whose model names the tokens is not told of padding.
    if ids is None or layer.has_padding or (kv.index is None and len(ids) > 1):
        return None
    # Once tokens are cold, sinks tell where sequences begin. A single one is seldom padded.
    pads = getattr(text, "pad_token_id", None), getattr(text, "eos_token_id", None)
    is_known = bool(slots.numel()) and bool((slots >= 0).all())
    if is_known and bool(slots.amin(dim=1).any()):
        return None
    if not is_known and (len(ids) > 1 or int(ids[0, 0]) in pads):
        return None
    stores = [one.kv.store for one in cache.retrieval_layers if one.kv is not None]
    is_coded = any(store is not None and store.codes_rows for store in stores)
    ids = ids[:, : kv.window.sink if is_coded else _TOKENS]
    no_text = torch.tensor([UNKNOWN, *ids_of_pictures(config)], device=ids.device)
    others = torch.isin(ids, no_text).any(0).nonzero()
    return ids[:, : int(others[0])] if len(others) else ids
