"""Counters of a layer, for ``cache.stats()``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_kvret.core.index import ColdTokens, Index
from hf_kvret.core.recall import Recall


@dataclass
class LayerCounters:
    """Counts since the layer was made. ``selected`` lives on the device until it is read."""

    steps: int = 0
    queries: int = 0
    candidates: int = 0
    cold_rows: int = 0
    exact_rows: int = 0
    selected: torch.Tensor | None = None
    recalls: list[Recall] = field(default_factory=list)
    # Of one query and head, and what that depends on.
    _candidates: int = field(default=0, init=False)
    _form: tuple[object, ...] = field(default=(), init=False)

    def count(self, cold: ColdTokens, heads: int, queries: int) -> None:
        """Count a step of ``queries`` queries, for ``heads`` heads of all rows of the batch."""
        self.steps += 1
        self.queries += queries
        self.cold_rows += len(cold) * heads * queries

    def count_candidates(
        self, index: Index, changes: object, cold: ColdTokens, searches: int
    ) -> None:
        """Count what ``searches`` searches score.

        ``changes``: something else whenever the index or its options are no longer the same.
        """
        form = changes, cold.budget
        if form != self._form:
            self._form, self._candidates = form, index.cost(len(cold), cold.budget).candidates
        self.candidates += self._candidates * searches

    def total(self, cold: ColdTokens) -> torch.Tensor:
        """``selected``, for the caller to add to, in place: also in a captured step."""
        if self.selected is None:
            # Written to in and out of inference mode.
            with torch.inference_mode(False):
                self.selected = torch.zeros((), dtype=torch.long, device=cold.valid.device)
        return self.selected

    def numbers(self) -> tuple[int, ...]:
        """The counts on the host."""
        return self.steps, self.queries, self.candidates, self.cold_rows

    def set(self, numbers: tuple[int, ...]) -> None:
        """Restore the counts on the host from ``numbers()``."""
        self.steps, self.queries, self.candidates, self.cold_rows = numbers
