"""Triton's interpreter without work that it repeats for each operation of each program.

Most of its time goes into types and shapes that it makes anew, into rules of promotion, and into
patches of its language that it makes anew for each call. Here types and patches are made once, and
operators of tensors of one kind, loads and stores are a call. What kernels compute stays the same.
"""

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
    "xor": (np.bitwise_xor, (_INT,)),
    "lshift": (np.left_shift, (_INT,)),
    "rshift": (np.right_shift, (_INT,)),
    # Division rounds towards zero.
    "mod": (np.fmod, (_INT,)),
    "floordiv": (lambda one, other: (one - np.fmod(one, other)) // other, (_INT,)),
}
# A cast to a bool compares with zero.
_CASTS = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
_WHOLE = slice(None)


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
    interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"a": language, "b": core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()

    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _unwrapped(core)
    # Each launch would make the types of its pointers anew.
    language.str_to_ty = functools.cache(language.str_to_ty)
    core.block_type.__init__ = _block_type_init(core)
    core.tensor.__init__ = _tensor_init
    # Sizes of data are those of their types.
    interpreter.TensorHandle.__post_init__ = lambda self: None
    operators = Operators(core, interpreter.TensorHandle)
    for name, (operation, kinds) in _OPERATORS.items():
        for method, is_reflected in ((f"__{name}__", False), (f"__r{name}__", True)):
            slow = getattr(core.tensor, method, None)
            if slow is not None:
                setattr(core.tensor, method, operators.quick(slow, operation, kinds, is_reflected))
    core.tensor.__add__ = operators.advanced(core.tensor.__add__)
    core.tensor.__getitem__ = operators.indexed(core.tensor.__getitem__)
    core.tensor.to = operators.cast(core.tensor.to)
    memory = Memory(operators, interpreter)
    quick = {
        "minimum": operators.pairs(core.minimum, np.fmin),
        "maximum": operators.pairs(core.maximum, np.fmax),
        "where": operators.where(core.where),
        "arange": _arange(core.arange),
        "load": memory.load(core.load),
        "store": memory.store(core.store),
    }
    for name, function in quick.items():
        setattr(core, name, function)
        setattr(language, name, function)


def _arange(arange: Callable[[int, int], Any]) -> Callable[[Any, Any], Any]:
    cached = functools.cache(arange)
    return lambda start, end: cached(getattr(start, "value", start), getattr(end, "value", end))


def _by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    results: dict[str, Any] = {}

    def cached(dtype: Any) -> Any:
        name = dtype.name
        if name not in results:
            results[name] = np_dtype(dtype)
        return results[name]

    return cached


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
            other, is_block = self.operand(right, kind) if kind in kinds else (None, False)
            if other is None:
                return slow(left, right)
            one = left.handle.data
            data = operation(other, one) if is_reflected else operation(one, other)
            return self.tensor(data, self._dtypes[data.dtype], is_block or left.type.is_block())

        return operator

    def advanced(self, add: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The sum of a pointer and an offset, too."""

        def operator(left: Any, right: Any) -> Any:
            offset, is_block = self.operand(right, _INT) if left.dtype.is_ptr() else (None, False)
            if offset is None:
                return add(left, right)
            width = max(1, left.dtype.element_ty.primitive_bitwidth // 8)
            data = left.handle.data + width * np.asarray(offset).astype(np.uint64)
            return self.tensor(data, left.dtype, is_block or left.type.is_block())

        return operator

    def pairs(self, slow: Any, operation: Any) -> Callable[..., Any]:
        """A function of two tensors of one kind, or of a tensor and a number."""
        quick = self.quick(slow, operation, (_FLOAT, _INT), is_reflected=False)

        def function(x: Any, y: Any, **options: Any) -> Any:
            is_slow = options or type(x) is not self._core.tensor
            return slow(x, y, **options) if is_slow else quick(x, y)

        return function

    def indexed(self, slow: Any) -> Callable[[Any, Any], Any]:
        """More axes of a block."""

        def operator(block: Any, axes: Any) -> Any:
            is_quick = type(axes) is tuple and block.type.is_block()
            if not is_quick or any(axis is not None and axis != _WHOLE for axis in axes):
                return slow(block, axes)
            return self.tensor(block.handle.data[axes], block.dtype, True)

        return operator

    def cast(self, slow: Any) -> Callable[..., Any]:
        def operator(value: Any, dtype: Any, *more: Any, **options: Any) -> Any:
            target = getattr(dtype, "value", dtype)
            if more or options or value.dtype.name not in _KINDS or target.name not in _CASTS:
                return slow(value, dtype, *more, **options)
            if value.dtype.name == target.name:
                return value
            data = value.handle.data.astype(_CASTS[target.name])
            return self.tensor(data, self._dtypes[data.dtype], value.type.is_block())

        return operator

    def where(self, slow: Any) -> Callable[[Any, Any, Any], Any]:
        def function(condition: Any, x: Any, y: Any) -> Any:
            typed = x if type(x) is self._core.tensor else y
            kind = _KINDS.get(typed.dtype.name) if type(typed) is self._core.tensor else None
            values = [self.operand(x, kind), self.operand(y, kind)] if kind else [(None, False)]
            operands = [self.operand(condition, _BOOL), *values]
            if any(data is None for data, _ in operands):
                return slow(condition, x, y)
            # Memory has the order of rows, as Triton spreads numbers: sums in another one differ.
            data = np.ascontiguousarray(np.where(*(data for data, _ in operands)))
            return self.tensor(data, self._dtypes[data.dtype], any(block for _, block in operands))

        return function

    def operand(self, value: Any, kind: str) -> tuple[Any, bool]:
        """An operand of this kind for NumPy, and whether it is a block; (None, False) for others.

        A number takes the type of the tensor that it meets.
        """
        if type(value) is self._core.tensor:
            is_same = _KINDS.get(value.dtype.name) == kind
            return (value.handle.data, value.type.is_block()) if is_same else (None, False)
        if type(value) is self._core.constexpr:
            value = value.value
        is_number = type(value) in (float, int) and kind == _FLOAT
        is_number |= type(value) is int and kind != _BOOL and -(2**31) <= value < 2**31
        return (value if is_number else None), False

    def tensor(self, data: Any, dtype: Any, is_block: bool) -> Any:
        if not is_block:
            return self._core.tensor(self._handle(data, dtype), dtype)
        key = id(dtype), data.shape
        if key not in self._block_types:
            self._block_types[key] = self._core.block_type(dtype, [*data.shape])
        return self._core.tensor(self._handle(data, dtype), self._block_types[key])


class Memory:
    """Loads and stores of blocks, or of numbers, whose masks and values have the same type."""

    def __init__(self, operators: Operators, interpreter: Any) -> None:
        self._operators = operators
        self._np_dtype = interpreter._get_np_dtype
        self._load, self._store = interpreter._interpreter.load, interpreter._interpreter.store

    def load(self, slow: Any) -> Callable[..., Any]:
        def function(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
            element = getattr(pointer.dtype, "element_ty", None)
            places = pointer.handle.data
            seen = self._seen(mask, places)
            value = 0 if other is None else self._number(other)
            if element is None or element.name == "int1" or seen is None or value is None:
                return slow(pointer, mask, other, **options)
            # The bits of zero are zero in every type.
            if value != 0 and element.name not in _CASTS:
                return slow(pointer, mask, other, **options)
            others = np.full(places.shape, value, self._np_dtype(element))
            data = self._load(places, seen, others, others.dtype)
            return self._operators.tensor(data, element, pointer.type.is_block())

        return function

    def store(self, slow: Any) -> Callable[..., Any]:
        def function(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
            element = getattr(pointer.dtype, "element_ty", None)
            places = pointer.handle.data
            seen = self._seen(mask, places)
            is_same = element is not None and getattr(value, "dtype", None) == element
            if not is_same or element.name == "int1" or seen is None:
                return slow(pointer, value, mask, **options)
            if value.handle.data.shape != places.shape:
                return slow(pointer, value, mask, **options)
            self._store(places, value.handle.data, seen)
            return None

        return function

    def _seen(self, mask: Any, places: Any) -> Any:
        """A mask of the shape of ``places``; None where there is none."""
        if mask is None:
            return np.ones(places.shape, bool)
        data, _ = self._operators.operand(mask, _BOOL)
        if data is None or data.shape == places.shape:
            return data
        sizes = zip(data.shape, places.shape, strict=False)
        fits = data.ndim == places.ndim and all(size in (1, whole) for size, whole in sizes)
        return np.broadcast_to(data, places.shape) if fits else None

    @staticmethod
    def _number(value: Any) -> float | int | None:
        value = getattr(value, "value", value)
        return value if type(value) in (float, int) else None
