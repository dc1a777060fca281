"""Several questions in turn about one long context, on the cache that grows with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.needles import Document, contains
from hf_kvret.lab.evaluate.reader import Reader, UsageSum
from hf_kvret.lab.evaluate.tasks.niah import NeedleTask
from hf_kvret.lab.program import options as common
from hf_kvret.lab.program.arguments import one_or_both
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import Columns, held, or_dash, over_full, table_of

MODES = ("turns", "forks")


@dataclass(frozen=True, kw_only=True)
class MultiTurn(NeedleTask):
    """One context with a needle for each turn, read once without any question; then the questions.

    Mode "turns" asks them one after the other on the same cache. Earlier answers in it are the
    right ones, whatever the model said. Mode "forks" asks each question of a fork of the cache
    that has read the context only.
    """

    name: ClassVar[str] = "multiturn"
    summary: ClassVar[str] = "several questions in turn about one context"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval multiturn --context 4K,16K --turns 8 --caches full,flat,paris --plot "
        "turns.png",
    )

    context: tuple[int, ...] = common.context_option(
        (4096, 16384), "tokens, all questions and room for all answers included"
    )
    turns: int = common.count_option(8, "needles and questions")
    samples: int = common.count_option(4, "contexts of each length")
    modes: tuple[str, ...] = option(
        MODES[:1],
        "one cache for all questions, or a fork for each",
        kind=one_or_both(*MODES),
        metavar="{turns,forks,both}",
        name="--mode",
    )

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [
            {"cache": cache, "mode": mode, "length": length}
            for length in self.context
            for mode in self.modes
            for cache in caches
        ]

    def check_length(self, length: int) -> None:
        super().check_length(length)
        self._document(length, 0)

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        wording = self.wording
        right = np.zeros((self.samples, self.turns))
        used, answers = UsageSum(), []
        for sample in tqdm(range(self.samples), leave=False, desc=choice.name, unit="context"):
            document = self._document(cell["length"], sample)
            reader = Reader(self.subject.model, choice, cell["length"])
            reader.prefill(document.context)
            prefill_seconds = reader.seconds
            # Tokens of the last answer that the cache does not hold yet.
            pending: list[int] = []
            for turn, fact in enumerate(document.facts):
                question = torch.tensor([*pending, *fact.question])
                # A fork answers, so that what it says is gone.
                fork = reader.fork()
                given = fork.answer(fork.feed(question), wording.answer_len, wording.stop)
                used.add(fork)
                reply = wording.text(given)
                right[sample, turn] = contains(fact.answer, reply)
                answers.append({"turn": turn + 1, "expected": fact.answer, "given": reply})
                if cell["mode"] == "turns":
                    reader.feed(question)
                    # One a pass, as if the model had said them; the last comes with a question.
                    *fed, last = fact.gold
                    for token in fed:
                        reader.feed(torch.tensor([token]))
                    pending = [last]
            # Right answers that were fed count neither as rows read nor as time.
            used.count(replace(reader.usage(), rows_read=0, rows_cold=0), prefill_seconds)
        return {
            "right": right.mean(axis=0).tolist(),
            "mean": float(right.mean()),
            "answers": answers,
            **used.row(),
        }

    def _document(self, length: int, sample: int) -> Document:
        # The same document for every cache and mode. Depths are drawn, so turns don't follow the
        # text's order.
        rng = np.random.default_rng([self.seed, length, sample])
        depths = (100 * rng.random(self.turns)).tolist()
        return self.wording.document(rng, length, depths, self.turns, sample / self.samples)

    @classmethod
    def table(cls, results: Results) -> str:
        columns: Columns = {
            "cache": lambda cell, row: cell["cache"],
            "mode": lambda cell, row: cell["mode"],
            "length": lambda cell, row: str(cell["length"]),
            **{f"turn {n + 1}": partial(_right, n) for n in range(results.setup["turns"])},
            "mean": lambda cell, row: f"{100 * row['mean']:.1f}",
            "over full": lambda cell, row: or_dash(
                over_full(results, cell, row, "mean"), "+.1f", 100
            ),
            "cold rows read, %": lambda cell, row: or_dash(row["read_ratio"], ".2f", 100),
            "held / full K,V": lambda cell, row: held(row),
        }
        return table_of(results, columns)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        both = len({cell["mode"] for cell, _ in results}) > 1
        shares: dict[str, list[list[float]]] = {}
        for cell, row in results:
            name = f"{cell['cache']}, {cell['mode']}" if both else cell["cache"]
            shares.setdefault(name, []).append(row["right"])
        turns = [float(turn + 1) for turn in range(results.setup["turns"])]
        lines = {
            name: (turns, (100 * np.mean(some, axis=0)).tolist()) for name, some in shares.items()
        }
        lengths = ", ".join(str(length) for length in sorted({c["length"] for c, _ in results}))
        title = f"questions in turn on one cache, contexts of {lengths} tokens"
        plot_lines(path, lines, title=title, x="turn", y="right answers, %", low=-3, high=103)


def _right(turn: int, cell: Cell, row: dict[str, Any]) -> str:
    return f"{100 * row['right'][turn]:.0f}"
