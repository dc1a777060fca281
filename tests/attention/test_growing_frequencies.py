"""Frequencies that grow with the text, and threads: every conversation has its own."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret.models import kept_state
from hf_kvret.testing.conformance import LOGIT_TOLERANCE

from ..pictures import COVER, Text, ask, assert_same, flat, next_turn, picture_model, picture_prompt


def growing(rope_type: str = "dynamic") -> LlamaForCausalLM:
    """A text model whose frequencies depend on the length of the text."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"original_max_position_embeddings": 64}
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=64, rope_parameters=rope,
        bos_token_id=None, eos_token_id=None, initializer_range=0.25,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def text(seed: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def converse(model: PreTrainedModel, cache: Any, length: int, between: list[Any]) -> Text:
    """Two turns; before each of them the requests ``between``."""
    ask_others(model, between)
    first = text(1, length)
    answer = ask(model, first, cache)
    ask_others(model, between)
    return ask(model, next_turn(model, first, answer), cache)


def ask_others(model: PreTrainedModel, requests: list[Any]) -> None:
    for request in requests:
        ask(model, request)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [40, 120])
def test_frequencies_are_those_of_the_conversation_alone(
    rope_type: str, length: int, tmp_path: Path
) -> None:
    """Whether requests between are longer or shorter; in a fork and after a load, too."""
    alone = growing(rope_type)
    reference = converse(alone, DynamicCache(config=alone.config), length, [])
    model = growing(rope_type)
    for between in ([text(2, 300)], [text(2, 20)], [text(2, 300), text(3, 20)]):
        assert_same(converse(model, flat(model), length, between), reference)
    ask_others(model, between)
    named = {"cache_implementation": "flat", "cache_config": COVER}
    first = text(1, length)
    answer = ask(model, first, **named)
    assert_same(answer, ask(growing(rope_type), first))
    cache = flat(model)
    ask(model, first, cache)
    cache.save_pretrained(tmp_path)
    fresh = growing(rope_type)
    loaded = hf_kvret.FlatKVCache.from_pretrained(tmp_path, config=fresh.config, model=fresh)
    ask_others(model, [text(2, 300)])
    assert_same(ask(model, next_turn(model, first, answer), cache.fork()), reference)
    assert_same(ask(fresh, next_turn(fresh, first, answer), loaded), reference)


@pytest.mark.parametrize("name", ["vision", "growing"])
def test_passes_of_two_threads_with_one_model_are_right_or_refused(name: str) -> None:
    """Whoever comes into another one's pass is refused; passes in turn have their own state."""
    model = picture_model("glm_ocr") if name == "vision" else growing()
    hf_kvret.attach(model)
    prompts = (
        [picture_prompt(model, 1, [(8, 16)]), picture_prompt(model, 2, [(4, 4), (8, 8)])]
        if name == "vision"
        else [text(1, 120), text(2, 300)]
    )
    with torch.no_grad():
        references = [model(**one, past_key_values=flat(model)).logits for one in prompts]
    inside, go_on = threading.Event(), threading.Event()
    results: dict[int, Any] = {}

    def stop(*_: Any) -> None:
        """The pass has its own positions and frequencies by now, and reads them next."""
        if threading.current_thread().name == "0" and not inside.is_set():
            inside.set()
            go_on.wait(60)

    hook = model.get_decoder().register_forward_pre_hook(stop)

    def run(row: int) -> None:
        try:
            with torch.no_grad():
                results[row] = model(**prompts[row], past_key_values=flat(model)).logits
        except RuntimeError as error:
            results[row] = error

    threads = [threading.Thread(target=run, args=(row,), name=str(row)) for row in (0, 1)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    threads[1].join(60)
    go_on.set()
    threads[0].join(60)
    hook.remove()
    assert torch.allclose(results[0], references[0], atol=LOGIT_TOLERANCE)
    assert "two threads ran one" in str(results[1])
    # Neither waits for the other afterwards.
    for row in (0, 1):
        run(row)
        assert torch.allclose(results[row], references[row], atol=LOGIT_TOLERANCE)


def test_calls_of_two_threads_are_right_or_refused() -> None:
    """Each pass of one comes between two of the other, as far as it is let in."""
    model, prompts = growing(), (text(1, 120), text(2, 300))
    alone = [ask(growing(), prompt) for prompt in prompts]
    results: list[list[Any]] = [[], []]
    barrier = threading.Barrier(2, timeout=60)

    def serve(row: int) -> None:
        for _ in range(3):
            barrier.wait()
            try:
                results[row].append(ask(model, prompts[row], flat(model)))
            except RuntimeError as error:
                results[row].append(error)

    threads = [threading.Thread(target=serve, args=(row,)) for row in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row in (0, 1):
        assert len(results[row]) == 3
        for result in results[row]:
            if isinstance(result, RuntimeError):
                assert "two threads ran one" in str(result)
            else:
                assert_same(result, alone[row])


def test_a_model_that_ran_is_freed() -> None:
    model = growing()
    ask(model, text(1, 40), flat(model))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_restore_takes_the_hooks_away_and_plain_models_get_none() -> None:
    model, plain = growing(), growing("default")
    for one in (model, plain):
        hooks = [len(module._forward_hooks) for module in one.modules()]
        hf_kvret.attach(one)
        hf_kvret.attach(one)
        added = sum(len(module._forward_hooks) for module in one.modules()) - sum(hooks)
        # Two modules of each note tokens.
        assert added == (4 if kept_state.kept(one) else 2)
        hf_kvret.restore(one)
        assert [len(module._forward_hooks) for module in one.modules()] == hooks
        assert not any(module._forward_hooks_always_called for module in one.modules())
