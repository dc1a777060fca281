"""Documents with needles at given depths, to the token, and questions about them.

A document is built in tokens, after the needle-in-a-haystack test of gkamradt: a haystack is cut to
what the length leaves, and each needle goes in at its depth, moved back to the end of a sentence.

The needle language is that of the bundled model, which speaks no other. A needle is
``K k1 k2 v1 v2``: the key ``k1 k2`` has the value ``v1 v2``. A question is ``Q k1 k2 ->`` and its
answer is ``v1 v2``. Everything else is noise with Zipf frequencies. Answering needs exactly what a
retrieval cache may lose, one row among many thousands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.lab.evaluate.ruler.prompts import NOISE, TEMPLATES, adjective_noun_pairs, filled
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.texts import encode, first_tokens, read_text

# Fewer tokens of haystack are no haystack; a length that leaves less is refused.
LEAST_HAYSTACK = 16
# Tokens of a document to learn from for each needle in it, and of the shortest one.
_NEEDLE_EVERY = 64

_CLOSING = r"[.!?][\"'”’)\]]*"
_SENTENCE_END = re.compile(_CLOSING + r"\s")
# Line breaks may be of one token with the dot; a blank is of the next word.
_LAST_OF_SENTENCE = re.compile(_CLOSING + r"[\r\n]*$")


@dataclass(frozen=True)
class NeedleLanguage:
    """Token ids and sizes of the language; the defaults are those of the bundled model."""

    vocab_size: int = 512
    pad: int = 0
    bos: int = 1
    needle: int = 2
    question: int = 3
    arrow: int = 4
    first_key: int = 8
    first_value: int = 136
    first_noise: int = 264
    value_len: int = 2
    # A question asks for a key of two tokens.
    question_len: int = 4
    zipf_exponent: float = 1.1

    @property
    def n_keys(self) -> int:
        return self.first_value - self.first_key

    @property
    def n_values(self) -> int:
        return self.first_noise - self.first_value

    @property
    def most_needles(self) -> int:
        """Distinct keys of two tokens."""
        return self.n_keys**2

    def least_length(self, count: int) -> int:
        """Tokens of the shortest document with ``count`` needles, whose keys have two tokens."""
        return 1 + count * (3 + self.value_len + 1)

    def noise(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """``[size]`` int64 noise tokens, the r-th most frequent with weight ``r ** -exponent``."""
        ranks = np.arange(1, self.vocab_size - self.first_noise + 1)
        weights = ranks**-self.zipf_exponent
        return self.first_noise + rng.choice(len(ranks), size=size, p=weights / weights.sum())

    def pairs(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct keys ``[count, 2]`` and values ``[count, value_len]``, int64.

        ValueError for more than there are keys.
        """
        if count > self.most_needles:
            raise ValueError(
                f"{count:,} needles have no keys of their own, of which there are "
                f"{self.most_needles:,}: take fewer (--distractors, --turns)"
            )
        codes = rng.choice(self.most_needles, size=count, replace=False)
        digits = [codes % self.n_keys, codes // self.n_keys]
        values = rng.integers(self.n_values, size=(count, self.value_len))
        return np.stack(digits, axis=1) + self.first_key, values + self.first_value

    def document(
        self, rng: np.random.Generator, length: int, keys: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A document of ``length`` tokens that starts with BOS and holds every needle.

        Returns ``tokens [length]`` and the sorted starts ``[needles]`` of the needles; the
        i-th needle in the text is row i of ``keys`` and ``values``.
        """
        count = len(keys)
        needle_len = 1 + keys.shape[1] + values.shape[1]
        noise_len = length - 1 - count * needle_len
        if noise_len < count:
            raise ValueError(
                f"length={length} cannot hold {count} needles of {needle_len} tokens and as much "
                f"noise: use at least {1 + count * (needle_len + 1)}"
            )
        gaps = np.sort(rng.choice(noise_len, size=count, replace=False))
        starts = 1 + gaps + np.arange(count) * needle_len
        tokens = np.empty(length, dtype=np.int64)
        is_noise = np.ones(length, dtype=bool)
        indices = starts[:, None] + np.arange(needle_len)[None]
        is_noise[indices] = is_noise[0] = False
        tokens[0] = self.bos
        tokens[indices] = np.concatenate([np.full((count, 1), self.needle), keys, values], axis=1)
        tokens[is_noise] = self.noise(rng, int(is_noise.sum()))
        return tokens, starts

    def questions(self, keys: np.ndarray) -> np.ndarray:
        """``[count, 4]`` prompts ``Q key ->``; the answer is the needle's value."""
        count = len(keys)
        head, tail = np.full((count, 1), self.question), np.full((count, 1), self.arrow)
        return np.concatenate([head, keys, tail], axis=1)


def needle_documents(count: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Documents of the bundled model's language, with questions and answers at their end.

    ``count`` tokens in all, at most ``length`` in each, in almost equal parts.

    Raises:
        ValueError: documents too short for a needle.
    """
    language, rng = NeedleLanguage(), np.random.default_rng(seed)
    for part in np.array_split(np.arange(count), -(-count // length)):
        size = len(part)
        if size < _NEEDLE_EVERY:
            raise ValueError(
                f"documents of {size} tokens are too short for needles: give --tokens and --length "
                f"of at least {2 * _NEEDLE_EVERY}"
            )
        keys, values = language.pairs(rng, size // _NEEDLE_EVERY)
        questions = language.questions(keys[: max(1, len(keys) // 4)])
        tail = np.concatenate([questions, values[: len(questions)]], axis=1).ravel()
        document, _ = language.document(rng, size - len(tail), keys, values)
        yield torch.from_numpy(np.concatenate([document, tail]))


@dataclass(frozen=True)
class Fact:
    """A needle and the question about it, as token ids.

    Attributes:
        needle: what is hidden.
        question: what follows the document, up to where the answer begins.
        gold: the right answer as it would be given.
        answer: what a right answer contains, as text.
    """

    needle: list[int]
    question: list[int]
    gold: list[int]
    answer: str


@dataclass(frozen=True)
class Document:
    """A context and the facts that are asked about.

    Attributes:
        context: ``[n]`` int64, read without any question.
        facts: those asked about, in the order of the questions.
    """

    context: torch.Tensor
    facts: tuple[Fact, ...]


class TextHaystack:
    """A text on a line of its own, repeated where too short; needles go between its sentences.

    Raises:
        ValueError: the text has no end of a sentence.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        if not _SENTENCE_END.search(text):
            raise ValueError(
                f"the text that begins {text[:40]!r} has no end of a sentence, and needles go "
                "between sentences: give another text"
            )
        self._tokenizer = tokenizer
        self._break = encode(tokenizer, "\n")
        self._tokens = encode(tokenizer, f"{text.rstrip()}\n")

    def take(self, rng: np.random.Generator, count: int, start: float) -> list[int]:
        """A line break and ``count`` tokens with it, from the share ``start`` of the text on.

        The break comes first, so that a needle at depth 0 is a sentence by itself too. Nothing is
        drawn.
        """
        first = int(start * len(self._tokens))
        repeats = -(-(first + count) // len(self._tokens))
        return (self._break + (self._tokens * repeats)[first : first + count])[:count]

    def index(self, tokens: Sequence[int], depth: float) -> int:
        """Where a needle of this depth in percent goes: the last end of a sentence up to it.

        It is 0 without one; 100 % is the very end.
        """
        if depth >= 100:
            return len(tokens)
        index = int(len(tokens) * depth / 100)
        while index and not self._is_end(tokens, index):
            index -= 1
        return index

    def _is_end(self, tokens: Sequence[int], index: int) -> bool:
        # A dot and what closes behind it, such as quotes, may be several tokens.
        first = max(0, index - 4)
        before = self._decode(tokens[first:index])
        if not _LAST_OF_SENTENCE.search(before):
            return False
        # The dot of "3.14" is followed by a digit, that of a sentence by a blank.
        behind = self._decode(tokens[first : index + 1])[len(before.rstrip()) :]
        return not behind or behind[0].isspace()

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)


class NoiseHaystack:
    """Noise of the needle language; needles go in exactly at their depths."""

    def __init__(self, language: NeedleLanguage) -> None:
        self._language = language

    def take(self, rng: np.random.Generator, count: int, start: float) -> list[int]:
        """``count`` tokens of fresh noise; ``start`` means nothing here."""
        return self._language.noise(rng, count).tolist()

    def index(self, tokens: Sequence[int], depth: float) -> int:
        """The depth's share of the tokens, rounded down."""
        return int(len(tokens) * depth / 100)


@dataclass(frozen=True)
class Wording:
    """How documents and questions are worded.

    Attributes:
        heads: what comes before the haystack, BOS included: for one question, for several.
        haystack: what needles are hidden in.
        facts: ``facts(rng, count)`` draws that many.
        text: an answer's tokens as text.
        answer_len: tokens that an answer may have.
        stop: tokens that end an answer.
    """

    heads: tuple[list[int], list[int]]
    haystack: TextHaystack | NoiseHaystack
    facts: Callable[[np.random.Generator, int], list[Fact]]
    text: Callable[[list[int]], str]
    answer_len: int
    stop: frozenset[int]

    def document(
        self,
        rng: np.random.Generator,
        length: int,
        depths: Sequence[float],
        questions: int,
        start: float = 0.0,
    ) -> Document:
        """A document with a needle at each depth (percent), and ``questions`` for the first ones.

        Context, questions and room for the answers have exactly ``length`` tokens.

        Raises:
            ValueError: ``length`` leaves no room for a haystack; says how long is enough.
        """
        facts = self.facts(rng, len(depths))
        head = self.heads[questions > 1]
        turns = sum(self.turn_len(fact) for fact in facts[:questions])
        other = len(head) + sum(len(fact.needle) for fact in facts) + turns
        if length < other + LEAST_HAYSTACK:
            raise ValueError(
                f"--context {length} is too short: instruction, {len(facts)} needles, {questions} "
                f"questions and their answers take {other} tokens, so give at least "
                f"{other + LEAST_HAYSTACK}"
            )
        tokens = self.haystack.take(rng, length - other, start)
        indices = [self.haystack.index(tokens, depth) for depth in depths]
        context, last = list(head), 0
        for index, fact in sorted(zip(indices, facts, strict=True), key=lambda pair: pair[0]):
            context += [*tokens[last:index], *fact.needle]
            last = index
        return Document(torch.tensor(context + tokens[last:]), tuple(facts[:questions]))

    def turn_len(self, fact: Fact) -> int:
        """Most tokens that a question and its answer take, be it given or right."""
        return len(fact.question) + max(len(fact.gold), self.answer_len)


def magic_wording(subject: Subject, task: str, essays: Path | None, answer_len: int) -> Wording:
    """RULER's magic numbers: "One of the special magic numbers for calm-river is: 4821907."

    RULER's noise is the haystack where no ``essays`` are given.

    Raises:
        ValueError: the model has no tokenizer, or the essays can't be used.
        FileNotFoundError: no such file.
        ModuleNotFoundError: wonderwords, which the keys are drawn from, is not installed.
    """
    tokenizer = subject.need_tokenizer(task)
    pairs = adjective_noun_pairs()

    def draw(rng: np.random.Generator, count: int) -> list[Fact]:
        facts = []
        for index in rng.choice(len(pairs), size=count, replace=False):
            key, value = pairs[int(index)], str(rng.integers(1_000_000, 10_000_000))
            needle = TEMPLATES["needle"].format(type_v="numbers", key=key, value=value)
            asked = filled("niah_one", "", (), type_v="number", query=key)
            question = encode(tokenizer, asked.question + asked.answer_prefix)
            right = encode(tokenizer, f" {value}.")
            facts.append(Fact(encode(tokenizer, f" {needle}"), question, right, value))
        return facts

    def head(template: str, type_v: str) -> list[int]:
        text = filled(template, "", (), type_v=type_v, query="").context.rstrip()
        return first_tokens(tokenizer) + encode(tokenizer, text)

    return Wording(
        (head("niah_one", "number"), head("niah", "numbers")),
        TextHaystack(tokenizer, NOISE if essays is None else read_text(essays)),
        draw,
        lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        answer_len,
        end_tokens(subject),
    )


def token_wording() -> Wording:
    """The language of the bundled needle model; answers are written as token ids."""
    language = NeedleLanguage()

    def facts(rng: np.random.Generator, count: int) -> list[Fact]:
        keys, values = language.pairs(rng, count)
        return [
            Fact([language.needle, *key, *value], question, value, _spelled(value))
            for key, value, question in zip(
                keys.tolist(), values.tolist(), language.questions(keys).tolist(), strict=True
            )
        ]

    heads = ([language.bos], [language.bos])
    haystack = NoiseHaystack(language)
    return Wording(heads, haystack, facts, _spelled, language.value_len, frozenset())


def choose_wording(subject: Subject, task: str, essays: Path | None, answer_len: int) -> Wording:
    """The wording of RULER; for the needle model, which has no tokenizer, that of its language.

    Raises:
        ValueError: essays for the needle model, or another model without a tokenizer.
    """
    if not is_needle_model(subject):
        return magic_wording(subject, task, essays, answer_len)
    if essays is not None:
        raise ValueError(
            f"--essays {essays} is text, and {subject.name} is asked in token ids: leave --essays "
            "out, or take another --model"
        )
    return token_wording()


def is_needle_model(subject: Subject) -> bool:
    """Whether a model speaks the needle language: it has no tokenizer, and the language's ids."""
    language, config = NeedleLanguage(), subject.model.config
    # Models of text have an end of text, and their ids mean something else.
    ids = (config.vocab_size, config.bos_token_id, config.pad_token_id, config.eos_token_id)
    learned = ids == (language.vocab_size, language.bos, language.pad, None)
    return learned and subject.tokenizer is None


def end_tokens(subject: Subject) -> frozenset[int]:
    """The tokens that end a text, by the model's generation config and its tokenizer."""
    ends = subject.model.generation_config.eos_token_id
    tokens = {*(ends if isinstance(ends, list) else [ends])}
    if subject.tokenizer is not None:
        tokens.add(subject.tokenizer.eos_token_id)
    return frozenset(tokens - {None})


def contains(answer: str, reply: str) -> bool:
    """Whether the right answer is in the reply, letter case aside."""
    return answer.lower() in reply.lower()


def _spelled(tokens: list[Any]) -> str:
    return " ".join(map(str, tokens))
