"""Triton's interpreter without work that it repeats for each operation of each program.

Most of its time goes into types and shapes that it makes anew, into rules of promotion, and into
patches of its language that it makes anew for each call. Here types and patches are made once, and
operators of tensors of one kind are a call of NumPy. What kernels compute stays the same.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np

# Operands of one of these kinds give what NumPy gives; Triton promotes others by rules of its own.
_FLOAT, _INT, _BOOL = "float", "int", "bool"
_KINDS = {"fp32": _FLOAT, "int32": _INT, "int64": _INT, "int1": _BOOL}
_OPERATORS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "add": (np.add, (_FLOAT, _INT)),
    "sub": (np.subtract, (_FLOAT, _INT)),
    "mul": (np.multiply, (_FLOAT, _INT)),
    "truediv": (np.divide, (_FLOAT,)),
    "lt": (np.less, (_FLOAT, _INT)),
    "le": (np.less_equal, (_FLOAT, _INT)),
    "gt": (np.greater, (_FLOAT, _INT)),
    "ge": (np.greater_equal, (_FLOAT, _INT)),
    "eq": (np.equal, (_FLOAT, _INT)),
    "ne": (np.not_equal, (_FLOAT, _INT)),
    "and": (np.bitwise_and, (_INT, _BOOL)),
    "or": (np.bitwise_or, (_INT, _BOOL)),
}


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
    core._unwrap_if_constexpr = _unwrapped(core)
    # Each launch would make the types of its pointers anew.
    language.str_to_ty = functools.cache(language.str_to_ty)
    core.block_type.__init__ = _block_type_init(core)
    core.tensor.__init__ = _tensor_init
    operators = Operators(core, interpreter.TensorHandle)
    for name, (operation, kinds) in _OPERATORS.items():
        for method, is_reflected in ((f"__{name}__", False), (f"__r{name}__", True)):
            slow = getattr(core.tensor, method)
            setattr(core.tensor, method, operators.quick(slow, operation, kinds, is_reflected))
    core.tensor.__add__ = operators.advanced(core.tensor.__add__)


def _patch_attr(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's function, without a copy of the keywords and a check of them."""
    from triton.runtime.interpreter import interpreter_semantic

    member = getattr(member, "__wrapped__", member)

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
        # Tensors of one shape share it, see ``_block_type_init``.
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    return quick


def _unwrapped(core: Any) -> Callable[[Any], Any]:
    unwrap = core._unwrap_if_constexpr
    wrappers = core.constexpr, core.tuple, list, tuple
    return lambda value: unwrap(value) if isinstance(value, wrappers) else value


def _block_type_init(core: Any) -> Callable[..., None]:
    """The attributes of a type are those of the first one of its elements and shape.

    ``sizes`` is what its tensors have: a constant for each number of the shape, and their product.
    """
    init = core.block_type.__init__
    # The attributes hold the type of the elements, so that its id stays its own.
    results: dict[tuple[Any, ...], dict[str, Any]] = {}

    @functools.cache
    def sizes(*shape: int) -> tuple[Any, Any]:
        numel = 1
        for size in shape:
            numel *= size
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(numel)

    def cached(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), *map(int, shape)
        if key not in results:
            init(self, element_ty, shape)
            self.sizes = sizes(*key[1:])
            results[key] = dict(vars(self))
        vars(self).update(results[key])

    core.dtype.sizes = sizes()
    return cached


def _tensor_init(self: Any, handle: Any, type: Any) -> None:
    """As the original, which makes the sizes anew."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.sizes


class Operators:
    """Operators of tensors in fp32, int32, int64 and bool, whose operands NumPy broadcasts.

    Other operands take the language's own.
    """

    def __init__(self, core: Any, handle: Any) -> None:
        self._core, self._handle = core, handle
        names = {"f4": "float32", "i4": "int32", "i8": "int64", "?": "int1"}
        self._dtypes = {np.dtype(short): getattr(core, name) for short, name in names.items()}
        self._block_types: dict[tuple[Any, ...], Any] = {}

    def quick(
        self, slow: Any, operation: Any, kinds: tuple[str, ...], is_reflected: bool
    ) -> Callable[[Any, Any], Any]:
        def operator(left: Any, right: Any) -> Any:
            kind = _KINDS.get(left.dtype.name, "")
            other, is_block = self._operand(right, kind) if kind in kinds else (None, False)
            if other is None:
                return slow(left, right)
            one = left.handle.data
            data = operation(other, one) if is_reflected else operation(one, other)
            return self._tensor(data, self._dtypes[data.dtype], is_block or left.type.is_block())

        return operator

    def advanced(self, add: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The sum of a pointer and an offset, too."""

        def operator(left: Any, right: Any) -> Any:
            offset, is_block = self._operand(right, _INT) if left.dtype.is_ptr() else (None, False)
            if type(offset) is not np.ndarray:
                return add(left, right)
            width = max(1, left.dtype.element_ty.primitive_bitwidth // 8)
            data = left.handle.data + width * offset.astype(np.uint64)
            return self._tensor(data, left.dtype, is_block or left.type.is_block())

        return operator

    def _operand(self, value: Any, kind: str) -> tuple[Any, bool]:
        """An operand of this kind for NumPy, and whether it is a block; (None, False) for others.

        A number takes the type of the tensor that it meets.
        """
        if type(value) is self._core.tensor:
            is_same = _KINDS.get(value.dtype.name) == kind
            return (value.handle.data, value.type.is_block()) if is_same else (None, False)
        if type(value) is self._core.constexpr:
            value = value.value
        is_number = type(value) is float and kind == _FLOAT
        is_number |= type(value) is int and kind != _BOOL and -(2**31) <= value < 2**31
        return (value if is_number else None), False

    def _tensor(self, data: Any, dtype: Any, is_block: bool) -> Any:
        if not is_block:
            return self._core.tensor(self._handle(data, dtype), dtype)
        key = id(dtype), data.shape
        if key not in self._block_types:
            self._block_types[key] = self._core.block_type(dtype, [*data.shape])
        return self._core.tensor(self._handle(data, dtype), self._block_types[key])
