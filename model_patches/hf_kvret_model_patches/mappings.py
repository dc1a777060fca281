"""Our names among transformers' attention functions and mask functions.

Another library may put a function of its own under one of our names, as one that wraps ours. It
stays there: neither adding a name again nor removing it touches a function that is not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Function = Callable[..., Any]

_MAPPINGS = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
# By name, the attention function and the mask function that were added.
_added: dict[str, tuple[Function, Function]] = {}


def add(name: str, attention: Function, mask: Function) -> None:
    """Put both functions under ``name``. Doing it twice is harmless."""
    for mapping, function in zip(_MAPPINGS, (attention, mask), strict=True):
        if name not in _added or name not in mapping._global_mapping:
            mapping.register(name, function)
    _added[name] = attention, mask


def remove(name: str) -> None:
    """Take our functions away from ``name``. Doing it twice is harmless."""
    for mapping, function in zip(_MAPPINGS, _added.get(name, ()), strict=False):
        if mapping._global_mapping.get(name) is function:
            del mapping._global_mapping[name]
    # A function of somebody else that replaced ours there is known as that when we add the name.
    if not any(name in mapping for mapping in _MAPPINGS):
        _added.pop(name, None)


def foreign_names() -> set[str]:
    """Names of attention functions under which we added none."""
    return set(ALL_ATTENTION_FUNCTIONS.valid_keys()) - _added.keys()
