"""Following a text through one variant of a retrieval cache, and what was met on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.reader import Reader, UsageSum
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.teacher_forcing import (
    LayerRecall,
    Pace,
    full_choices,
    layer_recalls,
    mean_by_layer,
    mean_of,
    mean_sections,
    text_source,
    walk,
)

_MEANS = ("overlap", "mass", "best_mass", "equal")


@dataclass
class Follower:
    """What was met by one variant, over all its contexts.

    Attributes:
        subject: the model.
        choice: the variant.
        method: the name of its cache, for errors.
        samples: for each context the stretches that were measured, as ``Walk.sections`` with
            ``equal``, the share of tokens that are full attention's.
        recalls: of each layer in each stretch.
        usage: rows and seconds of the tokens that were measured.
    """

    subject: Subject
    choice: CacheChoice
    method: str
    samples: list[list[dict[str, Any]]] = field(default_factory=list)
    recalls: list[Sequence[LayerRecall]] = field(default_factory=list)
    usage: UsageSum = field(default_factory=UsageSum)

    def follow(self, window: torch.Tensor, length: int, pace: Pace) -> None:
        """Read ``window[:length]``, then measure stretches of the tokens after it."""
        reader, stretches = self.reader(window, length), []
        expected = full_choices(self.subject.model, window, start=length)
        for start in range(0, pace.count, pace.every):
            end = min(start + pace.every, pace.count)
            tokens, right = window[length + start : length + end], expected[start:end]
            reader, result = self.measure(reader, tokens, right, pace.step)
            stretches.append(result | {"end": end})
        self.samples.append(stretches)

    def result(self) -> dict[str, Any]:
        """Means over contexts, and what was read, as plain JSON values.

        ``candidate_ratio`` and ``read_ratio`` are shares of the cold rows; ``rerank_ratio`` is
        candidates over selected rows, candidates counted as lists name them, twice where two do.

        Raises:
            ValueError: nothing was cold.
        """
        if not self.usage.rows_cold:
            raise ValueError(
                "nothing was cold: take a longer --context, or a smaller window as "
                f"{self.method}:dense_below=0:recent=64:flush=64"
            )
        stretches, usage = mean_sections(self.samples), self.usage
        return {
            **{name: mean_of(stretches, name) for name in _MEANS},
            "stretches": stretches,
            "candidate_ratio": usage.candidates / usage.rows_cold,
            "read_ratio": usage.rows_read / usage.rows_cold,
            "rerank_ratio": usage.candidates / usage.rows_read if usage.rows_read else 0.0,
            "seconds_with_recall": usage.seconds,
        }

    def layers(self) -> list[dict[str, Any]]:
        """The recall of each layer, mean over contexts."""
        return [one.to_dict() for one in mean_by_layer(self.recalls)]

    def reader(self, window: torch.Tensor, length: int) -> Reader:
        """A cache that has read ``window[:length]``."""
        reader = Reader(self.subject.model, self.choice, len(window))
        reader.prefill(window[:length])
        return reader

    def measure(
        self, reader: Reader, tokens: torch.Tensor, right: torch.Tensor, step: int
    ) -> tuple[Reader, dict[str, Any]]:
        """One stretch, ``step`` tokens a forward pass; the reader after it, and what was met."""
        whole = -(-len(tokens) // step) * step
        pace = Pace(len(tokens), whole, step)
        # The text says what comes next, so no logits are asked for.
        done = walk(reader, torch.empty(0), text_source(tokens, step), pace, self.usage)
        self.recalls.append(layer_recalls(done.reader))
        return done.reader, done.compared(right)[0]
