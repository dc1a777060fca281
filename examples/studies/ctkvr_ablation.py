"""What each part of CTkvr is worth, over turns and along a generation too.

python examples/studies/ctkvr_ablation.py --text novel.txt --json ablation.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ablation import Ablation, caches_option, distinct, main, parts_option
from ctkvr_follower import CTkvrFollower, starts_of
from ctkvr_tables import PLOTS, TABLES
from ctkvr_variants import PARTS, Variants, centroid_count

from hf_kvret.evaluation.arguments import budget, number, whole_number
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.common_options import budget_option, count_option
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.results import Cell
from hf_kvret.evaluation.stretches import Pace
from hf_kvret.evaluation.subject import Subject
from hf_kvret.methods.ctkvr import CTkvrConfig


def _centroids(text: str) -> str:
    try:
        centroid_count(text, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


@dataclass(frozen=True, kw_only=True)
class CTkvrAblation(Ablation):
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
        "python examples/studies/ctkvr_ablation.py --text novel.txt --json ablation.json "
        "--plot ablation.png",
        "python examples/studies/ctkvr_ablation.py --model needle --parts choice,questions",
    )
    method: ClassVar[str] = "ctkvr"
    example: ClassVar[str] = "causal=false"
    described: ClassVar[tuple[str, ...]] = (
        *("windows", "new_tokens", "step", "questions", "question_tokens", "answer_tokens"),
        *("turns", "turn_tokens", "turn_measured", "long_tokens", "every"),
    )
    # These follow thousands of tokens.
    once: ClassVar[tuple[str, ...]] = ("update", "pending")
    tables = TABLES
    plots = PLOTS

    caches: str | None = caches_option("ctkvr")
    # A share of the cold tokens like that of 1,024 of 32K.
    top_k: int | float = budget_option(128)
    parts: tuple[str, ...] = parts_option(PARTS)
    centroids: tuple[str, ...] = option(
        ("1/8x", "1/4x", "1/2x", "1x", "2x"),
        "counts, or multiples of what the options give",
        kind=distinct(_centroids),
    )
    probes: tuple[int, ...] = option(
        (1, 2, 4, 8, 16), "centroids recalled", kind=distinct(whole_number(1))
    )
    ratios: tuple[float, ...] = option(
        (1.0, 1.5, 2.5, 4.0), "keys of a list, as multiples of the budget", kind=distinct(number(0))
    )
    budgets: tuple[int | float, ...] = option(
        (512, 1024, 0.04), "of the part budget", kind=distinct(budget)
    )
    step: int = count_option(8, "tokens a forward pass; turns and answers take 1")
    questions: int = count_option(4, "passages that come again, each on a fork")
    question_tokens: int = option(48, "of a passage", kind=whole_number(2))
    answer_tokens: int = count_option(32, "that follow it and are measured")
    turns: int = count_option(8, "of the update part")
    turn_tokens: int = count_option(256, "of new text in a turn")
    turn_measured: int = count_option(64, "tokens after it that are measured")
    long_tokens: int = count_option(4000, "of the pending part")
    every: int = count_option(400, "of them a number")

    @property
    def long(self) -> Pace:
        """Of the pending part."""
        return Pace(self.long_tokens, self.every, self.step)

    @cached_property
    def varied(self) -> Variants:
        """The variants of all parts."""
        return Variants(self.centroids, self.probes, self.ratios, self.budgets)

    def __post_init__(self) -> None:
        # Refuse steps that cross the end of a stretch, and values that CTkvr refuses.
        _ = self.long, self.varied
        if "questions" in self.parts:
            for length in self.lengths:
                starts_of(self.questions, self.question_tokens + self.answer_tokens, length)

    def variants(self, part: str) -> Sequence[str]:
        return self.varied.names(part)

    def following(self, part: str) -> int:
        turns = self.turns * (self.turn_tokens + self.turn_measured)
        others = {"questions": 0, "update": turns, "pending": self.long_tokens}
        return others.get(part, self.new_tokens)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, length = cell["part"], cell["length"]
        assert isinstance(choice.options, CTkvrConfig)
        variant = self.varied.choice(part, cell["variant"], choice.options, length)
        follower = CTkvrFollower(subject, variant, self.method)
        for window in self.contexts(subject, part, length):
            if part == "questions":
                asked, answered = self.question_tokens, self.answer_tokens
                follower.ask(window, self.questions, asked, answered)
            elif part == "update":
                new, measured = self.turn_tokens, self.turn_measured
                follower.talk(window, length, self.turns, new, measured)
            else:
                follower.follow(window, length, self.long if part == "pending" else self.pace)
        return follower.result()


STUDY = CTkvrAblation

if __name__ == "__main__":
    sys.exit(main(STUDY))
