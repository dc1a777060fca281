"""Subscribers of a cache: counters, those that its options ask for, and observers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from transformers.cache_utils import Cache

from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.step import LayerCounters, Lender, StepRecord, Subscriber
from hf_kvret.observe.recall import RecallMeter
from hf_kvret.options.config import RetrievalConfig
from hf_kvret_kernels import host_library

# The name under which users know the warning.
_log = logging.getLogger("hf_kvret.cache")
_Class = TypeVar("_Class")


@dataclass
class RoundCounts:
    """What drafts of a cache with ``lossless`` came to.

    Attributes:
        rounds: of drafts, each verified by one exact pass.
        drafted: tokens.
        accepted: drafts that the caller's loop chose.
        exact_steps: steps without drafts.
        draft_s: seconds of the drafts.
        exact_s: seconds of exact passes and steps.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    exact_steps: int = 0
    draft_s: float = 0.0
    exact_s: float = 0.0

    def add(self, drafted: int, accepted: int, draft_s: float, exact_s: float) -> None:
        """Count a round, or a step, where it drafted nothing."""
        self.rounds += drafted > 0
        self.exact_steps += drafted == 0
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.draft_s, self.exact_s = self.draft_s + draft_s, self.exact_s + exact_s


def subscriber(layer: RetrievalLayer, cls: type[_Class]) -> _Class | None:
    """The subscriber of this class that a layer has; None where it has none."""
    return next((each for each in layer.subscribers if isinstance(each, cls)), None)


def counters_of(layer: RetrievalLayer) -> LayerCounters:
    """The counters of a cache's layer."""
    counters: Any = subscriber(layer, LayerCounters)
    assert counters is not None, "a cache gives counters to each of its layers"
    return counters


@dataclass(frozen=True, eq=False)
class Selection:
    """What the queries of one step attend to in one layer. Tensors are the observer's own.

    Attributes:
        layer: number of the layer in the model.
        query: ``[B, Hq, Q, Dk]`` as the keys are, after rotation; logits are its products with
            them, times ``scale``, and capped by ``softcap`` where that is not None.
        ids: ``[B, H, Q, K]`` int32 token indices of the selected cold tokens, in any order, -1
            for none; H counts KV heads, or query heads where a method has these select apart. None:
            all cold tokens, for a method without an index.
        sinks: ``[B, S]`` int64 token indices of the sinks, always attended to, -1 for none.
        recent: tokens ``recent[0]`` to ``recent[1] - 1`` are the recent ones, always attended to,
            the Q new ones at their end. Tokens before ``recent[0]`` are cold.
    """

    layer: int
    query: torch.Tensor
    scale: float
    softcap: float | None
    ids: torch.Tensor | None
    sinks: torch.Tensor
    recent: tuple[int, int]


Observer = Callable[[Selection], None]


class Observation(Subscriber):
    """Calls an observer with a ``Selection`` of each step; a subscriber.

    An object of its own for each ``observe``, so that the same observer may be there twice.
    """

    capture_obstacle = "the cache is observed, and a replayed step calls no observer"

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(self, record: StepRecord) -> None:
        """Call the observer; an error of its own ends the forward pass."""
        ids, window, cold = record.ids, record.kv.window, record.cold
        selection = Selection(
            record.number,
            record.query.clone(),
            cold.scale,
            cold.softcap,
            None if ids is None else ids.clone(),
            window.sink_slots.clone(),
            (window.start, window.end),
        )
        self._observer(selection)

    def reset(self) -> None:
        """Nothing is kept."""


@contextmanager
def observe(cache: Cache, observer: Observer) -> Iterator[None]:
    """Call ``observer`` with a ``Selection`` for every step of every layer that retrieves.

        selections = []
        with hf_kvret.observe(cache, selections.append):
            model.generate(**inputs, past_key_values=cache)

    For study, with any method and store. A step is a forward pass of up to ``max_draft`` tokens
    after a prompt, in a layer with cold tokens; in prompts, and in shorter caches, nothing is
    selected. Layers that share a cache are observed one by one. Forks are not observed. While a
    cache is observed its steps are not replayed from a CUDA graph. An error of the observer ends
    the forward pass.

    Args:
        cache: a retrieval cache; TypeError for another.
        observer: called in the thread of the forward pass.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    if not layers:
        raise TypeError(
            f"cache is a {type(cache).__name__}: only a retrieval cache selects; make one, as "
            "hf_kvret.ParisKVCache(config=model.config)"
        )
    entry = Observation(observer)
    for layer in layers:
        layer.subscribers = (*layer.subscribers, entry)
        # An edit makes steps that were captured before invalid.
        layer.edited()
    try:
        yield
    finally:
        for layer in layers:
            layer.subscribers = tuple(each for each in layer.subscribers if each is not entry)


@functools.cache
def log_missing_kernels() -> None:
    """Warn once a process where decode steps lack the C++ kernels, and no GPU does their work."""
    reason = host_library.why_not()
    # Where there are kernels, nobody looks for a GPU.
    if reason and not torch.cuda.is_available():
        _log.warning(
            "decode steps on this CPU are slower than they could be: torch stands in for the C++ "
            "kernels, and takes 2 to 6 times as long for attention to the selected tokens. %s",
            reason,
        )


def subscribe(layers: Sequence[RetrievalLayer], options: RetrievalConfig) -> None:
    """Give the layers of a new cache what its options ask for."""
    for layer in layers:
        counters = LayerCounters()
        layer.subscribers = (counters, RecallMeter()) if options.track_recall else (counters,)
    every = options.select_every
    # One of up to so many layers in a row, where they are alike, selects for the others.
    for _, run in groupby(layers, key=lambda layer: (type(layer), layer.layer_info.shape)):
        alike = list(run)
        for start in range(0, len(alike), every):
            first, *others = alike[start : start + every]
            if others:
                lender = Lender(first.layer_info.number)
                first.subscribers = (*first.subscribers, lender)
                for layer in others:
                    layer.borrow(lender)
