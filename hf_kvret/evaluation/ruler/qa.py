"""The tasks ``qa_1`` and ``qa_2`` of RULER: questions about one of many documents.

arXiv 2404.06654, section 3.4. Templates and order of the random draws are those of
``scripts/data/synthetic/qa.py`` in NVIDIA/RULER (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hf_kvret.evaluation.ruler.data import QuestionSet
from hf_kvret.evaluation.ruler.fitting import (
    Draws,
    Fitted,
    Job,
    draw_fitting,
    fitting_size,
)
from hf_kvret.evaluation.ruler.prompts import Draft, Template

_INCREMENT = 10
_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
_TEMPLATE = (
    f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}\n\n"
    f"{_INSTRUCTION}\n\nQuestion: {{query}}"
)
_PREFIX = " Answer:"


class DocumentMaker:
    """Draws prompts that ask one of the questions."""

    def __init__(self, questions: QuestionSet, template: Template, draws: Draws) -> None:
        self._set = questions
        self._template = template
        self._draws = draws

    def draft(self, index: int, size: int) -> Draft:
        """Question ``index`` behind ``size`` documents, at least its gold ones.

        A size of all documents and more takes them all in order, over and over.
        """
        question = self._set.questions[index]
        documents = self._set.documents
        if size < len(documents):
            texts = [documents[i] for i in self._chosen(index, size)]
        else:
            repeats = -(-size // len(documents))
            texts = list((documents * repeats)[:size])
        self._draws.fresh().shuffle(texts)
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(texts, start=1))
        return self._template.fill(context, question.outputs, query=question.query)

    def _chosen(self, index: int, size: int) -> list[int]:
        """Gold documents, then some of the same article, then, if these run out, random others."""
        question = self._set.questions[index]
        rng = self._draws.python
        gold, related = list(question.gold), list(question.related)
        missing = size - len(gold)
        if missing <= len(related):
            return gold + rng.sample(related, max(missing, 0))
        known = {*gold, *related}
        others = [i for i in range(len(self._set.documents)) if i not in known]
        return gold + related + rng.sample(others, missing - len(related))


def document_samples(job: Job, questions: QuestionSet) -> Iterator[Fitted]:
    """The samples of a ``qa_*`` task; sample i asks question i.

    The number of documents is fitted to question 0.

    Raises:
        ValueError: more samples than questions, or the length is too short.
    """
    if job.samples > len(questions.questions):
        raise ValueError(
            f"samples={job.samples} for task {job.task.name!r}, but data.{job.task.data} has "
            f"{len(questions.questions)} questions: ask for at most that many"
        )
    template = Template.make(_TEMPLATE, _PREFIX, job.chat_template)
    maker = DocumentMaker(questions, template, job.draws)
    size = fitting_size(
        lambda size: job.count(maker.draft(0, size).prompt),
        job.length,
        _INCREMENT,
        job.task.max_new_tokens,
    )
    for index in range(job.samples):
        yield draw_fitting(job, partial(maker.draft, index), size, _INCREMENT)
