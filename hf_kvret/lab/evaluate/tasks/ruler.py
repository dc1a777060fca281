"""RULER's 13 tasks, asked of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.needles import end_tokens
from hf_kvret.lab.evaluate.reader import Reader, UsageSum, begin
from hf_kvret.lab.evaluate.ruler.prompts import TASKS, Sample, generate, sample_score
from hf_kvret.lab.evaluate.task import Task
from hf_kvret.lab.evaluate.texts import encode, token_ids
from hf_kvret.lab.program.arguments import file_path, known_names
from hf_kvret.lab.program.options import context_option, count_option, option, questions_option
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.plots import count_label, plot_heat_maps
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import held, markdown_table, mean_or_dash


@dataclass(frozen=True, kw_only=True)
class Ruler(Task):
    """RULER: needles, variable tracking, word counts and questions at any length.

    A cell is a task at a length. With --questions inside, the whole prompt is read in one pass,
    the question too; with after, the context is read without it, as when many questions are
    asked about one document, and question and answer prefix are fed then. An answer ends early
    once all that counts is in it, which can't change its score.
    """

    name: ClassVar[str] = "ruler"
    summary: ClassVar[str] = "RULER's 13 tasks at any length"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval ruler --essays essays.json --squad squad.json --hotpot hotpot.json "
        "--context 4K,8K --samples 20 --caches full,flat,paris --json ruler.json",
    )

    tasks: tuple[str, ...] = option(
        tuple(TASKS), "comma-separated (default: all 13)", kind=known_names(TASKS)
    )
    context: tuple[int, ...] = context_option((4096,), "tokens, answer included")
    samples: int = count_option(20, "of each cell; RULER: 500")
    questions: tuple[str, ...] = questions_option()
    essays: Path | None = option(None, "haystack text: JSON or plain text", kind=file_path)
    squad: Path | None = option(None, "SQuAD or XQuAD JSON, for qa_1", kind=file_path)
    hotpot: Path | None = option(None, "HotpotQA distractor JSON, for qa_2", kind=file_path)

    def __post_init__(self) -> None:
        for task in self.tasks:
            option = TASKS[task].data
            if option is not None and getattr(self, option) is None:
                raise ValueError(f"task {task} needs --{option} FILE, or leave it out of --tasks")

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [
            {"cache": cache, "task": task, "length": length, "questions": questions}
            for length in self.context
            for task in self.tasks
            for questions in self.questions
            for cache in caches
        ]

    def check_cells(self, cells: Sequence[Cell]) -> None:
        super().check_cells(cells)
        for task in dict.fromkeys(cell["task"] for cell in cells):
            self._samples(task, min(cell["length"] for cell in cells), 1)

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        task = cell["task"]
        samples = self._samples(task, cell["length"], self.samples)
        scores, answers, used = [], [], UsageSum()
        for sample in tqdm(samples, leave=False, desc=f"{choice.name} {task}"):
            reader, answer = self._answer(sample, cell, choice)
            scores.append(sample_score(task, answer, sample.outputs))
            answers.append(answer)
            used.add(reader)
        return {
            "score": 100 * sum(scores) / len(scores),
            "scores": scores,
            "answers": answers,
            **used.row(),
        }

    def _samples(self, task: str, length: int, count: int) -> list[Sample]:
        tokenizer, data = self.subject.need_tokenizer(self.name), TASKS[task].data
        path = None if data is None else getattr(self, data)
        return generate(task, partial(token_ids, tokenizer), length, count, self.seed, path)

    def _answer(self, sample: Sample, cell: Cell, choice: CacheChoice) -> tuple[Reader, str]:
        """The reader and its greedy answer, which ends when it can't be scored better any more."""
        tokenizer, task = self.subject.need_tokenizer(self.name), TASKS[cell["task"]]
        whole = cell["questions"] == "inside"
        text = sample.question + sample.answer_prefix
        context = token_ids(tokenizer, sample.context + text if whole else sample.context)
        question = torch.tensor([] if whole else encode(tokenizer, text), dtype=torch.long)
        budget = task.max_new_tokens
        reader, logits = begin(self.subject.model, choice, context, question, budget, whole=whole)

        def decode(given: list[int]) -> str:
            return tokenizer.decode(given, skip_special_tokens=True)

        def right(given: list[int]) -> bool:
            return sample_score(task.name, decode(given), sample.outputs) == 1.0

        return reader, decode(reader.answer(logits, budget, end_tokens(self.subject), done=right))

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each task, the mean over all tasks, and the share of cold rows read.

        The mean is ``-`` while a task is missing, as means of different tasks mislead.
        """
        settings = sorted({(cell["length"], cell["questions"]) for cell, _ in results})
        caches = dict.fromkeys(cell["cache"] for cell, _ in results)
        columns: list[Cell] = [
            {"cache": cache, "length": n, "questions": q} for n, q in settings for cache in caches
        ]
        tasks = _tasks_of(results)

        def numbers(column: Cell, name: str, some: Sequence[str]) -> list[float]:
            rows = (results.find(column | {"task": task}) for task in some)
            return [row[name] for row in rows if row is not None and row[name] is not None]

        def score(column: Cell, *some: str) -> str:
            scores = numbers(column, "score", some)
            return mean_or_dash(scores if len(scores) == len(some) else [], ".1f")

        lines = [[task, *(score(column, task) for column in columns)] for task in tasks]
        lines.append(["mean", *(score(column, *tasks) for column in columns)])
        read = (numbers(column, "read_ratio", tasks) for column in columns)
        lines.append(["cold rows read", *(mean_or_dash(ratios, ".2%") for ratios in read)])
        rows = ([results.find(column | {"task": task}) for task in tasks] for column in columns)
        lines.append(["held / full K,V", *(held(*filter(None, some)) for some in rows)])
        header = (f"{one['cache']}, {one['length']} {one['questions']}" for one in columns)
        return markdown_table(["task", *header], lines)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        percents = {
            (cell["cache"], cell["task"], (cell["length"], cell["questions"])): row["score"]
            for cell, row in results
        }
        columns = sorted({column for _, _, column in percents})
        plot_heat_maps(
            path,
            percents,
            rows={task: task for task in _tasks_of(results)},
            columns={(n, questions): f"{count_label(n)} {questions}" for n, questions in columns},
            title="RULER, score in %",
            x="tokens, question",
            y="task",
        )


def _tasks_of(results: Results) -> list[str]:
    """The tasks that have a result, in RULER's order."""
    finished = {cell["task"] for cell, _ in results}
    return [task for task in TASKS if task in finished]
