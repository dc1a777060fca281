"""Which tokens of a layer were read with ``prompt="retrieve"``, and what that left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch

from hf_kvret.contracts.schema import Schema, damaged
from hf_kvret.options.config import RetrievalConfig

SPANS = "prompt.spans"
"""Tensor ``[n, 2]`` of a saved layer: where the spans begin, and where they end."""


class RetrievedTokens:
    """Tokens whose layer attended to a part of what came before them.

    Attributes:
        spans: first token and the one behind the last of each run of them, in order.
        lost_mass: mean share of the attention of probes that was left out, one for each group of
            queries; numbers of the device.
    """

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self.spans = list(spans)
        self.lost_mass: list[torch.Tensor] = []

    def __len__(self) -> int:
        return sum(last - first for first, last in self.spans)

    def add(self, spans: Iterable[tuple[int, int]], lost_mass: Iterable[torch.Tensor]) -> None:
        """Add later spans; one that begins where the last one ends goes on with it."""
        for first, last in spans:
            if self.spans and self.spans[-1][1] == first:
                first = self.spans.pop()[0]
            self.spans.append((first, last))
        self.lost_mass += lost_mass

    def crop(self, length: int) -> None:
        """Forget all from token ``length`` on."""
        self.spans = [(first, min(last, length)) for first, last in self.spans if first < length]

    def stats(self) -> dict[str, Any]:
        """For ``stats()``; nothing where there are no such tokens. Waits for the device."""
        if not self.spans:
            return {}
        lost = {"prompt_lost_mass": float(torch.stack(self.lost_mass).mean())}
        return {"prompt_retrieved": len(self), **(lost if self.lost_mass else {})}

    def fork(self) -> Self:
        """An independent copy."""
        return type(self)(self.spans)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors to be saved; none where there are no such tokens."""
        return {SPANS: torch.tensor(self.spans, dtype=torch.int64)} if self.spans else {}

    def load_state_dict(self, state: dict[str, torch.Tensor], length: int) -> None:
        """Take over the spans in ``state``; ValueError if they are none of ``length`` tokens."""
        spans = state.get(SPANS)
        if spans is None:
            return
        Schema(torch.int64, {}).check(SPANS, spans, "n 2", torch.int64)
        ends = spans.flatten().tolist()
        if ends != sorted(ends) or not ends or ends[0] < 0 or ends[-1] > length:
            raise damaged(f"{SPANS} are no spans of {length} tokens in order")
        self.spans = list(zip(ends[::2], ends[1::2], strict=True))

    def check(self, config: RetrievalConfig) -> None:
        """ValueError where options want exact rows, and some were read by retrieval."""
        if self.spans and config.prompt_recipe is None:
            raise ValueError(
                f"{len(self):,} tokens of this cache were read with prompt='retrieve', and "
                "prompt='exact' is asked for: leave the option as it was, or read the text again"
            )
