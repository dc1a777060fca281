"""State: a part of a cache whose fields are declared once."""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import torch

Tensors = dict[str, torch.Tensor]
DTypes = torch.dtype | tuple[torch.dtype, ...] | None

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What keys may be."""

_MAPPED = "_hf_kvret_mapped"
# In place of a key: that of the attribute.
_NAME = "<attribute>"


def mark_mapped(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, marked as the mapping of a file that a load may leave where it is."""
    setattr(tensor, _MAPPED, True)
    return tensor


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether this very tensor was marked; a view or a copy of it is not."""
    return hasattr(tensor, _MAPPED)


class Schema:
    """Sizes by letter, with which saved tensors are compared before anything uses them.

    Capital letters are of the layer: ``B`` sequences, ``H`` KV heads, ``Q`` query heads
    (not always known), ``D`` and ``V`` elements of a key and a value, ``S`` sinks, ``N`` cold
    tokens, ``T`` all tokens, ``I`` elements of a key that are its value. Other letters stand for a
    size that the first tensor of a state decides for its others.

    Attributes:
        dtype: of keys and values.
        sizes: by letter, as far as they are known.
    """

    def __init__(self, dtype: torch.dtype, sizes: Mapping[str, int]) -> None:
        self.dtype = dtype
        self.sizes = dict(sizes)

    def check(self, name: str, tensor: torch.Tensor, dims: str, dtype: DTypes = None) -> None:
        """ValueError unless ``tensor`` has these dims and (one of) these dtypes.

        Args:
            name: for the message.
            tensor: on any device.
            dims: letters or numbers with blanks between them, ``"B H N D"``.
            dtype: None for that of keys.
        """
        allowed = (self.dtype,) if dtype is None else dtype
        allowed = allowed if isinstance(allowed, tuple) else (allowed,)
        letters = dims.split()
        fits = tensor.dtype in allowed and tensor.ndim == len(letters)
        for letter, size in zip(letters, tensor.shape, strict=False):
            expected = int(letter) if letter.isdigit() else self.sizes.setdefault(letter, size)
            fits &= size == expected
        if not fits:
            sizes = [int(x) if x.isdigit() else self.sizes.get(x, x) for x in letters]
            types = " or ".join(str(one).removeprefix("torch.") for one in allowed)
            raise ValueError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, not "
                f"{types} {sizes}: the file is damaged, or of another model; save the cache again"
            )


@dataclass(eq=False, kw_only=True)
class Field:
    """How a ``State`` treats one of its attributes; the base does nothing.

    Args:
        key: its name in ``state_dict``; the attribute's without leading underscores by default.
        saved: whether ``state_dict`` has it.
        dims: of a saved tensor, see ``Schema``; None: any.
        dtype: of a saved tensor with ``dims``; None for that of keys.
    """

    key: str = _NAME
    saved: bool = True
    dims: str | None = None
    dtype: DTypes = None

    def __set_name__(self, owner: type, name: str) -> None:
        if self.key == _NAME:
            self.key = name.lstrip("_")

    def initial(self) -> Any:
        """The value in a new state."""

    def emptied(self, value: Any) -> Any:
        """The value after ``reset``."""
        return self.initial()

    def reordered(self, value: Any, rows: torch.Tensor) -> Any:
        """The value after ``reorder``."""
        return value

    def crop(self, value: Any, length: int) -> None:
        """What ``crop`` does with the value."""

    def forked(self, value: Any) -> Any:
        """The value in a fork."""
        return value

    def nbytes(self, value: Any) -> int:
        """Bytes of the value's tensors."""
        return 0

    def is_in(self, state: Tensors) -> bool:
        """Whether ``state`` contains it, or a part of it."""
        return self.saved and self.key in state

    def check(self, value: Any, state: Tensors, schema: Schema) -> None:
        """ValueError for a tensor of ``state`` with other dims; ``value`` is of a new state."""
        if self.dims is not None and self.is_in(state):
            schema.check(self.key, state[self.key], self.dims, self.dtype)

    def to_save(self, value: Any) -> Tensors:
        """Tensors of the value, by name."""
        return {}

    def loaded(self, value: Any, state: Tensors, device: torch.device | None) -> Any:
        """The value saved in ``state``; ``value`` is that of an empty state."""
        return value


@dataclass(eq=False, kw_only=True)
class TensorField(Field):
    """A small tensor ``[B, ...]``, None until it is assigned.

    Args:
        optional: it may be missing where other fields were saved.
        batched: its first dimension is the batch.
        shared: it is never written in place, so that forks need no copy.
    """

    optional: bool = False
    batched: bool = True
    shared: bool = False

    def reordered(self, value: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
        if value is None or not self.batched:
            return value
        return value.index_select(0, rows.to(value.device))

    def forked(self, value: torch.Tensor | None) -> torch.Tensor | None:
        return value if value is None or self.shared else value.clone()

    def nbytes(self, value: torch.Tensor | None) -> int:
        return 0 if value is None else value.nbytes

    def to_save(self, value: torch.Tensor | None) -> Tensors:
        return {} if value is None or self.key is None else {self.key: value.contiguous()}

    def loaded(
        self, value: torch.Tensor | None, state: Tensors, device: torch.device | None
    ) -> torch.Tensor | None:
        if self.optional and self.key not in state:
            return None
        source = state[self.key].to(device)
        return source if self.shared else source.clone()


@dataclass(eq=False)
class NumberField(Field):
    """A plain number, of the type of ``default``.

    Numbers with the same key are saved in one tensor, in their order.

    Args:
        default: in a new state.
        reset_on_fork: a fork starts with the default, for example counters of a report.
    """

    default: bool | int | float
    _: KW_ONLY
    reset_on_fork: bool = False

    def initial(self) -> float:
        return self.default

    def forked(self, value: float) -> float:
        return self.default if self.reset_on_fork else value


@dataclass(eq=False, kw_only=True)
class TransientField(Field):
    """What one call leaves to the next one, of any type, or None.

    It is None in a new state, in a fork, and after ``reset`` and ``reorder``; it is not saved.
    """

    saved: bool = False

    def reordered(self, value: Any, rows: torch.Tensor) -> None:
        return None

    def forked(self, value: Any) -> None:
        return None


@dataclass(eq=False)
class ListField(Field):
    """A list, of which each fork has its own; a state that saves it does so by itself.

    Args:
        end: the number of tokens that an element needs. A crop to fewer drops it.
    """

    end: Callable[[Any], int]
    _: KW_ONLY
    saved: bool = False

    def initial(self) -> list[Any]:
        return []

    def crop(self, value: list[Any], length: int) -> None:
        value[:] = [one for one in value if self.end(one) <= length]

    def forked(self, value: list[Any]) -> list[Any]:
        return list(value)


@dataclass(eq=False)
class PartField(Field):
    """A part that is a ``State`` itself, whose tensors are saved as ``key.name``.

    With the key ``""`` their names are those of the part alone.

    Args:
        make: makes an empty one; None where ``__init__`` assigns it.
        optional: None until it is assigned, and after ``reset``.
        may_be_empty: it may hold nothing where other fields were saved.

    Raises:
        ValueError: an optional part that is saved, without ``make``.
    """

    make: Callable[[], State] | None = None
    _: KW_ONLY
    optional: bool = False
    may_be_empty: bool = False

    def __post_init__(self) -> None:
        if self.optional and self.saved and self.make is None:
            raise ValueError(
                "part(optional=True) can't be made when a state that has it is loaded: pass make, "
                "as its class, or saved=False"
            )

    @property
    def prefix(self) -> str:
        """Prefix of its tensors' names in ``state_dict``."""
        return f"{self.key}." if self.key else ""

    def initial(self) -> State | None:
        return None if self.make is None or self.optional else self.make()

    def emptied(self, value: State | None) -> State | None:
        if value is None or self.optional:
            return None
        value.reset()
        return value

    def reordered(self, value: State | None, rows: torch.Tensor) -> State | None:
        if value is not None:
            value.reorder(rows)
        return value

    def crop(self, value: State | None, length: int) -> None:
        if value is not None:
            value.crop(length)

    def forked(self, value: State | None) -> State | None:
        return None if value is None else value.fork()

    def nbytes(self, value: State | None) -> int:
        return 0 if value is None else value.nbytes()

    def check(self, value: State | None, state: Tensors, schema: Schema) -> None:
        if not self.is_in(state):
            return
        if value is None:
            assert self.make is not None, "a part that is saved can be made"
            value = self.make()
        with self._named():
            value.check_saved(self._of_part(state), schema)

    def is_in(self, state: Tensors) -> bool:
        if self.prefix or self.make is None:
            return self.saved and any(name.startswith(self.prefix) for name in state)
        return self.saved and any(field.is_in(state) for field in self.make().fields.values())

    def to_save(self, value: State | None) -> Tensors:
        if value is None:
            return {}
        return {f"{self.prefix}{name}": x for name, x in value.state_dict().items()}

    def loaded(
        self, value: State | None, state: Tensors, device: torch.device | None
    ) -> State | None:
        mine = self._of_part(state)
        if (self.optional and not self.is_in(state)) or (self.may_be_empty and not mine):
            return value
        if value is None:
            if self.make is None:
                raise RuntimeError(
                    f"the part {self.key} was not made: assign it in __init__, or declare it as "
                    "part(make) with what makes an empty one"
                )
            value = self.make()
        with self._named():
            value.load_state_dict(mine, device)
        return value

    def _of_part(self, state: Tensors) -> Tensors:
        """The tensors of ``state`` that are the part's, by its own names."""
        prefix = self.prefix
        return {
            name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)
        }

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the part's tensors name the part, too."""
        try:
            yield
        except KeyError as missing:
            raise KeyError(f"{self.prefix}{missing.args[0]}") from missing
        except ValueError as error:
            raise ValueError(f"{self.prefix}{error}") from error


# Declarations in the body of a class; the attribute of an instance is not the field, but its value.
tensor: Callable[..., Any] = TensorField
number: Callable[..., Any] = NumberField
transient: Callable[..., Any] = TransientField
part: Callable[..., Any] = PartField
listed: Callable[..., Any] = ListField

__all__ = ["State", "Tensors", "number", "part", "tensor", "transient"]


class State(ABC):  # noqa: B024 - contracts that derive from it have abstract methods
    """A part of a cache that declares its fields, from which the operations below are derived.

    Fields are declared in the body of the class, with the functions of this module::

        class MeanKeys(State):
            total: torch.Tensor | None = tensor(dims="B H D")
            recent: TokenBuffer = part(TokenBuffer)   # a state of its own
            updates: int = number(0)

    ``reorder``, ``crop``, ``fork``, ``nbytes``, ``state_dict``, ``load_state_dict`` and ``reset``
    then go through the fields. A class overrides one only where it really differs, and says why.
    Undeclared attributes (options, tables of constants) are shared by forks and not saved.

    A saved state is compared with the dims that the fields declare before it is loaded
    (``check_saved``).
    """

    fields: ClassVar[dict[str, Field]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own_fields = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        base_fields = [vars(base).get("fields", {}) for base in reversed(cls.__mro__[1:])]
        cls.fields = {name: field for fields in base_fields for name, field in fields.items()}
        cls.fields |= own_fields
        for name in own_fields:
            # An instance always has its own value.
            delattr(cls, name)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        state = super().__new__(cls)
        for name, field in cls.fields.items():
            setattr(state, name, field.initial())
        return state

    def reorder(self, rows: torch.Tensor) -> None:
        """Sequence b becomes the old sequence ``rows[b]``; ``rows`` may repeat or omit some."""
        for name, field in self.fields.items():
            setattr(self, name, field.reordered(getattr(self, name), rows))

    def crop(self, length: int) -> None:
        """Forget all tokens from index ``length`` on; 0 forgets everything."""
        for name, field in self.fields.items():
            field.crop(getattr(self, name), length)

    def fork(self) -> Self:
        """An independent copy; rows of tokens are shared until one side writes."""
        twin = copy.copy(self)
        for name, field in self.fields.items():
            setattr(twin, name, field.forked(getattr(self, name)))
        return twin

    def reset(self) -> None:
        """Return to the empty state of a new object."""
        for name, field in self.fields.items():
            setattr(self, name, field.emptied(getattr(self, name)))

    def nbytes(self) -> int:
        """Bytes of all tensors, spare capacity included."""
        return sum(field.nbytes(getattr(self, name)) for name, field in self.fields.items())

    def state_dict(self) -> Tensors:
        """Tensors that restore it, without spare capacity; empty if it has none.

        Numbers are saved as tensors, those that share a key in one tensor. A state without tensors
        saves no numbers either.
        """
        tensors: Tensors = {}
        for name, field in self.fields.items():
            if field.saved:
                tensors |= field.to_save(getattr(self, name))
        if not tensors:
            return {}
        for key, names in self._numbers():
            values = [getattr(self, name) for name in names]
            content = values if len(values) > 1 else values[0]
            types = {type(self.fields[name].initial()) for name in names}
            dtype = torch.float64 if float in types else torch.int64
            tensors[key] = torch.tensor(content, dtype=dtype)
        return tensors

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        """Restore a saved state, on ``device`` (None: where the tensors are).

        Raises:
            KeyError: a missing tensor, by name.
            ValueError: an invalid state, from ``loaded``.
        """
        self.reset()
        for name, field in self.fields.items():
            if field.saved:
                setattr(self, name, field.loaded(getattr(self, name), state, device))
        if not state:
            return
        for key, names in self._numbers():
            for name, value in zip(names, state[key].reshape(-1).tolist(), strict=True):
                setattr(self, name, type(self.fields[name].initial())(value))
        self.loaded()

    def loaded(self) -> None:  # noqa: B027 - most states need nothing else
        """Hook: derive attributes from tensors just loaded. ValueError where they are invalid."""

    def check_saved(self, state: Tensors, schema: Schema) -> None:
        """ValueError where a saved state has a tensor of other dims or dtype than its field."""
        # Sizes of small letters are those of another state.
        schema = Schema(schema.dtype, {x: n for x, n in schema.sizes.items() if x.isupper()})
        for name, field in self.fields.items():
            field.check(getattr(self, name), state, schema)

    def _numbers(self) -> Iterator[tuple[str, list[str]]]:
        """Keys of saved numbers, with the fields that are saved under each."""
        keys: dict[str, list[str]] = {}
        for name, field in self.fields.items():
            if isinstance(field, NumberField) and field.saved:
                keys.setdefault(field.key, []).append(name)
        yield from keys.items()
