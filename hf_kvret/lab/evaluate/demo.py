"""``hf-kvret demo``: one long document, many questions, and what each cache costs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.evaluate.needles import NeedleLanguage
from hf_kvret.lab.evaluate.reader import LayerRecall, Reader, UsageSum, check_positions, mean_recall
from hf_kvret.lab.evaluate.task import Task
from hf_kvret.lab.program.arguments import length
from hf_kvret.lab.program.options import count_option, option, with_default
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.plots import plot_groups
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import share, table_of

# Neither transformers' slower cache nor a method that decodes all rows: both take long.
_CACHES = ("static", "flat", "paris", "lrqk", "ctkvr", "a2ats")


@dataclass(frozen=True, kw_only=True)
class Demo(Task):
    """Ask the bundled model questions about one long document, and compare its caches.

    These are full attention and retrieval caches. It needs no network.
    """

    command: ClassVar[str] = "demo"
    name: ClassVar[str] = ""
    summary: ClassVar[str] = "ask questions about a long document, with the bundled model"
    examples: ClassVar[tuple[str, ...]] = ("hf-kvret demo --context 8K --caches static,paris",)

    model: str = "needle"
    device_map: str | None = None
    context: int = option(16_384, "document length in tokens, as 4096 or 4K", kind=length)
    caches: str | None = option(
        ",".join(_CACHES), "comma-separated, options after colons as lrqk:rank=16:store=resident"
    )
    questions: int = count_option(128, "needles asked for")
    store: str = with_default(Task, "store", "host")
    seed: int = with_default(Task, "seed", 0)
    recall_questions: int = 16
    """How many questions are asked again with recall measured."""

    def __post_init__(self) -> None:
        language = NeedleLanguage()
        most, least = language.most_needles, language.least_length(self.questions)
        if self.questions > most:
            raise ValueError(
                f"--questions {self.questions}: the language has {most} keys; ask fewer"
            )
        if self.context < least:
            raise ValueError(
                f"--context {self.context}: {self.questions} needles take at least {least} tokens; "
                "give a longer one, or fewer --questions"
            )

    def check(self) -> None:
        """Caches and context are refused before the document is read."""
        super().check()
        check_positions(self.subject.model, self._capacity)
        self.check_cells(self.cells())

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """One by one, after a line that says what is done."""
        if waiting := self.waiting(results):
            caches = ", ".join(cell["cache"] for cell in waiting)
            print(
                f"The bundled model reads {self.context:,} tokens and answers {self.questions} "
                f"questions about them, with each of these caches: {caches}.\n",
                file=sys.stderr,
            )
        yield from super().plan(results)

    def setup(self) -> dict[str, Any]:
        keys = ("context", "questions", "top_k", "store", "recall_questions", "seed")
        return {key: getattr(self, key) for key in (*keys, "dtype", "device")}

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [{"cache": name} for name in caches]

    @cached_property
    def _model(self) -> Any:
        model = self.subject.model
        with torch.inference_mode():
            # The first forward pass pays for start-up; no cache should.
            model(torch.zeros(1, 512, dtype=torch.long, device=model.device))
        return model

    @cached_property
    def _document(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[context]`` tokens, and of each question its tokens and its answer's."""
        language, rng = NeedleLanguage(), np.random.default_rng(self.seed)
        keys, values = language.pairs(rng, self.questions)
        document, _ = language.document(rng, self.context, keys, values)
        arrays = document, language.questions(keys), values
        tokens, prompts, answers = map(torch.from_numpy, arrays)
        return tokens, prompts, answers

    @property
    def _capacity(self) -> int:
        language = NeedleLanguage()
        return self.context + language.question_len + language.value_len

    def run(self, cell: Cell, choice: CacheChoice) -> Row:
        """Answers, bytes and reads of a cache.

        ``right_ratio`` is the share of questions answered with exactly the needle's value;
        ``tokens_per_second`` new tokens over the median time of a question, its reading included;
        ``read_ratio`` the share of the cold rows that decoding read, 1 for full attention;
        ``recall`` the share of the exact top-k that was selected and ``mass`` that of the cold
        attention on it, means over layers, None for caches that don't retrieve.
        """
        tokens, prompts, answers = self._document
        again = prompts[: self.recall_questions]
        reader = Reader(self._model, choice, self._capacity)
        reader.prefill(tokens)
        right, seconds, used = 0, [], UsageSum()
        example: Row = {}
        for prompt, answer in tqdm(
            list(zip(prompts, answers, strict=True)), desc=f"{choice.name}: questions", leave=False
        ):
            turn = reader.fork()
            given = turn.answer(turn.feed(prompt), len(answer))
            right += given == answer.tolist()
            asked = {"key": prompt[1:-1].tolist(), "right": answer.tolist()}
            example = example or asked | {"given": given}
            seconds.append(turn.seconds)
            used.add(turn)
        usage, recalls = reader.usage(), list[LayerRecall]()
        if isinstance(reader.cache, RetrievalCache):
            for prompt in tqdm(list(again), desc=f"{choice.name}: recall", leave=False):
                turn = reader.branch()
                turn.answer(turn.feed(prompt), answers.shape[1])
                recalls += turn.recalls()
        recall = mean_recall(recalls)
        return {
            "right_ratio": right / len(prompts),
            "prefill_seconds": reader.seconds,
            "tokens_per_second": answers.shape[1] / median(seconds),
            **usage.sizes,
            "read_ratio": used.usage.read_ratio or 0.0,
            "recall": recall["overlap"],
            "mass": recall["mass"],
            "example": example,
        }

    @classmethod
    def table(cls, results: Results) -> str:
        """A question and its answers, costs, and a conclusion."""
        setup = results.setup
        title = (
            f"{setup['questions']} questions about {setup['context']:,} tokens, {setup['dtype']}, "
            f"top_k={setup['top_k']}, store={setup['store']}"
        )
        texts = [title, _example(results), _costs(results), _conclusion(results)]
        return "\n\n".join(filter(None, texts))

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Answers, device bytes and rows read, a bar for each cache."""
        caches, rows = zip(*((cell["cache"], row) for cell, row in results), strict=True)
        panels = {
            "answers right": [row["right_ratio"] for row in rows],
            "device bytes / full K,V": [row["device_bytes"] / row["full_bytes"] for row in rows],
            "cold rows read": [row["read_ratio"] for row in rows],
        }
        title = f"{results.setup['context']:,} tokens of context"
        plot_groups(path, caches, panels, title=title, y="share")


def _example(results: Results) -> str:
    """The first question, and what each cache answers; the model's words are numbers."""
    examples = {cell["cache"]: row["example"] for cell, row in results if "example" in row}
    # Files of 0.1.0 have none.
    if not examples:
        return ""
    first = next(iter(examples.values()))
    key, right = (" ".join(map(str, first[name])) for name in ("key", "right"))
    given = "; ".join(
        f"{cache}: {' '.join(map(str, one['given']))}" for cache, one in examples.items()
    )
    return (
        f"One of the questions: which two words stand behind {key} in the document? (The words of "
        f"this model are numbers.) Right is {right}. Answers of {given}."
    )


def _conclusion(results: Results) -> str:
    """What full attention and the best cache that retrieves have in common, and what not."""
    rows = [(cell["cache"], row) for cell, row in results]
    full = next((one for one in rows if one[0] in ("full", "static")), None)
    caches = [one for one in rows if one[1]["recall"] is not None]
    if full is None or not caches:
        return ""
    name, best = max(caches, key=lambda one: (one[1]["right_ratio"], -one[1]["device_bytes"]))
    return (
        f"Conclusion: {name} answers {best['right_ratio']:.1%} of the questions right, full "
        f"attention ({full[0]}) {full[1]['right_ratio']:.1%}, and {name} reads "
        f"{best['read_ratio']:.1%} of the rows outside its window, with "
        f"{best['device_bytes'] / best['full_bytes']:.0%} of the bytes on the device."
    )


def _costs(results: Results) -> str:
    columns = {
        "cache": lambda cell, row: cell["cache"],
        "answers right": lambda cell, row: f"{row['right_ratio']:.1%}",
        "new tokens/s": lambda cell, row: f"{row['tokens_per_second']:.1f}",
        "prefill s": lambda cell, row: f"{row['prefill_seconds']:.1f}",
        "device MB": lambda cell, row: f"{row['device_bytes'] / 1e6:.1f}",
        "host MB": lambda cell, row: f"{row['host_bytes'] / 1e6:.1f}",
        "device / full K,V": lambda cell, row: f"{row['device_bytes'] / row['full_bytes']:.1%}",
        "cold rows read": lambda cell, row: f"{row['read_ratio']:.2%}",
        "recall@k": lambda cell, row: share(row["recall"]),
        "attention mass": lambda cell, row: share(row["mass"]),
    }
    return table_of(results, columns)
