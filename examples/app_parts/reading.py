"""A document that is read once, and questions about it: each takes a fork of the filled cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from app_parts.answers import Answer, Step, retrieved
from app_parts.languages import Language, Tokens
from hf_kvret import Shelf
from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.failures import out_of_memory
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lossless.steps import why_not
from hf_kvret.observe.observers import Selection, observe
from hf_kvret.options.config import LOAD_OPTIONS

CACHES = ("paris", "lrqk", "flat", "ctkvr", "a2ats")
# A small window, so that a short document shows something.
WINDOW = {"sink": 4, "recent": 64, "flush": 64, "dense_below": 0}
_CHUNK = 1_024


@dataclass(frozen=True)
class Limits:
    """What is refused, and where an answer ends.

    Attributes:
        upload: bytes of a document.
        tokens: of a document.
        question: characters of a question.
        answer: tokens of an answer.
    """

    upload: int = 5_000_000
    tokens: int = 32_768
    question: int = 4_000
    answer: int = 32


@dataclass(frozen=True)
class Document:
    """What is asked about."""

    name: str
    tokens: Tokens


@contextmanager
def memory_named(task: str) -> Iterator[None]:
    """Makes every way to run out of memory in it a MemoryError that names the way out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise MemoryError(
            f"{task}: out of memory. Give a shorter document, or start the app with a smaller "
            "--model or --dtype bfloat16; --max-tokens sets how long a document may be"
        ) from error


class Reading:
    """A document in a cache.

    Args:
        subject: the model.
        language: that it speaks.
        document: see ``read``.
        method: the cache, one of ``CACHES``.
        limits: see there.

    Raises:
        ValueError: a cache that this model can't have, or a document that is too long.
    """

    def __init__(
        self, subject: Subject, language: Language, document: Document, method: str, limits: Limits
    ) -> None:
        self.language, self.document, self.method, self.limits = language, document, method, limits
        count = len(document.tokens)
        if count > limits.tokens:
            raise ValueError(
                f"{document.name} has {count:,} tokens, and at most {limits.tokens:,} are "
                "accepted: give a part of it, or start the app with a larger --max-tokens"
            )
        config: Any = subject.model.config.get_text_config(decoder=True)
        self._positions: int | None = getattr(config, "max_position_embeddings", None)
        self._check_length(document.tokens)
        # Caches of ours grow as they need; a question has fewer tokens than bytes.
        capacity = self._positions or count + 4 * limits.question + limits.answer
        self._reader = Reader(subject.model, choose_cache(method, WINDOW), capacity)
        self.seconds = 0.0

    def read(self) -> Iterator[int]:
        """Read the document; yields the number of tokens that were read, after each part."""
        ids = torch.tensor(self.document.tokens.ids)
        chunks = list(ids.split(_CHUNK))
        if len(chunks) > 1 and len(chunks[-1]) < _CHUNK // 4:
            # So few tokens would retrieve, as drafted ones do.
            chunks[-2:] = [torch.cat(chunks[-2:])]
        for chunk in chunks:
            self._reader.feed(chunk)
            yield self._reader.length
        started = time.perf_counter()
        # Builds the indexes, so that no question has to.
        self._reader.fork()
        self.seconds = self._reader.seconds + time.perf_counter() - started

    def load(self, shelf: Shelf) -> bool:
        """Whether the document is on a shelf; then it is in the cache, and need not be read."""
        reader, options = self._reader, asdict(self._reader.choice.options)
        entry = shelf.has(self._ids, reader.model, self.method, **options)
        if entry is not None:
            changes = {name: options[name] for name in LOAD_OPTIONS & {*options}}
            reader.cache = shelf.load(entry.name, reader.model, **changes)
            reader.length = entry.tokens
        return entry is not None

    @torch.inference_mode()
    def put(self, shelf: Shelf) -> bool:
        """Put the document on a shelf, by its name; it is there then, or an error says why not."""
        shelf.put(self._reader.cache, self._ids, self._reader.model, self.document.name)
        return True

    @property
    def _ids(self) -> torch.Tensor:
        return torch.tensor([self.document.tokens.ids])

    def prompt(self, question: str) -> Tokens:
        """Document and question.

        Raises:
            ValueError: no question, or one that is too long.
        """
        if not question.strip():
            raise ValueError("there is no question: write one")
        if len(question) > self.limits.question:
            raise ValueError(
                f"the question has {len(question):,} characters, and at most "
                f"{self.limits.question:,} are accepted: put the text into the document"
            )
        prompt = self.document.tokens + self.language.question(question)
        self._check_length(prompt)
        return prompt

    def ask(self, prompt: Tokens, top_k: int | float) -> Iterator[Answer]:
        """The answer to a ``prompt`` after every token of it, the same object each time.

        What was retrieved is in it the last time, with full attention's answer.
        """
        turn = self._reader.fork(top_k=top_k)
        ids = torch.tensor(prompt.ids[len(self.document.tokens) :])
        if len(ids) > 1:
            turn.feed(ids[:-1])
        # The last token is fed alone: it asks for the first new one, and retrieves. Another fork
        # counts the steps of the answer alone.
        answer = Answer(prompt, len(self.document.tokens))
        yield from self._generate(turn.fork(), ids[-1:], answer)
        answer.exact = self._exact(ids)
        yield answer

    def _exact(self, ids: torch.Tensor) -> str | None:
        """Full attention's answer to ``ids`` behind the document; None where it can't be had."""
        turn = self._reader.fork()
        if why_not(turn.model, turn.cache) is not None:
            return None
        turn = turn.fork(lossless=True)
        return "".join(
            self.language.answer(
                turn.answer(turn.feed(ids), self.limits.answer, self.language.stop)
            )
        )

    def _generate(self, turn: Reader, token: torch.Tensor, answer: Answer) -> Iterator[Answer]:
        cache, seen = turn.cache, []
        assert isinstance(cache, RetrievalCache), "the app offers no others"
        for _ in range(self.limits.answer):
            with observe(cache, seen.append):
                best = int(turn.feed(token)[-1].argmax())
            answer.passes, answer.seconds = answer.passes + 1, turn.seconds
            if best in self.language.stop:
                break
            answer.steps.append(Step({}, turn.length))
            answer.ids.append(best)
            answer.texts = self.language.answer(answer.ids)
            token = torch.tensor([best])
            yield answer
        usage = turn.usage()
        answer.step_bytes, answer.full_bytes = usage.step_bytes, usage.full_bytes
        answer.dense = cache.why_dense()
        _fill_in(answer, cache, seen)
        yield answer

    def _check_length(self, prompt: Tokens) -> None:
        needed = len(prompt) + self.limits.answer
        if self._positions is not None and needed > self._positions:
            raise ValueError(
                f"document, question and answer need {needed:,} positions, and the model knows "
                f"{self._positions:,} (max_position_embeddings): give a shorter document, or "
                "start the app with another --model"
            )


def _fill_in(answer: Answer, cache: RetrievalCache, seen: list[Selection]) -> None:
    """Put what was ``seen`` into the answer's steps."""
    by_layer: dict[int, list[Selection]] = {}
    for one in seen:
        by_layer.setdefault(one.layer, []).append(one)
    for number, of_layer in by_layer.items():
        # All keys of a layer, but of one layer at a time.
        keys = cache.layers[number].keys
        for one in of_layer:
            # A pass that ended the answer gave no token.
            step = one.recent[1] - len(answer.prompt)
            if step < len(answer.steps):
                answer.steps[step].layers[number] = retrieved(one, keys)
