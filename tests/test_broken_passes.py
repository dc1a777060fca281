"""Forward passes that broke off, and threads that share a cache."""

import copy
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

import hf_kvret
from hf_kvret.models.compatibility import index_budget
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.conformance import ALL_MODELS
from hf_kvret.testing.scenario import prompt

STEP = torch.ones(1, 1, dtype=torch.long)


def _filled(name: str, method: str = "flat") -> tuple[Any, hf_kvret.RetrievalCache]:
    """An attached model, and a cache that holds 60 tokens."""
    model = MODELS[name].build()
    hf_kvret.attach(model)
    cache = hf_kvret.registered_methods()[method](model.config, **COVERING_OPTIONS)
    with torch.no_grad():
        model(prompt(1, 60), past_key_values=cache)
    return model, cache


def _break_off(
    model: Any, cache: hf_kvret.RetrievalCache, layer: int, tokens: torch.Tensor = STEP
) -> None:
    """A pass that breaks off before a layer."""

    def broken(*args: object) -> None:
        raise MemoryError("out of paper")

    hook = model.model.layers[layer].register_forward_pre_hook(broken)
    with torch.no_grad(), pytest.raises(MemoryError):
        model(tokens, past_key_values=cache)
    hook.remove()


@pytest.mark.parametrize(
    ("name", "method", "length", "crop"),
    [
        *(("llama", "paris", 1, 0), ("llama", "lrqk", 30, -3), ("llama", "h2o", 30, 0)),
        # Latents, keys that others read behind windows that aren't full, keys of an indexer.
        ("deepseek_v3", "paris", 30, 0),
        ("gemma4_shared", "flat", 1, 0),
        ("gemma4_shared", "flat", 30, 0),
        ("minimax_m3", "native", 30, 0),
    ],
)
def test_a_crop_drops_a_pass_that_broke_off(name: str, method: str, length: int, crop: int) -> None:
    try:
        index_budget(ALL_MODELS[name].config())
    except ValueError:
        pytest.skip("this transformers has no such model")
    model, more, outputs = ALL_MODELS[name].build(), prompt(1, length, salt=3), []
    hf_kvret.attach(model)
    options = {**COVERING_OPTIONS, **({"top_k": None} if method == "native" else {})}
    ids = prompt(1, 12 if name == "gemma4_shared" else 60)
    for breaks in (False, True):
        cache = hf_kvret.registered_methods()[method](model.config, **options)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        if breaks:
            _break_off(model, cache, 1, more[:, :2] if name == "gemma4_shared" else more)
        cache.crop(crop)
        assert cache.get_seq_length() == ids.shape[1] + crop == len(cache.tokens)
        assert torch.equal(cache.input_ids, ids[:, : len(cache.tokens)])
        with torch.no_grad():
            outputs.append(model(more, past_key_values=cache).logits)
            outputs.append(model(STEP, past_key_values=cache.fork()).logits)
    torch.testing.assert_close(outputs[2:], outputs[:2], atol=1e-5, rtol=0)


def test_a_signal_tears_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while a store takes rows in, and the call of ``generate`` ends right behind it."""
    model, cache = _filled("llama", "paris")
    ids = torch.cat([prompt(1, 60), prompt(1, 60, salt=1)], dim=1)
    store = cache.retrieval_layers[1].kv.store
    append = store.append

    def interrupted(block: Any) -> None:
        patch.undo()
        signal.raise_signal(signal.SIGINT)
        append(block)

    with monkeypatch.context() as patch:
        patch.setattr(store, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, past_key_values=cache, max_new_tokens=2)
    assert cache.retrieval_layers[1].get_seq_length() == 120
    cache.crop(0)
    assert cache.get_seq_length() == 60
    fresh = hf_kvret.ParisKVCache(model.config, **COVERING_OPTIONS)
    run: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    answers = [model.generate(ids, past_key_values=one, **run) for one in (cache, fresh)]
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("name", "message"), [("gemma2", "does not track past"), ("qwen3_next", "a recurrent state")]
)
def test_a_window_that_is_full_and_a_state_go_back_to_a_snapshot_alone(
    name: str, message: str
) -> None:
    model, cache = _filled(name)
    snapshots = cache.snapshots.fork()
    cache.snapshots.reset()
    _break_off(model, cache, 2)
    lengths = [layer.get_seq_length() for layer in cache.retrieval_layers]
    with pytest.raises(RuntimeError, match=f"{message}.*there is no snapshot"):
        cache.crop(0)
    assert [layer.get_seq_length() for layer in cache.retrieval_layers] == lengths
    cache.snapshots = snapshots
    assert cache.crop(0) == 0
    ids = torch.cat([prompt(1, 60), prompt(1, 5, salt=3)], dim=1)
    fresh = hf_kvret.ParisKVCache(model.config, **COVERING_OPTIONS)
    run: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    answers = [model.generate(ids, past_key_values=one, **run) for one in (cache, fresh)]
    assert torch.equal(*answers)


def test_a_window_that_kept_too_little_is_not_cut_short() -> None:
    """While it drafts, transformers keeps some tokens of the past, and would cut these silently."""
    model, cache = _filled("gemma3")
    window = next(x for x in cache.layers if isinstance(x, DynamicSlidingWindowLayer))
    window.record_past = True
    for token in prompt(1, 5)[0]:
        with torch.no_grad():
            model(token.view(1, 1), past_key_values=cache)
    before = window.keys.shape[2]
    with pytest.raises(RuntimeError, match="does not track past states for 30 tokens"):
        cache.crop(-30)
    lengths = {layer.get_seq_length() for layer in cache.layers}
    assert window.keys.shape[2] == before and lengths == {65} == {len(cache.tokens)}
    cache.crop(-2)
    assert cache.get_seq_length() == 63


# Behind a layer that slides, or has a state, and took in what the others lack.
@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        ("llama", 1, r"numbers of tokens \(62, 61\).*broke off.*reset"),
        ("gemma2", 1, "finish the forward pass first"),
        ("gemma2", 2, "finish the forward pass first"),
        ("qwen3_next", 1, "finish the forward pass first"),
    ],
)
def test_a_half_finished_pass_is_not_copied_saved_or_followed(
    name: str, layer: int, words: str, tmp_path: Path
) -> None:
    model, cache = _filled(name)
    step = torch.no_grad()(partial(model, STEP, past_key_values=cache))
    step()
    _break_off(model, cache, layer)
    for act in (
        cache.fork,
        lambda: copy.deepcopy(cache),
        lambda: cache.save_pretrained(tmp_path / "half"),
        step,
    ):
        with pytest.raises(RuntimeError, match=words):
            act()
    assert not (tmp_path / "half").exists()


def test_a_second_thread_in_the_middle_of_a_pass_is_named() -> None:
    model, cache = _filled("llama")
    errors: list[Exception] = []

    def second() -> None:
        try:
            with torch.no_grad():
                model(STEP, past_key_values=cache)
        except RuntimeError as error:
            errors.append(error)

    def interrupt(*args: object) -> None:
        # Once only: the second thread comes through here, too.
        hook.remove()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(60)

    with torch.no_grad():
        hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        model(STEP, past_key_values=cache)
    assert len(errors) == 1 and "another thread" in str(errors[0])
    assert "a cache of its own" in str(errors[0]) and "attach" not in str(errors[0])
    assert {layer.get_seq_length() for layer in cache.retrieval_layers} == {61}


def test_a_cache_is_handed_from_thread_to_thread(model: Any) -> None:
    hf_kvret.attach(model)
    caches = [hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS) for _ in range(2)]
    outputs: list[list[torch.Tensor]] = [[], []]

    def feed(number: int, chunk: torch.Tensor) -> None:
        with torch.no_grad():
            outputs[number].append(model(chunk, past_key_values=caches[number]).logits)

    for chunk in prompt(1, 63).split([60, 1, 1, 1], dim=1):
        feed(0, chunk)
        thread = threading.Thread(target=feed, args=(1, chunk))
        thread.start()
        thread.join(60)
    for here, elsewhere in zip(*outputs, strict=True):
        assert torch.equal(here, elsewhere)
