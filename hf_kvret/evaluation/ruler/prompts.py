"""A task's template inside a chat template, and a prompt in its three parts.

RULER's order is chat template around the task's template, then the answer prefix, so that the
prefix stands behind the assistant's header.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

ChatTemplate = Callable[[str], str]
"""Puts a user's message into the model's chat format, up to and with the assistant's header."""

_CONTEXT = "{context}"


@dataclass(frozen=True)
class Draft:
    """A prompt that is not yet known to fit; the fields are those of ``Sample``."""

    context: str
    question: str
    answer_prefix: str
    outputs: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """All that the model is given."""
        return self.context + self.question + self.answer_prefix

    def after(self, text: str) -> Draft:
        """The same prompt behind ``text``."""
        return replace(self, context=text + self.context)


@dataclass(frozen=True)
class Template:
    """A task's template, ready to be filled.

    Attributes:
        opening: the chat template's text before the task's.
        head: the task's text before the haystack.
        tail: the task's text behind the haystack.
        closing: the chat template's text behind the task's.
        answer_prefix: follows ``closing``.

    ``head``, ``tail`` and ``answer_prefix`` have placeholders in braces; the chat template's parts
    are taken as they are.
    """

    opening: str
    head: str
    tail: str
    closing: str
    answer_prefix: str

    @classmethod
    def make(cls, text: str, answer_prefix: str, chat_template: ChatTemplate | None) -> Template:
        """Split ``text`` at its ``{context}`` and put it into the chat template.

        The chat template is called once, with the text unfilled.

        Raises:
            ValueError: what the chat template returned doesn't hold the text unchanged and once.
        """
        rendered = text if chat_template is None else chat_template(text)
        if rendered.count(text) != 1:
            raise ValueError(
                f"chat_template returned {rendered[:80]!r}...: it must return a text that holds "
                f"the message it is given once and unchanged, braces included"
            )
        opening, _, closing = rendered.partition(text)
        head, _, tail = text.partition(_CONTEXT)
        return cls(opening, head, tail, closing, answer_prefix)

    def fill(self, context: str, outputs: tuple[str, ...], **fields: object) -> Draft:
        """The prompt around a haystack."""
        return Draft(
            context=self.opening + self.head.format(**fields) + context,
            question=self.tail.format(**fields) + self.closing,
            answer_prefix=self.answer_prefix.format(**fields),
            outputs=outputs,
        )

    def with_example(self, draft: Draft, example: str) -> Draft:
        """``draft``, made by this template, with a text between chat template and task's text."""
        assert draft.context.startswith(self.opening)
        context = self.opening + example + draft.context.removeprefix(self.opening)
        return replace(draft, context=context)
