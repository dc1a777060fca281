"""The size of chunks, and the new tokens that a call of ``generate`` is expected to make."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, GPT2Config, LlamaConfig, PreTrainedConfig

from hf_kvret.generate.chunks import (
    LEAST_NEW_TOKENS,
    auto_chunk,
    expected_new_tokens,
    fit_chunk,
    token_bytes,
)
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.stores.free_memory import free_bytes
from hf_kvret.testing import MODELS

GIB = 1 << 30
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=32,
)


@pytest.mark.parametrize(
    ("config", "hidden_size"),
    [
        (LLAMA_8B, 4096),
        (GPT2Config(n_embd=64, n_head=4), 64),
        (PreTrainedConfig(), 4096),
        (MODELS["gemma4"].config(), MODELS["gemma4"].config().get_text_config().hidden_size),
    ],
)
def test_a_token_takes_some_hidden_states(config: PreTrainedConfig, hidden_size: int) -> None:
    assert token_bytes(config, torch.bfloat16) == 32 * 2 * hidden_size
    assert token_bytes(config, torch.float32) == 32 * 4 * hidden_size


@pytest.mark.parametrize(
    ("batch", "chunk"), [(1, 8192), (2, 4096), (3, 2048), (8, 1024), (64, 256), (10_000, 256)]
)
def test_a_chunk_of_a_batch_takes_two_gib_but_is_never_tiny(batch: int, chunk: int) -> None:
    assert auto_chunk(token_bytes(LLAMA_8B, torch.bfloat16), batch) == chunk


@pytest.mark.parametrize(("chunk", "max_draft"), [(33, 32), (64, 6), (100, 32), (256, 600)])
def test_every_chunk_is_longer_than_a_draft(chunk: int, max_draft: int) -> None:
    for length in (*range(1, 400), 1024, 1025, 4097, 5003):
        size = fit_chunk(length, chunk, max_draft)
        if size is None:
            # Short, or there is no way: two chunks or more of more than max_draft tokens.
            assert length <= max(chunk, 2 * max_draft + 1)
            continue
        parts = [len(part) for part in torch.arange(length).split(size)]
        assert min(parts) > max_draft and len(parts) > 1


def test_a_chunk_is_changed_as_little_as_whole_pages_allow() -> None:
    assert fit_chunk(8 * 8192, 8192, 32) == 8192
    assert fit_chunk(8 * 8192 + 33, 8192, 32) == 8192
    assert fit_chunk(8 * 8192 + 32, 8192, 32) == 8192 - 64
    # Four tokens more than a chunk of 33 can't follow it: two of 35.
    assert fit_chunk(70, 33, 32) == 35


@pytest.mark.parametrize("chunk", [0, 32])
def test_chunks_that_would_retrieve_are_refused(chunk: int) -> None:
    told = f"prefill_chunk={chunk} with max_draft=32: .* take more than 32, as 1024, or 'auto'"
    with pytest.raises(ValueError, match=told):
        FlatConfig(prefill_chunk=chunk)


def test_free_memory_is_only_known_of_a_gpu() -> None:
    assert free_bytes(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_torch_holds_in_reserve_is_free() -> None:
    device = torch.device("cuda", 0)
    held = torch.empty(GIB, dtype=torch.uint8, device=device)
    before = free_bytes(device)
    del held
    after = free_bytes(device)
    assert before is not None and after is not None and after - before >= GIB // 2


@pytest.mark.parametrize(
    ("limits", "context_len", "expected"),
    [
        ({"max_new_tokens": 100}, 30, 100),
        ({"max_new_tokens": LEAST_NEW_TOKENS + 1}, 30, LEAST_NEW_TOKENS),
        ({"max_new_tokens": 10**6}, 0, LEAST_NEW_TOKENS),
        ({"max_new_tokens": 10**6}, 30_000, 30_000),
        ({"max_length": 500}, 480, 20),
        ({"max_length": 480}, 480, 0),
        ({}, 480, 0),
    ],
)
def test_new_tokens_are_those_that_are_sure_or_as_many_as_the_context(
    limits: dict[str, int], context_len: int, expected: int
) -> None:
    assert expected_new_tokens(GenerationConfig(**limits), context_len) == expected
