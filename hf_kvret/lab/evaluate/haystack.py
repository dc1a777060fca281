"""Documents with needles at given depths, to the token, and questions about them.

A document is built in tokens, after the needle-in-a-haystack test of gkamradt: a haystack is cut to
what the length leaves, and each needle goes in at its depth, moved back to the end of a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.lab.evaluate.needles import NeedleLanguage
from hf_kvret.lab.evaluate.ruler.prompts import NOISE
from hf_kvret.lab.evaluate.ruler.texts import adjective_noun_pairs
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.texts import read_text

# Fewer tokens of haystack are no haystack; a length that leaves less is refused.
LEAST_HAY = 16

# RULER's wording, in the singular as RULER puts it where one value is asked for.
_HEADS = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.",
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.",
)
_NEEDLE = " One of the special magic numbers for {key} is: {value}."
_QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)

_CLOSING = r"[.!?][\"'”’)\]]*"
_SENTENCE_END = re.compile(_CLOSING + r"\s")
# Line breaks may be of one token with the dot; a blank is of the next word.
_LAST_OF_SENTENCE = re.compile(_CLOSING + r"[\r\n]*$")


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
        asked: the facts in the order of the questions.
    """

    context: torch.Tensor
    asked: tuple[Fact, ...]


class Hay(Protocol):
    """What needles are hidden in."""

    def take(self, rng: np.random.Generator, count: int, start: float) -> list[int]:
        """``count`` tokens; a text begins at the share ``start`` of it and is repeated."""
        ...

    def place(self, tokens: Sequence[int], depth: float) -> int:
        """Where a needle of this depth in percent goes: an index from 0 to ``len(tokens)``."""
        ...


class TextHay:
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
        """A line break and ``count`` tokens with it; nothing is drawn.

        The break comes first, so that a needle at depth 0 is a sentence by itself too.
        """
        first = int(start * len(self._tokens))
        repeats = -(-(first + count) // len(self._tokens))
        return (self._break + (self._tokens * repeats)[first : first + count])[:count]

    def place(self, tokens: Sequence[int], depth: float) -> int:
        """The last end of a sentence up to the depth, else 0; 100 % is the very end."""
        if depth >= 100:
            return len(tokens)
        place = int(len(tokens) * depth / 100)
        while place and not self._is_end(tokens, place):
            place -= 1
        return place

    def _is_end(self, tokens: Sequence[int], place: int) -> bool:
        # A dot and what closes behind it, such as quotes, may be several tokens.
        first = max(0, place - 4)
        before = self._decode(tokens[first:place])
        if not _LAST_OF_SENTENCE.search(before):
            return False
        # The dot of "3.14" is followed by a digit, that of a sentence by a blank.
        follows = self._decode(tokens[first : place + 1])[len(before.rstrip()) :]
        return not follows or follows[0].isspace()

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)


class NoiseHay:
    """Noise of the needle language; needles go in exactly at their depths."""

    def __init__(self, language: NeedleLanguage) -> None:
        self._language = language

    def take(self, rng: np.random.Generator, count: int, start: float) -> list[int]:
        """``count`` tokens of fresh noise; ``start`` means nothing here."""
        return self._language.noise(rng, count).tolist()

    def place(self, tokens: Sequence[int], depth: float) -> int:
        """The depth's share of the tokens, rounded down."""
        return int(len(tokens) * depth / 100)


@dataclass(frozen=True)
class Wording:
    """How documents and questions are worded.

    Attributes:
        name: of the style.
        heads: what comes before the hay, BOS included: for one question, for several.
        hay: what needles are hidden in.
        facts: ``facts(rng, count)`` draws that many.
        text: an answer's tokens as text.
        answer_len: tokens that an answer may have.
        stop: tokens that end an answer.
    """

    name: str
    heads: tuple[list[int], list[int]]
    hay: Hay
    facts: Callable[[np.random.Generator, int], list[Fact]]
    text: Callable[[list[int]], str]
    answer_len: int
    stop: frozenset[int]

    def document(
        self,
        rng: np.random.Generator,
        length: int,
        depths: Sequence[float],
        asked: int,
        start: float = 0.0,
    ) -> Document:
        """A document with a needle at each depth (percent), the first ``asked`` of them asked for.

        Context, questions and room for the answers have exactly ``length`` tokens.

        Raises:
            ValueError: ``length`` leaves no room for a haystack; says how long is enough.
        """
        facts = self.facts(rng, len(depths))
        head = self.heads[asked > 1]
        turns = sum(self.turn_len(fact) for fact in facts[:asked])
        other = len(head) + sum(len(fact.needle) for fact in facts) + turns
        if length < other + LEAST_HAY:
            raise ValueError(
                f"--context {length} is too short: instruction, {len(facts)} needles, {asked} "
                f"questions and their answers take {other} tokens in style {self.name}, so give at "
                f"least {other + LEAST_HAY}"
            )
        hay = self.hay.take(rng, length - other, start)
        places = [self.hay.place(hay, depth) for depth in depths]
        context, last = list(head), 0
        for place, fact in sorted(zip(places, facts, strict=True), key=lambda pair: pair[0]):
            context += [*hay[last:place], *fact.needle]
            last = place
        return Document(torch.tensor(context + hay[last:]), tuple(facts[:asked]))

    def turn_len(self, fact: Fact) -> int:
        """Most tokens that a question and its answer take, be it given or right."""
        return len(fact.question) + max(len(fact.gold), self.answer_len)


def magic_wording(subject: Subject, task: str, essays: Path | None, answer_len: int) -> Wording:
    """RULER's magic numbers: "One of the special magic numbers for calm-river is: 4821907."

    Raises:
        ValueError: the model has no tokenizer, or the essays can't be used.
        FileNotFoundError: no such file.
        ModuleNotFoundError: wonderwords, which the keys are drawn from, is not installed.
    """
    tokenizer = subject.need_tokenizer(f"{task} --style magic")
    pairs = adjective_noun_pairs()

    def facts(rng: np.random.Generator, count: int) -> list[Fact]:
        found = []
        for number in rng.choice(len(pairs), size=count, replace=False):
            key, value = pairs[int(number)], str(rng.integers(1_000_000, 10_000_000))
            needle = encode(tokenizer, _NEEDLE.format(key=key, value=value))
            question = encode(tokenizer, _QUESTION.format(key=key))
            found.append(Fact(needle, question, encode(tokenizer, f" {value}."), value))
        return found

    bos = first_tokens(tokenizer)
    heads = (bos + encode(tokenizer, _HEADS[0]), bos + encode(tokenizer, _HEADS[1]))
    return text_wording("magic", subject, heads, essays, facts, answer_len)


def text_wording(
    name: str,
    subject: Subject,
    heads: tuple[list[int], list[int]],
    essays: Path | None,
    facts: Callable[[np.random.Generator, int], list[Fact]],
    answer_len: int,
) -> Wording:
    """A wording in text; RULER's noise is the haystack where no ``essays`` are given."""
    tokenizer = subject.need_tokenizer(name)
    hay = TextHay(tokenizer, NOISE if essays is None else read_text(essays))
    return Wording(
        name,
        heads,
        hay,
        facts,
        lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        answer_len,
        end_tokens(subject),
    )


def token_wording(subject: Subject, task: str) -> Wording:
    """The language of the bundled needle model; answers are written as token ids.

    Raises:
        ValueError: the model can't have learned it, as its configuration has other token ids.
    """
    language, config = NeedleLanguage(), subject.model.config
    # Models of text have an end of text, and their ids mean something else.
    learned = (config.vocab_size, config.bos_token_id, config.pad_token_id, config.eos_token_id)
    if learned != (language.vocab_size, language.bos, language.pad, None):
        if subject.tokenizer is None:
            subject.need_tokenizer(task)
        raise ValueError(
            f"{task} --style tokens is the language of --model needle, which {subject.name!r} has "
            "not learned (its config.json has other token ids): use --style magic"
        )

    def facts(rng: np.random.Generator, count: int) -> list[Fact]:
        keys, values = language.pairs(rng, count)
        return [
            Fact([language.needle, *key, *value], question, value, _spelled(value))
            for key, value, question in zip(
                keys.tolist(), values.tolist(), language.questions(keys).tolist(), strict=True
            )
        ]

    heads = ([language.bos], [language.bos])
    hay = NoiseHay(language)
    return Wording("tokens", heads, hay, facts, _spelled, language.value_len, frozenset())


def choose_wording(
    style: str | None, subject: Subject, task: str, essays: Path | None, answer_len: int
) -> Wording:
    """That of ``style``, ``magic`` or ``tokens``; None: ``magic``, or ``tokens`` without tokenizer.

    Raises:
        ValueError: essays for tokens, or a model that can't be asked so.
    """
    if (style or ("magic" if subject.tokenizer else "tokens")) == "magic":
        return magic_wording(subject, task, essays, answer_len)
    if essays is not None:
        raise ValueError(
            f"--essays {essays} is text, and --style tokens, in which {subject.name} is asked, has "
            "none: leave --essays out, or take another --style or --model"
        )
    return token_wording(subject, task)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a piece of text, none added."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """BOS, where the tokenizer has one."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def end_tokens(subject: Subject) -> frozenset[int]:
    """The tokens that end a text, by the model's generation config and its tokenizer."""
    ends = subject.model.generation_config.eos_token_id
    found = set(ends if isinstance(ends, list) else [ends])
    if subject.tokenizer is not None:
        found.add(subject.tokenizer.eos_token_id)
    return frozenset(found - {None})


def contains(answer: str, given: str) -> bool:
    """Whether the right answer is in what was given, letter case aside."""
    return answer.lower() in given.lower()


def _spelled(tokens: list[Any]) -> str:
    return " ".join(map(str, tokens))
