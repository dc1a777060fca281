"""Wrappers around methods of transformers, beside those of other libraries.

Any library may wrap the same method, before us or after us, and take its wrapper away again. What
our wrapper does is a hook, which is replaced or taken away. To restore is to take the hook away;
the wrapper goes with it where nobody has wrapped it since, else it stays and passes calls on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import nn

Function = Callable[..., Any]
Hook = Callable[..., Any]
"""``hook(inner, *args, **kwargs)`` does the work of a call; ``inner`` is what we wrapped."""


class WrappedMethod:
    """The method ``name`` of a class that has or inherits it."""

    def __init__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name
        self._wrapper: _Wrapper | None = None

    def apply(self, hook: Hook) -> None:
        """Let ``hook`` do the work of every call. Applying again replaces the hook."""
        home = self._home()
        function = vars(home)[self._name]
        if self._wrapper is None or self._wrapper.function not in _chain(function):
            # Where another library hides it, the older wrapper passes calls on from now on.
            self.restore()
            self._wrapper = _Wrapper(function)
            setattr(home, self._name, self._wrapper.function)
        self._wrapper.hook = hook

    def restore(self) -> None:
        """Take the hook away, and our wrapper where it is the outermost. Twice is harmless."""
        if self._wrapper is None:
            return
        self._wrapper.hook = None
        home = self._home()
        if vars(home)[self._name] is self._wrapper.function:
            setattr(home, self._name, self._wrapper.inner)

    def _home(self) -> type:
        """The class that a call of the method finds it in."""
        return next(cls for cls in self._owner.__mro__ if self._name in vars(cls))


class _Wrapper:
    """A function around ``inner``, and what it does: its hook, or nothing."""

    def __init__(self, inner: Function) -> None:
        self.inner = inner
        self.hook: Hook | None = None

        @functools.wraps(inner)
        def function(*args: Any, **kwargs: Any) -> Any:
            hook = self.hook
            return inner(*args, **kwargs) if hook is None else hook(inner, *args, **kwargs)

        self.function = function


class Patches:
    """The methods that a patch wraps, each once."""

    def __init__(self) -> None:
        self._wrapped: dict[tuple[type, str], WrappedMethod] = {}

    def apply(self, owner: type, name: str, hook: Hook) -> None:
        """Let ``hook`` do the work of the method ``name``; see ``WrappedMethod``."""
        self._wrapped.setdefault((owner, name), WrappedMethod(owner, name)).apply(hook)

    def apply_to(self, model: nn.Module, known_by: str, name: str, hook: Hook) -> None:
        """The same in the classes of ``model``'s modules that have a method ``known_by``."""
        for owner in {owner for module in model.modules() for owner in type(module).__mro__}:
            if known_by in vars(owner):
                self.apply(owner, name, hook)

    def restore(self) -> None:
        """Take all hooks away. Doing it twice is harmless."""
        for wrapped in self._wrapped.values():
            wrapped.restore()


@functools.lru_cache(maxsize=16)
def signature_with(function: Function, parameter: str) -> inspect.Signature:
    """The signature of ``function``, or of what it wraps if only that names ``parameter``."""
    signatures = (
        inspect.signature(one) for one in _chain(function) if isinstance(one, FunctionType)
    )
    named = (one for one in signatures if parameter in one.parameters)
    return next(named, inspect.signature(function))


def _chain(function: Any) -> Iterator[Any]:
    """``function`` and the functions that it says it wraps."""
    while callable(function):
        yield function
        function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
