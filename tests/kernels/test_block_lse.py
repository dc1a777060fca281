"""block_lse against whole matrices in float64, in every place it runs."""

from typing import Any

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
    place: Place, padded: bool = False, block: int = 64, positions: Any = None, **sizes: Any
) -> None:
    query, key, _ = attention_inputs(place, **{"queries": 5, "tokens": 330} | sizes)
    queries, tokens = query.shape[2], key.shape[2]
    if positions is None:
        positions = torch.randint(-1, tokens + 3, (len(query), queries), device=place[1])
    valid, poisoned = None, key
    if padded:
        valid = torch.rand(2, tokens, device=place[1]) > 0.3
        valid[1, :200] = False
        poisoned = key.masked_fill(~valid[:, None, :, None], float("nan"))
    options: dict[str, Any] = {"scale": 0.2, "block": block, "valid": valid}
    result = block_lse(query, poisoned, positions, backend=place[0], **options)
    assert result.dtype == torch.float32
    expected = reference(query, key, positions, **options)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.factor("padded", [False, True])
@pytest.mark.factor("block", [16, 64, 128])
@pytest.mark.factor("queries", [33, 70])
def test_each_block_has_its_log_sum_exp(
    where: Place, queries: int, block: int, padded: bool, dtype: torch.dtype
) -> None:
    check(where, queries=queries, block=block, padded=padded, dtype=dtype)


def test_no_keys_and_no_queries(where: Place) -> None:
    check(where, tokens=0)
    check(where, padded=True, queries=0)


def test_positions_far_outside(where: Place) -> None:
    ends = torch.iinfo(torch.int64)
    positions = torch.tensor([[ends.min, ends.max]], device=where[1])
    check(where, positions=positions, batch=1, queries=2, tokens=210)


def test_torch_in_several_chunks_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naive, "_SCORES", 100)
    check(("naive", "cpu"), padded=True)
