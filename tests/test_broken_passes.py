"""Forward passes that broke off, and threads that share a cache."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt


def _ids(rows: int = 1, length: int = 60) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.factor("where", ["append", "mlp"])
def test_a_forward_pass_that_broke_off_is_noticed_by_the_next_one(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a layer, or between two: what some layers took in, others lack."""
    model = MODELS["llama"].build()
    hf_kvret.attach(model)
    cache = hf_kvret.FlatKVCache(model.config, **{**COVERING_OPTIONS, "top_k": 4})
    ids = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(0))
    step = ids[:, :1]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with monkeypatch.context() as patch:

            def broken(*args: object, **kwargs: object) -> None:
                raise MemoryError("out of paper")

            if where == "append":
                patch.setattr(cache.retrieval_layers[1].kv.store, "append", broken)
            else:
                patch.setattr(model.model.layers[0].mlp, "forward", broken)
            with pytest.raises(MemoryError):
                for _ in range(10):
                    model(step, past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"broke off.*reset\(\)"):
            model(step, past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        model(step, past_key_values=cache)
    assert cache.get_seq_length() == 61


def _half_done(method: str = "paris") -> tuple[PreTrainedModel, hf_kvret.RetrievalCache]:
    """A model, and a cache whose last pass broke off between its two layers."""
    model = MODELS["llama"].build()
    hf_kvret.attach(model)
    options = {**COVERING_OPTIONS, "top_k": 4}
    cache = hf_kvret.registered_methods()[method](model.config, **options)
    ids = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(0))

    def broken(*args: object) -> None:
        raise MemoryError("out of paper")

    with torch.no_grad():
        model(ids, past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(broken)
        with pytest.raises(MemoryError):
            model(ids[:, :1], past_key_values=cache)
        hook.remove()
    return model, cache


@pytest.mark.parametrize("method", ["flat", "paris", "h2o"])
def test_a_half_finished_pass_is_not_copied_cropped_or_saved(method: str, tmp_path: Path) -> None:
    model, cache = _half_done(method)
    for what in (
        cache.fork,
        lambda: copy.deepcopy(cache),
        lambda: cache.crop(-1),
        lambda: cache.save_pretrained(tmp_path / "half"),
        lambda: model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache),
    ):
        with pytest.raises(RuntimeError, match=r"numbers of tokens \(61, 60\).*broke off.*reset"):
            what()
    assert not (tmp_path / "half").exists()
    cache.reset()
    with torch.no_grad():
        model(torch.ones(1, 9, dtype=torch.long), past_key_values=cache)
    assert cache.fork().get_seq_length() == 9


@pytest.mark.parametrize(
    ("name", "layer"), [("gemma2", 1), ("gemma2", 2), ("qwen3_next", 1), ("qwen3_next", 2)]
)
def test_a_pass_that_broke_off_in_a_hybrid_is_noticed(
    name: str, layer: int, tmp_path: Path
) -> None:
    """Behind a layer that slides, or has a state, and took in what the others lack."""
    model = MODELS[name].build()
    hf_kvret.attach(model)
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)
    step = torch.ones(1, 1, dtype=torch.long)

    def broken(*args: object) -> None:
        raise MemoryError("out of paper")

    with torch.no_grad():
        model(_ids(), past_key_values=cache)
        model(step, past_key_values=cache)
        hook = model.model.layers[layer].register_forward_pre_hook(broken)
        with pytest.raises(MemoryError):
            model(step, past_key_values=cache)
        hook.remove()
        for what in (cache.fork, lambda: cache.save_pretrained(tmp_path / "half")):
            with pytest.raises(RuntimeError, match="finish the forward pass first"):
                what()


def test_a_retry_behind_a_layer_that_slides_is_refused() -> None:
    model = MODELS["gemma2"].build()
    hf_kvret.attach(model)
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)

    def broken(*args: object) -> None:
        raise MemoryError("out of paper")

    with torch.no_grad():
        model(_ids(), past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(broken)
        with pytest.raises(MemoryError):
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match=r"numbers of tokens \(61, 60, 60\)"):
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)


def test_layers_may_run_in_threads_one_after_the_other() -> None:
    model = MODELS["llama"].build()
    hf_kvret.attach(model)
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)
    expected = model(_ids(), past_key_values=DynamicCache(config=model.config)).logits
    for layer in model.model.layers:
        pool, forward = ThreadPoolExecutor(1), layer.forward

        def elsewhere(*args: Any, pool: Any = pool, forward: Any = forward, **kwargs: Any) -> Any:
            return pool.submit(torch.no_grad()(forward), *args, **kwargs).result()

        layer.forward = elsewhere
    with torch.no_grad():
        model(_ids()[:, :59], past_key_values=cache)
        got = model(_ids()[:, 59:], past_key_values=cache).logits
    torch.testing.assert_close(got[:, -1], expected[:, -1], atol=1e-4, rtol=0)


def test_a_second_thread_in_the_middle_of_a_pass_is_named() -> None:
    model = MODELS["llama"].build()
    hf_kvret.attach(model)
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)
    errors: list[Exception] = []
    step = torch.ones(1, 1, dtype=torch.long)

    def second() -> None:
        try:
            with torch.no_grad():
                model(step, past_key_values=cache)
        except RuntimeError as error:
            errors.append(error)

    def interrupt(*args: object) -> None:
        # Once only: the second thread comes through here, too.
        hook.remove()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(60)

    with torch.no_grad():
        model(torch.ones(1, 60, dtype=torch.long), past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        model(step, past_key_values=cache)
    assert len(errors) == 1 and "another thread" in str(errors[0])
    assert "a cache of its own" in str(errors[0]) and "attach" not in str(errors[0])
    assert {layer.get_seq_length() for layer in cache.retrieval_layers} == {61}


def test_a_cache_is_handed_from_thread_to_thread() -> None:
    model = MODELS["llama"].build()
    hf_kvret.attach(model)
    caches = [hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS) for _ in range(2)]
    ids = torch.randint(3, 128, (1, 63), generator=torch.Generator().manual_seed(0))
    outputs: list[list[torch.Tensor]] = [[], []]

    def feed(number: int, part: torch.Tensor) -> None:
        with torch.no_grad():
            outputs[number].append(model(part, past_key_values=caches[number]).logits)

    for part in ids.split([60, 1, 1, 1], dim=1):
        feed(0, part)
        thread = threading.Thread(target=feed, args=(1, part))
        thread.start()
        thread.join(60)
    for here, elsewhere in zip(*outputs, strict=True):
        assert torch.equal(here, elsewhere)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "lfm2"])
def test_a_crop_that_a_layer_refuses_cuts_none(name: str) -> None:
    """Sliding windows and states of transformers can't give tokens back."""
    model: Any = MODELS[name].build()
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)
    run: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    answer = model.generate(prompt(1, 50), past_key_values=cache, **run)
    held = cache.get_seq_length()
    with pytest.raises((RuntimeError, ValueError)):
        cache.crop(-13)
    assert len(cache.tokens) == held == cache.get_seq_length()
    ids = torch.cat([answer, prompt(1, 9)], dim=1)
    expected = model.generate(ids, **run)
    assert torch.equal(model.generate(ids, past_key_values=cache, **run), expected)
