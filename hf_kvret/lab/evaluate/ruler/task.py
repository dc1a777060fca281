"""The 13 tasks of RULER by name, what a sample of one holds, and what an answer is worth.

Names, lengths of answers and scores are those of ``scripts/synthetic.yaml``,
``scripts/data/synthetic/constants.py`` and ``scripts/eval`` in NVIDIA/RULER (Apache-2.0).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Symbols = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class RulerTask:
    """One task.

    Attributes:
        name: key in :data:`TASKS`.
        max_new_tokens: tokens that an answer may have; they count towards a sample's length.
        metric: ``all`` counts the share of the references that are in the answer, ``part``
            whether any is.
        data: the file that the task needs; None where it makes up its text.
        haystack: what hides the needles of ``niah_*`` without essays: noise, or other needles.
        key, value: what keys and values of needles look like.
        keys, values: how many keys there are, how many values each has, one needle for each.
        queries: how many of the keys are asked for.
    """

    name: str
    max_new_tokens: int
    metric: Literal["all", "part"] = "all"
    data: Literal["essays", "squad", "hotpot"] | None = None
    haystack: Literal["noise", "needles"] = "noise"
    key: Symbols = "words"
    value: Symbols = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


TASKS: dict[str, RulerTask] = {
    task.name: task
    for task in (
        RulerTask("niah_single_1", 128),
        RulerTask("niah_single_2", 128, data="essays"),
        RulerTask("niah_single_3", 128, data="essays", value="uuids"),
        RulerTask("niah_multikey_1", 128, data="essays", keys=4),
        RulerTask("niah_multikey_2", 128, haystack="needles"),
        RulerTask("niah_multikey_3", 128, haystack="needles", key="uuids", value="uuids"),
        RulerTask("niah_multivalue", 128, data="essays", values=4),
        # As many keys as are asked for, as RULER makes it.
        RulerTask("niah_multiquery", 128, data="essays", keys=4, queries=4),
        RulerTask("vt", 30),
        RulerTask("cwe", 120),
        RulerTask("fwe", 50),
        RulerTask("qa_1", 32, metric="part", data="squad"),
        RulerTask("qa_2", 32, metric="part", data="hotpot"),
    )
}
"""All tasks by name, in the order of RULER's tables."""


@dataclass(frozen=True)
class Sample:
    """One prompt, in the parts that a model may be given apart, and its right answers.

    Attributes:
        context: instruction, one-shot example and haystack. It can be read before the question is
            known.
        question: the text behind the haystack.
        answer_prefix: beginning of the answer that is put into the model's mouth.
        outputs: references; the task's metric says how they count.
    """

    context: str
    question: str
    answer_prefix: str
    outputs: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """All that the model is given."""
        return self.context + self.question + self.answer_prefix


def sample_score(task: str, prediction: str, references: Sequence[str]) -> float:
    """Score of one answer, 0 to 1: references count where they are substrings, case aside.

    In the answer each control character 0x00-0x1f is a newline first, and the ends are stripped.
    """
    text = re.sub(r"[\x00-\x1f]", "\n", prediction).strip().lower()
    scores = [float(reference.lower() in text) for reference in references]
    return max(scores) if TASKS[task].metric == "part" else sum(scores) / len(scores)
