"""Which tokens of a layer were read with ``prompt="retrieve"``, and what that left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch

from hf_kvret.contracts.state import State, Tensors
from hf_kvret.options.config import RetrievalConfig

SPANS = "prompt.spans"
"""Tensor of a saved layer: where the spans begin, and where they end."""


class Group(NamedTuple):
    """A group of queries that attended to a part of what came before them.

    Attributes:
        first: token of the group; ``end``: the one behind its last.
        lost_mass: mean share of its probes' attention that was left out, on the device.
    """

    first: int
    end: int
    lost_mass: torch.Tensor


class RetrievedTokens(State):
    """Tokens whose layer attended to a part of what came before them.

    Attributes:
        spans: first token and the one behind the last of each run of them, in order.
        groups: of queries that this process read, in order; a fork begins with none.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.groups: list[Group] = []

    def fork(self) -> Self:
        twin = super().fork()
        twin.spans, twin.groups = list(self.spans), []
        return twin

    def __len__(self) -> int:
        return sum(end - first for first, end in self.spans)

    def add(self, groups: Iterable[Group]) -> None:
        """Add later groups; a span grows where the next group begins at its end."""
        for group in groups:
            first = group.first
            if self.spans and self.spans[-1][1] == first:
                first = self.spans.pop()[0]
            self.spans.append((first, group.end))
            self.groups.append(group)

    def crop(self, length: int) -> None:
        self.spans = [(first, min(end, length)) for first, end in self.spans if first < length]
        self.groups = [group for group in self.groups if group.first < length]

    def lost_mass(self) -> float | None:
        """Mean over the groups; None where there are none. Waits for the device."""
        if not self.groups:
            return None
        return float(torch.stack([group.lost_mass for group in self.groups]).mean())

    def stats(self) -> dict[str, Any]:
        """For ``stats()``; nothing where there are no such tokens. Waits for the device."""
        if not self.spans:
            return {}
        return {"prompt_retrieved": len(self), "prompt_lost_mass": self.lost_mass()}

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
