"""Replayed steps beside what models keep of a conversation."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvret import registry
from hf_kvret.lab.coverage.conversation import Conversation, ask, assert_same, next_turn
from hf_kvret.lab.coverage.pictures import picture_model
from hf_kvret.replay import DecodeGraph
from hf_kvret.replay.replayable import untested
from hf_kvret.testing.tape import taped


def test_a_second_turn_after_replayed_steps_has_its_own_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replays read positions and call no hook, so another request may come between."""
    made: list[DecodeGraph] = []

    class Noted(DecodeGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(registry, "DecodeGraph", Noted)
    talk = Conversation(picture_model("qwen2_5_vl"))
    model, cache = talk.model, talk.filled()
    second = next_turn(model, talk.first, talk.answer)
    # Steps that are told types of tokens are not replayed; a question has none.
    second.pop("mm_token_type_ids")
    whole = next_turn(model, talk.first, talk.answer, pictures=True)
    reference = ask(model, whole, max_new_tokens=16)
    ask(model, talk.others[1])
    with taped():
        answer = ask(model, second, cache, max_new_tokens=16)
    assert made[-1].reason is None and made[-1].replays > 4
    assert_same(answer, reference)
    ask(model, talk.others[0])
    third = ask(model, next_turn(model, second, answer), cache)
    assert_same(third, ask(model, next_turn(model, whole, reference, pictures=True)))


def test_steps_whose_frequencies_grow_with_the_text_are_not_replayed() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )  # fmt: skip
    reason = untested(LlamaForCausalLM(config))
    assert reason is not None and "grow with the text" in reason and "graph=False" in reason
