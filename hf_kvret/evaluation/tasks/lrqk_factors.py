"""How good LRQK's factors are, on queries and keys of a real model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tqdm import tqdm

from hf_kvret.evaluation.arguments import file_path, lengths, names, several, whole_number
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.contexts import describe_file, text_windows
from hf_kvret.evaluation.lrqk_report import factor_pictures, factor_tables, plot_factors
from hf_kvret.evaluation.lrqk_study import LayerStudy, read_layers
from hf_kvret.evaluation.lrqk_variants import VARIANTS
from hf_kvret.evaluation.needles import NeedleLanguage
from hf_kvret.evaluation.reader import check_positions
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.task import Choices, Task, lengths_of
from hf_kvret.methods.lrqk import LRQKCache, LRQKConfig

# Options of the cache that count here; variants choose the others, or nothing depends on them.
_COUNT = ("top_k", "recency", "half_life", "iterations", "penalty", "seed")
_TOKENS_PER_NEEDLE = 128


@dataclass(frozen=True, kw_only=True)
class LRQKFactors(Task):
    """How good LRQK's factors are: what low-rank proxies miss of the scores of a real model."""

    name: ClassVar[str] = "lrqk-factors"
    summary: ClassVar[str] = "how good LRQK's low-rank factors are"
    description: ClassVar[str] = (
        "How good LRQK's factors are: what low-rank proxies miss of the scores of a real model. "
        "A text is read once; queries and keys of every retrieval layer are kept in fp32, so "
        "take up to some 8K tokens. For each rank, proxies are made in several ways "
        "(--variants). Their relative error over all queries and keys is exact. Recall of the "
        "exact top-k is that of the last --queries, each among all tokens before it. Without "
        "--text the model reads a document of needles with questions at its end, which is what "
        "--model needle speaks."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval lrqk-factors --model needle --plot factors.png",
        "hf-kvret eval lrqk-factors --model reference --text novel.txt --lengths 2K",
    )

    text: Path | None
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    variants: tuple[str, ...]
    queries: int
    seed: int
    # Queries and keys of the last text, for the cells about it.
    _read: dict[Any, list[LayerStudy]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"--queries {self.queries}: at least 1")
        if not self.ranks or min(self.ranks) < 1 or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"--ranks {self.ranks}: different numbers, at least 1 each")
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown or not self.variants:
            raise ValueError(
                f"unknown variant {', '.join(unknown) or '(none named)'}: choose among "
                f"{', '.join(VARIANTS)}"
            )

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(caches="lrqk", top_k=100, store="device")
        parser.add_argument(
            "--text", type=file_path, metavar="FILE", help="default: a document of needles"
        )
        parser.add_argument("--lengths", type=lengths, default=[2048], help="tokens of the text")
        parser.add_argument(
            "--ranks",
            type=several(whole_number(1)),
            default=(8, 16, 32, 48, 64),
            help="left out above the head dim",
        )
        parser.add_argument(
            "--variants",
            type=names,
            default=list(VARIANTS),
            metavar="NAME,NAME",
            help=f"default: all of {', '.join(VARIANTS)}",
        )
        parser.add_argument(
            "--queries", type=int, default=64, help="newest tokens of the text that select"
        )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        if options.store != "device":
            raise ValueError(
                f"--store {options.store}: lrqk-factors stores nothing, leave the option out"
            )
        return cls(
            options.text,
            tuple(options.lengths),
            options.ranks,
            tuple(options.variants),
            options.queries,
            options.seed,
        )

    def setup(self) -> dict[str, Any]:
        text = describe_file("--text", self.text)
        return {"text": text or "document of needles", "queries": self.queries}

    def cells(self, caches: Sequence[str]) -> list[Cell]:
        for cache in caches:
            _check_cache(cache)
        # Lengths come first, so that each text is read once for all that is asked about it.
        return [
            {"cache": cache, "length": length, "variant": variant, "rank": rank}
            for length in self.lengths
            for cache in caches
            for variant in self.variants
            for rank in self.ranks
        ]

    def check(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check(cells, subject, choices)
        for length in lengths_of(cells):
            for choice in choices.values():
                self._top_k(length, subject, choice)
            self._tokens(length, subject)
            check_positions(subject.model, length)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        """The numbers of one cell; ``layers`` leaves out those with a head dim below the rank.

        Raises:
            ValueError: a text too short for the budget, or one that this model can't read.
        """
        length, rank = cell["length"], cell["rank"]
        top_k, options = self._top_k(length, subject, choice)
        variant, studies = VARIANTS[cell["variant"]], self._studies(length, subject)
        largest = max(study.dim for study in studies)
        if min(self.ranks) > largest:
            raise ValueError(
                f"--ranks {','.join(map(str, self.ranks))}: all are above the head dim {largest}"
            )
        fitting = [study for study in studies if rank <= study.dim]
        found = []
        for study in tqdm(fitting, desc="layers", leave=False):
            quality = study.judge(variant.approximate(study, rank, options), top_k)
            found.append({"layer": study.layer, **quality.to_dict()})
        return {"top_k": top_k, "layers": found}

    def _top_k(self, length: int, subject: Subject, choice: CacheChoice) -> tuple[int, LRQKConfig]:
        """How many tokens a query selects, and the options of the cache."""
        given = choice.make(subject.model.config, 1)
        assert isinstance(given, LRQKCache) and isinstance(given.options, LRQKConfig)
        top_k = given.options.budget(length)
        if top_k >= length - self.queries:
            raise ValueError(
                f"--lengths {length}: --queries {self.queries} and --top-k {top_k} leave nothing "
                "to choose; take a longer text, or less of them"
            )
        return top_k, given.options

    def _studies(self, length: int, subject: Subject) -> list[LayerStudy]:
        key = (subject.model, length)
        if key not in self._read:
            self._read.clear()
            self._read[key] = read_layers(
                subject.model, self._tokens(length, subject), self.queries
            )
        return self._read[key]

    def _tokens(self, length: int, subject: Subject) -> torch.Tensor:
        """The text, ``[length]`` int64."""
        if self.text is not None:
            return text_windows(subject, self.name, self.text, length, 0, 1, None)[0]
        language, known = NeedleLanguage(), subject.model.config.vocab_size
        if known != language.vocab_size:
            raise ValueError(
                f"--model {subject.name} has {known} token ids, the language of needles "
                f"{language.vocab_size}: give --text FILE, or take --model needle"
            )
        return needle_tokens(length, self.queries, self.seed)

    @classmethod
    def table(cls, results: Results) -> str:
        return factor_tables(results)

    @classmethod
    def pictures(cls, path: Path) -> list[Path]:
        return factor_pictures(path)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Errors over rank to ``path``, recall over rank to ``NAME-recall`` beside it."""
        plot_factors(path, results)


def needle_tokens(length: int, asking: int, seed: int) -> torch.Tensor:
    """``[length]`` int64: a document of needles, then questions with answers, ``asking`` or more.

    ValueError where ``length`` is too short for both.
    """
    language, rng = NeedleLanguage(), np.random.default_rng(seed)
    keys, values = language.pairs(rng, 1)
    turn = language.questions(keys).shape[1] + values.shape[1]
    turns = -(-asking // turn)
    keys, values = language.pairs(rng, max(turns, length // _TOKENS_PER_NEEDLE))
    document, _ = language.document(rng, length - turns * turn, keys, values)
    asked = rng.permutation(len(keys))[:turns]
    questions = np.concatenate([language.questions(keys[asked]), values[asked]], axis=1)
    return torch.from_numpy(np.concatenate([document, questions.reshape(-1)]))


def _check_cache(cache: str) -> None:
    """ValueError for another cache than lrqk, or options that mean nothing here."""
    name, *options = (part.strip() for part in cache.split(":"))
    if name != LRQKCache.name:
        raise ValueError(f"--caches {cache}: lrqk-factors is about lrqk, leave the option out")
    for option in (part.partition("=")[0] for part in options):
        if option not in _COUNT:
            raise ValueError(
                f"--caches {cache}: {option} is chosen by --ranks and --variants, or changes "
                f"nothing here; leave it out. What counts: {', '.join(_COUNT)}"
            )
