"""Long prompts in chunks: of what size, the same text, far less memory, never by mistake."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

from hf_kvret import FlatKVCache, registered_methods
from hf_kvret.generate import chunks
from hf_kvret.models.versions import CHUNKS_COUNT_PAST, CUTS_TOKEN_TYPES
from hf_kvret.stores.placement import free_bytes
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.conformance import LOGIT_TOLERANCE
from hf_kvret.testing.scenario import prompt, ragged

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
LOGITS: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
SMALL = {**COVERING_OPTIONS, "top_k": 12}


@contextmanager
def passes_of(model: PreTrainedModel) -> Iterator[list[int]]:
    """The tokens of each forward pass of ``model``, in order."""
    lengths: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        lengths.append(tokens.shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield lengths
    finally:
        hook.remove()


def _same(ours: Any, expected: Any) -> None:
    assert torch.equal(ours.sequences, expected.sequences)
    for some, other in zip(ours.logits, expected.logits, strict=True):
        torch.testing.assert_close(some, other, atol=LOGIT_TOLERANCE, rtol=0)


# With a small budget not paris, whose keys are centred by the mean of the first block to go cold,
# and not lrqk, whose factors come from a sample of the queries of each block: with chunks these are
# others. The suite of conformance has a budget that covers everything.
@pytest.mark.parametrize("method", ["flat", "ctkvr"])
def test_chunks_select_as_one_pass_does(
    llama: PreTrainedModel, method: str, artifact_options: Callable[[str, str], dict[str, str]]
) -> None:
    ids, mask = ragged((200, 140, 171), salt=1)
    options, results = {**SMALL, **artifact_options(method, "llama")}, []
    for chunk in (None, 48):
        cache = registered_methods()[method](llama.config, **options, prefill_chunk=chunk)
        with passes_of(llama) as lengths:
            request = {"attention_mask": mask, "past_key_values": cache}
            results.append(llama.generate(ids, **request, **GREEDY, **LOGITS))
        prompts = [length for length in lengths if length > 1]
        assert prompts == ([200] if chunk is None else [48, 48, 48, 48, 8])
        assert 0 < cache.stats()["layers"][0]["read_ratio"] < 0.5
    _same(results[1], results[0])


def test_a_second_prompt_is_read_in_chunks_where_transformers_counts_the_past(
    llama: PreTrainedModel,
) -> None:
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS, prefill_chunk=30)
    first = llama.generate(prompt(1, 50), past_key_values=cache, **GREEDY)
    ids = torch.cat([first, prompt(1, 60, salt=2)], dim=1)
    with passes_of(llama) as lengths:
        ours = llama.generate(ids, past_key_values=cache, **GREEDY)
    # The last token of the first answer is new to the cache.
    prompts = [length for length in lengths if length > 1]
    assert prompts == (_cut(61, 30) if CHUNKS_COUNT_PAST else [61])
    assert torch.equal(ours, llama.generate(ids, **GREEDY))


def _cut(length: int, chunk: int) -> list[int]:
    size = chunks.fit_chunk(length, chunk, COVERING_OPTIONS["max_draft"])
    assert size is not None
    return [len(chunk) for chunk in torch.arange(length).split(size)]


def test_chunks_are_of_this_call_alone(llama: PreTrainedModel) -> None:
    request = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
    options = {**COVERING_OPTIONS, "prefill_chunk": 20}
    with passes_of(llama) as lengths:
        cache = FlatKVCache(llama.config, **options)
        llama.generate(prompt(1, 60), past_key_values=cache, generation_config=request)
        llama.generate(prompt(1, 60), generation_config=request)
        llama.generate(
            prompt(1, 60), cache_implementation="flat", cache_config=options, max_new_tokens=2
        )
    assert lengths == [20, 20, 20, 1, 60, 1, 20, 20, 20, 1]
    assert request.prefill_chunk_size is None
    assert llama.generation_config.prefill_chunk_size is None


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (30, [30, 30]),
        # The last chunk would retrieve, with max_draft=6.
        (29, [26, 26, 8]),
        # All of them do, as the caller asks.
        (5, [5] * 12),
    ],
)
def test_what_the_caller_says_comes_first(
    llama: PreTrainedModel, size: int, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS, prefill_chunk=20)
    with passes_of(llama) as lengths:
        llama.generate(
            prompt(1, 60), past_key_values=cache, prefill_chunk_size=size, max_new_tokens=1
        )
    assert lengths == expected
    assert ("which retrieve as drafted ones do" in caplog.text) == (size == 5)


def test_auto_reads_in_chunks_what_no_pass_affords(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = chunks.token_bytes(llama.config, torch.float32)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", needed * 300)
    with passes_of(llama) as lengths:
        for length in (256, 700):
            cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
            llama.generate(prompt(1, length), past_key_values=cache, max_new_tokens=1)
    assert lengths == [256, 256, 256, 188]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"snapshots": 0}, [300]), ({}, [293, 7]), ({"snapshot_every": 100}, [100, 100, 93, 7])],
)
def test_auto_cuts_recurrent_layers_at_snapshots_alone(
    options: dict[str, Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["lfm2"].build()
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    with passes_of(model) as lengths:
        cache = FlatKVCache(model.config, **COVERING_OPTIONS, **options)
        model.generate(prompt(1, 300), past_key_values=cache, max_new_tokens=1)
    assert lengths == expected


@pytest.mark.parametrize(("dense_below", "expected"), [(0, [150]), (151, [149, 1])])
def test_the_last_token_of_a_short_prompt_comes_alone_where_it_is_exact(
    dense_below: int, expected: list[int]
) -> None:
    model, ids = MODELS["gemma2"].build(), prompt(1, 150)
    options = {"top_k": 1, "recent": 8, "flush": 4, "max_draft": 100, "dense_below": dense_below}
    call: dict[str, Any] = {**LOGITS, **GREEDY, "max_new_tokens": 1}
    full = model.generate(ids, **call)
    with passes_of(model) as lengths:
        ours = model.generate(ids, cache_implementation="flat", cache_config=options, **call)
    assert lengths == expected
    _same(ours, full)


def test_embeddings_go_in_one_pass(llama: PreTrainedModel) -> None:
    ids = prompt(1, 60)
    embeds = llama.get_input_embeddings()(ids)
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS, prefill_chunk=20)
    with passes_of(llama) as lengths:
        ours = llama.generate(inputs_embeds=embeds, past_key_values=cache, **GREEDY)
    assert lengths[0] == 60
    assert torch.equal(ours, llama.generate(inputs_embeds=embeds, **GREEDY))


@pytest.mark.parametrize("size", [25, 5])
def test_a_callers_chunks_do_not_cut_what_cant_be_cut(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    call = {"output_hidden_states": True, "return_dict_in_generate": True, **GREEDY}
    with passes_of(llama) as lengths:
        out: Any = llama.generate(
            prompt(1, 60), past_key_values=cache, prefill_chunk_size=size, **call
        )
    assert lengths[0] == 60 and out.hidden_states[0][0].shape[1] == 60
    assert f"prefill_chunk_size={size}: the prompt goes in one pass, as output_hid" in caplog.text


@pytest.mark.parametrize("seen", [False, True])
def test_token_types_of_text_alone_are_cut(llama: PreTrainedModel, seen: bool) -> None:
    """Processors of models that see give them with every prompt."""
    types = torch.zeros(1, 60, dtype=torch.long)
    types[0, 7] = seen
    call = {"mm_token_type_ids": types, "attention_mask": torch.ones_like(types)}
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    obstacle = chunks._obstacle(cache, GenerationConfig(), call, 60)
    assert (obstacle is None) == (CUTS_TOKEN_TYPES and not seen)


def test_a_draft_model_is_not_told_to_cut_its_prompts(llama: PreTrainedModel) -> None:
    draft = MODELS["llama"].build()
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS, prefill_chunk=20)
    ids = prompt(1, 60)
    with passes_of(draft) as lengths:
        ours = llama.generate(ids, past_key_values=cache, assistant_model=draft, **GREEDY)
    assert lengths[0] == 60
    assert torch.equal(ours, llama.generate(ids, **GREEDY))


def test_what_a_chunk_takes_does_not_grow_with_the_prompt(
    llama: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    temporaries: Callable[[Callable[[], object]], int],
) -> None:
    """Bytes at the peak of reading a prompt, on top of what the cache holds then."""
    monkeypatch.setattr("hf_kvret.stores.chunks._LEAST_LEN", 64)
    used = []
    for length, chunk in ((256, 64), (768, 64), (768, None)):
        cache = FlatKVCache(llama.config, **{**SMALL, "prefill_chunk": chunk})
        call = {"past_key_values": cache, "max_new_tokens": 1}
        used.append(temporaries(partial(llama.generate, prompt(1, length), **call)))
    short, long, whole = used
    # Token ids, positions, and marks of what is a sink: nothing that grows is a row wide.
    assert long - short <= 512 * 64
    needed = chunks.token_bytes(llama.config, torch.float32)
    # A narrow MLP and few heads take less than the share of hidden states that is counted.
    assert 0.2 < whole / (needed * 768) < 1.0
    assert long < whole / 3


LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=32,
)


def test_a_token_takes_some_hidden_states_of_the_text_model() -> None:
    config = MODELS["gemma4"].config()
    hidden_size = config.get_text_config().hidden_size
    assert chunks.token_bytes(config, torch.float32) == 32 * 4 * hidden_size
    assert chunks.token_bytes(PreTrainedConfig(), torch.bfloat16) == 32 * 2 * 4096


@pytest.mark.parametrize(
    ("batch", "chunk"), [(1, 8192), (2, 4096), (3, 2048), (8, 1024), (64, 256), (10_000, 256)]
)
def test_a_chunk_of_a_batch_takes_two_gib_but_is_never_tiny(batch: int, chunk: int) -> None:
    assert chunks.auto_chunk(chunks.token_bytes(LLAMA_8B, torch.bfloat16), batch) == chunk


@pytest.mark.parametrize(("chunk", "max_draft"), [(33, 32), (64, 6), (100, 32), (256, 600)])
def test_every_chunk_is_longer_than_a_draft(chunk: int, max_draft: int) -> None:
    for length in (*range(1, 400), 1024, 1025, 4097, 5003):
        size = chunks.fit_chunk(length, chunk, max_draft)
        if size is None:
            # Short, or there is no way: two chunks or more of more than max_draft tokens.
            assert length <= max(chunk, 2 * max_draft + 1)
            continue
        parts = [len(part) for part in torch.arange(length).split(size)]
        assert min(parts) > max_draft and len(parts) > 1


def test_a_chunk_is_changed_as_little_as_whole_pages_allow() -> None:
    assert chunks.fit_chunk(8 * 8192, 8192, 32) == 8192
    assert chunks.fit_chunk(8 * 8192 + 33, 8192, 32) == 8192
    assert chunks.fit_chunk(8 * 8192 + 32, 8192, 32) == 8192 - 64
    # Four tokens more than a chunk of 33 can't follow it: two of 35.
    assert chunks.fit_chunk(70, 33, 32) == 35


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_torch_holds_in_reserve_is_free() -> None:
    device = torch.device("cuda", 0)
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    before = free_bytes(device)
    del held
    after = free_bytes(device)
    assert before is not None and after is not None and after - before >= 1 << 29


def test_behind_the_limit_no_new_tokens_are_expected() -> None:
    for limits in ({"max_length": 480}, {}):
        assert chunks.expected_new_tokens(GenerationConfig(**limits), 480) == 0
