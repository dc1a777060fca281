"""TokenRecord: which text a cache holds, so that another one is not taken for it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch

from hf_kvret.contracts.signals import SIGNALS_WAIT
from hf_kvret.contracts.state import State, Tensors, listed, part
from hf_kvret.contracts.token_buffer import TokenBuffer

UNKNOWN = -1
"""In place of the id of a token that came as something else."""

EMBEDDINGS = "inputs_embeds"
"""The input of a model that has a vector for each token."""

# In configurations, names of ids that stand for a part of a picture, a video or a sound.
_MARK = re.compile(
    "(image|img|video|audio|vision|media|speech|sound)"
    "(_context|_placeholder|_patch)?_token_(id|index)$"
)


def ids_of_pictures(config: Any) -> list[int]:
    """Ids of tokens that stand for pictures or sounds, by a model's configuration."""
    marks = [value for name, value in vars(config).items() if _MARK.search(name)]
    return [mark for mark in marks if isinstance(mark, int)]


def _nobody() -> None:
    """No owner."""


class InputDigest(NamedTuple):
    """SHA-256 of a pass' inputs that are no text, for its tokens ``start`` to ``end - 1``."""

    start: int
    end: int
    sha256: str

    @classmethod
    def of(
        cls, inputs: Mapping[str, torch.Tensor], start: int, end: int, first: int = 0
    ) -> InputDigest:
        """That of ``inputs`` by name, whose embeddings begin at the token ``first``; reads them."""
        digest = hashlib.sha256()
        for name, value in sorted(inputs.items()):
            tensor = value[:, start - first : end - first] if name == EMBEDDINGS else value
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
        return cls(start, end, digest.hexdigest())


class TokenRecord(State):
    """Ids of the tokens in a cache, as far as it saw them, and digests of its other inputs.

    Ids are copied as they come, without waiting for the device, and read when they are
    compared or saved. Tokens that came as embeddings, or by hand, are ``UNKNOWN``.

    Attributes:
        pending: passes that are not written yet, in their order: the first token, and a copy of the
            ids ``[B, n]``; None: they are unknown. A step appends to it, and calls nothing.
        passes: digests of the passes with inputs that are no text, in their order.
        owner: the outermost module of the running pass, which writes its ids; None between passes.
        checked_owner: gives the module that last began a pass, after it was compared with what
            filled the cache; or None.
        start: index of the first token of that pass.
        given: its ids or embeddings; None between passes.
    """

    # `[B, 1, n]`, as buffers have heads.
    _ids: TokenBuffer = part(TokenBuffer, saved=False)
    passes: list[InputDigest] = listed(lambda one: one.end)

    def __init__(self) -> None:
        self.pending: list[tuple[int, torch.Tensor | None]] = []
        self.owner: Any = None
        self.checked_owner: Callable[[], Any] = _nobody
        self.start = 0
        self.given: torch.Tensor | None = None

    def __len__(self) -> int:
        self.write_pending()
        return len(self._ids)

    def __getstate__(self) -> dict[str, Any]:
        """Without modules, which are of this process alone."""
        self.write_pending()
        return {**vars(self), "owner": None, "given": None, "checked_owner": _nobody}

    def reset(self) -> None:
        super().reset()
        self.pending, self.checked_owner = [], _nobody
        self.owner = self.given = None

    def fork(self) -> Self:
        self.write_pending()
        twin = super().fork()
        twin.pending = []
        return twin

    def crop(self, length: int) -> None:
        self.write_pending()
        # No pass runs now: one whose end nobody saw, as of Ctrl-C, is over.
        self.owner = self.given = None
        super().crop(length)

    def reorder(self, rows: torch.Tensor) -> None:
        """As every state; digests are forgotten where the number of rows changes."""
        self.write_pending()
        if not self._ids.is_allocated:
            return
        if len(rows) != len(self._ids.rows):
            self.passes = []
        # As in `write`.
        with torch.inference_mode(False):
            super().reorder(rows.to(self._ids.rows.device))

    def state_dict(self) -> Tensors:
        """``ids [B, n]``; nothing where none were written."""
        self.write_pending()
        return {"ids": self._ids.rows[:, 0].contiguous()} if self._ids.is_allocated else {}

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        self.reset()
        if "ids" in state:
            self.write(state["ids"].to(device), 0)

    def write(self, ids: torch.Tensor, start: int) -> None:
        """Write ``ids`` ``[B, n]`` of the tokens from ``start`` on; earlier gaps are unknown."""
        self.pending.append((start, ids))
        self.write_pending()

    def write_pending(self) -> None:
        """Write the ids of all pending passes."""
        if not self.pending:
            return
        # Memory made in inference mode could not be written to outside of it.
        with SIGNALS_WAIT, torch.inference_mode(False):
            while self.pending:
                start, ids = self.pending[0]
                self._write(ids, start)
                del self.pending[0]

    def _write(self, ids: torch.Tensor | None, start: int) -> None:
        self._ids.crop(start)
        if ids is None:
            return
        if self._ids.is_allocated and len(self._ids.rows) != len(ids):
            # Another batch: what is known of the old one counts no more.
            self._ids.reset()
            self.passes = [one for one in self.passes if one.start >= start]
            self.checked_owner = _nobody
        like = ids.new_empty((len(ids), 1, 0), dtype=torch.int32)
        gap = start - len(self._ids)
        if gap > 0:
            self._ids.reserve(gap, like).fill_(UNKNOWN)
        self._ids.reserve(ids.shape[1], like).copy_(ids.detach()[:, None])

    def ids(self, length: int) -> torch.Tensor | None:
        """``[B, length]`` int32 of the tokens from 0 on; None if nothing was ever written."""
        self.write_pending()
        if not self._ids.is_allocated:
            return None
        ids = self._ids.rows[:, 0, :length]
        return torch.nn.functional.pad(ids, (0, length - ids.shape[1]), value=UNKNOWN)

    def difference(
        self, prompt: torch.Tensor, mask: torch.Tensor, length: int
    ) -> tuple[int, int, int, int] | None:
        """Where a prompt first has another id: row, token index, and the ids of prompt and cache.

        None if they agree. Unknown tokens, and what the prompt masks, differ from nothing.

        Args:
            prompt: ``[B, T]`` ids; each row may stand for several rows of the cache.
            mask: ``[B, T]``, padding is 0.
            length: tokens that the cache holds.
        """
        ids = self.ids(length)
        if ids is None or len(ids) % len(prompt):
            return None
        ids, repeats = ids[:, : prompt.shape[1]].to(prompt.device), len(ids) // len(prompt)
        prompt, mask = (one[:, :length].repeat_interleave(repeats, dim=0) for one in (prompt, mask))
        differs = (ids != prompt) & (ids != UNKNOWN) & (mask != 0).to(ids.device)
        if not differs.any():
            return None
        index = int(differs.any(dim=0).nonzero()[0])
        row = int(differs[:, index].nonzero()[0])
        return row, index, int(prompt[row, index]), int(ids[row, index])
