"""Recall of the exact top-k along a generation of thousands of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.reader import Reader, UsageSum, check_positions
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.task import Choices, Task, lengths_of
from hf_kvret.lab.evaluate.teacher_forcing import (
    Pace,
    Source,
    full_choices,
    greedy_source,
    mean_of,
    mean_sections,
    sampling_source,
    text_source,
    walk,
)
from hf_kvret.lab.evaluate.texts import text_windows
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.options import option
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import or_dash, share, table_of, with_step

FOLLOW = ("text", "greedy", "sample")


@dataclass(frozen=True, kw_only=True)
class LongGeneration(Task):
    """Recall of the exact top-k along a generation of thousands of tokens."""

    name: ClassVar[str] = "longgen"
    summary: ClassVar[str] = "recall along a generation of thousands of tokens"
    description: ClassVar[str] = (
        "Recall of the exact top-k along a generation of thousands of tokens. An index that was "
        "fitted to the prompt may fit worse the more was generated. Each context is read in one "
        "pass; then --new-tokens follow, one at a time: those of the text itself, or the "
        "cache's own (--follow). Recall, and agreement with full attention on the very same "
        "tokens, are told for each --every of them."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval longgen --text novel.txt --context 4K --new-tokens 4096 --caches flat,paris",
    )

    text: Path = common.text_option()
    then: Path | None = common.then_option("follows after the context, for a change of subject")
    context: tuple[int, ...] = common.context_option((4096,), "tokens of a context")
    windows: int = common.count_option(1, "at most this many contexts of each length")
    new_tokens: int = common.count_option(2048, "after each context")
    every: int = common.count_option(128, "tokens that share a number")
    step: int = common.count_option(
        1,
        "tokens a forward pass with --follow text, up to max_draft (32), and one for caches that "
        "learn from queries",
    )
    follow: str = option(
        "text",
        "where the new tokens come from: the text, or the cache's own choice",
        choices=FOLLOW,
    )

    def __post_init__(self) -> None:
        if self.follow != "text" and self.pace.step != 1:
            raise ValueError(
                f"--step {self.step} with --follow {self.follow}: a token of its own comes "
                "alone, leave --step out"
            )
        if self.follow != "text" and self.then is not None:
            raise ValueError(f"--then with --follow {self.follow}: leave one out")

    @property
    def pace(self) -> Pace:
        """How the new tokens are walked through."""
        return Pace(self.new_tokens, self.every, self.step)

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [{"cache": cache, "length": n} for n in self.context for cache in caches]

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        new = self.pace.count if self.follow == "text" else 0
        for length in lengths_of(cells):
            text_windows(subject, self.name, self.text, length, new, self.windows, self.then)
            check_positions(subject.model, length + self.pace.count)
        for choice in choices.values():
            Reader(subject.model, choice, 0).check_step(self.pace.step)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        length, count = cell["length"], self.pace.count
        new = count if self.follow == "text" else 0
        windows = text_windows(subject, self.name, self.text, length, new, self.windows, self.then)
        samples, used = [], UsageSum()
        for number, window in enumerate(windows):
            reader = Reader(subject.model, choice, length + count)
            logits = reader.prefill(window[:length])[-1]
            source = self._source(window[length:], number)
            result = walk(reader, logits, source, self.pace, used)
            tokens = torch.cat([window[:length], result.tokens])
            samples.append(result.compared(full_choices(subject.model, tokens, start=length)))
        return {
            "stretches": mean_sections(samples),
            "windows": len(windows),
            **used.row("seconds_with_recall"),
        }

    def _source(self, rest: torch.Tensor, number: int) -> Source:
        if self.follow == "text":
            return text_source(rest, self.pace.step)
        return greedy_source if self.follow == "greedy" else sampling_source(self.seed + number)

    @classmethod
    def table(cls, results: Results) -> str:
        columns: dict[str, Callable[[Cell, dict[str, Any]], str]] = {
            "cache": lambda cell, row: cell["cache"],
            "context": lambda cell, row: str(cell["length"]),
        }
        for title, name in (("recall", "overlap"), ("mass", "mass")):
            blanks = " " * len(columns)
            columns |= {
                f"{title}, first": partial(_share, name, 0),
                f"last{blanks}": partial(_share, name, -1),
                f"mean{blanks}": partial(_share, name, None),
            }
        columns |= {
            "best mass": partial(_share, "best_mass", None),
            "tokens equal": partial(_share, "equal", None),
            "cold rows read": lambda cell, row: or_dash(row["read_ratio"], ".2%"),
        }
        return with_step(table_of(results, columns), results)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        lengths = {cell["length"] for cell, _ in results}
        retrieves = any(row["stretches"][0]["overlap"] is not None for _, row in results)
        name = "overlap" if retrieves else "equal"
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for cell, row in results:
            sections = [one for one in row["stretches"] if one[name] is not None]
            label = cell["cache"] if len(lengths) == 1 else f"{cell['cache']}, {cell['length']}"
            if sections:
                lines[label] = [one["end"] for one in sections], [one[name] for one in sections]
        quantity = "recall of the exact top-k" if retrieves else "tokens equal to full attention's"
        plot_lines(
            path,
            lines,
            title=f"{quantity}, following {results.setup['follow']}",
            x="generated tokens",
            y="recall" if retrieves else "share",
        )


def _share(name: str, index: int | None, cell: Cell, row: dict[str, Any]) -> str:
    """A share of the section at ``index``, or of all sections."""
    sections = row["stretches"]
    return share(mean_of(sections, name) if index is None else sections[index][name])
