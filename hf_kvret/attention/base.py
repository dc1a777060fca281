"""The attention that a model had before it was switched to ours."""

from __future__ import annotations

import sys
import weakref
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

# Attention names registered by us, now or before: `restore` recognizes models by them, also after
# `unregister`.
OUR_NAMES: set[str] = set()

# Outside the configs, because a field on a config ends up in config.json. Configs are not
# hashable, so the table goes by identity and forgets an entry when its config dies.
_bases: dict[int, str] = {}


def record_base(config: PreTrainedConfig, name: str) -> None:
    """Remember that ``config`` used the implementation ``name`` before it was switched."""
    if id(config) not in _bases:
        weakref.finalize(config, _bases.pop, id(config), None)
    _bases[id(config)] = name


def recorded_base(config: PreTrainedConfig) -> str | None:
    """The implementation that ``record_base`` recorded for ``config``, or None."""
    return _bases.get(id(config))


def forget_base(config: PreTrainedConfig) -> None:
    """Drop the record of ``config``."""
    _bases.pop(id(config), None)


def base_name(module: nn.Module, keywords: dict[str, Any]) -> str:
    """The implementation for ``module`` in calls without a retrieval layer.

    Without a record (a model loaded with our name): sdpa where the model supports it and the call
    has neither soft cap nor attention sink logits, else eager.
    """
    base = recorded_base(module.config)
    if base is not None:
        return base
    plain = keywords.get("softcap") is None and keywords.get("s_aux") is None
    return "sdpa" if plain and _supports_sdpa(module) else "eager"


def attend_with_base(
    name: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the implementation ``name`` as the model itself would have."""
    if name == "eager":
        functions = (getattr(home, "eager_attention_forward", None) for home in _modeling(module))
        function = next(filter(None, functions), None)
        if function is None:
            raise RuntimeError(
                f"{type(module).__module__} has no eager attention: load the model with "
                "attn_implementation='sdpa'"
            )
    else:
        function = ALL_ATTENTION_FUNCTIONS[name]
    caller: Any = module
    if name.startswith("flash") or "/" in name:
        # Flash attention looks up its kernel by the name in the module's config, which is ours.
        caller = _Overlay(module, config=_Overlay(module.config, _attn_implementation=name))
    return function(caller, query, key, value, mask, **kwargs)


class _Overlay:
    """``target`` with other values of some attributes."""

    def __init__(self, target: Any, **attributes: Any) -> None:
        self._target = target
        vars(self).update(attributes)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._target, attribute)


def _modeling(module: nn.Module) -> list[ModuleType]:
    """The modules of Python that a class and its ancestors stand in; a notebook's may be first."""
    homes = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    return [home for home in homes if home is not None]


def _supports_sdpa(module: nn.Module) -> bool:
    """Whether the modeling file that ``module`` comes from declares support for sdpa."""
    for home in _modeling(module):
        for value in vars(home).values():
            is_model = isinstance(value, type) and issubclass(value, PreTrainedModel)
            if is_model and value.__module__ == home.__name__:
                return bool(getattr(value, "_supports_sdpa", False))
    return False
