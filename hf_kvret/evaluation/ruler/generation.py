"""``generate``: the samples of any RULER task, made from a tokenizer, a length and a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Protocol

from hf_kvret.evaluation.ruler import data as files
from hf_kvret.evaluation.ruler.aggregation import coded_text_samples, common_word_samples
from hf_kvret.evaluation.ruler.data import RulerData
from hf_kvret.evaluation.ruler.fitting import Draws, Fitted, Job
from hf_kvret.evaluation.ruler.niah import NEEDLE_TASKS, Essays, needle_samples
from hf_kvret.evaluation.ruler.prompts import ChatTemplate
from hf_kvret.evaluation.ruler.qa import document_samples
from hf_kvret.evaluation.ruler.sentences import best_splitter
from hf_kvret.evaluation.ruler.task import Sample, known_task
from hf_kvret.evaluation.ruler.tracking import tracking_samples

_NO_DATA = RulerData()


class Tokenizer(Protocol):
    """What is needed of a tokenizer: the tokens of a text, of which only the number counts."""

    def encode(self, text: str, /) -> Sized:
        """The tokens of ``text``."""
        ...


def generate(
    task: str,
    tokenizer: Tokenizer | Callable[[str], Sized],
    length: int,
    samples: int,
    seed: int = 42,
    data: RulerData = _NO_DATA,
    chat_template: ChatTemplate | None = None,
) -> list[Sample]:
    """The first ``samples`` samples of a RULER task at ``length`` tokens, answers included.

    Draws the same random numbers in the same order as RULER's scripts do, so the same arguments
    and texts give RULER's samples, letter for letter; on essays, if NLTK's sentences are there
    (see ``sentence_splitter``). A larger ``samples`` begins with the same ones. We depart from
    RULER where it never ends or fails, which is noted at the functions of each task. The state of
    ``random`` and ``numpy.random`` is left alone.

    Args:
        task: name in ``TASKS``.
        tokenizer: has ``encode(text)``, or is itself a function from a text to its tokens. A
            tokenizer of transformers is taken with its default, special tokens included; RULER
            counts without them: ``lambda text: tokenizer.encode(text, add_special_tokens=False)``.
        length: most tokens that prompt, with special tokens as counted, and answer may have. RULER
            takes powers of two from 4096 to 131072.
        samples: how many; RULER takes 500.
        seed: of all random numbers; RULER takes 42.
        data: where the texts of the tasks are, see there which task needs which.
        chat_template: puts a message into the model's chat format, up to and with the header of
            the assistant's turn; None for base models. It is called with the task's template
            unfilled, placeholders in braces, and must keep it unchanged.

    Raises:
        TypeError: ``tokenizer`` can't encode.
        ValueError: an unknown task; a length that no sample fits into, with one that would do;
            texts that are missing, too few or of another format; a chat template that changes its
            message.
        FileNotFoundError: no file at a path of ``data``.
        ModuleNotFoundError: wonderwords is not installed.
    """
    if samples < 1:
        raise ValueError(f"samples={samples}: ask for at least 1")
    if length < 1:
        raise ValueError(f"length={length}: RULER starts at 4096 tokens; give a positive number")
    job = Job(
        task=known_task(task),
        length=length,
        samples=samples,
        count=_counter(tokenizer),
        draws=Draws(seed),
        chat_template=chat_template,
    )
    return [
        Sample(
            index=index,
            context=fitted.draft.context,
            question=fitted.draft.question,
            answer_prefix=fitted.draft.answer_prefix,
            outputs=fitted.draft.outputs,
            length=fitted.length,
        )
        for index, fitted in enumerate(_fitted(job, data))
    ]


def _fitted(job: Job, data: RulerData) -> Iterator[Fitted]:
    name = job.task.name
    if name in NEEDLE_TASKS:
        return needle_samples(
            job, lambda: Essays(files.read_essay_words(data, name), best_splitter())
        )
    if name == "vt":
        return tracking_samples(job)
    if name == "cwe":
        return common_word_samples(job, files.read_english_words(data, name))
    if name == "fwe":
        return coded_text_samples(job)
    read = files.read_squad if job.task.data == "squad" else files.read_hotpot
    return document_samples(job, read(data, name))


def _counter(tokenizer: Tokenizer | Callable[[str], Sized]) -> Callable[[str], int]:
    """The number of tokens of a text."""
    encode = getattr(tokenizer, "encode", tokenizer)
    if not callable(encode):
        raise TypeError(
            f"tokenizer={tokenizer!r} has no encode method and can't be called: give a tokenizer "
            f"or a function from a text to its tokens"
        )

    def count(text: str) -> int:
        tokens = len(encode(text))
        if not tokens:
            raise ValueError(f"tokenizer={tokenizer!r} makes no tokens of {text[:60]!r}...")
        return tokens

    return count
