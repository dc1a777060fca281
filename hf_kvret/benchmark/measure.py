"""What is measured: the contract of ``decode``, ``prefill`` and ``memory``, and their set-up."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.benchmark.filling import LayerRows, fill_randomly, prefill, random_tokens
from hf_kvret.benchmark.shapes import Shape, WeightBytes
from hf_kvret.benchmark.timing import Bandwidth
from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.progress import prompt_bar
from hf_kvret.evaluation.reader import Reader, Usage
from hf_kvret.evaluation.results import Cell, Results

# A median of fewer says nothing.
_LEAST_STEPS = 3


@dataclass(frozen=True)
class Subject:
    """A model of some layers, ready to be measured.

    Attributes:
        model: random weights, transformers' own sdpa attention.
        layers: how many it has.
        weights: bytes of its parameters.
        rows: what random rows look like; None where they are not used.
    """

    model: PreTrainedModel
    layers: int
    weights: WeightBytes
    rows: list[LayerRows] | None


@dataclass(frozen=True)
class Bench:
    """Everything that the cells of one command have in common.

    Attributes:
        shape: of the whole model.
        subjects: the model to measure; where it has fewer layers than the shape, a second one
            with half of them.
        whole: bytes of the whole model's parameters.
        bandwidth: measured by this command.
        steps, warmup, rounds: timed steps or runs, those before, and how often all caches take
            turns.
        seed: of weights, tokens and rows.
        limit: seconds that the timed steps of one turn may take.
    """

    shape: Shape
    subjects: tuple[Subject, ...]
    whole: WeightBytes
    bandwidth: Bandwidth
    steps: int
    warmup: int
    rounds: int
    seed: int
    limit: float = math.inf

    def steps_within(self, pace: float) -> int:
        """``steps``, or as many of ``pace`` seconds as the limit allows, at least 3."""
        if pace * self.steps <= self.limit:
            return self.steps
        return min(self.steps, max(_LEAST_STEPS, int(self.limit / pace)))

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return self.subjects[0].model.device

    @property
    def scaled(self) -> bool:
        """Whether fewer layers are measured than the model has."""
        return len(self.subjects) > 1


@dataclass(frozen=True)
class Turn:
    """One cache at one size on one model: the unit of a round."""

    bench: Bench
    subject: Subject
    choice: CacheChoice
    context: int
    batch: int
    fill: str

    def filled(self, cache: Cache) -> torch.Tensor:
        """Fill ``cache`` with the context; returns the token to go on with, ``[B, 1]``."""
        model, seed = self.subject.model, self.bench.seed
        if self.fill == "prefill":
            tokens = random_tokens(model, self.batch, self.context, seed)
            with prompt_bar(model, self.context, self.choice.name):
                return prefill(model, self.choice, cache, tokens)[:, -1:].argmax(-1)
        assert self.subject.rows is not None
        fill_randomly(model, cache, self.subject.rows, self.batch, self.context, seed)
        return random_tokens(model, self.batch, 1, seed)

    def usage(self, cache: Cache, length: int) -> Usage:
        """What ``cache`` holds after ``length`` tokens of each sequence."""
        reader = Reader(self.subject.model, self.choice, 0)
        reader.cache, reader.length = cache, length
        usage = reader.usage()
        if isinstance(cache, RetrievalCache):
            return usage
        # A reader has one sequence, and only retrieval caches know of more.
        return dataclasses.replace(usage, full_bytes=self.batch * usage.full_bytes)


class Measure(ABC):
    """One command: what a turn measures, and how turns become a row.

    Attributes:
        name: on the command line.
        summary: one line for ``--help``.
        description: the text of the measure's own ``--help``.
        examples: commands below it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    description: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]

    @abstractmethod
    def once(self, turn: Turn) -> Any:
        """A sample, measured now; the cache is gone afterwards."""

    @abstractmethod
    def row(self, bench: Bench, cell: Cell, samples: Mapping[int, Sequence[Any]]) -> dict[str, Any]:
        """The row of a cell, from its samples by number of layers, as plain JSON values.

        What was measured and what was scaled stay apart: all scaled numbers are in ``scaled``.
        """

    @abstractmethod
    def table(self, results: Results) -> str:
        """All rows as a markdown table."""

    @abstractmethod
    def plot(self, path: Path, results: Results) -> None:
        """Write a picture of the rows."""
