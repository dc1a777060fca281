"""What a cache expects of the prompt that ``generate`` announces, and what becomes of it later."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache, attach, stores
from hf_kvret.generate import chunks
from hf_kvret.stores import paged
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

from .test_chunks import passes_of

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def sizes_chosen_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of rows of each choice of a store from now on; all choose the device."""
    sizes: list[int] = []

    def choose(device: torch.device, rows_bytes: int, *args: Any) -> tuple[str, str]:
        sizes.append(rows_bytes)
        return "device", "a test"

    monkeypatch.setattr(stores, "choose", choose)
    return sizes


def test_where_rows_live_is_decided_by_the_whole_prompt(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the first block to go cold: that of the first chunk, or all that a window held."""
    sizes = sizes_chosen_for(monkeypatch)
    # Our chunks, those of the caller, and the length up to which nothing goes cold.
    cases = [(None, None, 0), (None, 48, 0), (48, None, 49), (50, None, 460), (13, None, 25)]
    for chunk, callers, dense in cases:
        options = {**COVERING_OPTIONS, "dense_below": dense, "prefill_chunk": chunk}
        request = {"past_key_values": FlatKVCache(llama.config, **options), "max_new_tokens": 1}
        llama.generate(prompt(1, 480), **request, prefill_chunk_size=callers)
    assert sizes == sizes[:1] * len(cases)


@pytest.mark.parametrize(("chunk", "dense"), [(None, 0), (48, 100), (48, 170)])
def test_where_rows_live_is_decided_by_what_may_be_generated_too(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, chunk: int | None, dense: int
) -> None:
    """Also where the first row goes cold while tokens are generated."""
    sizes = sizes_chosen_for(monkeypatch)
    options = {**COVERING_OPTIONS, "dense_below": dense, "prefill_chunk": chunk}
    for lengths in ({"max_new_tokens": 60}, {"max_length": 180}):
        cache = FlatKVCache(llama.config, **options)
        llama.generate(prompt(1, 120), past_key_values=cache, do_sample=False, **lengths)
    # Keys and values of 2 layers, 2 heads and 16 numbers, in fp32; eight tokens stay recent.
    assert options["recent"] == 8
    assert sizes == [(180 - 8) * 2 * 2 * 2 * 16 * 4] * 2


def test_a_prompt_that_nobody_announced_is_not_that_of_the_call_before(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That call may have ended early, so what it could have generated says nothing any more."""
    sizes = sizes_chosen_for(monkeypatch)
    cache = FlatKVCache(llama.config, **{**COVERING_OPTIONS, "dense_below": 300})
    cache.expect(100, 100, new_tokens=9000)
    attach(llama)
    with torch.no_grad():
        for first, end in ((0, 100), (100, 400)):
            llama(prompt(1, 400)[:, first:end], past_key_values=cache)
    # What the window held goes cold, and nothing else is known.
    assert sizes == [100 * 2 * 2 * 2 * 16 * 4]


def test_room_is_made_for_a_prompt_once(llama: PreTrainedModel) -> None:
    """Neither sequences that are repeated later, nor tokens after a reset, get it again."""
    options = {**COVERING_OPTIONS, "prefill_chunk": 480}
    ids, sizes = prompt(1, 3880), []
    for chunk in (None, 480):
        cache = FlatKVCache(llama.config, **{**options, "prefill_chunk": chunk})
        llama.generate(ids[:, :3840], past_key_values=cache, max_new_tokens=1)
        before = cache.memory().store_device
        cache.batch_repeat_interleave(8)
        llama.generate(ids.expand(8, -1), past_key_values=cache, max_new_tokens=1)
        sizes.append(cache.memory().store_device - before)
    assert sizes[1] <= sizes[0] + 1024
    # A prompt that ends without a decode step, and a pass by hand.
    cache = FlatKVCache(llama.config, **options)
    llama.generate(ids[:, :3840], past_key_values=cache, max_new_tokens=1)
    before = cache.memory().store_device
    cache.reset()
    attach(llama)
    with torch.no_grad():
        llama(ids[:, :100], past_key_values=cache)
    assert cache.memory().store_device < before / 10


def test_nothing_is_expected_any_more_once_tokens_are_decoded(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FlatKVCache(llama.config, **{**COVERING_OPTIONS, "dense_below": 900}, prefill_chunk=48)
    llama.generate(prompt(1, 480), past_key_values=cache, max_new_tokens=3)
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(paged.PagedStore, "expect", lambda self, *args: calls.append(args))
    attach(llama)
    with torch.no_grad():
        llama(prompt(1, 600), past_key_values=cache)
    assert cache.memory().store_device and {tokens for tokens, _ in calls} <= {0}


@pytest.mark.parametrize(
    ("how", "size"), [({"prompt_lookup_num_tokens": 3}, None), ({"assistant_model": None}, 20)]
)
def test_decoding_with_drafts_reads_and_expects_one_pass(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], size: int | None
) -> None:
    sizes, calls = sizes_chosen_for(monkeypatch), []
    monkeypatch.setattr(paged.PagedStore, "expect", lambda self, *args: calls.append(args))
    draft = MODELS["llama"].build()
    more = {name: draft if value is None else value for name, value in how.items()}
    own = None if size else 20
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS, prefill_chunk=own)
    call = {"past_key_values": cache, "prefill_chunk_size": size, **GREEDY, **more}
    with passes_of(llama) as lengths:
        llama.generate(prompt(1, 60), **call)
    assert max(lengths) >= 60
    assert {tokens for tokens, _ in calls} <= {0}
    plain = FlatKVCache(llama.config, **COVERING_OPTIONS)
    llama.generate(prompt(1, 60), past_key_values=plain, **GREEDY)
    # The first drafts come with the prompt; three chunks would count three times.
    assert sizes[1] <= sizes[0] < 1.5 * sizes[1]


def test_new_tokens_with_positions_of_their_own_go_in_one_pass(llama: PreTrainedModel) -> None:
    texts = []
    for chunk in (None, 20):
        cache = FlatKVCache(llama.config, **COVERING_OPTIONS, prefill_chunk=chunk)
        first = llama.generate(prompt(1, 60), past_key_values=cache, **GREEDY)
        length = cache.get_seq_length()
        ids = torch.cat([first, prompt(1, 50, salt=4)], dim=1)
        request = {
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(length, ids.shape[1])[None],
        }
        with passes_of(llama) as lengths:
            out = llama.generate(ids[:, length:], past_key_values=cache, **request, **GREEDY)
        assert lengths[0] == ids.shape[1] - length
        texts.append(out[:, ids.shape[1] - length :])
    assert torch.equal(*texts)
    assert torch.equal(texts[0], llama.generate(ids, **GREEDY)[:, ids.shape[1] :])


def stop_at(length: int) -> list[Any]:
    """Stopping criteria that end a text at ``length`` tokens, long before the limits below."""
    return [lambda ids, *request, **more: torch.full((len(ids),), ids.shape[1] >= length)]


@pytest.mark.parametrize(
    ("limit", "chunk", "dense"), [("max_new_tokens", None, 0), ("max_length", 48, 300)]
)
def test_a_mere_limit_of_new_tokens_decides_nothing(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, limit: str, chunk: int, dense: int
) -> None:
    """Neither the store nor what is compiled goes by what may never come."""
    sizes = sizes_chosen_for(monkeypatch)
    options = {**COVERING_OPTIONS, "dense_below": dense, "prefill_chunk": chunk}
    cache = FlatKVCache(llama.config, **options)
    request = {"past_key_values": cache, "do_sample": False, "stopping_criteria": stop_at(483)}
    assert llama.generate(prompt(1, 480), **request, **{limit: 10**6}).shape[1] == 483
    assert sizes == [(480 + chunks.LEAST_NEW_TOKENS - 8) * 2 * 2 * 2 * 16 * 4]
    assert {layer.final_len for layer in cache.retrieval_layers} == {480 + chunks.LEAST_NEW_TOKENS}


def test_a_second_turn_counts_the_tokens_that_are_held(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LEAST_NEW_TOKENS", 64)
    sizes = sizes_chosen_for(monkeypatch)
    cache = FlatKVCache(llama.config, **{**COVERING_OPTIONS, "dense_below": 300})
    request = {"past_key_values": cache, "do_sample": False, "max_new_tokens": 10**6}
    first = llama.generate(prompt(1, 100), **request, stopping_criteria=stop_at(103))
    assert not sizes and {layer.final_len for layer in cache.retrieval_layers} == {200}
    ids = torch.cat([first, prompt(1, 400, salt=3)], dim=1)
    llama.generate(ids, **request, stopping_criteria=stop_at(506))
    assert len(sizes) == 1 and sizes[0] <= 2.5 * 503 * 2 * 2 * 2 * 16 * 4
    assert {layer.final_len for layer in cache.retrieval_layers} == {2 * 503}


def test_a_text_that_outgrows_what_was_expected_goes_on(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LEAST_NEW_TOKENS", 4)
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS, store="device")
    ids, settings = prompt(1, 40), {"max_new_tokens": 80, "do_sample": False}
    out = llama.generate(ids, past_key_values=cache, **settings)
    assert {layer.final_len for layer in cache.retrieval_layers} == {80}
    assert cache.get_seq_length() == 119 and len(cache.retrieval_layers[0].kv.store) > 80
    assert torch.equal(out, llama.generate(ids, **settings))
