"""Which tokens of a layer were read with ``prompt="retrieve"``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_kvret.contracts.state import State, Tensors, listed
from hf_kvret.options.config import RetrievalConfig


class RetrievedTokens(State):
    """Tokens whose layer attended to a part of what came before them.

    Attributes:
        spans: first token and the one behind the last of each run of them, in order.
    """

    spans: list[tuple[int, int]] = listed(lambda span: span[1])

    def __len__(self) -> int:
        return sum(end - first for first, end in self.spans)

    def add(self, groups: Iterable[tuple[int, int]]) -> None:
        """Add later tokens, ``first`` to ``end``; a span grows where these begin at its end."""
        for first, end in groups:
            if self.spans and self.spans[-1][1] == first:
                first = self.spans.pop()[0]
            self.spans.append((first, end))

    def crop(self, length: int) -> None:
        self.spans = [(first, min(end, length)) for first, end in self.spans if first < length]

    def stats(self) -> dict[str, Any]:
        """For ``stats()``; nothing where there are no such tokens."""
        return {"prompt_retrieved": len(self)} if self.spans else {}

    def state_dict(self) -> Tensors:
        """The ``spans [n, 2]`` int64; nothing where there are no such tokens."""
        return {"spans": torch.tensor(self.spans, dtype=torch.int64)} if self.spans else {}

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        self.spans = [(first, end) for first, end in state["spans"].tolist()]

    def check(self, config: RetrievalConfig) -> None:
        """ValueError where options want exact rows, and some were read by retrieval."""
        if self.spans and config.prompt_recipe is None:
            raise ValueError(
                f"{len(self):,} tokens of this cache were read with prompt='retrieve', and "
                "prompt='exact' is asked for: leave the option as it was, or read the text again"
            )
