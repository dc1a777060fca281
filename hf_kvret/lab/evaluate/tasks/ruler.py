"""RULER's 13 tasks, asked of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tqdm import tqdm
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.haystack import end_tokens
from hf_kvret.lab.evaluate.reader import Reader, begin, check_positions
from hf_kvret.lab.evaluate.ruler import TASKS, RulerData, Sample, generate, sample_score
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.task import Choices, Task, lengths_of, mean_points
from hf_kvret.lab.evaluate.texts import chat_parts, token_ids
from hf_kvret.lab.evaluate.usage import UsageSum
from hf_kvret.lab.program.arguments import file_path, known_names
from hf_kvret.lab.program.common_options import context_option, count_option, questions_option
from hf_kvret.lab.program.options import option
from hf_kvret.lab.report.plots import count_label, plot_heat_maps
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import markdown_table


@dataclass(frozen=True, kw_only=True)
class Ruler(Task):
    """RULER: needles, variable tracking, word counts and questions at any length."""

    name: ClassVar[str] = "ruler"
    summary: ClassVar[str] = "RULER's 13 tasks at any length"
    description: ClassVar[str] = (
        "RULER: needles, variable tracking, word counts and questions at any length. A cell is "
        "a task at a length. With --questions inside, the whole prompt is read in one pass, the "
        "question too; with after, the context is read without it, as when many questions are "
        "asked about one document, and question and answer prefix are fed then. An answer ends "
        "early once all that counts is in it, which can't change its score."
    )
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
    english_words: Path | None = option(None, "more words for cwe from 128K on", kind=file_path)
    chat: bool = option(False, "wrap prompts in the tokenizer's chat template")

    @property
    def data(self) -> RulerData:
        """The files of texts and words."""
        return RulerData(self.essays, self.squad, self.hotpot, self.english_words)

    def __post_init__(self) -> None:
        for task in self.tasks:
            option = TASKS[task].data
            path = None if option is None else getattr(self.data, option)
            if option is not None and path is None:
                raise ValueError(f"task {task} needs --{option} FILE, or leave it out of --tasks")
            if path is not None and not path.is_file():
                raise FileNotFoundError(f"--{option} {path}: no such file")

    def details(self) -> dict[str, Any]:
        files = {
            name: None
            if path is None
            else f"{path.name} {sha256(path.read_bytes()).hexdigest()[:12]}"
            for name, path in asdict(self.data).items()
        }
        return {"samples": self.samples, "chat": self.chat, **files}

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [
            {"cache": cache, "task": task, "length": length, "questions": questions}
            for length in self.context
            for task in self.tasks
            for questions in self.questions
            for cache in caches
        ]

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        tokenizer = subject.need_tokenizer(self.name)
        lengths = lengths_of(cells)
        if lengths:
            check_positions(subject.model, lengths[-1])
        for task in dict.fromkeys(cell["task"] for cell in cells):
            _samples(task, tokenizer, lengths[0], 1, self.seed, self.data, self.chat)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        tokenizer = subject.need_tokenizer(self.name)
        task = TASKS[cell["task"]]
        samples = _samples(
            task.name, tokenizer, cell["length"], self.samples, self.seed, self.data, self.chat
        )
        stop = end_tokens(subject)
        scores, answers, used = [], [], UsageSum()
        for sample in tqdm(samples, leave=False, desc=f"{choice.name} {task.name}"):
            reader, tokens = self._read(sample, cell, subject, choice, task.max_new_tokens)
            answer = _answer(
                reader, tokens, task.max_new_tokens, tokenizer, stop, task.name, sample
            )
            scores.append(sample_score(task.name, answer, sample.outputs))
            answers.append(answer)
            used.add(reader)
        return {
            "score": 100 * sum(scores) / len(scores),
            "scores": scores,
            "answers": answers,
            **used.row(),
        }

    def _read(
        self, sample: Sample, cell: Cell, subject: Subject, choice: CacheChoice, budget: int
    ) -> tuple[Reader, torch.Tensor]:
        """A reader that has read all that comes before the answer but for the returned tokens."""
        tokenizer = subject.need_tokenizer(self.name)
        whole = cell["questions"] == "inside"
        text = sample.question + sample.answer_prefix
        first = sample.context + text if whole else sample.context
        context = token_ids(tokenizer, first)
        rest = [] if whole else tokenizer(text, add_special_tokens=False)["input_ids"]
        question = torch.tensor(rest, dtype=torch.long)
        return begin(subject.model, choice, context, question, budget, whole=whole)

    @classmethod
    def table(cls, results: Results) -> str:
        columns = sorted({(cell["length"], cell["questions"]) for cell, _ in results})
        caches = list(dict.fromkeys(cell["cache"] for cell, _ in results))
        found = {_place(cell): result for cell, result in results}
        tasks = [task for task in TASKS if any(cell["task"] == task for cell, _ in results)]
        header = ["task", *(f"{cache}, {n} {q}" for n, q in columns for cache in caches)]
        places = [(cache, n, q) for n, q in columns for cache in caches]
        rows = []
        for task in tasks:
            scores = [found.get((task, *place)) for place in places]
            rows.append([task, *("-" if s is None else f"{s['score']:.1f}" for s in scores)])
        for name, value in (("mean", _mean_score), ("cold rows read", _mean_read)):
            rows.append([name, *(value(found, tasks, place) for place in places)])
        return markdown_table(header, rows)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        columns = sorted({(cell["length"], cell["questions"]) for cell, _ in results})
        tasks = [task for task in TASKS if any(cell["task"] == task for cell, _ in results)]
        maps: dict[str, np.ndarray] = {}
        for cell, result in results:
            values = maps.setdefault(cell["cache"], np.full((len(tasks), len(columns)), np.nan))
            column = columns.index((cell["length"], cell["questions"]))
            values[tasks.index(cell["task"]), column] = result["score"]
        plot_heat_maps(
            path,
            maps,
            rows=tasks,
            columns=[f"{count_label(length)} {questions}" for length, questions in columns],
            title="RULER, score in %",
            x="tokens, question",
            y="task",
            high=100.0,
        )

    @classmethod
    def accuracy(cls, results: Results) -> dict[str, tuple[float, float]]:
        return mean_points(results, "score", 100.0)


@lru_cache(maxsize=1)
def _samples(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    seed: int,
    data: RulerData,
    chat: bool,
) -> list[Sample]:
    """The samples of a cell; all caches of a row get the same ones, made once."""

    def tokens(text: str) -> torch.Tensor:
        return token_ids(tokenizer, text)

    if not chat:
        return generate(task, tokens, length, count, seed, data)
    before, after = chat_parts(tokenizer)
    return generate(task, tokens, length, count, seed, data, lambda text: f"{before}{text}{after}")


Place = tuple[str, str, int, str]


def _place(cell: Cell) -> Place:
    return cell["task"], cell["cache"], cell["length"], cell["questions"]


def _mean_score(
    found: dict[Place, dict[str, Any]], tasks: list[str], place: tuple[str, int, str]
) -> str:
    """The mean over all tasks; ``-`` while one is missing, as means of different tasks mislead."""
    scores = [found[task, *place]["score"] for task in tasks if (task, *place) in found]
    return f"{sum(scores) / len(scores):.1f}" if len(scores) == len(tasks) else "-"


def _mean_read(
    found: dict[Place, dict[str, Any]], tasks: list[str], place: tuple[str, int, str]
) -> str:
    ratios = [found[task, *place]["read_ratio"] for task in tasks if (task, *place) in found]
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{sum(known) / len(known):.2%}" if known else "-"


def _answer(
    reader: Reader,
    tokens: torch.Tensor,
    budget: int,
    tokenizer: PreTrainedTokenizerBase,
    stop: frozenset[int],
    task: str,
    sample: Sample,
) -> str:
    """Greedy text of at most ``budget`` tokens; ends when it can't be scored better any more."""

    def text(given: list[int]) -> str:
        return tokenizer.decode(given, skip_special_tokens=True)

    def right(given: list[int]) -> bool:
        return sample_score(task, text(given), sample.outputs) == 1.0

    return text(reader.answer(tokens, budget, stop, done=right))
