"""TokenRecord: which tokens a cache holds, so that another text is not taken for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from hf_kvret.core.input_record import InputRecord
from hf_kvret.core.state import State, part, tensor
from hf_kvret.core.token_buffer import TokenBuffer

PADDING, UNKNOWN = -1, -2
"""What stands in place of an id for padding, and for tokens that were not given as ids."""

CHAIN_BLOCK = 64
"""Tokens of a link of ``chain``."""


class TokenDifference(NamedTuple):
    """Where a prompt differs from the tokens of a cache: the two ids at a slot of a row.

    The id of the cache is ``PADDING`` where it holds padding, and the prompt a token.
    """

    row: int
    slot: int
    prompt_id: int
    cache_id: int


class TokenRecord(State):
    """Ids of the tokens in a cache by row and slot, as far as it saw them, on their device.

    Ids are copied when they are noted, without waiting for the device, and read when they are
    compared or saved. Slots that nobody noted are ``UNKNOWN``: tokens that came as embeddings, or
    by hand.

    Attributes:
        inputs: hashes of what the model was given beside ids.
        start: slot of the first token of the pass that is running.
        paused: passes are not noted; whoever sets it notes their tokens.
    """

    # [B, 1, n] int32, as a token buffer has heads.
    _ids: TokenBuffer = part(TokenBuffer)
    # The newest attention mask: [B, T] of slots from 0 on, padding is 0. None: no padding.
    _mask: torch.Tensor | None = tensor(shared=True)
    inputs: InputRecord = part(InputRecord)

    def __init__(self) -> None:
        self.start = 0
        self.paused = False
        self._warnings: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self._ids)

    def warn_once(self, topic: str) -> bool:
        """Whether to warn of ``topic`` now: the first call of a cache; its forks don't again."""
        new = topic not in self._warnings
        self._warnings |= {topic}
        return new

    def repeat(self, repeats: int) -> None:
        """Every row of the batch ``repeats`` times."""
        if self._ids.is_allocated:
            rows = torch.arange(len(self._ids.rows), device=self._ids.rows.device)
            self.reorder(rows.repeat_interleave(repeats))

    def crop(self, length: int) -> None:
        if length >= len(self._ids):
            return
        super().crop(length)
        if self._mask is not None:
            self._mask = self._mask[:, :length]

    def reorder(self, rows: torch.Tensor) -> None:
        if self._ids.is_allocated:
            # As in `note`.
            with torch.inference_mode(False):
                self._move(rows.device)
                super().reorder(rows)

    def note(self, ids: torch.Tensor, start: int, mask: torch.Tensor | None = None) -> None:
        """Note tokens that the cache was given.

        Args:
            ids: ``[B, n]`` of the slots from ``start`` on; what was noted of these is forgotten.
            start: slots before it that were not noted are unknown.
            mask: the attention mask of the pass; other than ``[B, T]`` it is not looked at.
        """
        # Memory made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            if self._ids.is_allocated and len(self._ids.rows) != len(ids):
                self.reset()
            self._move(ids.device)
            self.crop(start)
            like = ids.new_empty((len(ids), 1, 0), dtype=torch.int32)
            if start > len(self._ids):
                self._ids.reserve(start - len(self._ids), like).fill_(UNKNOWN)
            self._ids.reserve(ids.shape[1], like).copy_(ids.detach()[:, None])
        if mask is not None and mask.ndim == 2 and len(mask) == len(ids):
            self._mask = mask.detach()

    def ids(self, length: int) -> torch.Tensor | None:
        """``[B, length]`` int32 of the slots from 0 on; None if nothing was ever noted."""
        if not self._ids.is_allocated:
            return None
        ids = self._ids.rows[:, 0, :length]
        if ids.shape[1] < length:
            rest = ids.new_full((len(ids), length - ids.shape[1]), UNKNOWN)
            ids = torch.cat([ids, rest], dim=1)
        if self._mask is None:
            return ids
        mask = self._mask[:, :length].to(ids.device)
        ids = ids.clone()
        masked = ids[:, : mask.shape[1]]
        masked[mask == 0] = PADDING
        return ids

    def unknown(self, length: int) -> int:
        """How many of the first ``length`` slots are unknown, in the row with the most."""
        ids = self.ids(length)
        return length if ids is None else int((ids == UNKNOWN).sum(dim=1).max())

    def difference(
        self, prompt: torch.Tensor, mask: torch.Tensor | None, length: int
    ) -> TokenDifference | None:
        """The first slot at which a prompt has another id, or a token in place of padding.

        None if there is none. Unknown tokens, and what the prompt masks, differ from nothing.

        Args:
            prompt: ``[B, T]`` ids; each row may stand for several rows of the cache.
            mask: ``[B, T]``, padding is 0; None where that isn't known.
            length: tokens that the cache holds; all slots if the prompt has as many.
        """
        ids = self._ids_for(prompt, length)
        if ids is None:
            return None
        repeats, length = len(ids) // len(prompt), ids.shape[1]
        prompt = prompt[:, :length]
        differs = ids != prompt.repeat_interleave(repeats, dim=0)
        if mask is None:
            differs &= ids >= 0
        else:
            differs &= ids != UNKNOWN
            differs &= mask[:, :length].to(prompt.device).repeat_interleave(repeats, dim=0) != 0
        place = _first(differs)
        if place is None:
            return None
        row, slot = place
        return TokenDifference(row, slot, int(prompt[row // repeats, slot]), int(ids[row, slot]))

    def hidden(
        self, prompt: torch.Tensor, mask: torch.Tensor, length: int
    ) -> tuple[int, int] | None:
        """Row and slot of the first token that a mask hides, and that later tokens have seen.

        None if there is none, as where a row ends in what it hides: those are the padding tokens
        that ``generate`` gives to a row that has ended. Arguments as of ``difference``.
        """
        ids = self._ids_for(prompt, length)
        if ids is None:
            return None
        mask = mask[:, : ids.shape[1]].to(ids.device).repeat_interleave(len(ids) // len(mask), 0)
        shown = (mask != 0) & (ids != PADDING)
        # Tokens shown from a slot on.
        behind = shown.flip(1).cumsum(1).flip(1)
        return _first((ids >= 0) & (mask == 0) & (behind > 0))

    def _ids_for(self, prompt: torch.Tensor, length: int) -> torch.Tensor | None:
        """Ids of as many slots as a prompt has, on its device; None if they don't fit."""
        ids = self.ids(length)
        if ids is None or len(ids) % len(prompt):
            return None
        return ids[:, : prompt.shape[1]].to(prompt.device)

    def to_json(self, length: int) -> dict[str, Any] | None:
        """Plain JSON and tensors for a cache of ``length`` tokens; None if nothing was noted.

        ``ids`` is ``[B, length]`` int32 on the CPU, ``chain`` ``[B, links, 32]`` uint8: see
        ``chain``.
        """
        ids = self.ids(length)
        if ids is None or not length:
            return None
        ids = ids.cpu().contiguous()
        return {
            "unknown": self.unknown(length),
            "inputs": self.inputs.to_json(),
            "ids": ids,
            "chain": chain(ids),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Self:
        """The inverse of ``to_json``.

        Args:
            plain: without the tensors.
            tensors: ``ids`` and ``chain``.

        Raises:
            KeyError, TypeError, ValueError: anything else.
        """
        ids, links = tensors["ids"], tensors["chain"]
        if ids.dtype != torch.int32 or ids.ndim != 2 or not ids.numel() or int(ids.min()) < UNKNOWN:
            raise ValueError(f"token ids of {ids.dtype} {list(ids.shape)} are not those of a cache")
        if not torch.equal(links, chain(ids)):
            raise ValueError("the token ids are not those that the chain of hashes was made of")
        record = cls()
        # As in `note`.
        with torch.inference_mode(False):
            record._ids.append(ids[:, None])
        record.inputs = InputRecord.from_json(plain["inputs"])
        return record

    def _move(self, device: torch.device) -> None:
        """Go on in memory of ``device``, where a loaded cache is not yet."""
        if self._ids.is_allocated and self._ids.rows.device != device:
            rows, self._ids = self._ids.rows.to(device), TokenBuffer()
            self._ids.append(rows)


def _first(places: torch.Tensor) -> tuple[int, int] | None:
    """Row and slot of the first True of ``[B, n]``, by slot; None if there is none."""
    if not places.any():
        return None
    slot = int(places.any(dim=0).nonzero()[0])
    return int(places[:, slot].nonzero()[0]), slot


def chain(ids: torch.Tensor) -> torch.Tensor:
    """Hashes that tell how far two texts agree: ``[B, links, 32]`` uint8 of ``[B, n]`` int32 ids.

    Link i of a row is the SHA-256 of link i - 1 and of the ids of tokens 64 i to 64 i + 63, little
    endian. Padding is left out, the last link may have fewer tokens, and a row ends before its
    first unknown token. Missing links are zeros.
    """
    rows = []
    for row in ids.cpu().numpy():
        unknown = np.flatnonzero(row == UNKNOWN)
        known = row[: unknown[0]] if len(unknown) else row
        known = known[known != PADDING].astype("<i4")
        links = [b""]  # before the first
        for start in range(0, len(known), CHAIN_BLOCK):
            block = known[start : start + CHAIN_BLOCK].tobytes()
            links.append(hashlib.sha256(links[-1] + block).digest())
        joined = torch.from_numpy(np.frombuffer(b"".join(links), dtype=np.uint8).copy())
        rows.append(joined.view(-1, 32))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
