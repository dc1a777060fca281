"""A conversation whose cache stays filled from turn to turn."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.cache import RetrievalCache
from hf_kvret.methods.known import METHODS
from hf_kvret.shelf.questions import answer_options


class Chat:
    """A conversation with a model; made by ``hf_kvret.chat``.

    Attributes:
        messages: of the conversation so far, as a chat template takes them. They may be edited:
            the next turn reads again what differs.
        cache: that holds it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: RetrievalCache,
        messages: list[dict[str, Any]],
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.cache, self.messages = cache, messages
        self._is_free = threading.Lock()

    def send(self, text: str, **options: Any) -> str:
        """The model's answer to ``text``, which the conversation holds from here on.

        What the cache holds already is not read again. Where the chat template changes earlier
        turns, as it does when it leaves out what the model thought, what differs is. A call that
        fails, or is interrupted, leaves the conversation as it was.

        Args:
            text: of the user.
            **options: of ``generate``, as ``streamer``; 512 new tokens at most, unless they or a
                ``generation_config`` name a length. One answer of one beam.

        Raises:
            RuntimeError: another thread waits for an answer.
            ValueError: several beams or answers, another cache, or a conversation that the template
                refuses.
        """
        if not self._is_free.acquire(blocking=False):
            raise RuntimeError("another thread waits for an answer: ask for one at a time")
        try:
            return self._send(text, options)
        finally:
            self._is_free.release()

    def _send(self, text: str, options: Mapping[str, Any]) -> str:
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"].to(self._model.device)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        usual = {"past_key_values": self.cache, "max_new_tokens": 512}
        arguments = answer_options(self._model, self._tokenizer, prompt, options, usual)
        generate: Any = self._model.generate
        try:
            result = generate(prompt, **arguments)
        except BaseException:
            # A pass that broke off is dropped; where nobody knows what is held, everything.
            try:
                self.cache.crop(0)
            except RuntimeError:
                self.cache.reset()
            raise
        tokens = getattr(result, "sequences", result)[0, prompt.shape[1] :]
        answer = str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def chat(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache_implementation: str = "paris",
    *,
    cache_config: Mapping[str, Any] | None = None,
    system: str | None = None,
) -> Chat:
    """A new conversation with ``model``, which keeps its cache from turn to turn.

        talk = hf_kvret.chat(model, tokenizer)
        print(talk.send("Who wrote it?"))
        print(talk.send("And when?"))

    Args:
        model: that answers.
        tokenizer: of the model, with a chat template.
        cache_implementation: name of a registered method.
        cache_config: options of the cache; ``on_divergence`` is ``"crop"`` where they don't say.
        system: text of a system message, in front of all others.

    Raises:
        ValueError: a tokenizer without a chat template, an unknown method or option, or a model
            that a retrieval cache can't serve.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: set "
            "tokenizer.chat_template, or call model.generate with past_key_values"
        )
    if cache_implementation not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"cache_implementation={cache_implementation!r}: choose one of {known}")
    options = {"on_divergence": "crop", **(cache_config or {})}
    cache = METHODS[cache_implementation](model.config, **options)
    first = [] if system is None else [{"role": "system", "content": system}]
    return Chat(model, tokenizer, cache, first)
