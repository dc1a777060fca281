"""Triton's interpreter without work that it repeats for each operation of each program.

Half of its time goes into types and shapes that it makes anew, and into patches of its language
that it makes anew for each call. Here they are made once. What kernels compute stays the same.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any


def patch_interpreter() -> None:
    """Make the interpreter of this process faster; call it before the first launch."""
    from triton import language
    from triton.runtime import interpreter

    core = language.core
    # Nobody reads these checks, as assertions of kernels are off.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    # A launch restores the language, and each call of a device function patches it again.
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"a": language, "b": core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()

    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    semantic = type(interpreter.interpreter_semantic)
    semantic.computation_type_impl = _computation_type(semantic.computation_type_impl)
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)
    core.block_type.__init__ = _block_type_init(core.block_type.__init__)
    core.tensor.__init__ = _tensor_init(core)


def _patch_attr(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's function, without a copy of the keywords."""
    from triton.runtime.interpreter import interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(target, name, call)


def _by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    results: dict[str, Any] = {}

    def cached(dtype: Any) -> Any:
        name = dtype.name
        if name not in results:
            results[name] = np_dtype(dtype)
        return results[name]

    return cached


def _computation_type(computation_type: Callable[..., Any]) -> Callable[..., Any]:
    results: dict[tuple[Any, ...], Any] = {}

    def cached(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_scalar, b.name, b_scalar, div_or_mod
        if key not in results:
            results[key] = computation_type(self, a, a_scalar, b, b_scalar, div_or_mod)
        return results[key]

    return cached


def _broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def quick(self: Any, left: Any, right: Any) -> Any:
        # Tensors of one shape share it, see ``_tensor_init``.
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    return quick


def _block_type_init(init: Callable[..., None]) -> Callable[..., None]:
    """The attributes of a type are those of the first one of its elements and shape."""
    # The attributes hold the type of the elements, so that its id stays its own.
    results: dict[tuple[Any, ...], dict[str, Any]] = {}

    def cached(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), *map(int, shape)
        if key not in results:
            init(self, element_ty, shape)
            results[key] = dict(vars(self))
        vars(self).update(results[key])

    return cached


def _tensor_init(core: Any) -> Callable[..., None]:
    """As the original, which makes a constant for each number of a shape."""

    @functools.cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        numel = 1
        for size in shape:
            numel *= size
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(numel)

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes(tuple(type.shape) if type.is_block() else ())

    return init
