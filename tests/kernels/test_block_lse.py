"""block_lse against whole matrices in float64, in every place it runs."""

from __future__ import annotations

import pytest
import torch

from hf_kvret_kernels.block_lse import block_lse, naive

from .draws import Place, attention64, attention_inputs


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    block: int,
    valid: torch.Tensor | None,
) -> torch.Tensor:
    tokens, keys = key.shape[2], key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    seen = torch.arange(tokens, device=key.device) <= positions[:, None, :, None]
    if valid is not None:
        seen = seen & valid[:, None, None]
    _, _, scores = attention64(query, keys, keys, seen, scale)
    scores = torch.nn.functional.pad(scores, (0, -tokens % block), value=float("-inf"))
    return scores.unflatten(3, (-1, block)).logsumexp(4)


def check(
    place: Place,
    *,
    queries: int = 5,
    tokens: int = 330,
    dtype: torch.dtype = torch.float32,
    block: int = 64,
    padded: bool = True,
) -> None:
    query, key, _ = attention_inputs(place, queries=queries, tokens=tokens, dtype=dtype)
    positions = torch.randint(-1, tokens + 3, (2, queries), device=place[1])
    valid = None
    if padded:
        valid = torch.rand(2, tokens, device=place[1]) > 0.3
        valid[1, :200] = False
    got = block_lse(
        query,
        key if valid is None else key.masked_fill(~valid[:, None, :, None], float("nan")),
        positions,
        scale=0.2,
        block=block,
        valid=valid,
        backend=place[0],
    )
    want = reference(query, key, positions, 0.2, block, valid)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.factor("padded", [False, True])
@pytest.mark.factor("block", [16, 64, 128])
@pytest.mark.factor("queries", [33, 300])
def test_each_block_has_its_log_sum_exp(
    where: Place, queries: int, block: int, padded: bool, dtype: torch.dtype
) -> None:
    check(where, queries=queries, block=block, padded=padded, dtype=dtype)


def test_no_keys_and_no_queries(where: Place) -> None:
    check(where, tokens=0, padded=False)
    check(where, queries=0)


def test_positions_far_outside(where: Place) -> None:
    query, key, _ = attention_inputs(where, batch=1, queries=2, tokens=210)
    ends = torch.iinfo(torch.int64)
    positions = torch.tensor([[ends.min, ends.max]], device=where[1])
    got = block_lse(query, key, positions, scale=0.2, block=64, backend=where[0])
    want = reference(query, key, positions, 0.2, 64, None)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_torch_in_several_chunks_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naive, "_SCORES", 100)
    check(("naive", "cpu"))
