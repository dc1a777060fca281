"""A turn: one cache at one size on one model, filled and ready for what is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.benchmark.filling import LayerRows, fill_randomly, prefill, random_tokens, serving
from hf_kvret.benchmark.shapes import WeightBytes
from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.progress import prompt_bar
from hf_kvret.evaluation.reader import Reader, Usage


@dataclass(frozen=True)
class Subject:
    """A model of some layers, ready to be measured.

    Attributes:
        model: random weights, transformers' own sdpa attention.
        weights: bytes of its parameters.
        rows: what random rows look like; None where they are not used.
        seed: of tokens and rows.
    """

    model: PreTrainedModel
    weights: WeightBytes
    rows: list[LayerRows] | None
    seed: int

    @property
    def layers(self) -> int:
        """How many it has."""
        return self.model.config.num_hidden_layers


@dataclass(frozen=True)
class Turn:
    """One cache at one size on one model: the unit of a round."""

    subject: Subject
    choice: CacheChoice
    context: int
    batch: int
    fill: str

    @contextmanager
    def filled(self, spare: int) -> Iterator[tuple[Cache, torch.Tensor]]:
        """A cache that holds the context, with room for ``spare`` more tokens, and the next one.

        That is ``[B, 1]``. Inside, the model has the attention that the cache needs.
        """
        model, seed = self.subject.model, self.subject.seed
        cache = self.choice.make(model.config, self.context + spare)
        with serving(model, cache):
            if self.fill == "prefill":
                tokens = random_tokens(model, self.batch, self.context, seed)
                with prompt_bar(model, self.context, self.choice.name):
                    logits = prefill(model, self.choice, cache, tokens)
                yield cache, logits[:, -1:].argmax(-1)
            else:
                assert self.subject.rows is not None
                fill_randomly(model, cache, self.subject.rows, self.batch, self.context, seed)
                yield cache, random_tokens(model, self.batch, 1, seed)

    def usage(self, cache: Cache, length: int) -> Usage:
        """What ``cache`` holds after ``length`` tokens of each sequence."""
        reader = Reader(self.subject.model, self.choice, 0)
        reader.cache, reader.length = cache, length
        usage = reader.usage()
        if isinstance(cache, RetrievalCache):
            return usage
        # A reader has one sequence, and only retrieval caches know of more.
        return dataclasses.replace(usage, full_bytes=self.batch * usage.full_bytes)
