"""Wrappers around functions of transformers, beside those of other libraries.

Any library may wrap the same function, before us or after us, and take its wrapper away again in
any order. Our wrapper is therefore put there once and stays where it is: what it does is a hook,
which is replaced or taken away. To restore is to take the hook away; the wrapper goes with it where
nobody has wrapped it since, else it stays and passes calls on.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

_MARK = "_hf_kvret_wrapper"

Function = Callable[..., Any]
Hook = Callable[..., Any]
"""``hook(inner, *args, **kwargs)`` does the work of a call; ``inner`` is what we wrapped."""


@dataclass(eq=False)
class _Slot:
    """The hook of the wrappers of one function; None where they pass calls on."""

    hook: Hook | None = None


@dataclass(eq=False)
class _Mark:
    """What a wrapper of ours is known by. ``functools.wraps`` copies it to wrappers of others."""

    wrapper: Function
    inner: Function
    slot: _Slot


class WrappedFunction:
    """The function ``name`` of a class, or of the globals of a module.

    Args:
        owner: a class that has or inherits the function, or the globals of a module.
        name: of the function.
    """

    def __init__(self, owner: type | dict[str, Any], name: str) -> None:
        self._owner, self._name = owner, name
        self._slot = _Slot()

    def apply(self, hook: Hook) -> None:
        """Let ``hook`` do the work of every call. Applying again replaces the hook."""
        home = next(self._homes())
        mark = find_wrapper(home[self._name])
        if mark is None:
            home[self._name] = _wrap(home[self._name], self._slot)
        else:
            # After this module was loaded again, the wrapper in place is of the older one.
            self._slot = mark.slot
        self._slot.hook = hook

    def restore(self) -> None:
        """Take the hook away, and our wrapper where it is the outermost. Twice is harmless."""
        self._slot.hook = None
        for home in self._homes():
            while (mark := _own_mark(home[self._name])) is not None:
                home[self._name] = mark.inner

    def _homes(self) -> Iterator[Any]:
        """The namespaces that have the function, in the order in which a call looks it up."""
        if isinstance(self._owner, dict):
            yield self._owner
            return
        for cls in self._owner.__mro__:
            if self._name in vars(cls):
                yield _Namespace(cls)


@dataclass
class _Namespace:
    """The attributes of a class itself, as a mapping that can be written."""

    cls: type

    def __getitem__(self, name: str) -> Any:
        return vars(self.cls)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.cls, name, value)


def once(hook: Hook) -> Hook:
    """``hook``, which works once in a call where two wrappers of ours are in a chain.

    That happens where another library does not say, by ``__wrapped__``, what it wrapped. A call is
    known from those inside it by its first argument.
    """
    running = threading.local()

    @functools.wraps(hook)
    def hook_once(inner: Function, *args: Any, **kwargs: Any) -> Any:
        outer, outer_owner = around = getattr(running, "call", (None, None))
        owner = args[0] if args else None
        if outer is not None and outer is not inner and outer_owner is owner:
            return inner(*args, **kwargs)
        running.call = inner, owner
        try:
            return hook(inner, *args, **kwargs)
        finally:
            running.call = around

    return hook_once


def find_wrapper(function: Any) -> _Mark | None:
    """The mark of our wrapper that a call of ``function`` reaches; None where we see none."""
    marks = (_own_mark(one) for one in _chain(function))
    return next((mark for mark in marks if mark is not None), None)


@functools.lru_cache(maxsize=16)
def signature_with(function: Function, parameter: str) -> inspect.Signature:
    """The signature of ``function``, or of what it wraps if only that names ``parameter``."""
    signatures = (
        inspect.signature(one) for one in _chain(function) if isinstance(one, FunctionType)
    )
    named = (one for one in signatures if parameter in one.parameters)
    return next(named, inspect.signature(function))


def _own_mark(function: Any) -> _Mark | None:
    mark = getattr(function, _MARK, None)
    return mark if mark is not None and mark.wrapper is function else None


def _wrap(inner: Function, slot: _Slot) -> Function:
    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        hook = slot.hook
        return inner(*args, **kwargs) if hook is None else hook(inner, *args, **kwargs)

    setattr(wrapper, _MARK, _Mark(wrapper, inner, slot))
    return wrapper


def _chain(function: Any) -> Iterator[Any]:
    """``function`` and the functions that it says it wraps."""
    while callable(function):
        yield function
        function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
