"""Switch a model to our attention, and back."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

from transformers import PreTrainedModel

from hf_kvret.attention.base import OUR_NAMES, forget_base, record_base, recorded_base
from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.fast_linear import slow_down, speed_up
from hf_kvret.generate.model_state import keep_state, remove_hooks
from hf_kvret.generate.provenance import watch
from hf_kvret.layer.layer import HANDLE
from hf_kvret.models.compatibility import check_model, text_key
from hf_kvret.models.ranks import check_split
from hf_kvret.replay.compiled_layers import restore_layers
from hf_kvret_model_patches import latent, pooled_choice

ATTENTION_NAME = "hf_kvret"
"""The attention implementation that ``generate`` switches a model to.

A model loaded with a method's name as its attention implementation uses that method's cache by
default."""

attached: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""The models that are switched."""


def attach(model: PreTrainedModel) -> None:
    """Switch ``model``'s text attention to ours, as ``generate`` does by itself.

    Needed before calling ``model(...)`` directly with a retrieval cache. Layers without one go on
    with the attention that the model had; ``restore(model)`` puts it back.

    Raises:
        ValueError: a model that a retrieval cache cannot serve, with the reason.
    """
    check_model(model)
    check_split(model)
    latent.apply(model, lambda latents: getattr(latents, HANDLE, None) is not None)
    pooled_choice.apply(
        model,
        lambda config: config._attn_implementation in OUR_NAMES,
        lambda cache: isinstance(cache, RetrievalCache),
    )
    text = model.config.get_text_config(decoder=True)
    attached.add(model)
    watch(model)
    speed_up(model)
    keep_state(model)
    if text._attn_implementation in OUR_NAMES:
        return
    classes: set[Any] = {type(module) for module in model.modules()}
    for cls in classes:
        _look_at(cls, cls.forward)
    record_base(text, text._attn_implementation)
    name = ATTENTION_NAME if text is model.config else {text_key(model.config): ATTENTION_NAME}
    model.set_attn_implementation(name)
    if text._attn_implementation != ATTENTION_NAME:
        restore(model)
        raise ValueError(
            f"{type(model).__name__} did not take the attention {ATTENTION_NAME!r}: use "
            "cache_implementation='dynamic'"
        )


@functools.cache
def _look_at(cls: Any, forward: Any) -> None:
    """Warn where the forward pass of an attention class is code of another library."""
    home = getattr(forward, "__globals__", {}).get("__name__", "transformers")
    known = {base.__module__.partition(".")[0] for base in cls.__mro__}
    known |= {"transformers", "hf_kvret", "hf_kvret_model_patches"}
    if "Attention" in cls.__name__ and home.partition(".")[0] not in known:
        warnings.warn(
            f"{home} has replaced the forward pass of {cls.__name__}: it may not ask a cache of "
            "hf_kvret, and answers and times are those of its code, so use it in another process",
            stacklevel=3,
        )


def restore(model: PreTrainedModel) -> None:
    """Give ``model`` back the attention it had. Harmless on a model that was never switched."""
    supports = getattr(model, "_supports_sdpa", False)
    text = model.config.get_text_config(decoder=True)
    inner = [getattr(model.config, key, None) for key in model.config.sub_configs]
    for config in (text, *filter(None, inner), model.config):
        if config._attn_implementation in OUR_NAMES:
            base = recorded_base(config) or ("sdpa" if supports else "eager")
            config._attn_implementation = {"": base}
        forget_base(config)
    remove_hooks(model)
    restore_layers(model)
    slow_down(model)
    attached.discard(model)
