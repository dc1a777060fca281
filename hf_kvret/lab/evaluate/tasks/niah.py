"""Needle in a haystack: one needle at a depth of a long text, and a question about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.needles import Document, Wording, choose_wording, contains
from hf_kvret.lab.evaluate.reader import UsageSum, begin
from hf_kvret.lab.evaluate.task import Task
from hf_kvret.lab.program import options as common
from hf_kvret.lab.program.arguments import file_path, percent, several, whole_number
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.plots import count_label, plot_heat_maps
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import held, markdown_table, mean_or_dash, over_full


@dataclass(frozen=True, kw_only=True)
class NeedleTask(Task):
    """A task of needles in documents."""

    essays: Path | None = option(
        None,
        "haystack: plain text or a JSON list of texts; RULER's noise without it",
        kind=file_path,
        metavar="FILE",
    )
    answer_tokens: int = common.answer_tokens_option()

    @cached_property
    def wording(self) -> Wording:
        """How documents and questions are worded."""
        return choose_wording(self.subject, self.name, self.essays, self.answer_tokens)


@dataclass(frozen=True, kw_only=True)
class NeedleInHaystack(NeedleTask):
    """A needle in a haystack, at every depth of every length: a heat map for each cache.

    The wording is RULER's, with a random key and number, which small models can answer; the
    bundled needle model is asked in its own language. An answer is right when the expected text
    is in it. With --questions inside, the question is read with the text in one pass; with
    after, the text is read without it, and the question is fed then.
    """

    name: ClassVar[str] = "niah"
    summary: ClassVar[str] = "needle in a haystack: a heat map of length and depth"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval niah --context 4K,8K,16K --essays essays.json --json niah.json --plot "
        "niah.png",
    )

    context: tuple[int, ...] = common.context_option(
        (2048, 4096, 8192, 16384), "tokens, question and room for the answer included"
    )
    depths: tuple[float, ...] = option(
        tuple(float(depth) for depth in range(0, 101, 10)),
        "where the needle is, in percent of the haystack, comma-separated",
        kind=several(percent),
    )
    samples: int = common.count_option(3, "documents in each cell")
    distractors: int = option(0, "more needles, with other keys, anywhere", kind=whole_number(0))
    questions: tuple[str, ...] = common.questions_option()

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [
            {"cache": cache, "questions": questions, "length": length, "depth": depth}
            for length in self.context
            for depth in self.depths
            for questions in self.questions
            for cache in caches
        ]

    def check_length(self, length: int) -> None:
        super().check_length(length)
        self._document(length, 0.0, 0)

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        wording = self.wording
        replies: list[dict[str, str]] = []
        right, used = 0, UsageSum()
        for sample in tqdm(range(self.samples), leave=False, desc=choice.name, unit="document"):
            document = self._document(cell["length"], cell["depth"], sample)
            reader, logits = begin(
                self.subject.model,
                choice,
                document.context,
                torch.tensor(document.facts[0].question),
                wording.answer_len,
                whole=cell["questions"] == "inside",
            )
            reply = wording.text(reader.answer(logits, wording.answer_len, wording.stop))
            replies.append({"expected": document.facts[0].answer, "given": reply})
            right += contains(document.facts[0].answer, reply)
            used.add(reader)
        return {"score": right / self.samples, "answers": replies, **used.row()}

    def _document(self, length: int, depth: float, sample: int) -> Document:
        # The same document for every cache and both set-ups; each sample starts elsewhere in the
        # text, the first one at its beginning.
        rng = np.random.default_rng([self.seed, length, round(1000 * depth), sample])
        depths = [depth, *(100 * rng.random(self.distractors))]
        return self.wording.document(rng, length, depths, 1, start=sample / self.samples)

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each cache and set-up: means over depths."""
        lengths = sorted({cell["length"] for cell, _ in results})
        rows = []
        for cache, questions in dict.fromkeys((c["cache"], c["questions"]) for c, _ in results):
            line = {"cache": cache, "questions": questions}.items()
            cells = [(cell, row) for cell, row in results if line <= cell.items()]
            differences = [over_full(results, cell, row, "score") for cell, row in cells]
            over = [difference for difference in differences if difference is not None]
            read = [row["read_ratio"] for _, row in cells if row["read_ratio"] is not None]
            groups = [[row for cell, row in cells if cell["length"] == n] for n in lengths]
            groups.append([row for _, row in cells])
            scores = [mean_or_dash([row["score"] for row in some], ".1f", 100) for some in groups]
            scores += [mean_or_dash(over, "+.1f", 100), mean_or_dash(read, ".2f", 100)]
            rows.append([cache, questions, *scores, held(*groups[-1])])
        header = ["cache", "question", *map(str, lengths), "mean", "over full", "cold rows read, %"]
        return markdown_table([*header, "held / full K,V"], rows)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        both = len({cell["questions"] for cell, _ in results}) > 1
        percents = {}
        for cell, row in results:
            name = f"{cell['cache']}, {cell['questions']}" if both else cell["cache"]
            percents[name, cell["depth"], cell["length"]] = 100 * row["score"]
        plot_heat_maps(
            path,
            percents,
            rows={depth: f"{depth:g}" for depth in sorted({d for _, d, _ in percents})},
            columns={n: count_label(n) for n in sorted({n for _, _, n in percents})},
            title="needle in a haystack, right answers in %",
            x="tokens",
            y="depth of the needle, %",
        )
