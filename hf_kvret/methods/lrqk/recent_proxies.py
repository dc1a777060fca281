"""RecentProxies: keys in the window with their proxies from algorithm 2."""

from __future__ import annotations

from functools import partial

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.schema import Schema, damaged
from hf_kvret.contracts.state import State, number
from hf_kvret.contracts.token_buffer import MOST_SLOT, TokenBuffer, passed
from hf_kvret.methods.lrqk.als import Bases, OmegaProducts

_small = partial(TokenBuffer, 64)


class RecentProxies(State):
    """The tokens that are not cold; before the factors are made only the last ``room``.

    Attributes:
        keys: ``[B, Hkv, m, D]``, of slots ``end - m .. end``; rows of zeros for padding.
        proxies: ``[B, Hq, m, r]`` fp32; empty before ``start``.
        end: slot after the newest.
    """

    keys: TokenBuffer = passed(_small, dims="B H m D")
    proxies: TokenBuffer = passed(_small, may_be_empty=True, dims="B Q m R", dtype=torch.float32)
    end: int = number(0, least=0, most=MOST_SLOT)
    _pass_len: int = number(0, key="end", least=0, most=MOST_SLOT)

    def __init__(self, room: int) -> None:
        self.room = room

    def add(self, keys: torch.Tensor, start: int, bases: Bases | None) -> None:
        """Put ``keys [B, Hkv, q, D]`` at slot ``start``, in place of all from there on."""
        self.end, self._pass_len = start + keys.shape[2], keys.shape[2]
        if bases is None:
            first = max(start, self.end - self.room)
            self.keys.put(keys[:, :, first - start :], first)
            self.keys.drop(self.end - self.room)
            return
        self.keys.put(keys, start)
        self.proxies.put(bases.guess(_repeat(keys, bases)), start)

    def start(self, to_key: torch.Tensor) -> None:
        """Make the proxies of all tokens with ``to_key [B, Hq, D, r]``."""
        keys = self.keys.rows
        heads = to_key.shape[1] // keys.shape[1]
        proxies = keys.float().repeat_interleave(heads, dim=1) @ to_key
        self.proxies.put(proxies, self.keys.first)

    def newest(self, count: int, query_heads: int) -> torch.Tensor:
        """Keys ``[B, Hq, count, D]`` fp32 of the newest tokens."""
        keys = self.keys.since(self.end - count).float()
        return keys.repeat_interleave(query_heads // keys.shape[1], dim=1)

    def replace_newest(self, proxies: torch.Tensor) -> None:
        """Replace the proxies of the newest tokens by ``[B, Hq, count, r]``."""
        self.proxies.put(proxies, self.end - proxies.shape[2])

    def omega(self, lite: int) -> OmegaProducts:
        """Products of the ``lite`` newest tokens before the last pass."""
        keys, proxies = self.keys.rows, self.proxies.rows
        last = keys.shape[2] - min(self._pass_len, keys.shape[2])
        part = slice(max(0, last - lite), last)
        heads = proxies.shape[1] // keys.shape[1]
        return OmegaProducts.of(
            keys[:, :, part].repeat_interleave(heads, dim=1), proxies[:, :, part]
        )

    def leave(self, block: TokenBlock, bases: Bases) -> torch.Tensor:
        """Remove a block that became cold; returns its proxies ``[B, Hq, n, r]``.

        Tokens dropped before the factors were made get a guess (``Bases.guess``).
        """
        first = self.proxies.first
        unknown = min(max(0, first - block.start), len(block))
        guesses = bases.guess(_repeat(block.keys[:, :, :unknown], bases))
        part = slice(max(0, block.start - first), max(0, block.end - first))
        proxies = torch.cat([guesses, self.proxies.rows[:, :, part]], dim=2)
        self.keys.drop(block.end)
        self.proxies.drop(block.end)
        return proxies

    def check_loaded(self, schema: Schema) -> None:
        """ValueError for tokens that are not the newest; a crop leaves later ones."""
        count, end = len(self.keys), self.end
        if not max(count, self._pass_len, schema["T"]) <= end:
            raise damaged(f"index.waiting: {count} tokens end at {end} of {schema['T']}")

    def loaded(self) -> None:
        for rows in (self.keys, self.proxies):
            rows.first = self.end - len(rows)


def _repeat(keys: torch.Tensor, bases: Bases) -> torch.Tensor:
    return keys.repeat_interleave(bases.key.shape[1] // keys.shape[1], dim=1)
