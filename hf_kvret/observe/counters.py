"""Counters of a layer, for ``cache.stats()``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_kvret.contracts.index import ColdTokens, Index
from hf_kvret.observe.recall import Recall
from hf_kvret.observe.selection import Observer


@dataclass
class LayerCounters:
    """Counts since the layer was made. Tensors live on the device until they are read.

    Attributes:
        selected: rows read by selection.
        lost: ``[2]`` fp64, the sum of the shares of the attention that were not computed exactly,
            as the index estimates them, and how many shares there are; None: nothing was measured.
        exactly_lost: the same from all keys, with ``track_recall``.
        observers: called with what each step selects; see ``observe``.
    """

    steps: int = 0
    queries: int = 0
    candidates: int = 0
    cold_rows: int = 0
    exact_rows: int = 0
    selected: torch.Tensor | None = None
    lost: torch.Tensor | None = None
    exactly_lost: torch.Tensor | None = None
    recalls: list[Recall] = field(default_factory=list)
    observers: tuple[Observer, ...] = ()
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

    def add_lost(self, shares: torch.Tensor, exact_shares: torch.Tensor | None = None) -> None:
        """Take in shares of any shape that were not attended exactly: also in a captured step."""
        if self.lost is None:
            self.lost = _two_zeros(shares.device)
        _add(shares, self.lost)
        if exact_shares is not None:
            if self.exactly_lost is None:
                self.exactly_lost = _two_zeros(shares.device)
            _add(exact_shares, self.exactly_lost)

    def lost_mass(self) -> float | None:
        """The mean of the estimated shares; None: not measured. May wait for the device."""
        return _mean(self.lost)

    def exact_lost_mass(self) -> float | None:
        """The mean of the exact shares; None: not measured."""
        return _mean(self.exactly_lost)

    def numbers(self) -> tuple[int, ...]:
        """The counts on the host."""
        return self.steps, self.queries, self.candidates, self.cold_rows

    def set(self, numbers: tuple[int, ...]) -> None:
        """Restore the counts on the host from ``numbers()``."""
        self.steps, self.queries, self.candidates, self.cold_rows = numbers


def _two_zeros(device: torch.device) -> torch.Tensor:
    # Written to in and out of inference mode.
    with torch.inference_mode(False):
        return torch.zeros(2, dtype=torch.double, device=device)


def _add(shares: torch.Tensor, total: torch.Tensor) -> None:
    total[:1].add_(shares.sum(dtype=torch.double))
    total[1:].add_(shares.numel())


def _mean(total: torch.Tensor | None) -> float | None:
    if total is None:
        return None
    amount, count = total.tolist()
    return amount / count if count else None
