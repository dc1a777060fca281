"""Counters of a layer, for ``cache.stats()``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.step import StepRecord, Subscriber

_Class = TypeVar("_Class")


@dataclass
class LayerCounters(Subscriber):
    """Counts since the layer was made; a subscriber of every retrieval layer.

    Attributes:
        steps: with cold tokens.
        queries: in these.
        candidates: tokens scored closely, summed over batch, heads and queries.
        cold_rows: rows there were to choose from, summed alike.
    """

    steps: int = 0
    queries: int = 0
    candidates: int = 0
    cold_rows: int = 0
    # Candidates of one query and head, and what their number depends on.
    _candidates: int = field(default=0, init=False)
    _key: tuple[object, ...] = field(default=(), init=False)

    def __call__(self, record: StepRecord) -> None:
        """Count a step."""
        query, cold, ids = record.query, record.cold, record.ids
        queries, count = query.shape[2], cold.valid.shape[1]
        self.steps += 1
        self.queries += queries
        if ids is None:
            self.cold_rows += count * len(query) * record.kv.window.keys.shape[1] * queries
            return
        searches = len(query) * ids.shape[1] * queries
        self.cold_rows += count * searches
        kv = record.kv
        key = kv.config, kv.changes, cold.budget
        if key != self._key:
            # Without an index the model's own named them.
            cost = None if kv.index is None else kv.index.cost(count, cold.budget)
            self._key, self._candidates = key, 0 if cost is None else cost.candidates
        self.candidates += self._candidates * searches

    def reset(self) -> None:
        """Start again at 0."""
        self.set((0, 0, 0, 0))

    def numbers(self) -> tuple[int, ...]:
        """The counts."""
        return self.steps, self.queries, self.candidates, self.cold_rows

    def set(self, numbers: tuple[int, ...]) -> None:
        """Restore the counts from ``numbers()``."""
        self.steps, self.queries, self.candidates, self.cold_rows = numbers


def subscriber(layer: RetrievalLayer, cls: type[_Class]) -> _Class | None:
    """The subscriber of this class that a layer has; None where it has none."""
    return next((each for each in layer.subscribers if isinstance(each, cls)), None)


def counters_of(layer: RetrievalLayer) -> LayerCounters:
    """The counters of a cache's layer."""
    counters: Any = subscriber(layer, LayerCounters)
    assert counters is not None, "a cache gives counters to each of its layers"
    return counters
