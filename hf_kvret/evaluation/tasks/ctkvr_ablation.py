"""What each part of CTkvr is worth, over turns and along a generation too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from hf_kvret.evaluation.arguments import (
    budget,
    file_path,
    lengths,
    names,
    number,
    several,
    whole_number,
)
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.contexts import describe_file, text_windows
from hf_kvret.evaluation.ctkvr_report import ablation_pictures, ablation_tables, plot_ablation
from hf_kvret.evaluation.ctkvr_study import Questions, Study, Turns
from hf_kvret.evaluation.ctkvr_variants import PARTS, Variants, centroid_count
from hf_kvret.evaluation.needles import NeedleLanguage
from hf_kvret.evaluation.reader import check_positions
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.stretches import Pace
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.task import Choices, Task
from hf_kvret.evaluation.tasks.lrqk_factors import needle_tokens
from hf_kvret.methods.ctkvr import CTkvrCache, CTkvrConfig

# These follow thousands of tokens, so they do it after the shortest context only.
_LONG = ("update", "pending")


@dataclass(frozen=True, kw_only=True)
class CTkvrAblation(Task):
    """What each part of CTkvr is worth: recall of the exact top-k without it, or with another."""

    name: ClassVar[str] = "ctkvr-ablation"
    summary: ClassVar[str] = "what each part of CTkvr is worth"
    description: ClassVar[str] = (
        "What each part of CTkvr is worth: recall of the exact top-k without it, or with "
        "another. choice: which queries of the prompt are centroids (the paper's table 4). "
        "centroids, probes: how many there are, and how many a query recalls (figure 10). "
        "rerank: how the recalled tokens are compared, and how many there are (figure 11). "
        "budget: tables 1 and 6. questions: whether a question's queries become centroids. "
        "update: new centroids over --turns (table 5). pending: recall of the prompt's and of "
        "generated tokens along --long-tokens, without the pending list and without the watch "
        "on coverage. Without --text the model reads documents of needles with questions after "
        "them, which is what --model needle speaks."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval ctkvr-ablation --text novel.txt --json ablation.json --plot ablation.png",
        "hf-kvret eval ctkvr-ablation --model needle --parts choice,questions",
    )

    text: Path | None
    lengths: tuple[int, ...]
    windows: int
    parts: tuple[str, ...]
    variants: Variants
    pace: Pace
    questions: Questions
    turns: Turns
    long: Pace
    seed: int

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(
                f"unknown part {', '.join(unknown) or '(none named)'}: choose among "
                f"{', '.join(PARTS)}"
            )
        if self.windows < 1:
            raise ValueError(f"--windows {self.windows}: at least 1")
        if "questions" in self.parts:
            for length in self.lengths:
                self.questions.starts(length)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        # A share of the cold tokens like that of 1,024 of 32K.
        parser.set_defaults(caches="ctkvr", top_k=128)
        add = parser.add_argument
        add("--text", type=file_path, metavar="FILE", help="default: documents of needles")
        add("--lengths", type=lengths, default=[4096], help="tokens of a context")
        add("--windows", type=int, default=1, help="at most this many contexts of each length")
        add("--parts", type=names, default=list(PARTS), help=f"default: all of {', '.join(PARTS)}")
        add(
            "--centroids",
            type=several(_centroids),
            default=("1/8x", "1/4x", "1/2x", "1x", "2x"),
            help="counts, or multiples of what the options give",
        )
        add(
            "--probes",
            type=several(whole_number(1)),
            default=(1, 2, 4, 8, 16),
            help="centroids recalled",
        )
        add(
            "--ratios",
            type=several(number(0)),
            default=(1.0, 1.5, 2.5, 4.0),
            help="keys of a list, as multiples of the budget",
        )
        add("--budgets", type=several(budget), default=(512, 1024, 0.04), help="of the part budget")
        add("--new-tokens", type=int, default=128, help="that are measured")
        add("--step", type=int, default=8, help="tokens a forward pass; turns and answers take 1")
        add("--questions", type=int, default=4, help="passages that come again, each on a fork")
        add("--question-tokens", type=int, default=48, help="of a passage")
        add("--answer-tokens", type=int, default=32, help="that follow it and are measured")
        add("--turns", type=int, default=8, help="of the update part")
        add("--turn-tokens", type=int, default=256, help="of new text in a turn")
        add("--turn-measured", type=int, default=64, help="tokens after it that are measured")
        add("--long-tokens", type=whole_number(1), default=4000, help="of the pending part")
        add("--every", type=int, default=400, help="of them a number")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        given = options
        # One stretch, rounded up to whole steps.
        whole = -(-given.new_tokens // max(1, given.step)) * max(1, given.step)
        return cls(
            given.text,
            tuple(given.lengths),
            given.windows,
            tuple(given.parts),
            Variants(given.centroids, given.probes, given.ratios, given.budgets),
            Pace(given.new_tokens, whole, given.step),
            Questions(given.questions, given.question_tokens, given.answer_tokens),
            Turns(given.turns, given.turn_tokens, given.turn_measured),
            Pace(given.long_tokens, given.every, given.step),
            given.seed,
        )

    def setup(self) -> dict[str, Any]:
        return {
            "text": describe_file("--text", self.text) or "documents of needles",
            "windows": self.windows,
            "new_tokens": self.pace.count,
            "step": self.pace.step,
            "questions": self.questions.count,
            "question_tokens": self.questions.asked,
            "answer_tokens": self.questions.answered,
            "turns": self.turns.count,
            "turn_tokens": self.turns.new,
            "turn_measured": self.turns.measured,
            "long_tokens": self.long.count,
            "every": self.long.every,
        }

    def cells(self, caches: Sequence[str]) -> list[Cell]:
        others = [cache for cache in caches if cache.split(":")[0].strip() != CTkvrCache.name]
        if others:
            raise ValueError(
                f"--caches {', '.join(others)}: ctkvr-ablation takes ctkvr apart, so name ctkvr "
                "alone, with options where wanted, as ctkvr:causal=false"
            )
        return [
            {"cache": cache, "part": part, "variant": name, "length": length}
            for part in self.parts
            for length in ((min(self.lengths),) if part in _LONG else self.lengths)
            for name in self.variants.names(part)
            for cache in caches
        ]

    def check(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check(cells, subject, choices)
        for part, length in dict.fromkeys((cell["part"], cell["length"]) for cell in cells):
            new = self._new(part)
            self._contexts(subject, length, new)
            check_positions(subject.model, length + new)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        length, part = cell["length"], cell["part"]
        given = choice.make(subject.model.config, 1)
        assert isinstance(given, CTkvrCache) and isinstance(given.options, CTkvrConfig)
        variant = self.variants.choice(part, cell["variant"], given.options, length)
        study = Study(subject, variant)
        for window in self._contexts(subject, length, self._new(part)):
            if part == "questions":
                study.ask(window, self.questions)
            elif part == "update":
                study.talk(window, length, self.turns)
            else:
                study.follow(window, length, self.long if part == "pending" else self.pace)
        return study.result()

    def _new(self, part: str) -> int:
        """Tokens that a part has after its context."""
        if part == "questions":
            return 0
        if part == "update":
            return self.turns.tokens
        return self.long.count if part == "pending" else self.pace.count

    def _contexts(self, subject: Subject, length: int, new: int) -> list[torch.Tensor]:
        """``[length + new]`` int64 each, of the text or of needles with questions after them."""
        if self.text is not None:
            return text_windows(subject, self.name, self.text, length, new, self.windows, None)
        language, known = NeedleLanguage(), subject.model.config.vocab_size
        if known != language.vocab_size:
            raise ValueError(
                f"--model {subject.name} has {known} token ids, the language of needles "
                f"{language.vocab_size}: give --text FILE, or take --model needle"
            )
        seeds = range(self.seed, self.seed + self.windows)
        return [needle_tokens(length + new, new, seed) for seed in seeds]

    @classmethod
    def table(cls, results: Results) -> str:
        return ablation_tables(results)

    @classmethod
    def pictures(cls, path: Path) -> list[Path]:
        return ablation_pictures(path)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """One picture a part: ``path``, and ``NAME-PART.png`` for the parts after the first."""
        plot_ablation(path, results)


def _centroids(text: str) -> str:
    try:
        centroid_count(text, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
