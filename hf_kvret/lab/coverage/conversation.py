"""A conversation about a picture, whose second turn is known from full attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.coverage.pictures import picture_prompt, with_types
from hf_kvret.methods.flat import FlatKVCache
from hf_kvret.models.versions import as_argument
from hf_kvret.testing.conformance import LOGIT_TOLERANCE

COVER: dict[str, Any] = {"top_k": 4096, "recent": 16, "flush": 16, "dense_below": 0}
"""A budget that covers everything: full attention, up to the order of sums."""

NEW_TOKENS = 4
"""Tokens of an answer."""


class Text(NamedTuple):
    """What one ``generate`` gave: ids ``[B, T]`` and logits ``[N, B, V]``."""

    ids: torch.Tensor
    logits: torch.Tensor


def ask(model: PreTrainedModel, inputs: dict[str, Any], cache: Any = None, **more: Any) -> Text:
    """The greedy answer to ``inputs`` with ``cache``; ``more`` are arguments of ``generate``."""
    given = {} if cache is None else as_argument(cache)
    call: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    call |= {"output_logits": True, "return_dict_in_generate": True}
    output = model.generate(**{**call, **inputs, **given, **more})
    return Text(output.sequences, torch.stack(output.logits))


def next_turn(model: PreTrainedModel, inputs: Any, answer: Text, *, pictures: bool = False) -> Any:
    """The conversation so far with a question behind it; with its pictures or without."""
    question = torch.randint(128, 255, (len(answer.ids), 9), generator=torch.Generator())
    ids = torch.cat([answer.ids, question], 1)
    ones = torch.ones(len(ids), ids.shape[1] - inputs["attention_mask"].shape[1], dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"], ones], 1)
    kept = {name: x for name, x in inputs.items() if pictures and name.startswith(("pix", "image"))}
    return with_types(model, {**kept, "input_ids": ids, "attention_mask": mask})


def flat(model: PreTrainedModel) -> FlatKVCache:
    """An empty cache for ``model`` that retrieves everything."""
    return FlatKVCache(config=model.config, **COVER)


def assert_same(result: Text, reference: Text) -> None:
    """AssertionError unless logits agree.

    Those of a second turn come from other groups of sums than those of one pass.
    """
    tolerance = 3 * LOGIT_TOLERANCE * max(1.0, float(reference.logits.std()) / 4)
    assert torch.allclose(result.logits, reference.logits, atol=tolerance, rtol=0)


class Conversation:
    """A first turn with a picture, and the second turn by full attention from scratch.

    Attributes:
        model: of ``picture_model``.
        first: inputs of the first turn.
        others: inputs of other requests: text alone, and two pictures.
        answer: to the first turn.
        reference: the answer to the second turn, without any cache of the first.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.first = model, picture_prompt(model, 1, [(8, 16)])
        self.others = [picture_prompt(model, 2, []), picture_prompt(model, 3, [(4, 4), (8, 8)])]
        self.answer = ask(model, self.first)
        whole = next_turn(model, self.first, self.answer, pictures=True)
        self.reference = ask(model, whole)

    def filled(self) -> FlatKVCache:
        """A cache that holds the first turn."""
        cache = flat(self.model)
        ask(self.model, self.first, cache)
        return cache

    def check(self, cache: RetrievalCache, model: PreTrainedModel | None = None) -> None:
        """The second turn with ``cache`` is that of full attention."""
        model = model or self.model
        second = next_turn(model, self.first, self.answer)
        assert_same(ask(model, second, cache), self.reference)
