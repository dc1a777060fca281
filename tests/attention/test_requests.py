"""Calls of generate: mistakes that only the whole call shows, and what a failed one leaves."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
)

import hf_kvret
from hf_kvret.lab.evaluate.bundled import REFERENCE_MODEL
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.models import REFUSED
from hf_kvret.testing.scenario import prompt

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
PARIS: dict[str, Any] = {"cache_implementation": "paris", "cache_config": COVERING_OPTIONS}


class Fails(LogitsProcessor):
    """Raises at the first token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such token")


@pytest.mark.parametrize("given", [False, True])
def test_a_call_that_fails_puts_back_what_it_switched(llama: PreTrainedModel, given: bool) -> None:
    ids, base = prompt(1, 40), llama.config._attn_implementation
    plain = llama.generate(ids, **RUN)
    cache = hf_kvret.ParisKVCache(llama.config, **COVERING_OPTIONS)
    asked = {"past_key_values": cache} if given else PARIS
    with pytest.raises(KeyError, match="no such token"):
        llama.generate(ids, **RUN, **asked, logits_processor=[Fails()])
    assert llama.config._attn_implementation == base
    assert torch.equal(llama.generate(ids, **RUN), plain)


def test_a_call_that_fails_leaves_what_was_switched_before(llama: PreTrainedModel) -> None:
    hf_kvret.attach(llama)
    with pytest.raises(KeyError):
        llama.generate(prompt(1, 40), **RUN, **PARIS, logits_processor=[Fails()])
    assert llama.config._attn_implementation == "hf_kvret"


def test_a_call_that_fails_leaves_what_another_thread_uses(llama: PreTrainedModel) -> None:
    entered, failed = threading.Event(), threading.Event()

    class Waits(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            entered.set()
            assert failed.wait(60)
            return scores

    expected = llama.generate(prompt(1, 40), **RUN)
    results: list[torch.Tensor] = []

    def other() -> None:
        ours = {**RUN, **PARIS, "logits_processor": [Waits()]}
        results.append(llama.generate(prompt(1, 40), **ours))

    class Joins(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            thread.start()
            assert entered.wait(60)
            raise KeyError("late")

    thread = threading.Thread(target=other)
    with pytest.raises(KeyError):
        llama.generate(prompt(1, 40), **RUN, **PARIS, logits_processor=[Joins()])
    failed.set()
    thread.join(60)
    assert torch.equal(results[0], expected)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_is_left_as_it_was(name: str) -> None:
    model = REFUSED[name]()
    before = model.config.get_text_config(decoder=True)._attn_implementation
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(prompt(1, 20), **RUN, cache_implementation="flat", use_cache=True)
    assert model.config.get_text_config(decoder=True)._attn_implementation == before


@pytest.mark.parametrize("length", [1, 30, 43])
def test_a_question_without_what_came_before_is_refused(
    llama: PreTrainedModel, length: int
) -> None:
    cache = hf_kvret.ParisKVCache(llama.config, **COVERING_OPTIONS)
    ids = llama.generate(prompt(1, 40), **RUN, past_key_values=cache)
    held = cache.get_seq_length()
    assert held == 43
    question = prompt(1, length, salt=1)
    for given in ({"inputs": question}, {"input_ids": question}):
        with pytest.raises(
            ValueError, match=f"has {length} tokens, past_key_values holds {held}: pass the whole"
        ):
            llama.generate(**given, **RUN, past_key_values=cache)
    assert cache.get_seq_length() == held
    whole = torch.cat([ids, question], dim=1)
    expected = llama.generate(whole, **RUN)
    assert torch.equal(llama.generate(whole, **RUN, past_key_values=cache), expected)


def test_embeddings_go_on_where_they_are_of_all_tokens(llama: PreTrainedModel) -> None:
    cache = hf_kvret.ParisKVCache(llama.config, **COVERING_OPTIONS)
    ids = llama.generate(prompt(1, 40), **RUN, past_key_values=cache)
    whole = torch.cat([ids, prompt(1, 5, salt=1)], dim=1)
    with torch.no_grad():
        embeds = llama.get_input_embeddings()(whole)
    given = {"attention_mask": torch.ones_like(whole), "past_key_values": cache}
    with pytest.raises(ValueError, match="inputs_embeds has 6 tokens, past_key_values holds 43"):
        llama.generate(inputs_embeds=embeds[:, 43:], **RUN, **given)
    expected = llama.generate(whole, **RUN)[:, whole.shape[1] :]
    assert torch.equal(llama.generate(inputs_embeds=embeds, **RUN, **given), expected)


@pytest.mark.parametrize("cache", [None, DynamicCache])
def test_options_that_no_cache_reads_are_refused(
    llama: PreTrainedModel, cache: type[DynamicCache] | None
) -> None:
    given = {} if cache is None else {"past_key_values": cache(config=llama.config)}
    options = {"cache_config": {"top_k": 64}}
    for run in ({**RUN, **options}, {"generation_config": GenerationConfig(**RUN, **options)}):
        with pytest.raises(ValueError, match=r"cache_config=.*nothing would read it.*paris"):
            llama.generate(prompt(1, 20), **run, **given)
    assert llama.config._attn_implementation == "sdpa"


def test_a_models_own_cache_config_is_left_alone(llama: PreTrainedModel) -> None:
    """It belongs to a name that another call gives, or that the model was loaded with."""
    expected = llama.generate(prompt(1, 20), **RUN)
    llama.generation_config.cache_config = {"top_k": 64}
    llama.set_attn_implementation("paris")
    calls: list[dict[str, Any]] = [
        {"use_cache": False},
        {"past_key_values": DynamicCache(config=llama.config)},
        {},
    ]
    for more in calls:
        assert torch.equal(llama.generate(prompt(1, 20), **RUN, **more), expected)
    hf_kvret.restore(llama)
    assert torch.equal(llama.generate(prompt(1, 20), **RUN), expected)


def test_a_call_without_any_ids_is_refused_behind_a_filled_cache(llama: PreTrainedModel) -> None:
    cache = hf_kvret.ParisKVCache(llama.config, **COVERING_OPTIONS)
    llama.generate(prompt(1, 40), **RUN, past_key_values=cache)
    with pytest.raises(ValueError, match="input_ids has 0 tokens, past_key_values holds 43"):
        llama.generate(**RUN, past_key_values=cache, bos_token_id=1)


def test_options_of_transformers_own_caches_are_theirs(llama: PreTrainedModel) -> None:
    llama.generate(prompt(1, 20), **RUN, cache_implementation="dynamic", cache_config={"nbits": 4})


@pytest.mark.parametrize(
    ("source", "samples", "warned"),
    [
        ("call", False, True),
        ("call", True, False),
        ("config", False, True),
        ("model", False, False),
    ],
)
def test_a_budget_given_to_generate_is_warned_of(
    llama: PreTrainedModel,
    caplog: pytest.LogCaptureFixture,
    source: str,
    samples: bool,
    warned: bool,
) -> None:
    run: dict[str, Any] = {"max_new_tokens": 2, "do_sample": samples}
    if source == "call":
        run["top_k"] = 64
    elif source == "config":
        run = {"generation_config": GenerationConfig(**run, top_k=64)}
    else:
        llama.generation_config.top_k = 64
    with caplog.at_level(logging.WARNING, "hf_kvret"):
        llama.generate(prompt(1, 20), **run, **PARIS)
    messages = [text for text in caplog.messages if "top_k=64 is generate's own" in text]
    assert len(messages) == warned
    assert all("cache_config={'top_k': ...}" in text for text in messages)


def test_a_cache_that_stayed_dense_says_so_once(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    cache = hf_kvret.ParisKVCache(llama.config)
    assert cache.stats()["dense"] is None, "nothing was held yet"
    with caplog.at_level(logging.INFO, "hf_kvret"):
        ids = llama.generate(prompt(1, 40), **RUN, past_key_values=cache)
        ids = torch.cat([ids, prompt(1, 3, salt=1)], dim=1)
        llama.generate(ids, **RUN, past_key_values=cache)
    told = [text for text in caplog.messages if "retrieved nothing" in text]
    assert told == [
        "ParisKVCache retrieved nothing: it attends to all tokens below "
        "dense_below=2308, and held 43"
    ]
    assert "dense_below=2308, and held 50" in cache.stats()["dense"]


def test_a_cache_whose_window_was_never_full_says_so(llama: PreTrainedModel) -> None:
    cache = hf_kvret.FlatKVCache(llama.config, dense_below=0)
    llama.generate(prompt(1, 40), **RUN, past_key_values=cache)
    assert "43 tokens fit into the window (sink=4, recent=256" in cache.stats()["dense"]


def test_a_cache_that_retrieved_says_nothing(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    cache = hf_kvret.ParisKVCache(llama.config, **COVERING_OPTIONS)
    with caplog.at_level(logging.INFO, "hf_kvret"):
        llama.generate(prompt(1, 40), **RUN, past_key_values=cache)
    assert cache.stats()["dense"] is None and "retrieved nothing" not in caplog.text


@pytest.mark.parametrize("asked", ["cache", "attention"])
def test_a_tokenizer_handed_to_generate_passes(asked: str) -> None:
    """For stop strings, and what ``transformers serve`` does with every request."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE_MODEL)
    model = MODELS["llama"].build()
    ids = prompt(1, 40)
    settings = {**RUN, "tokenizer": tokenizer, "stop_strings": ["never to be seen"]}
    expected = model.generate(ids, **settings)
    if asked == "attention":
        model.set_attn_implementation("paris")
        got = model.generate(ids, **settings, cache_config=COVERING_OPTIONS)
    else:
        got = model.generate(ids, **settings, **PARIS)
    assert torch.equal(got, expected)


def test_a_models_default_is_no_reason_against_it() -> None:
    """MPT says use_cache=False by itself; what stands in the way is its attention."""
    config = AutoConfig.for_model("mpt", d_model=32, n_heads=2, n_layers=1, vocab_size=128)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert model.generation_config.use_cache is False
    with pytest.raises(ValueError, match="MptForCausalLM computes attention by itself"):
        model.generate(prompt(1, 20), **RUN, cache_implementation="flat")


def test_a_call_owns_its_cache_until_it_is_over(llama: PreTrainedModel) -> None:
    """Calls whose passes take turns would mix two texts: the second one is refused at once."""
    ids = prompt(1, 60)
    cache = hf_kvret.ParisKVCache(llama.config, **COVERING_OPTIONS)
    answer = llama.generate(ids, past_key_values=cache, **RUN)
    more = [torch.cat([answer, prompt(1, 9, salt=salt)], dim=1) for salt in (1, 2)]
    plain = llama.generate(more[0], **RUN)
    twin = cache.fork()
    entered, refused = threading.Event(), threading.Event()

    class Waits(LogitsProcessor):
        """Lets the other call begin between two passes."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            entered.set()
            assert refused.wait(60)
            return scores

    def second() -> None:
        entered.wait(60)
        with pytest.raises(RuntimeError, match="another thread is in a call of generate"):
            llama.generate(more[1], past_key_values=cache, **RUN)
        results.append(llama.generate(more[1], past_key_values=twin, **RUN))
        refused.set()

    results: list[torch.Tensor] = []
    thread = threading.Thread(target=second)
    thread.start()
    call = {"past_key_values": cache, "logits_processor": [Waits()]}
    assert torch.equal(llama.generate(more[0], **call, **RUN), plain)
    thread.join()
    assert torch.equal(results[0], llama.generate(more[1], **RUN))
    again = torch.cat([plain, more[0]], dim=1)
    expected = llama.generate(again, **RUN)
    assert torch.equal(llama.generate(again, past_key_values=cache, **RUN), expected)
