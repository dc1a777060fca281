"""LosslessSteps in a loop of one's own."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

import hf_kvret
from hf_kvret import LosslessSteps, ParisKVCache
from hf_kvret.layer.hybrid import foreign_layers_of, recording
from hf_kvret.lossless.pace import GivenPace
from hf_kvret.lossless.steps import _are_equal
from hf_kvret.models.versions import as_argument
from hf_kvret.testing import COVERING_OPTIONS, HYBRID_MODELS, MODELS

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


def _text(step: Any, cache: Any, token: torch.Tensor, count: int, **counted: Any) -> list[int]:
    """Greedy tokens that ``step`` gives behind ``token``; what is ``counted`` goes up in place."""
    tokens = []
    with torch.inference_mode():
        for _ in range(count):
            output = step(input_ids=token, **as_argument(cache), **counted)
            token = output.logits[:, -1:].argmax(-1)
            tokens.append(int(token))
            counted = {name: one.add_(1) for name, one in counted.items()}
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
        with pytest.raises(RuntimeError, match="other LosslessSteps"):
            _text(LosslessSteps(model, cache), cache, token, 1)
        cache.crop(-1)
        with pytest.raises(RuntimeError, match="close"):
            _text(step, cache, token, 1)
    cache, token = _filled(model)
    with LosslessSteps(model, cache, pace=GivenPace(5, None)) as step:
        first = _text(step, cache, token, 1)
        for call, words in ((model, "read tokens ahead"), (step, "start with a new cache")):
            with pytest.raises(RuntimeError, match=words):
                _text(call, cache, torch.tensor([first]), 1)
    cache, token = _filled(model)
    with LosslessSteps(model, cache, pace=GivenPace(5, None)) as step:
        _text(step, cache, token, 3)
        step.close()
        cache.crop(-2)
        assert len(_text(step, cache, token, 3)) == 3


@pytest.mark.parametrize("name", ["position_ids", "attention_mask", "output_hidden_states"])
def test_a_step_with_other_inputs_than_the_drafts_is_computed(model: Any, name: str) -> None:
    mask = torch.ones(1, 62, dtype=torch.long)
    mask[0, 3:20] = 0
    other = {"position_ids": torch.tensor([[80]]), "attention_mask": mask}.get(name, True)
    cache, token = _filled(model)
    full = DynamicCache(config=model.config)
    pace = GivenPace(5, None)
    # All drafts are the token that comes next.
    step = LosslessSteps(model, cache, guess=lambda ids, logits: (token, logits), pace=pace)
    with torch.inference_mode(), step:
        model(_prompt(model), **as_argument(full))
        for more in ({}, {name: other}):
            expected = model(input_ids=token, **as_argument(full), **more)
            output = step(input_ids=token, **as_argument(cache), **more)
            torch.testing.assert_close(output.logits, expected.logits, atol=1e-4, rtol=1e-4)
            assert (output.hidden_states is None) == (expected.hidden_states is None)


def test_containers_are_other_inputs_and_raise_nothing() -> None:
    assert not _are_equal({"x": (torch.ones(2),)}, {"x": (torch.ones(2),)})


@pytest.mark.parametrize("confidence", [2.0, -1.0, float("nan"), "x"])
def test_a_confidence_is_a_probability(model: Any, confidence: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        LosslessSteps(model, _filled(model)[0], confidence=confidence)


@pytest.mark.parametrize(("name", "drafts"), [("gemma3", 0), ("gemma3", 5), ("gemma2", 5)])
def test_a_ctrl_c_in_a_round_of_sliding_layers_is_what_is_raised(name: str, drafts: int) -> None:
    sliding, passes = MODELS[name].build(), []
    hf_kvret.attach(sliding)
    cache, token = _filled(sliding)
    with LosslessSteps(sliding, cache, pace=GivenPace(drafts, None)) as step:
        token = torch.tensor([_text(step, cache, token, 3)[-1:]])
    expected = _text(sliding, cache.fork(), token, 3)

    def breaks(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 1 + drafts // 2:
            raise KeyboardInterrupt

    hook = sliding.model.layers[-1].register_forward_pre_hook(breaks)
    with LosslessSteps(sliding, cache, pace=GivenPace(drafts, None)) as step:
        with pytest.raises(KeyboardInterrupt):
            _text(step, cache, token, 1)
        hook.remove()
        # An exact step records no past: then layers go back to the prompt's snapshot.
        assert cache.get_seq_length() == (63 if drafts else 60)
        assert not drafts or _text(step, cache, token, 3) == expected


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


@pytest.mark.parametrize(
    ("name", "value"), [("return_dict", False), ("labels", 0), ("output_router_logits", True)]
)
def test_what_is_not_of_one_token_is_refused(model: Any, name: str, value: Any) -> None:
    cache, token = _filled(model)
    with LosslessSteps(model, cache) as step, pytest.raises(ValueError, match=f"{name}.*leave"):
        step(input_ids=token, **{name: token if name == "labels" else value}, **as_argument(cache))


def _states(cache: Any) -> list[torch.Tensor]:
    """Convolutional and recurrent states of all layers."""
    layers = [x for x in foreign_layers_of(cache.layers).values() if hasattr(x, "conv_states")]
    both = [states for one in layers for states in (one.conv_states, one.recurrent_states)]
    return [x for states in both for x in states.values() if x is not None]


def test_recurrent_states_are_those_of_the_tokens_that_were_read() -> None:
    recurrent = MODELS["qwen3_next"].build()
    hf_kvret.attach(recurrent)
    full = ParisKVCache(recurrent.config, **{**OPTIONS, "snapshots": 0})
    cache, token = _filled(recurrent)
    with torch.inference_mode():
        recurrent(_prompt(recurrent), **as_argument(full))
    expected = _text(recurrent, full, token, 12)
    with LosslessSteps(recurrent, cache, pace=GivenPace(5, None)) as step:
        assert _text(step, cache, token, 12, position_ids=torch.tensor([[60]])) == expected
    # It ends outside of inference mode, in the middle of a round.
    assert 0 < cache.rounds.accepted < cache.rounds.drafted
    assert cache.snapshots.pinned is None and cache.get_seq_length() == full.get_seq_length()
    assert cache.fork().rounds.rounds == 0
    for state, other in zip(_states(cache), _states(full), strict=True):
        torch.testing.assert_close(state, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("broken", [2, 6])
def test_a_round_that_breaks_leaves_states_as_they_were(broken: int) -> None:
    """The pass ``broken`` is a draft, or the one that verifies all."""
    recurrent = HYBRID_MODELS["falcon_h1"].build()
    hf_kvret.attach(recurrent)
    cache, token = _filled(recurrent)
    before, passes = [x.clone() for x in _states(cache)], []

    def breaks(*_: Any) -> None:
        passes.append(1)
        if len(passes) == broken:
            raise MemoryError

    expected = _text(recurrent, cache.fork(), token, 6)
    hook = recurrent.model.layers[-1].feed_forward.register_forward_pre_hook(breaks)
    with LosslessSteps(recurrent, cache, pace=GivenPace(5, None)) as step:
        with pytest.raises(MemoryError):
            _text(step, cache, token, 1)
        assert cache.get_seq_length() == 60 and len(passes) == broken
        assert all(map(torch.equal, _states(cache), before))
        hook.remove()
        assert _text(step, cache, token, 6) == expected


@pytest.mark.parametrize(("models", "name"), [(HYBRID_MODELS, "falcon_h1"), (MODELS, "qwen3_next")])
def test_a_ctrl_c_in_close_leaves_the_cache_as_before_the_round(models: Any, name: str) -> None:
    recurrent = models[name].build()
    hf_kvret.attach(recurrent)
    cache, token = _filled(recurrent)
    before = [x.clone() for x in _states(cache)]
    expected = _text(recurrent, cache.fork(), token, 6)

    def breaks(*_: Any) -> None:
        raise KeyboardInterrupt

    step = LosslessSteps(recurrent, cache, pace=GivenPace(5, None))
    _text(step, cache, token, 1)
    hook = recurrent.model.layers[-1].register_forward_pre_hook(breaks)
    with pytest.raises(KeyboardInterrupt):
        step.close()
    hook.remove()
    assert cache.get_seq_length() == 60 and cache.snapshots.pinned is None
    assert not recording(cache.layers)
    assert all(map(torch.equal, _states(cache), before))
    assert _text(recurrent, cache.fork(), token, 6) == expected
    with step:
        assert _text(step, cache, token, 6) == expected


def test_states_that_nobody_can_copy_are_refused() -> None:
    recurrent = MODELS["qwen3_next"].build()
    cache = ParisKVCache(recurrent.config, **OPTIONS)

    class Another(LinearAttentionLayer):
        """A layer of a later transformers."""

    cache.layers[0] = Another()
    with pytest.raises(ValueError, match="copy the states of a Another"):
        LosslessSteps(recurrent, cache)
