"""From a template and a sample to text that fits: filling, cutting in the middle, chat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.evaluation.longbench.data import LongSample
from hf_kvret.evaluation.longbench.prompts import split_template
from hf_kvret.evaluation.texts import Chat, token_ids


@dataclass(frozen=True)
class LongPrompt:
    """A prompt that is ready to be read.

    Attributes:
        context: what is read in one pass.
        question: what is fed after it; empty where the question is part of the context.
        cut: something was left out in the middle.
    """

    context: str
    question: str
    cut: bool


def fill(
    template: str,
    sample: LongSample,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    inside: bool,
    chat: Chat = ("", ""),
) -> LongPrompt:
    """The sample's prompt, at most ``max_length`` tokens of it and the chat around them.

    A longer one keeps its first and last half, as in LongBench: ``inside`` of the whole prompt,
    else of the context, whose second half is shorter by the question, so that both set-ups read the
    same text.

    Raises:
        ValueError: without ``inside``, a question that takes half of ``max_length`` or more.
    """
    head, tail = split_template(template)
    context = head.format(context=sample.context, input=sample.input)
    question = tail.format(input=sample.input)
    half = max_length // 2
    if inside:
        text, cut = _cut(context + question, tokenizer, max_length, half, half)
        return LongPrompt(chat[0] + text + chat[1], "", cut)
    taken = len(tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"])
    if taken >= half:
        raise ValueError(
            f"--max-length {max_length}: a question has {taken} tokens, and half of --max-length "
            "must be more: raise it, or use --questions inside"
        )
    text, cut = _cut(context, tokenizer, max_length - taken, half, half - taken)
    return LongPrompt(chat[0] + text, question + chat[1], cut)


def _cut(
    text: str, tokenizer: PreTrainedTokenizerBase, limit: int, first: int, last: int
) -> tuple[str, bool]:
    """The text, or its first and last tokens as text when it has more than ``limit``."""
    ids = token_ids(tokenizer, text)
    if len(ids) <= limit:
        return text, False
    decode: Callable[..., str] = tokenizer.decode
    parts = (ids[:first].tolist(), ids[len(ids) - last :].tolist())
    return "".join(decode(part, skip_special_tokens=True) for part in parts), True
