"""Rounds whose drafts are replayed from captured steps."""

from typing import Any

import pytest
import torch

import hf_kvret
from hf_kvret import DecodeGraph, LosslessSteps
from hf_kvret.cache import RetrievalCache
from hf_kvret.lossless.pace import GivenPace
from hf_kvret.testing import MODELS
from hf_kvret.testing.tape import taped
from hf_kvret_kernels._dispatch import interpreted

from ..replay.steps import small_cache, small_llama

pytestmark = pytest.mark.skipif(not interpreted(), reason="the tape needs Triton's interpreter")
_PROMPT = 24


@torch.inference_mode()
def _text(model: Any, cache: RetrievalCache, graph: DecodeGraph | None, count: int) -> list[int]:
    """Greedy tokens in rounds of three drafts."""
    prompt = torch.arange(_PROMPT)[None] * 7 % 50 + 10
    logits = model(input_ids=prompt, past_key_values=cache).logits
    tokens = []
    with LosslessSteps(model, cache, pace=GivenPace(3, None), step=graph) as step:
        for index in range(count):
            token = logits[:, -1:].argmax(-1)
            tokens.append(int(token))
            position = torch.full((1, 1), _PROMPT + index)
            logits = step(input_ids=token, position_ids=position, past_key_values=cache).logits
    return tokens


def _replayed(model: Any, count: int, method: str, **options: Any) -> tuple[DecodeGraph, Any]:
    """The graph of some rounds, whose text is that of usual ones, and their counts."""
    with taped():
        own, usual = (small_cache(model, method, lossless=True, **options) for _ in range(2))
        graph = DecodeGraph(model, own)
        assert _text(model, own, graph, count) == _text(model, usual, None, count)
    assert graph.reason is None
    return graph, own.rounds


def test_a_captured_step_serves_many_rounds() -> None:
    """It is captured anew behind a flush, but not behind an exact pass or dropped drafts."""
    graph, rounds = _replayed(small_llama(1), 12, "flat", store="host", recent=8, flush=8)
    assert rounds.rounds > 2
    assert graph.captures == 2 and graph.replays == rounds.drafted - 2


def test_drafts_of_an_index_that_learns_are_captured_in_each_round() -> None:
    graph, rounds = _replayed(small_llama(1), 6, "lrqk")
    assert graph.captures == rounds.rounds


@pytest.mark.slow
def test_drafts_with_a_recurrent_state_are_replayed_across_rounds() -> None:
    """A state goes back in place, so the captured step finds it there."""
    model = MODELS["qwen3_next"].build()
    hf_kvret.attach(model)
    graph, rounds = _replayed(model, 7, "flat", recent=8, flush=8)
    assert graph.replays > rounds.rounds
    assert rounds.accepted < rounds.drafted
