"""The tasks ``cwe`` and ``fwe`` of RULER: which words are frequent (arXiv 2404.06654, section 3.3).

``cwe`` lists words, ten of them ten times as often as the others; ``fwe`` is a text of coded words
with Zipf frequencies. Templates and order of the random draws are those of
``scripts/data/synthetic/common_words_extraction.py`` and ``freq_words_extraction.py`` in
NVIDIA/RULER (Apache-2.0).
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hf_kvret.evaluation.ruler.fitting import (
    SHORT_LEN,
    Draws,
    Fitted,
    Job,
    draw_fitting,
    largest_size,
)
from hf_kvret.evaluation.ruler.prompts import Draft, Template
from hf_kvret.evaluation.ruler.words import single_words

COMMON = 10
"""Words of ``cwe`` that are common, and references of a sample."""

_CWE_INCREMENT = 10
_CWE_TRIAL = 4096
_CWE_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
_CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

_FWE_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
_FWE_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
_FWE_WORD_LEN = 6
_FWE_NOISE = "..."
_FWE_ASKED = 3
_ALPHA = 2.0
_ZETA = math.pi**2 / 6  # the zeta function at 2


@dataclass(frozen=True)
class WordList:
    """How many different words a list has, and how often each of them."""

    words: int
    common_repeats: int
    other_repeats: int


class CommonWords:
    """Draws the prompts of ``cwe``.

    ``more`` are the words for lists that need more than ``words`` has; None where there are none.
    """

    def __init__(
        self,
        template: Template,
        draws: Draws,
        words: list[str],
        more: list[str] | None,
        short: bool,
    ) -> None:
        self._template = template
        self._draws = draws
        self._words = list(words)
        draws.fresh().shuffle(self._words)
        self._more = more
        self._short = short

    @property
    def most(self) -> int:
        """Different words that a list can have."""
        return max(len(self._words), len(self._more or ()))

    def draft(self, size: int) -> Draft:
        """A prompt with ``size`` different words, after an example with its answer."""
        if self._short:
            shown, asked = WordList(20, 3, 1), WordList(size, 6, 1)
        else:
            shown, asked = WordList(40, 10, 3), WordList(size, 30, 3)
        context, common = self._list(shown)
        example = self._template.fill(context, common)
        context, common = self._list(asked)
        answer = _numbered(example.outputs)
        return self._template.fill(context, common).after(f"{example.prompt} {answer}\n")

    def _list(self, kind: WordList) -> tuple[str, tuple[str, ...]]:
        """A numbered list, and the words that are common in it."""
        pool = self._words if kind.words <= len(self._words) else self._more
        assert pool is not None
        drawn = self._draws.python.sample(pool, kind.words)
        common, others = drawn[:COMMON], drawn[COMMON:]
        words = common * kind.common_repeats + others * kind.other_repeats
        self._draws.fresh().shuffle(words)
        return _numbered(words), tuple(common)


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def common_word_samples(job: Job, more: list[str] | None) -> Iterator[Fitted]:
    """The samples of ``cwe``.

    Below 4096 tokens the common words come 6 times and the others once, else 30 and 3 times.
    ``more`` stands in for wonderwords where a list needs more words than these have. RULER's own
    samples at such lengths, where the search for the size tries such lists, need RULER's words.

    Raises:
        ValueError: the length is too short, or needs more words than there are.
        ModuleNotFoundError: wonderwords is not installed.
    """
    template = Template.make(_CWE_TEMPLATE, _CWE_PREFIX, job.chat_template)
    maker = CommonWords(template, job.draws, single_words(), more, job.length < SHORT_LEN)
    per_word = job.count(maker.draft(_CWE_TRIAL).prompt) / _CWE_TRIAL
    # Twice the estimate here, where the other tasks have three times.
    wanted = max(int(job.length // per_word) * 2, _CWE_INCREMENT * 2)
    high = min(wanted, maker.most)
    size = largest_size(
        lambda size: job.total(maker.draft(size).prompt), job.length, _CWE_INCREMENT, high
    )
    if size == high < wanted:
        raise ValueError(
            f"length={job.length} holds more than the {maker.most} different words there are for "
            f"task 'cwe': give RulerData(english_words=Path(...)) with the path of a longer list"
        )
    for _ in range(job.samples):
        yield draw_fitting(job, maker.draft, size, _CWE_INCREMENT, smallest=COMMON)


class CodedText:
    """Draws the prompts of ``fwe``."""

    def __init__(self, template: Template, draws: Draws, vocabulary_size: int) -> None:
        self._template = template
        self._draws = draws
        self._size = vocabulary_size

    def vocabulary(self) -> list[str]:
        """Random words by rank; the most frequent is "...", which does not count."""
        words = [self._word() for _ in range(self._size)]
        while len(set(words)) < self._size:
            words.append(self._word())
        ranked = sorted(set(words))
        self._draws.fresh().shuffle(ranked)
        ranked[0] = _FWE_NOISE
        return ranked

    def _word(self) -> str:
        return "".join(self._draws.python.choices(string.ascii_lowercase, k=_FWE_WORD_LEN))

    def draft(self, vocabulary: list[str], size: int) -> Draft:
        """A prompt of about ``size`` words, the k-th of the vocabulary ``size / k² / zeta(2)``."""
        ranks = np.arange(1, len(vocabulary) + 1)
        counts = (size * (ranks**-_ALPHA) / _ZETA).astype(int).tolist()
        text = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
        self._draws.fresh().shuffle(text)
        return self._template.fill(" ".join(text), tuple(vocabulary[1 : 1 + _FWE_ASKED]))


def coded_text_samples(job: Job) -> Iterator[Fitted]:
    """The samples of ``fwe``; each has a vocabulary of its own.

    The text grows in steps of a 32nd of the length, so samples may fall short of it by as much in
    words.

    Raises:
        ValueError: the length is too short for a text in which the three words occur, or the
            tokenizer cuts texts off.
    """
    room = job.length - job.task.max_new_tokens
    step = room // 32
    # The least frequent word that is asked for occurs in texts of at least this size.
    fewest = math.ceil(_ZETA * (1 + _FWE_ASKED) ** _ALPHA)
    template = Template.make(_FWE_TEMPLATE, _FWE_PREFIX, job.chat_template)
    coded = CodedText(template, job.draws, max(room // 50, 1 + _FWE_ASKED))

    vocabulary = coded.vocabulary()
    size = room // _FWE_WORD_LEN
    tokens = job.count(coded.draft(vocabulary, size).prompt)
    while tokens < room and step > 0:
        size += step
        before, tokens = tokens, job.count(coded.draft(vocabulary, size).prompt)
        if tokens <= before:
            raise ValueError(
                f"tokenizer counts {tokens} tokens though the text grew by {step} words: turn its "
                f"truncation off"
            )
    size = max(size - step, fewest)

    for _ in range(job.samples):
        vocabulary = coded.vocabulary()
        fitting = size
        draft = coded.draft(vocabulary, fitting)
        total = job.total(draft.prompt)
        while total > job.length and fitting > fewest and step > 0:
            fitting = max(fitting - step, fewest)
            draft = coded.draft(vocabulary, fitting)
            total = job.total(draft.prompt)
        if total > job.length:
            raise job.too_short(job.total(coded.draft(vocabulary, fewest).prompt))
        yield Fitted(draft, total)
