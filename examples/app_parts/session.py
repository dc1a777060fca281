"""What a visitor of the page has open: a document, its reading, an answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app_parts.answers import Answer, Part
from app_parts.languages import Example, Language, language_of
from app_parts.reading import CACHES, Document, Limits, Reading, memory_named
from app_parts.uploads import check_size, checked, text_of
from hf_kvret import Shelf
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.program.arguments import budget


@dataclass(frozen=True)
class Choices:
    """What the page begins with.

    Attributes:
        cache: one of ``CACHES``.
        top_k: a count or a share, as written.
        limits: see there.
        plain: no chat template.
        shelf: the folder of a ``Shelf``; None for none.
    """

    cache: str = "paris"
    top_k: str = "64"
    limits: Limits = Limits()
    plain: bool = False
    shelf: Path | None = None


class Desk:
    """A model that reads documents for all visitors, one after the other."""

    def __init__(self, subject: Subject, choices: Choices) -> None:
        self.subject, self.choices, self.limits = subject, choices, choices.limits
        self.language: Language = language_of(subject, plain=choices.plain)
        self.example: Example | None = self.language.example
        self.shelf = None if choices.shelf is None else Shelf(choices.shelf)

    @property
    def first_step(self) -> str:
        """How to open a document, for a visitor who has none, as the end of a sentence."""
        either = ", or press Example" if self.example is not None else ""
        return f"choose a file, or paste a text and press Read{either}"

    def of_file(self, path: Path) -> Document:
        """The document in a file; ValueError with the way out for one that can't be read."""
        # Before it is read: it may be far too large.
        check_size(path.stat().st_size, self.limits.upload, path.name)
        return self._document(path.name, text_of(path.read_bytes(), path.name))

    def of_text(self, text: str, name: str = "the text") -> Document:
        """The document that was pasted; ValueError as above."""
        check_size(len(text.encode("utf-8", "replace")), self.limits.upload, name)
        return self._document(name, checked(text, name))

    def of_example(self) -> Document:
        """The example, whatever the limit of uploads."""
        assert self.example is not None, "without it the page has no button for it"
        return self._document("the example", self.example.document)

    def _document(self, name: str, text: str) -> Document:
        with memory_named(name):
            return Document(name, self.language.document(text))


@dataclass
class Session:
    """What one visitor has open. Messages are for the page.

    Attributes:
        reading: of the document, with one method; None before.
        answer: the newest, once it is whole; None before, and while another grows.
        stopped: whether the visitor wants what is being read or answered to end.
    """

    desk: Desk
    reading: Reading | None = None
    answer: Answer | None = None
    stopped: bool = False

    def read(self, document: Document, method: str) -> Iterator[str]:
        """Read a document in place of that which is open; yields messages.

        What was open stays until all is read, and where that fails. What is on the desk's shelf is
        loaded instead, and what is not is put there behind its reading.

        Raises:
            ValueError: a document or a cache that is refused.
            MemoryError: there was too little; names the way out.
        """
        if method not in CACHES:
            raise ValueError(f"there is no cache {method!r}: choose one of {', '.join(CACHES)}")
        desk, count = self.desk, len(document.tokens)
        task = f"{document.name}: reading {count:,} tokens into {method}"
        with memory_named(task):
            reading = Reading(desk.subject, desk.language, document, method, desk.limits)
            yield f"{task} ..."
            is_loaded, failure = _with_shelf(reading.load, desk.shelf)
            for done in () if is_loaded else reading.read():
                yield f"{document.name}: {done:,} of {count:,} tokens read into {method} ..."
        self.reading, self.answer = reading, None
        if is_loaded:
            yield f"{document.name}: {count:,} tokens in {method}, from the shelf."
            return
        result = f"{document.name}: {count:,} tokens read into {method} in {reading.seconds:.1f} s"
        if desk.shelf is not None and not failure:
            yield f"{result}; putting them on the shelf ..."
            _, failure = _with_shelf(reading.put, desk.shelf)
        yield f"{result}.{failure}"

    def ask(self, question: str, method: str, top_k: str) -> Iterator[str | Answer]:
        """Answer a question; reads the document again first where another method is wanted.

        Yields messages and, after every token, the answer.

        Raises:
            ValueError: no document, or what ``Reading.prompt`` and ``read`` refuse.
            MemoryError: there was too little; names the way out.
        """
        if self.reading is None:
            raise ValueError(f"there is no document yet: {self.desk.first_step}")
        rows, prompt = budget_of(top_k), self.reading.prompt(question)
        if method != self.reading.method:
            yield from self.read(self.reading.document, method)
        assert self.reading is not None, "it was read above"
        self.answer, answer = None, None
        yield f"{self.reading.document.name}: answering ..."
        with memory_named("the answer"):
            for answer in self.reading.ask(prompt, rows):
                yield answer
        # What its words retrieved is known from here on.
        self.answer = answer

    def part(self, word: int | None, layer: int | None, head: int | None) -> Part:
        """The part of the answer that was chosen; None or what is not there stands for all."""
        assert self.answer is not None, "there is an answer to look at"
        words, heads = self.answer.words, self.answer.heads
        tokens = self.answer.whole.tokens
        if word is not None and 0 <= word < len(words):
            tokens = words[word][1]
        layer = layer if layer in heads else None
        most = max(heads.values(), default=0) if layer is None else heads[layer]
        return Part(tokens, layer, head if head is not None and 0 <= head < most else None)


def _with_shelf(act: Callable[[Shelf], bool], shelf: Shelf | None) -> tuple[bool, str]:
    """What ``act`` says, and why it failed: without a shelf all goes on as well."""
    try:
        return shelf is not None and act(shelf), ""
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        return False, f" The shelf can't be used: {error}"


def budget_of(text: str) -> int | float:
    """The number of tokens to retrieve; ValueError for none that ``top_k`` may be."""
    try:
        return budget(text.strip())
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"top_k: {error}") from error
