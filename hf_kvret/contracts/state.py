"""State: a part of a cache whose fields are declared once."""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch

from hf_kvret.contracts.fields import Field, NumberField, Tensors, number, part, tensor
from hf_kvret.contracts.schema import Form, damaged

__all__ = ["State", "Tensors", "number", "part", "tensor"]


class State(ABC):  # noqa: B024 - contracts that derive from it have abstract methods
    """A part of a cache that declares its fields, from which the operations below are derived.

    Fields are declared in the body of the class, with the functions of this module::

        class MeanKeys(State):
            total: torch.Tensor | None = tensor(dims="B H D")
            recent: TokenBuffer = part(TokenBuffer)   # a state of its own
            updates: int = number(0, least=0)

    ``reorder``, ``crop``, ``fork``, ``nbytes``, ``state_dict``, ``load_state_dict`` and ``reset``
    then go through the fields. A class overrides one only where it really differs, and says why.
    Undeclared attributes (options, tables of constants) are shared by forks and not saved.

    A saved state is compared with what the fields declare before it is loaded (``check_saved``),
    and with itself afterwards (``check_loaded``).
    """

    fields: ClassVar[dict[str, Field]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own_fields = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        base_fields = [vars(base).get("fields", {}) for base in reversed(cls.__mro__[1:])]
        cls.fields = {name: field for fields in base_fields for name, field in fields.items()}
        cls.fields |= own_fields
        for name, field in own_fields.items():
            field.name = name
            # An instance always has its own value.
            delattr(cls, name)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        state = super().__new__(cls)
        for name, field in cls.fields.items():
            setattr(state, name, field.initial())
        return state

    def reorder(self, rows: torch.Tensor) -> None:
        """Row b of the batch becomes the old row ``rows[b]``; ``rows`` may repeat or omit rows."""
        for name, field in self.fields.items():
            setattr(self, name, field.reordered(getattr(self, name), rows))

    def crop(self, length: int) -> None:
        """Forget all tokens from slot ``length`` on; 0 forgets everything."""
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
            tensors |= field.saved(getattr(self, name))
        if not tensors:
            return {}
        for key, names in self._numbers():
            values = [getattr(self, name) for name in names]
            content = values if len(values) > 1 else values[0]
            kinds = {self.fields[name].kind for name in names}
            dtype = torch.float64 if float in kinds else torch.int64
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
            setattr(self, name, field.loaded(getattr(self, name), state, device))
        if not state:
            return
        for key, names in self._numbers():
            for name, value in zip(names, state[key].reshape(-1).tolist(), strict=True):
                setattr(self, name, self.fields[name].kind(value))
        self.loaded()

    def loaded(self) -> None:  # noqa: B027 - most states need nothing else
        """Hook: derive attributes from tensors just loaded. ValueError where they are invalid."""

    def saved_sizes(self, form: Form) -> dict[str, int]:
        """Sizes of this kind of state alone, for ``dims`` of its fields and of its parts."""
        return {}

    def check_saved(self, state: Tensors, form: Form) -> None:
        """Compare a saved state with the fields, before it is loaded.

        Raises:
            ValueError: a tensor that none has, or of another form; a number out of range.
        """
        claimed = self.claim(state, form)
        # Whoever loads by hand knows the names by hand.
        if type(self).load_state_dict is State.load_state_dict and claimed < state.keys():
            raise damaged(f"there is an unknown {min(state.keys() - claimed)[:80]}")

    def claim(self, state: Tensors, form: Form) -> set[str]:
        """The names of ``state`` that belong to it, checked as by ``check_saved``."""
        form = form.extended(self.saved_sizes(form))
        claimed: set[str] = set()
        for name, field in self.fields.items():
            claimed |= field.claim(getattr(self, name), state, form)
        for key, names in self._numbers():
            if key in state:
                claimed.add(key)
                self._check_numbers(key, [self.fields[name] for name in names], state[key], form)
        return claimed

    def check_loaded(self, form: Form) -> None:
        """ValueError where values just loaded do not fit one another; goes through the parts.

        A class with values that are used as ids, offsets or lengths extends it.
        """
        form = form.extended(self.saved_sizes(form))
        for name, field in self.fields.items():
            value = getattr(self, name)
            if field.is_saved and isinstance(value, State):
                value.check_loaded(form)

    @staticmethod
    def _check_numbers(key: str, fields: list[Any], saved: torch.Tensor, form: Form) -> None:
        dtype = torch.float64 if float in {field.kind for field in fields} else torch.int64
        form.check(key, saved.reshape(-1) if len(fields) == 1 else saved, f"{len(fields)}", dtype)
        for field, value in zip(fields, saved.reshape(-1).tolist(), strict=True):
            field.check(value, form)

    def _numbers(self) -> Iterator[tuple[str, list[str]]]:
        """Keys of saved numbers, with the fields that are saved under each."""
        keys: dict[str, list[str]] = {}
        for name, field in self.fields.items():
            if isinstance(field, NumberField) and field.is_saved:
                keys.setdefault(field.key, []).append(name)
        yield from keys.items()
