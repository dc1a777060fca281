"""Many facts scattered over one text, all of which an answer must list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.needles import HEADS, Document, Fact, Wording, text_wording
from hf_kvret.lab.evaluate.reader import UsageSum, begin, check_positions
from hf_kvret.lab.evaluate.ruler.texts import adjective_noun_pairs
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.task import Choices, Task, lengths_of, mean_points
from hf_kvret.lab.evaluate.texts import chat_parts, encode, first_tokens
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.plots import count_label, plot_groups
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import Columns, or_dash, over_full, table_of

# RULER's wording, and a list that the answer goes on with.
_FACT = " One of the special magic numbers for {} is: {}."
_QUESTION = "\nWhat are all the special magic numbers for {} mentioned in the provided text?"
_PREFIX = "The special magic numbers for {} mentioned in the provided text are:\n-"


@dataclass(frozen=True, kw_only=True)
class FactList(Task):
    """Many facts of one kind at even depths of a text, all asked for in one answer."""

    name: ClassVar[str] = "facts"
    summary: ClassVar[str] = "many facts of one text, all to be listed in one answer"
    description: ClassVar[str] = (
        "Many facts of one kind at even depths of a text, all asked for in one answer: a "
        "context-intensive task, where niah asks for one place in the text. Facts are RULER's "
        "magic numbers of one key, and the answer goes on with a list. Text and question stand in "
        "the model's chat template where it has one. Facts count whose number is in the answer."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval facts --model smollm2 --context 2K,4K --essays essays.json --top-k 0.06",
    )

    context: tuple[int, ...] = common.context_option((2048, 4096), "tokens, answer included")
    facts: int = common.count_option(8, "in a text")
    samples: int = common.count_option(5, "texts of each length")
    essays: Path | None = common.essays_option()

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [{"cache": cache, "length": length} for length in self.context for cache in caches]

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        wording = list_wording(subject, self.essays, self.facts)
        for length in lengths_of(cells):
            check_positions(subject.model, length)
            self._document(wording, length, 0)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        wording = list_wording(subject, self.essays, self.facts)
        answers, shares, used = [], [], UsageSum()
        for sample in tqdm(range(self.samples), leave=False, desc=choice.name, unit="text"):
            document = self._document(wording, cell["length"], sample)
            (fact,), count = document.facts, wording.answer_len
            texts = document.context, torch.tensor(fact.question)
            reader, logits = begin(subject.model, choice, *texts, count, whole=True)
            reply = wording.text(reader.answer(logits, count, wording.stop))
            answers.append({"expected": fact.answer, "given": reply})
            shares.append(listed_share(fact.answer, reply))
            used.add(reader)
        complete = fmean(share == 1 for share in shares)
        return {"score": fmean(shares), "complete": complete, "answers": answers, **used.row()}

    def _document(self, wording: Wording, length: int, sample: int) -> Document:
        rng = np.random.default_rng([self.seed, length, sample])
        depths = [100 * (fact + 0.5) / self.facts for fact in range(self.facts)]
        return wording.document(rng, length, depths, 1, start=sample / self.samples)

    @classmethod
    def table(cls, results: Results) -> str:
        columns: Columns = {
            "cache": lambda cell, row: cell["cache"],
            "length": lambda cell, row: str(cell["length"]),
            "facts listed, %": lambda cell, row: f"{100 * row['score']:.1f}",
            "over full": lambda c, r: or_dash(over_full(results, c, r, "score"), "+.1f", 100),
            "complete lists, %": lambda cell, row: f"{100 * row['complete']:.0f}",
            "cold rows read, %": lambda cell, row: or_dash(row["read_ratio"], ".2f", 100),
        }
        return table_of(results, columns)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        caches = list(dict.fromkeys(cell["cache"] for cell, _ in results))
        bars: dict[str, list[float | None]] = {}
        for cell, row in results:
            heights = bars.setdefault(count_label(cell["length"]), [None] * len(caches))
            heights[caches.index(cell["cache"])] = 100 * row["score"]
        plot_groups(path, caches, bars, title="many facts of one text", y="facts listed, %")

    @classmethod
    def accuracy(cls, results: Results) -> dict[str, tuple[float, float]]:
        return mean_points(results, "score")


def listed_share(answer: str, reply: str) -> float:
    """Share of the numbers of ``answer`` that stand in ``reply``, each as a number of its own."""
    listed = set(re.findall(r"\d+", reply))
    return fmean(number in listed for number in answer.split())


def list_wording(subject: Subject, essays: Path | None, count: int) -> Wording:
    """Documents of ``count`` facts, each with the question and the answer about all of them.

    ValueError, FileNotFoundError and ModuleNotFoundError as of ``magic_wording``.
    """
    tokenizer, pairs = subject.need_tokenizer(FactList.name), adjective_noun_pairs()
    before, after = chat_parts(tokenizer) if tokenizer.chat_template else ("", "\n")

    def draw(rng: np.random.Generator, count: int) -> list[Fact]:
        key = pairs[int(rng.integers(len(pairs)))]
        values = [str(number) for number in rng.integers(1_000_000, 10_000_000, size=count)]
        question = encode(tokenizer, _QUESTION.format(key) + after + _PREFIX.format(key))
        gold, answer = encode(tokenizer, " " + "\n- ".join(values) + "\n"), " ".join(values)
        needles = [encode(tokenizer, _FACT.format(key, value)) for value in values]
        return [Fact(needle, question, gold, answer) for needle in needles]

    head = first_tokens(tokenizer) + encode(tokenizer, before + HEADS[1])
    # Room for the list, and for a number more, as some come twice.
    room = len(draw(np.random.default_rng(0), count + 1)[0].gold)
    return text_wording(FactList.name, subject, (head, head), essays, draw, room)
