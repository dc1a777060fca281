"""InputRecord: hashes of what a model was given beside token ids: pictures, positions, types."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch

from hf_kvret.core.state import State, Tensors

BLOCK = 16
"""Tokens of a digest of an input with a number for each token."""

# Hex digits of such a digest: there are many.
_DIGITS = 16


@dataclass(frozen=True)
class InputHash:
    """One input of one pass.

    Attributes:
        name: of the argument.
        start: slot of the first token that it belongs to.
        count: slots from there on.
        by_token: the input has a number for each token, and ``sha256`` the digests of the blocks
            of the first row, then of the second, and so on. Otherwise it has one.
        sha256: hex digests, or their first 16 digits.
        block: tokens of a digest; 0 for all.
        parts: size of the first dimension, or of that before the rows (1 if there is none); None
            where it was not noted.
    """

    name: str
    start: int
    count: int
    by_token: bool
    sha256: tuple[str, ...]
    block: int = 0
    parts: int | None = None

    @property
    def end(self) -> int:
        """Slot after the last token."""
        return self.start + self.count

    @property
    def blocks(self) -> int:
        """Digests of a row."""
        return -(-self.count // self.block) if self.block else 1

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Digests by row."""
        count = self.blocks
        return [self.sha256[at : at + count] for at in range(0, len(self.sha256), count)]

    def cropped(self, length: int) -> InputHash | None:
        """What is known of the slots before ``length``, up to a border of blocks."""
        if self.end <= length:
            return self
        blocks = (length - self.start) // self.block if self.by_token and self.block else 0
        if blocks <= 0:
            return None
        digests = tuple(digest for row in self.rows for digest in row[:blocks])
        return replace(self, count=blocks * self.block, sha256=digests)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> InputHash:
        """The inverse of ``asdict``; KeyError, TypeError or ValueError for anything else."""
        digests = tuple(str(digest) for digest in plain["sha256"])
        start, count = int(plain["start"]), int(plain["count"])
        block, parts = int(plain.get("block", 0)), plain.get("parts")
        parts = None if parts is None else int(parts)
        entry = cls(
            str(plain["name"]), start, count, bool(plain["by_token"]), digests, block, parts
        )
        if not digests or min(start, count, block) < 0 or (parts is not None and parts < 0):
            raise ValueError(f"input {entry.name!r}: {len(digests)} hashes, slot {start}")
        if entry.blocks < 1 or len(digests) % entry.blocks or min(map(len, digests)) < _DIGITS:
            raise ValueError(f"input {entry.name!r}: {len(digests)} hashes of {count} tokens")
        return entry


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
        """Forget what belongs to forgotten tokens, and the rest of a block that was cut."""
        cropped = (entry.cropped(length) for entry in self.entries)
        self.entries = tuple(entry for entry in cropped if entry is not None)

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
        places: tuple[int, int] | None = None,
    ) -> None:
        """Note the inputs of a pass; reads them.

        Args:
            inputs: by name.
            shape: of the prompt's ids, of which the last ``count`` are new.
            start: slot of the first new token.
            count: new tokens.
            mask: ``[B, T]`` of all tokens, or None; numbers of padding don't count.
            places: first slot and count of those that inputs without a number for each token
                belong to; None: to all new tokens.
        """
        for name, value in inputs.items():
            if _is_by_token(value, shape):
                part = value[..., -count:], _part(mask, start, count)
                digests = tuple(digest for row in _row_digests(*part, BLOCK) for digest in row)
                parts = 1 if value.ndim == 2 else len(value)
                self.entries += (InputHash(name, start, count, True, digests, BLOCK, parts),)
                continue
            digests = (_digest(value),)
            if not any((name, digests) == (entry.name, entry.sha256) for entry in self.entries):
                slots = places or (start, count)
                parts = len(value) if value.ndim else 0
                self.entries += (InputHash(name, *slots, False, digests, 0, parts),)

    def difference(
        self, inputs: Mapping[str, torch.Tensor], shape: tuple[int, int], mask: torch.Tensor | None
    ) -> InputHash | None:
        """The first entry with a number for each token that a prompt contradicts, if one does.

        It is cut to the block that differs. Inputs that are not given again contradict nothing.

        Args:
            inputs: by name, for the whole conversation.
            shape: of the conversation's ids.
            mask: as of ``note``.
        """
        for entry in self.entries:
            value = inputs.get(entry.name)
            if value is None or not entry.by_token or not _is_by_token(value, shape):
                continue
            if entry.end > shape[1]:
                continue
            columns = value[..., entry.start : entry.end]
            rows = _row_digests(columns, _part(mask, entry.start, entry.count), entry.block)
            block = _first_difference(rows, entry, self._moved)
            if block is not None:
                start = entry.start + block * entry.block
                count = min(entry.block or entry.count, entry.end - start)
                return replace(entry, start=start, count=count)
        return None

    def unknown_picture(
        self, inputs: Mapping[str, torch.Tensor], shape: tuple[int, int]
    ) -> InputHash | None:
        """The first entry without a number for each token of which a prompt has another value.

        None where each value is one that was noted, or several behind one another, or where that
        can't be said. Arguments as of ``difference``.
        """
        for name, value in inputs.items():
            entries = [e for e in self.entries if e.name == name and not e.by_token]
            if not entries or _is_by_token(value, shape) or _is_made_of(value, entries):
                continue
            if len(entries) == 1 or all(entry.parts is not None for entry in entries):
                return entries[0]
        return None


def _first_difference(rows: list[tuple[str, ...]], entry: InputHash, moved: bool) -> int | None:
    """The first block of which a row of a prompt has another digest than that of an entry."""
    known = entry.rows
    # Of old entries the digest is longer.
    cut = len(entry.sha256[0])
    rows = [tuple(digest[:cut] for digest in row) for row in rows]
    for block in range(entry.blocks):
        given, noted = [row[block] for row in rows], [row[block] for row in known]
        in_place = len(given) == len(noted) and not moved
        if given != noted if in_place else not set(given) <= set(noted):
            return block
    return None


def _is_made_of(value: torch.Tensor, entries: list[InputHash]) -> bool:
    """Whether ``value`` is one of ``entries``, or some of them behind one another."""
    known = {entry.sha256[0]: entry.parts for entry in entries}
    if _digest(value) in known:
        return True
    start, length = 0, len(value) if value.ndim else 0
    while start < length:
        for digest, parts in known.items():
            if parts and _digest(value[start : start + parts]) == digest:
                start += parts
                break
        else:
            return False
    return length > 0


def _is_by_token(value: torch.Tensor, shape: tuple[int, int]) -> bool:
    """Whether ``value``, ``[B, T]`` or ``[parts, B, T]``, has a number for each id of a prompt."""
    if value.is_floating_point() or value.ndim not in (2, 3):
        return False
    rows, tokens = value.shape[-2:]
    return tokens == shape[1] and (rows in (1, shape[0]))


def _part(mask: torch.Tensor | None, start: int, count: int) -> torch.Tensor | None:
    return None if mask is None else mask[:, start : start + count]


def _row_digests(
    value: torch.Tensor, mask: torch.Tensor | None, block: int
) -> list[tuple[str, ...]]:
    """Digests of the blocks of each row of ``[B, n]`` or ``[parts, B, n]``, padding as zeros."""
    if mask is not None and mask.shape[-1] == value.shape[-1]:
        value = value * (mask != 0).to(value.device)
    if not block:
        return [(_digest(row),) for row in value.long().cpu().movedim(-2, 0)]
    return [
        tuple(_digest(part)[:_DIGITS] for part in row.split(block, dim=-1))
        for row in value.long().cpu().movedim(-2, 0)
    ]


def _digest(value: torch.Tensor) -> str:
    flat = value.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{flat.dtype} {tuple(flat.shape)}".encode())
    digest.update(flat.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
