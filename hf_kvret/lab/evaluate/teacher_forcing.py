"""Tokens forced through a cache: recall of the exact top-k by length, and what full attention says.

The tokens are those of a text, or the cache's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader, UsageSum
from hf_kvret.lab.program.progress import tqdm

# Tokens of full attention's forward passes, so that a long text with a large vocabulary fits.
_CHUNK = 128

# From the last logits [vocab] and the number of tokens so far to the next tokens [n].
Source = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class LayerRecall:
    """Recall of one layer over some selections, each a share as in ``observe.recall.Recall``."""

    layer: int
    overlap: float
    mass: float
    best_mass: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def branch(reader: Reader) -> Reader:
    """A fork of ``reader`` that counts from here, with recall where its cache retrieves."""
    tracks = isinstance(reader.cache, RetrievalCache)
    return reader.fork(track_recall=True) if tracks else reader.fork()


def layer_recalls(reader: Reader) -> list[LayerRecall]:
    """Recall of each layer that selected since the reader was branched off; else nothing."""
    if not isinstance(reader.cache, RetrievalCache):
        return []
    names = ("layer", "recall_overlap", "recall_mass", "recall_best_mass")
    layers = reader.cache.stats()["layers"]
    return [
        LayerRecall(*(stats[name] for name in names))
        for stats in layers
        if "recall_overlap" in stats
    ]


def mean_recall(recalls: Sequence[LayerRecall]) -> dict[str, Any]:
    """``overlap``, ``mass`` and ``best_mass``, means over ``recalls``; None each for none."""
    names = ("overlap", "mass", "best_mass")
    return {
        name: sum(getattr(one, name) for one in recalls) / len(recalls) if recalls else None
        for name in names
    }


def mean_by_layer(samples: Sequence[Sequence[LayerRecall]]) -> list[LayerRecall]:
    """The recall of each layer, mean over the samples that have it."""
    by_layer: dict[int, list[LayerRecall]] = {}
    for one in (recall for sample in samples for recall in sample):
        by_layer.setdefault(one.layer, []).append(one)
    return [LayerRecall(layer, **mean_recall(some)) for layer, some in sorted(by_layer.items())]


class Memo:
    """Tensors that were made for a model, for as long as it lives; the oldest go first.

    Args:
        most: entries for each model.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: WeakKeyDictionary[PreTrainedModel, dict[Any, torch.Tensor]] = (
            WeakKeyDictionary()
        )

    def get(
        self, model: PreTrainedModel, key: Any, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The entry of ``key``, made first where it is missing."""
        entries = self._entries.setdefault(model, {})
        if key not in entries:
            while len(entries) >= self.most:
                del entries[next(iter(entries))]
            entries[key] = make()
        return entries[key]


_choices = Memo(most=8)


def full_logits(model: PreTrainedModel, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """``[n - start, vocab]`` fp32 on the CPU: full attention's logits after ``tokens[start:]``."""
    return torch.cat([logits.float().cpu() for logits in _full_chunks(model, tokens, start)])


def full_choices(model: PreTrainedModel, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """``[n - start]`` int64 on the CPU: full attention's best token after each of those.

    Kept for the last few texts, as several caches are asked about the same one.
    """

    def make() -> torch.Tensor:
        chunks = _full_chunks(model, tokens, start)
        return torch.cat([logits.argmax(-1).cpu() for logits in chunks])

    return _choices.get(model, (tuple(tokens.tolist()), start), make)


def _full_chunks(
    model: PreTrainedModel, tokens: torch.Tensor, start: int
) -> Iterator[torch.Tensor]:
    reader = Reader(model, choose_cache("full"), len(tokens))
    reader.prefill(tokens[:start])
    for chunk in tokens[start:].split(_CHUNK):
        yield reader.feed(chunk, keep=len(chunk))


@dataclass(frozen=True)
class Pace:
    """How tokens are fed, and where sections with a recall of their own end; counts from 1.

    Attributes:
        count: tokens in all.
        every: tokens of a section; the last one may be shorter.
        step: tokens of a forward pass; divides ``every``.

    Raises:
        ValueError: steps cross the end of a section.
    """

    count: int
    every: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.every % self.step:
            raise ValueError(
                f"--every {self.every} is no multiple of --step {self.step}: choose it so"
            )


@dataclass(frozen=True)
class Walk:
    """The results of ``walk``.

    Attributes:
        tokens: ``[count]`` int64, fed one step after the other.
        choices: ``[count]`` int64, the best token after each of them.
        sections: for each its ``end`` in tokens, and ``overlap``, ``mass``, ``best_mass``: means
            over layers and tokens, None where nothing was retrieved.
        reader: at the end.
    """

    tokens: torch.Tensor
    choices: torch.Tensor
    sections: list[dict[str, Any]]
    reader: Reader

    def compared(self, choices: torch.Tensor) -> list[dict[str, Any]]:
        """The sections, each with the share of tokens that are ``equal`` to ``choices``."""
        equal, start, sections = (self.choices == choices).double(), 0, []
        for section in self.sections:
            sections.append({**section, "equal": float(equal[start : section["end"]].mean())})
            start = section["end"]
        return sections


def text_source(tokens: torch.Tensor, step: int) -> Source:
    """The tokens of a text, ``step`` at a time."""
    return lambda logits, index: tokens[index : index + step]


def greedy_source(logits: torch.Tensor, index: int) -> torch.Tensor:
    """The best token."""
    return logits.argmax(-1, keepdim=True).cpu()


def sampling_source(seed: int) -> Source:
    """A token drawn at temperature 1, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: torch.Tensor, index: int) -> torch.Tensor:
        return torch.multinomial(logits.float().cpu().softmax(-1), 1, generator=generator)

    return draw


def walk(reader: Reader, logits: torch.Tensor, source: Source, pace: Pace, usage: UsageSum) -> Walk:
    """Feed the tokens of ``source``, ``pace.count`` in all.

    Args:
        reader: has read the context; it is left behind where its cache can be forked cheaply.
        logits: ``[vocab]`` after the context.
        source: gives tokens that never cross the end of a section.
        pace: how many, and where sections end.
        usage: counts rows and seconds of all forward passes.
    """
    retrieves = isinstance(reader.cache, RetrievalCache)
    tokens, choices, sections, index = [], [], [], 0
    with tqdm(total=pace.count, leave=False, desc=reader.choice.name, mininterval=1) as bar:
        while index < pace.count:
            end = min(index + pace.every, pace.count)
            # A fork counts rows, seconds and recall from its start.
            reader = branch(reader) if retrieves else reader
            before = reader.seconds
            while index < end:
                new = source(logits, index)
                reader.check_step(len(new))
                step_logits = reader.feed(new, keep=len(new))
                logits = step_logits[-1]
                tokens.append(new)
                choices.append(step_logits.argmax(-1).cpu())
                index += len(new)
                bar.update(len(new))
            usage.count(reader.usage(), reader.seconds - before)
            sections.append({"end": end, **mean_recall(layer_recalls(reader))})
    return Walk(torch.cat(tokens), torch.cat(choices), sections, reader)


def mean_sections(samples: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means over samples whose sections end alike; None stays None."""
    means = []
    for sections in zip(*samples, strict=True):
        mean: dict[str, Any] = {"end": sections[0]["end"]}
        for name in sections[0]:
            values = [section[name] for section in sections]
            if name != "end":
                mean[name] = None if None in values else sum(values) / len(values)
        means.append(mean)
    return means


def mean_of(sections: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean over the tokens of all sections that have it; None for none."""
    total, tokens, start = 0.0, 0, 0
    for section in sections:
        if section[name] is not None:
            total += section[name] * (section["end"] - start)
            tokens += section["end"] - start
        start = section["end"]
    return total / tokens if tokens else None
