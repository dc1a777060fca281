"""LongBench's 16 English tasks: how long an answer may be, and what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_kvret.evaluation.longbench import metrics

# Upper bounds of the `length` field, in words, of LongBench-E's buckets.
BUCKETS: dict[str, float] = {"0-4k": 4000, "4-8k": 8000, "8k+": float("inf")}


@dataclass(frozen=True)
class LongTask:
    """One data set of LongBench v1.

    Attributes:
        max_new_tokens: of the answer.
        metric: ``(answer, reference, class names)`` to 0..1.
        chat: the prompt is put into a chat template, where one is used.
        first_line: only the answer's first line counts.
        stop_at_newline: the answer ends at a line break, but for one at its very start.
        even: LongBench-E has it.
    """

    name: str
    max_new_tokens: int
    metric: Callable[[str, str, Sequence[str]], float]
    chat: bool = True
    first_line: bool = False
    stop_at_newline: bool = False
    even: bool = True

    def score(self, answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
        """The best score over the references, in 0..1; 0 without any."""
        if self.first_line:
            answer = answer.lstrip("\n").split("\n")[0]
        return max(
            (self.metric(answer, reference, classes) for reference in references), default=0.0
        )


LONG_TASKS: dict[str, LongTask] = {
    task.name: task
    for task in (
        LongTask("narrativeqa", 128, metrics.word_f1, even=False),
        LongTask("qasper", 128, metrics.word_f1),
        LongTask("multifieldqa_en", 64, metrics.word_f1),
        LongTask("hotpotqa", 32, metrics.word_f1),
        LongTask("2wikimqa", 32, metrics.word_f1),
        LongTask("musique", 32, metrics.word_f1, even=False),
        LongTask("gov_report", 512, metrics.rouge_l),
        LongTask("qmsum", 512, metrics.rouge_l, even=False),
        LongTask("multi_news", 512, metrics.rouge_l),
        LongTask("trec", 64, metrics.classification, chat=False, first_line=True),
        LongTask("triviaqa", 32, metrics.word_f1, chat=False, first_line=True),
        LongTask("samsum", 128, metrics.rouge_l, chat=False, first_line=True, stop_at_newline=True),
        LongTask("passage_count", 32, metrics.count),
        LongTask("passage_retrieval_en", 32, metrics.retrieval),
        LongTask("lcc", 64, metrics.code_similarity, chat=False),
        LongTask("repobench-p", 64, metrics.code_similarity, chat=False),
    )
}


def bucket(length: int) -> str:
    """LongBench-E's bucket for a ``length`` in words."""
    return next(name for name, bound in BUCKETS.items() if length < bound)
