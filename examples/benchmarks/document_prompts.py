"""Turns of a chat, and questions to a document: prompts, and the time of answers to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_kvret.lab.evaluate.needles import Fact, Wording

SCENARIOS = ("chat", "document")


@dataclass(frozen=True)
class Prompts:
    """Texts with needles, and questions about them, all of given numbers of tokens.

    Attributes:
        wording: of needles and questions; between needles is its haystack.
        context, question, questions: tokens of the document, of each question, and their number.
        message, turns: tokens of each of a user's messages in the chat, and their number.
        new_tokens: most tokens of an answer.
        seed: of needles.
    """

    wording: Wording
    context: int
    question: int
    questions: int
    message: int
    turns: int
    new_tokens: int
    seed: int

    def longest(self, scenario: str) -> int:
        """Most tokens of a prompt and its answer."""
        if scenario == "document":
            return self.context + self.question + self.new_tokens
        return self.turns * (self.message + self.new_tokens)

    def texts(self, scenario: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """``[n]`` token ids that all prompts begin with, and of what each call adds to them.

        A chat begins with nothing. Its first message has the instruction in front, and each has a
        needle at its beginning and the question about it at its end.

        Raises:
            ValueError: a length that leaves no room for needles or question; names the option.
        """
        rng, head = np.random.default_rng(self.seed), self.wording.heads[1]
        if scenario == "document":
            facts = self.wording.facts(rng, self.questions)
            start = self._text(rng, "context", head, facts, [])
            return start, [self._text(rng, "question", [], [], fact.question) for fact in facts]
        facts = self.wording.facts(rng, self.turns)
        return torch.empty(0, dtype=torch.long), [
            self._text(rng, "message", [] if turn else head, [fact], fact.question)
            for turn, fact in enumerate(facts)
        ]

    def _text(
        self,
        rng: np.random.Generator,
        name: str,
        head: Sequence[int],
        facts: Sequence[Fact],
        tail: Sequence[int],
    ) -> torch.Tensor:
        """Head, needles with a piece of haystack behind each, and tail; ``name`` says how many."""
        length: int = getattr(self, name)
        room = length - len(head) - sum(len(fact.needle) for fact in facts) - len(tail)
        if room < 0:
            raise ValueError(
                f"--{name} {length}: its needles and its question take {length - room} tokens, "
                "give so many or more"
            )
        # Questions would begin with the same tokens if their haystacks did.
        haystack = self.wording.haystack.take(rng, room, rng.random())
        needles = [fact.needle for fact in facts] or [[]]
        tokens = [*head]
        for needle, piece in zip(needles, np.array_split(haystack, len(needles)), strict=True):
            tokens += [*needle, *map(int, piece)]
        return torch.tensor([*tokens, *tail])


class Call(NamedTuple):
    """What a prompt took, and the answer to it.

    Attributes:
        first: seconds to the first token.
        seconds: of the whole call.
        read: tokens of the prompt that were not there already.
        answer: new tokens; None where they are not compared.
    """

    first: float
    seconds: float
    read: int
    answer: tuple[int, ...] | None


def timed_answer(model: PreTrainedModel, new_tokens: int, ids: torch.Tensor, **cache: Any) -> Call:
    """The greedy answer of ``generate`` to ``ids [T]``, with the arguments of a ``cache``."""
    generate: Any = model.generate
    prompt, clock = ids[None].to(model.device), _Clock()
    options = {"max_new_tokens": new_tokens, "do_sample": False, "streamer": clock}
    options |= {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
    started = time.perf_counter()
    output = generate(prompt, **options, **cache)
    seconds = time.perf_counter() - started
    read = len(ids) - getattr(output.past_key_values, "from_shelf", 0)
    answer = tuple(output.sequences[0, len(ids) :].tolist())
    # The prompt is handed out before the first token.
    return Call(clock.times[1] - started, seconds, read, answer)


class _Clock(BaseStreamer):
    """When ``generate`` handed out the prompt, and each token, which is on the host then."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """All is noted."""
