"""Scores of RULER: which references occur in an answer, letter case aside.

Source: ``scripts/eval/evaluate.py`` and ``scripts/eval/synthetic/constants.py`` of NVIDIA/RULER
(Apache-2.0), and arXiv 2404.06654, section 4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hf_kvret.evaluation.ruler.task import known_task

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """The answer as it is scored: each control character 0x00-0x1f a newline, then stripped."""
    return _CONTROL.sub("\n", prediction).strip()


def sample_score(task: str, prediction: str, references: Sequence[str]) -> float:
    """Score of one answer, 0 to 1.

    Metric ``all``: the share of the references that are substrings of the cleaned answer; ``part``
    (``qa_*``): 1.0 if any of them is. Upper and lower case are the same.

    Raises:
        TypeError: ``references`` is one text instead of a sequence of texts.
        ValueError: an unknown task, or no references.
    """
    metric = known_task(task).metric
    if isinstance(references, str):
        raise TypeError(
            f"references={references!r} is a text: give the sequence of all right answers of the "
            f"sample, such as [{references!r}]"
        )
    if not references:
        raise ValueError("references is empty: a sample needs at least one right answer")
    text = clean(prediction).lower()
    found = [float(reference.lower() in text) for reference in references]
    return max(found) if metric == "part" else sum(found) / len(found)


def score(task: str, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean of :func:`sample_score` over all samples, in percent and unrounded.

    RULER's tables round it to two decimals.

    Raises:
        ValueError: an unknown task, no predictions, or not as many as there are references.
    """
    known_task(task)
    if len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions for {len(references)} samples: give one answer, "
            f"possibly empty, for every sample"
        )
    if not predictions:
        raise ValueError("predictions is empty: there is nothing to score")
    scores = [
        sample_score(task, prediction, right)
        for prediction, right in zip(predictions, references, strict=True)
    ]
    return sum(scores) / len(scores) * 100
