"""What a model speaks: text to token ids, with the text that each of them stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.lab.evaluate.needles import NeedleLanguage
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.shelf.questions import around_message

# The text of the English example, and the numbers that are hidden in it.
_LICENSE = Path(__file__).parents[2] / "LICENSE"
_NUMBERS = {
    "calm-river": "4821907",
    "old-harbour": "7310642",
    "green-lantern": "9054183",
    "quiet-garden": "2268415",
}


@dataclass(frozen=True)
class Tokens:
    """Ids, and the text that each adds; later ids of one character add ``""``."""

    ids: list[int]
    texts: list[str]

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.ids + other.ids, self.texts + other.texts)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Example:
    """A document with something to find in it, and questions about that."""

    document: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class TokenizerText:
    """A tokenizer, with what a chat template puts before the document and after the question.

    Ids of ``stop`` end an answer.
    """

    tokenizer: PreTrainedTokenizerBase
    stop: frozenset[int]
    before: str = ""
    after: str = ""

    @property
    def example(self) -> Example | None:
        """A licence with numbers hidden in it, asked for as RULER asks; None without one."""
        if not _LICENSE.is_file():
            return None
        paragraphs = _LICENSE.read_text("utf-8").split("\n\n")
        for number, (key, value) in enumerate(_NUMBERS.items()):
            place = int((number + 0.5) / len(_NUMBERS) * len(paragraphs))
            paragraphs.insert(place, f"One of the special magic numbers for {key} is: {value}.")
        asked = "special magic number for {} mentioned in the provided text"
        questions = [f"What is the {asked}? The {asked} is".format(key, key) for key in _NUMBERS]
        return Example("\n\n".join(paragraphs), tuple(questions))

    def document(self, text: str) -> Tokens:
        """The start of a prompt, with BOS where the tokenizer has one."""
        name = self.tokenizer.bos_token
        first = Tokens([], [])
        if name is not None and self.tokenizer.bos_token_id is not None:
            first = Tokens([self.tokenizer.bos_token_id], [name])
        return first + self._tokens(self.before) + self._tokens(text, own=False)

    def question(self, text: str) -> Tokens:
        """The prompt's tokens after the document, in a paragraph of their own."""
        return self._tokens("\n\n" + text, own=False) + self._tokens(self.after)

    def answer(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds; bytes of no whole character wait for the next id."""
        texts, shown = [], ""
        for count in range(1, len(ids) + 1):
            text = self.tokenizer.decode(list(ids[:count]), skip_special_tokens=True)
            whole = text if count == len(ids) else text.rstrip("\ufffd")
            texts.append(whole[len(shown) :])
            shown = whole if len(whole) > len(shown) else shown
        return texts

    def _tokens(self, text: str, own: bool = True) -> Tokens:
        # In what others wrote, the name of a special token is text: it can't end a user's turn.
        made = self.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=not own,
            return_offsets_mapping=True,
            verbose=False,
        )
        texts, end = [], 0
        for _, stop in made["offset_mapping"]:
            texts.append(text[end : max(end, stop)])
            end = max(end, stop)
        return Tokens(list(made["input_ids"]), texts)


@dataclass(frozen=True)
class NeedleWords:
    """Words for the ids of the bundled needle model: ``K k3 k70 v5 v120``, and noise ``n8``.

    ValueError for a text with other words. Methods are those of ``TokenizerText``.
    """

    language: NeedleLanguage = field(default_factory=NeedleLanguage)
    # It would go on with questions of its own.
    stop: frozenset[int] = frozenset({NeedleLanguage.question})

    @property
    def example(self) -> Example:
        """A document of noise with 24 needles."""
        rng = np.random.default_rng(0)
        keys, values = self.language.pairs(rng, 24)
        tokens, _ = self.language.document(rng, 6_000, keys, values)
        words = [self._words[token] for token in tokens[1:].tolist()]
        lines = (" ".join(words[i : i + 25]) for i in range(0, len(words), 25))
        questions = self.language.questions(keys).tolist()[:4]
        asked = (" ".join(self._words[token] for token in question) for question in questions)
        return Example("\n".join(lines), tuple(asked))

    def document(self, text: str) -> Tokens:
        """The start of a prompt."""
        return Tokens([self.language.bos], ["<s>"]) + self._tokens(text)

    def question(self, text: str) -> Tokens:
        """The prompt's tokens after the document."""
        return self._tokens("\n" + text)

    def answer(self, ids: Sequence[int]) -> list[str]:
        """The word of each generated id."""
        return [" " + self._words.get(one, f"<{one}>") for one in ids]

    def _tokens(self, text: str) -> Tokens:
        ids, texts, end = [], [], 0
        for match in re.finditer(r"\S+", text):
            number = self._numbers.get(match[0])
            if number is None:
                raise ValueError(
                    f"{match[0][:40]!r} is not a word of the needle model, which knows K, Q, ->, "
                    f"k0 to k{self.language.n_keys - 1}, v0 to v{self.language.n_values - 1} and "
                    f"n0 to n{self._noise - 1}: press Example, or start with --model reference "
                    "for English"
                )
            ids.append(number)
            texts.append(text[end : match.end()])
            end = match.end()
        return Tokens(ids, texts)

    @property
    def _noise(self) -> int:
        return self.language.vocab_size - self.language.first_noise

    @cached_property
    def _words(self) -> dict[int, str]:
        of = self.language
        words = {of.needle: "K", of.question: "Q", of.arrow: "->"}
        words |= {of.first_key + i: f"k{i}" for i in range(of.n_keys)}
        words |= {of.first_value + i: f"v{i}" for i in range(of.n_values)}
        return words | {of.first_noise + i: f"n{i}" for i in range(self._noise)}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in self._words.items()}


Language = TokenizerText | NeedleWords
"""How texts become tokens of a prompt, and generated tokens text."""


def language_of(subject: Subject, *, plain: bool) -> Language:
    """The language of a model.

    Args:
        subject: the model, and its tokenizer.
        plain: texts as they are, not put into the tokenizer's chat template.

    Raises:
        ValueError: a model without a tokenizer, or a chat template that can't be used.
    """
    if subject.name == "needle":
        return NeedleWords()
    tokenizer = subject.need_tokenizer("the app")
    if not tokenizer.is_fast:
        raise ValueError(
            f"--model {subject.name}: its tokenizer does not tell where tokens lie in a text; give "
            "a model with a tokenizer.json"
        )
    stop = subject.model.generation_config.eos_token_id
    ends = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
    chats = not plain and bool(tokenizer.chat_template)
    around = around_message(tokenizer) if chats else ("", "")
    return TokenizerText(tokenizer, frozenset(ends), *around)
