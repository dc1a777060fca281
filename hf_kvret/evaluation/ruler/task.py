"""The 13 tasks of RULER by name, and what a sample of one holds.

RULER: Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language
Models?", arXiv 2404.06654. Names, output budgets and metrics are those of
``scripts/synthetic.yaml`` and ``scripts/data/synthetic/constants.py`` in its repository
NVIDIA/RULER (Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Metric = Literal["all", "part"]
"""``all``: the share of the references that were found; ``part``: whether any was."""

DataOption = Literal["essays", "squad", "hotpot"]
"""The option of :class:`RulerData` that a task reads."""


@dataclass(frozen=True)
class RulerTask:
    """One task.

    Attributes:
        name: key in :data:`TASKS`.
        max_new_tokens: tokens that an answer may have; they count towards a sample's length.
        metric: how references count, see :func:`score`.
        data: option of :class:`RulerData` without which the task can't be made; None where it
            makes up its own text.
    """

    name: str
    max_new_tokens: int
    metric: Metric
    data: DataOption | None = None


@dataclass(frozen=True)
class Sample:
    """One prompt, in the parts that a model may be given apart, and its right answers.

    The model is asked ``context + question + answer_prefix``. ``context`` can be read before the
    question is known.

    Attributes:
        index: number of the sample in its call of :func:`generate`, from 0. (RULER's scripts
            overwrite theirs with the character position of the first needle in ``niah_*``.)
        context: chat template, instruction, one-shot example and haystack.
        question: what stands behind the haystack, with the chat template's end.
        answer_prefix: beginning of the answer that is put into the model's mouth.
        outputs: references; what they count for is up to the task's metric.
        length: tokens of the whole prompt plus ``max_new_tokens``.
    """

    index: int
    context: str
    question: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int

    @property
    def input(self) -> str:
        """``context + question``: the prompt without the answer prefix, as RULER's files have it.

        Put together on demand, so that a long sample is in memory once.
        """
        return self.context + self.question


def _task(
    name: str, max_new_tokens: int, metric: Metric = "all", data: DataOption | None = None
) -> RulerTask:
    return RulerTask(name, max_new_tokens, metric, data)


TASKS: dict[str, RulerTask] = {
    task.name: task
    for task in (
        _task("niah_single_1", 128),
        _task("niah_single_2", 128, data="essays"),
        _task("niah_single_3", 128, data="essays"),
        _task("niah_multikey_1", 128, data="essays"),
        _task("niah_multikey_2", 128),
        _task("niah_multikey_3", 128),
        _task("niah_multivalue", 128, data="essays"),
        _task("niah_multiquery", 128, data="essays"),
        _task("vt", 30),
        _task("cwe", 120),
        _task("fwe", 50),
        _task("qa_1", 32, "part", "squad"),
        _task("qa_2", 32, "part", "hotpot"),
    )
}
"""All tasks by name, in the order of RULER's tables."""


def known_task(name: str) -> RulerTask:
    """The task of that name; ValueError that lists all names where there is none."""
    if name not in TASKS:
        raise ValueError(f"task={name!r} is not a RULER task; known are {', '.join(TASKS)}")
    return TASKS[name]
