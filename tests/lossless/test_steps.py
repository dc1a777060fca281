"""LosslessSteps in a loop of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_kvret
from hf_kvret import LosslessSteps, ParisKVCache
from hf_kvret.layer.hybrid import recording
from hf_kvret.lossless.pace import GivenPace
from hf_kvret.models.versions import as_argument
from hf_kvret.testing import COVERING_OPTIONS, MODELS

OPTIONS: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 4, "max_draft": 32, "lossless": True}


@pytest.fixture(scope="module")
def model() -> Any:
    built = MODELS["qwen3"].build()
    hf_kvret.attach(built)
    yield built
    hf_kvret.restore(built)


def _prompt(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.config.vocab_size, (1, 60), generator=generator)


def _filled(model: Any) -> tuple[ParisKVCache, torch.Tensor]:
    """A cache that holds the prompt, and the first token behind it."""
    cache = ParisKVCache(model.config, **OPTIONS)
    with torch.inference_mode():
        logits = model(_prompt(model), **as_argument(cache)).logits
    return cache, logits[:, -1:].argmax(-1)


def _text(step: Any, cache: Any, token: torch.Tensor, count: int) -> list[int]:
    """Greedy tokens that ``step`` gives behind ``token``."""
    tokens = []
    with torch.inference_mode():
        for _ in range(count):
            token = step(input_ids=token, **as_argument(cache)).logits[:, -1:].argmax(-1)
            tokens.append(int(token))
    return tokens


def test_a_loop_gets_the_tokens_of_full_attention(model: Any) -> None:
    full = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(_prompt(model), **as_argument(full)).logits
    expected = _text(model, full, logits[:, -1:].argmax(-1), 30)
    cache, token = _filled(model)
    with LosslessSteps(model, cache, pace=GivenPace(5, None)) as step:
        assert _text(step, cache, token, 30) == expected
    assert cache.get_seq_length() == full.get_seq_length()
    assert cache.rounds.accepted + cache.rounds.rounds == 30


def test_a_cache_that_was_changed_inside_is_refused_and_behind_it_is_not(model: Any) -> None:
    cache, token = _filled(model)
    with LosslessSteps(model, cache, pace=GivenPace(5, None)) as step:
        _text(step, cache, token, 1)
        with pytest.raises(RuntimeError, match="close"):
            cache.fork()
        cache.crop(-1)
        with pytest.raises(RuntimeError, match="close"):
            _text(step, cache, token, 1)
    cache, token = _filled(model)
    with LosslessSteps(model, cache, pace=GivenPace(5, None)) as step:
        _text(step, cache, token, 3)
        step.close()
        cache.crop(-2)
        assert len(_text(step, cache, token, 3)) == 3


def test_a_cache_that_was_reset_inside_starts_anew(model: Any) -> None:
    cache, token = _filled(model)
    step = LosslessSteps(model, cache, pace=GivenPace(5, None))
    _text(step, cache, token, 1)
    cache.reset()
    with pytest.raises(RuntimeError, match="reset"):
        step.close()
    with torch.inference_mode():
        model(_prompt(model), **as_argument(cache))
    assert cache.fork().get_seq_length() == _prompt(model).shape[1]


def test_sliding_layers_keep_no_past_behind_a_round() -> None:
    sliding = MODELS["gemma3"].build()
    hf_kvret.attach(sliding)
    cache, token = _filled(sliding)
    with LosslessSteps(sliding, cache, pace=GivenPace(5, None)) as step:
        _text(step, cache, token, 20)
    assert cache.rounds.drafted and not recording(cache.layers)


def test_every_pass_of_such_a_cache_is_exact(model: Any) -> None:
    full = DynamicCache(config=model.config)
    cache, token = _filled(model)
    with torch.inference_mode():
        model(_prompt(model), **as_argument(full))
        for count in (1, 1, 4, 1):
            ids = token.expand(1, count)
            expected = model(ids, **as_argument(full)).logits
            actual = model(ids, **as_argument(cache)).logits
            torch.testing.assert_close(actual, expected, atol=3e-4, rtol=0)


def test_a_draft_ends_behind_a_token_of_low_probability(model: Any) -> None:
    cache, token = _filled(model)
    with LosslessSteps(model, cache, pace=GivenPace(9, None), confidence=1.0) as step:
        _text(step, cache, token, 8)
    assert cache.rounds.drafted == cache.rounds.rounds


@pytest.mark.parametrize(
    ("cache_of", "error", "words"),
    [
        (lambda model: DynamicCache(config=model.config), TypeError, "DynamicCache"),
        (lambda model: ParisKVCache(model.config), ValueError, "lossless=True"),
    ],
)
def test_other_caches_are_refused(model: Any, cache_of: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        LosslessSteps(model, cache_of(model))


def test_an_output_without_names_is_refused(model: Any) -> None:
    cache, token = _filled(model)
    with LosslessSteps(model, cache) as step, pytest.raises(ValueError, match="return_dict=False"):
        step(input_ids=token, return_dict=False, **as_argument(cache))


def test_a_model_with_a_recurrent_state_is_refused() -> None:
    recurrent = MODELS["qwen3_next"].build()
    with pytest.raises(ValueError, match="recurrent state"):
        LosslessSteps(recurrent, ParisKVCache(recurrent.config, **OPTIONS))
