"""InputRecord: hashes of what a model was given beside token ids: pictures, positions, types."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from hf_kvret.core.state import State, Tensors


@dataclass(frozen=True)
class InputHash:
    """One input of one pass.

    Attributes:
        name: of the argument.
        start: slot of the pass's first token.
        count: tokens of the pass.
        by_token: the input has a number for each token, and ``sha256`` a digest for each row.
        sha256: hex digests.
    """

    name: str
    start: int
    count: int
    by_token: bool
    sha256: tuple[str, ...]

    @property
    def end(self) -> int:
        """Slot after the pass's last token."""
        return self.start + self.count

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> InputHash:
        """The inverse of ``asdict``; KeyError, TypeError or ValueError for anything else."""
        digests = tuple(str(digest) for digest in plain["sha256"])
        start, count = int(plain["start"]), int(plain["count"])
        if not digests or start < 0 or count < 0:
            raise ValueError(f"input {plain['name']!r}: {len(digests)} hashes, slot {start}")
        return cls(str(plain["name"]), start, count, bool(plain["by_token"]), digests)


class InputRecord(State):
    """Hashes of the inputs of the passes that filled a cache, in their order.

    Attributes:
        entries: the hashes. They are as they were, while rows of the cache may have moved.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.entries: tuple[InputHash, ...] = ()
        self._moved = False

    def reorder(self, rows: torch.Tensor) -> None:
        self._moved = True

    def crop(self, length: int) -> None:
        """Forget the inputs of passes of which a token is forgotten."""
        self.entries = tuple(entry for entry in self.entries if entry.end <= length)

    def nbytes(self) -> int:
        return 0

    def state_dict(self) -> Tensors:
        """Nothing: it is saved as plain JSON."""
        return {}

    def to_json(self) -> list[dict[str, Any]]:
        """The entries as plain JSON."""
        return [asdict(entry) for entry in self.entries]

    @classmethod
    def from_json(cls, plain: list[Any]) -> Self:
        """The inverse of ``to_json``; KeyError, TypeError or ValueError for anything else."""
        record = cls()
        record.entries = tuple(InputHash.from_json(entry) for entry in plain)
        # The rows may have been moved before they were saved.
        record._moved = True
        return record

    def note(
        self,
        inputs: Mapping[str, torch.Tensor],
        shape: tuple[int, int],
        start: int,
        count: int,
        mask: torch.Tensor | None,
    ) -> None:
        """Note the inputs of a pass; reads them.

        Args:
            inputs: by name.
            shape: of the prompt's ids, of which the last ``count`` are new.
            start: slot of the first new token.
            count: new tokens.
            mask: ``[B, T]`` of all tokens, or None; numbers of padding don't count.
        """
        for name, value in inputs.items():
            by_token = _is_by_token(value, shape)
            if by_token:
                digests = _row_digests(value[..., -count:], _part(mask, start, count))
            else:
                digests = (_digest(value),)
                if any((name, digests) == (entry.name, entry.sha256) for entry in self.entries):
                    continue
            self.entries += (InputHash(name, start, count, by_token, digests),)

    def difference(
        self,
        inputs: Mapping[str, torch.Tensor],
        shape: tuple[int, int],
        mask: torch.Tensor | None,
        repeats_pictures: bool,
    ) -> InputHash | None:
        """The first entry that the inputs of a prompt contradict; None if none does.

        Inputs that are not given again, and those of which it can't be said what they belong to,
        contradict nothing.

        Args:
            inputs: by name, for the whole conversation.
            shape: of the conversation's ids.
            mask: as of ``note``.
            repeats_pictures: inputs without a number for each token are those of earlier passes,
                because there is no place for more.
        """
        names = [entry.name for entry in self.entries]
        for entry in self.entries:
            value = inputs.get(entry.name)
            if value is None or _is_by_token(value, shape) != entry.by_token:
                continue
            if entry.by_token:
                if entry.end > shape[1]:
                    continue
                columns = value[..., entry.start : entry.end]
                digests = _row_digests(columns, _part(mask, entry.start, entry.count))
                if self._moved or len(digests) != len(entry.sha256):
                    differs = not set(digests) <= set(entry.sha256)
                else:
                    differs = digests != entry.sha256
            else:
                single = names.count(entry.name) == 1
                differs = repeats_pictures and single and entry.sha256 != (_digest(value),)
            if differs:
                return entry
        return None


def _is_by_token(value: torch.Tensor, shape: tuple[int, int]) -> bool:
    """Whether ``value``, ``[B, T]`` or ``[parts, B, T]``, has a number for each id of a prompt."""
    if value.is_floating_point() or value.ndim not in (2, 3):
        return False
    rows, tokens = value.shape[-2:]
    return tokens == shape[1] and (rows in (1, shape[0]))


def _part(mask: torch.Tensor | None, start: int, count: int) -> torch.Tensor | None:
    return None if mask is None else mask[:, start : start + count]


def _row_digests(value: torch.Tensor, mask: torch.Tensor | None) -> tuple[str, ...]:
    """A digest for each row of ``[B, n]`` or ``[parts, B, n]``, padding as zeros."""
    if mask is not None and mask.shape[-1] == value.shape[-1]:
        value = value * (mask != 0).to(value.device)
    rows = value.long().cpu().movedim(-2, 0)
    return tuple(_digest(row) for row in rows)


def _digest(value: torch.Tensor) -> str:
    flat = value.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{flat.dtype} {tuple(flat.shape)}".encode())
    digest.update(flat.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
