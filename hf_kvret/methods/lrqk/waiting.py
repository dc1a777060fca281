"""WaitingTokens: keys in the window with their proxies, as algorithm 2 leaves them."""

from __future__ import annotations

from typing import Self

import torch

from hf_kvret.core.block import TokenBlock
from hf_kvret.methods.lrqk.decoding import Bases, Seen


class WaitingTokens:
    """The newest tokens, until they are cold: before the factors are made only the last ``room``.

    Attributes:
        keys: ``[B, Hkv, m, D]``, of slots ``end - m .. end``; rows of zeros for padding.
        proxies: ``[B, Hq, m, r]`` fp32; None before ``start``.
        end: slot after the newest.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.keys: torch.Tensor | None = None
        self.proxies: torch.Tensor | None = None
        self.end = 0
        self._passed = 0

    def add(self, keys: torch.Tensor, start: int, bases: Bases | None) -> None:
        """Take in ``keys [B, Hkv, q, D]`` from slot ``start`` on; what was there is forgotten."""
        # A deep crop drops more than is held.
        old, kept = self.keys, max(0, self._count - max(0, self.end - start))
        held = keys if old is None else torch.cat([old[:, :, :kept], keys], dim=2)
        if bases is None:
            # Not a view, which would keep all keys of a prompt alive.
            self.keys = held[:, :, -self.room :].clone()
        else:
            guessed = bases.guess(_repeat(keys, bases))
            old_proxies = guessed[:, :, :0] if self.proxies is None else self.proxies[:, :, :kept]
            self.keys, self.proxies = held, torch.cat([old_proxies, guessed], dim=2)
        self.end, self._passed = start + keys.shape[2], keys.shape[2]

    def start(self, to_key: torch.Tensor) -> None:
        """Give all tokens the proxies that ``to_key [B, Hq, D, r]`` makes."""
        assert self.keys is not None
        heads = to_key.shape[1] // self.keys.shape[1]
        self.proxies = self.keys.float().repeat_interleave(heads, dim=1) @ to_key

    def newest(self, count: int, query_heads: int) -> torch.Tensor:
        """Keys ``[B, Hq, count, D]`` fp32 of the newest tokens."""
        assert self.keys is not None
        keys = self.keys[:, :, self._count - count :].float()
        return keys.repeat_interleave(query_heads // keys.shape[1], dim=1)

    def settle(self, proxies: torch.Tensor) -> None:
        """Replace the proxies of the newest tokens by ``[B, Hq, count, r]``."""
        assert self.proxies is not None
        older = self.proxies[:, :, : self._count - proxies.shape[2]]
        self.proxies = torch.cat([older, proxies], dim=2)

    def seen(self, lite: int) -> Seen:
        """Of the ``lite`` newest tokens before the last pass."""
        assert self.keys is not None and self.proxies is not None
        last = self._count - min(self._passed, self._count)
        part = slice(max(0, last - lite), last)
        heads = self.proxies.shape[1] // self.keys.shape[1]
        return Seen.of(
            self.keys[:, :, part].repeat_interleave(heads, dim=1), self.proxies[:, :, part]
        )

    def leave(self, block: TokenBlock, bases: Bases) -> torch.Tensor:
        """Proxies ``[B, Hq, n, r]`` of a block that is cold now; older tokens are forgotten.

        Those that were already in the window when the factors were made are guessed.
        """
        assert self.keys is not None and self.proxies is not None
        first = self.end - self._count
        unknown = min(max(0, first - block.start), len(block))
        guessed = bases.guess(_repeat(block.keys[:, :, :unknown], bases))
        known = slice(max(0, block.start - first), max(0, block.end - first))
        found = torch.cat([guessed, self.proxies[:, :, known]], dim=2)
        left = slice(max(0, block.end - first), None)
        self.keys, self.proxies = self.keys[:, :, left].clone(), self.proxies[:, :, left].clone()
        return found

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        if self.keys is not None:
            self.keys = self.keys.index_select(0, rows)
        if self.proxies is not None:
            self.proxies = self.proxies.index_select(0, rows)

    def fork(self) -> Self:
        """A copy; tensors are shared, as none is ever written to."""
        twin = type(self)(self.room)
        twin.keys, twin.proxies = self.keys, self.proxies
        twin.end, twin._passed = self.end, self._passed
        return twin

    def nbytes(self) -> int:
        """Of keys and proxies."""
        return sum(x.nbytes for x in (self.keys, self.proxies) if x is not None)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that restore it."""
        parts = {"keys": self.keys, "proxies": self.proxies}
        counts = {"end": torch.tensor([self.end, self._passed])}
        return counts | {name: x for name, x in parts.items() if x is not None}

    def load_state_dict(self, state: dict[str, torch.Tensor], started: bool) -> None:
        """Become what was saved, before or after ``start``. KeyError names a missing tensor."""
        self.end, self._passed = state["end"].tolist()
        self.keys, self.proxies = state["keys"], state["proxies"] if started else None

    @property
    def _count(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]


def _repeat(keys: torch.Tensor, bases: Bases) -> torch.Tensor:
    return keys.repeat_interleave(bases.key.shape[1] // keys.shape[1], dim=1)
