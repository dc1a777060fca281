"""LongBench's English tasks, asked of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from hf_kvret.evaluation.arguments import file_path, known_names, whole_number
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.common_options import questions_option
from hf_kvret.evaluation.haystack import end_tokens
from hf_kvret.evaluation.longbench import (
    BUCKETS,
    LONG_TASKS,
    PROMPTS,
    LongData,
    LongPrompt,
    LongSample,
    bucket,
    download,
    fill,
    read_prompts,
    score_bars,
    score_table,
    split_template,
)
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.plots import plot_groups
from hf_kvret.evaluation.reader import Reader, begin, check_positions
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.task import Choices, Task, mean_points
from hf_kvret.evaluation.texts import chat_parts, token_ids
from hf_kvret.evaluation.usage import UsageSum

# LongBench reads 3,500 tokens with a model of 4,096: room for the answer and a chat template.
_ROOM = 596


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """LongBench: questions, summaries, few-shot tasks and code about long texts."""

    name: ClassVar[str] = "longbench"
    summary: ClassVar[str] = "LongBench v1's 16 English tasks, or LongBench-E"
    description: ClassVar[str] = (
        "LongBench: questions, summaries, few-shot tasks and code about long texts. Prompts, "
        "cutting in the middle, answer lengths and scores are those of LongBench v1's 16 "
        "English tasks. With --questions inside, the whole prompt is read in one pass; with "
        "after, what stands before the question is read without it."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval longbench --data data.zip --tasks qasper,hotpotqa,trec --samples 50 "
        "--max-length 7500 --caches full,flat,paris --json longbench.json",
    )

    path: Path | None = option(
        None,
        "LongBench's data.zip, or a folder with <task>.jsonl; this or --hub-id",
        kind=file_path,
        metavar="DATA",
        name="--data",
    )
    hub_id: str | None = option(None, "download data.zip from there: THUDM/LongBench", metavar="ID")
    tasks: tuple[str, ...] = option(
        (), "comma-separated (default: all)", kind=known_names(LONG_TASKS)
    )
    samples: int | None = option(
        None, "the first so many of a task; default: all", kind=whole_number(1)
    )
    e: bool = option(False, "LongBench-E: 13 tasks, scores by length of the text")
    questions: tuple[str, ...] = questions_option()
    max_length: int | None = option(
        None,
        "a longer prompt loses its middle; default: the positions of the model's configuration "
        f"less {_ROOM}. LongBench: 3500, 7500, 15500, 31500",
        kind=whole_number(2),
    )
    prompts: Path | None = option(
        None, "templates of yours: dataset2prompt.json", kind=file_path, metavar="FILE"
    )
    chat: bool = option(
        False, "wrap prompts in the tokenizer's chat template, but for few-shot and code tasks"
    )

    @cached_property
    def data(self) -> LongData:
        """The texts and questions; downloaded where a hub id is given."""
        path = self.path if self.path is not None else download(str(self.hub_id))
        return LongData(path, self.e)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The tasks to be run."""
        return self.tasks or tuple(self._known())

    def _known(self) -> list[str]:
        return [name for name, task in LONG_TASKS.items() if task.even or not self.e]

    def __post_init__(self) -> None:
        if (self.path is None) == (self.hub_id is None):
            raise ValueError("give one of --data and --hub-id")
        unknown = [name for name in self.tasks if name not in self._known()]
        if unknown:
            raise ValueError(
                f"--tasks {unknown[0]}: no LongBench-E task, choose among "
                f"{', '.join(self._known())}"
            )

    def check(self) -> None:
        super().check()
        for name in self.chosen:
            self.data.read(name, self.samples)
            template = self._template(name)
            if "after" in self.questions and "{input}" in split_template(template)[0]:
                raise ValueError(
                    f"--prompts {self.prompts}, {name}: the question stands before the context: "
                    "use --questions inside"
                )

    def details(self) -> dict[str, Any]:
        prompts = "LongBench"
        if self.prompts is not None:
            digest = sha256(self.prompts.read_bytes()).hexdigest()[:12]
            prompts = f"{self.prompts.name} {digest}"
        # All files there are, so that a run with more of --tasks goes on with the same results.
        files = {name: self.data.fingerprint(name) for name in LONG_TASKS}
        return {
            "data": {name: found for name, found in files.items() if found is not None},
            "e": self.data.even,
            "samples": self.samples,
            "max_length": self.max_length,
            "prompts": prompts,
            "chat": self.chat,
        }

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [
            {"cache": cache, "task": task, "questions": questions}
            for task in self.chosen
            for questions in self.questions
            for cache in caches
        ]

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        for task in dict.fromkeys(cell["task"] for cell in cells):
            (sample,) = self.data.read(task, 1)
            prompt = self._prompt(sample, {"task": task, "questions": "inside"}, subject)
            tokens = token_ids(subject.need_tokenizer(self.name), prompt.context)
            check_positions(subject.model, len(tokens))

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        task = LONG_TASKS[cell["task"]]
        samples = _samples(self.data, task.name, self.samples)
        scores, answers, cut, used = [], [], 0, UsageSum()
        for sample in tqdm(samples, leave=False, desc=f"{choice.name} {task.name}"):
            prompt = self._prompt(sample, cell, subject)
            reader, answer = self._answer(prompt, cell, subject, choice)
            scores.append(task.score(answer, sample.answers, sample.classes))
            answers.append(answer)
            cut += prompt.cut
            used.add(reader)
        return {
            "score": 100 * fmean(scores),
            "buckets": _by_bucket(samples, scores) if self.data.even else None,
            "scores": scores,
            "answers": answers,
            "cut": cut,
            "max_length": self._max_length(subject),
            **used.row(),
        }

    def _template(self, task: str) -> str:
        prompts = PROMPTS if self.prompts is None else read_prompts(self.prompts)
        if task not in prompts:
            raise ValueError(f"--prompts {self.prompts} has no template for {task}: add one")
        return prompts[task]

    def _max_length(self, subject: Subject) -> int:
        if self.max_length is not None:
            return self.max_length
        config = subject.model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", 0)
        if positions < 2 * _ROOM:
            raise ValueError(
                f"{subject.name} has {positions} positions, too few to leave {_ROOM} for the "
                "answer: give --max-length"
            )
        return positions - _ROOM

    def _prompt(self, sample: LongSample, cell: Cell, subject: Subject) -> LongPrompt:
        tokenizer = subject.need_tokenizer(self.name)
        chat = ("", "")
        if self.chat and LONG_TASKS[cell["task"]].chat:
            chat = chat_parts(tokenizer)
        return fill(
            self._template(cell["task"]),
            sample,
            tokenizer,
            self._max_length(subject),
            cell["questions"] == "inside",
            chat,
        )

    def _answer(
        self, prompt: LongPrompt, cell: Cell, subject: Subject, choice: CacheChoice
    ) -> tuple[Reader, str]:
        """The reader after the answer, and the answer."""
        tokenizer, task = subject.need_tokenizer(self.name), LONG_TASKS[cell["task"]]
        tokens = token_ids(tokenizer, prompt.context)
        rest = tokenizer(prompt.question, add_special_tokens=False)["input_ids"]
        stop = set(end_tokens(subject))
        barred: set[int] = set()
        if task.stop_at_newline:
            stop.add(tokenizer("\n", add_special_tokens=False)["input_ids"][-1])
            barred = stop
        reader, question = begin(
            subject.model,
            choice,
            tokens,
            torch.tensor(rest, dtype=torch.long),
            task.max_new_tokens,
            whole=not prompt.question,
        )
        given = reader.answer(question, task.max_new_tokens, stop, barred=barred)
        return reader, tokenizer.decode(given, skip_special_tokens=True)

    @classmethod
    def table(cls, results: Results) -> str:
        return score_table(results)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        groups, bars = score_bars(results)
        title = "LongBench-E" if results.setup["e"] else "LongBench"
        plot_groups(path, groups, bars, title=title, y="score")

    @classmethod
    def accuracy(cls, results: Results) -> dict[str, tuple[float, float]]:
        return mean_points(results, "score", 100.0)


@lru_cache(maxsize=1)
def _samples(data: LongData, task: str, count: int | None) -> list[LongSample]:
    """Read once for all caches of a row."""
    return data.read(task, count)


def _by_bucket(samples: Sequence[LongSample], scores: Sequence[float]) -> dict[str, float | None]:
    """LongBench-E's means by length; None for a bucket without samples."""
    found: dict[str, list[float]] = {name: [] for name in BUCKETS}
    for sample, score in zip(samples, scores, strict=True):
        found[bucket(sample.length)].append(score)
    return {name: 100 * fmean(part) if part else None for name, part in found.items()}
