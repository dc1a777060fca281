"""A long walk through a cache, with recall told for each stretch of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.following import branch, layer_recalls, mean_recall
from hf_kvret.lab.evaluate.reader import Reader

# From the last logits [vocab] and the number of tokens so far to the next tokens [n].
Source = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Pace:
    """How a text is walked through.

    Attributes:
        count: tokens in all.
        every: tokens of a stretch; the last one may be shorter.
        step: tokens of a forward pass; divides ``every``.

    Raises:
        ValueError: a number below 1, or steps that cross the end of a stretch.
    """

    count: int
    every: int
    step: int = 1

    def __post_init__(self) -> None:
        if min(self.count, self.every, self.step) < 1:
            raise ValueError(
                f"--new-tokens {self.count}, --every {self.every}, --step {self.step}: at least 1 "
                "each"
            )
        if self.every % self.step:
            raise ValueError(
                f"--every {self.every} is no multiple of --step {self.step}: choose it so"
            )


@dataclass(frozen=True)
class Walk:
    """What was met on the way.

    Attributes:
        tokens: ``[count]`` int64, fed one step after the other.
        choices: ``[count]`` int64, the best token after each of them.
        stretches: for each its ``end`` in tokens, and ``overlap``, ``mass``, ``best_mass``: means
            over layers and tokens, None where nothing was retrieved.
        reader: at the end.
        rows_read, rows_cold: as in ``Usage``, over the whole walk.
        candidates: cold rows that were looked at closely, counted like ``rows_cold``; 0 for caches
            that don't retrieve.
        seconds: of all forward passes.
    """

    tokens: torch.Tensor
    choices: torch.Tensor
    stretches: list[dict[str, Any]]
    reader: Reader
    rows_read: int
    rows_cold: int
    candidates: int
    seconds: float

    def compared(self, choices: torch.Tensor) -> list[dict[str, Any]]:
        """The stretches, each with the share of tokens that are ``equal`` to ``choices``."""
        equal, start, found = (self.choices == choices).double(), 0, []
        for stretch in self.stretches:
            found.append({**stretch, "equal": float(equal[start : stretch["end"]].mean())})
            start = stretch["end"]
        return found


def text_source(tokens: torch.Tensor, step: int) -> Source:
    """The tokens of a text, ``step`` at a time."""
    return lambda logits, place: tokens[place : place + step]


def greedy_source(logits: torch.Tensor, place: int) -> torch.Tensor:
    """The best token."""
    return logits.argmax(-1, keepdim=True).cpu()


def sampling_source(seed: int) -> Source:
    """A token drawn at temperature 1, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: torch.Tensor, place: int) -> torch.Tensor:
        return torch.multinomial(logits.float().cpu().softmax(-1), 1, generator=generator)

    return draw


def walk(reader: Reader, logits: torch.Tensor, source: Source, pace: Pace) -> Walk:
    """Feed what ``source`` gives, ``pace.count`` tokens in all.

    Args:
        reader: has read the context; it is left behind where its cache can be forked cheaply.
        logits: ``[vocab]`` after the context.
        source: gives tokens that never cross the end of a stretch.
        pace: how many, and where stretches end.
    """
    retrieves = isinstance(reader.cache, RetrievalCache)
    tokens, choices, stretches = [], [], []
    read, cold, candidates, seconds, place = 0, 0, 0, 0.0, 0
    with tqdm(total=pace.count, leave=False, desc=reader.choice.name, mininterval=1) as bar:
        while place < pace.count:
            end = min(place + pace.every, pace.count)
            # A fork counts from its start.
            reader = branch(reader) if retrieves else reader
            before = reader.seconds
            while place < end:
                new = source(logits, place)
                reader.check_step(len(new))
                given = reader.feed(new, keep=len(new))
                logits = given[-1]
                tokens.append(new)
                choices.append(given.argmax(-1).cpu())
                place += len(new)
                bar.update(len(new))
            usage = reader.usage()
            read, cold = read + usage.rows_read, cold + usage.rows_cold
            candidates += _candidates(reader)
            seconds += reader.seconds - before
            stretches.append({"end": end, **mean_recall(layer_recalls(reader))})
    return Walk(
        torch.cat(tokens),
        torch.cat(choices),
        stretches,
        reader,
        read,
        cold,
        candidates,
        seconds,
    )


def _candidates(reader: Reader) -> int:
    cache = reader.cache
    if not isinstance(cache, RetrievalCache):
        return 0
    return sum(layer["candidates"] for layer in cache.stats()["layers"])


def mean_stretches(samples: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means over samples whose stretches end alike; None stays None."""
    means = []
    for alike in zip(*samples, strict=True):
        one: dict[str, Any] = {"end": alike[0]["end"]}
        for name in alike[0]:
            values = [stretch[name] for stretch in alike]
            if name != "end":
                one[name] = None if None in values else sum(values) / len(values)
        means.append(one)
    return means


def mean_of(stretches: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean over the tokens of all stretches that have it; None for none."""
    total, tokens, start = 0.0, 0, 0
    for stretch in stretches:
        if stretch[name] is not None:
            total += stretch[name] * (stretch["end"] - start)
            tokens += stretch["end"] - start
        start = stretch["end"]
    return total / tokens if tokens else None


def share(value: float | None) -> str:
    """A share for a table, ``-`` for None."""
    return "-" if value is None else f"{value:.3f}"
