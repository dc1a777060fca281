"""Logits of means tokens, and their share of a step, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret_kernels.mean_tokens import BlockMeans, MeanTokens, mean_logits
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.step_attention import step_attention

from .draws import Place

HEADS = 2


def make_case(
    group: int, dim: int, tokens: int, choosers: int, dtype: torch.dtype
) -> tuple[torch.Tensor, BlockMeans, torch.Tensor]:
    """Queries, means of ``tokens`` sets of 10 slots each, and ids of ``choosers`` heads."""
    generator = torch.Generator().manual_seed(dim + tokens)
    query = torch.randn(2, HEADS * group, 3, dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, HEADS, tokens, dim, generator=generator).unbind()
    total = 10 * tokens
    # Some tokens are not valid; row 1 leaves out nothing of its first set.
    counts = torch.randint(7, 10, (2, tokens), generator=generator, dtype=torch.int32)
    counts[1, 0] = 3
    drawn = torch.rand(2, choosers, 3, total, generator=generator).argsort(-1)[..., :6].int()
    drawn[drawn % 10 >= 7] = -1
    drawn[1, :, :, :3] = torch.arange(3, dtype=torch.int32)
    drawn[1, :, :, 3:][drawn[1, :, :, 3:] < 10] = -1
    return query, BlockMeans(keys, values, counts, 10 if tokens > 1 else 0), drawn


def logits_by_hand(
    query: torch.Tensor, means: BlockMeans, ids: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    batch, query_heads, queries, _ = query.shape
    tokens = means.keys.shape[2]
    expected = torch.empty(batch, query_heads, queries, tokens, dtype=torch.float64)
    for b, h, q, r in torch.cartesian_prod(*(torch.arange(n) for n in expected.shape)).tolist():
        key = means.keys[b, h * HEADS // query_heads, r].double()
        score = float(query[b, h, q].double() @ key) * 0.3
        if softcap is not None:
            score = softcap * math.tanh(score / softcap)
        own = ids[b, h * ids.shape[1] // query_heads, q]
        own = own[(own >= 0) & ((own // 10 == r) | (means.block_len == 0))]
        left = int(means.counts[b, r]) - len(own)
        expected[b, h, q, r] = score + math.log(left) if left > 0 else -math.inf
    return expected


@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.factor("softcap", [None, 1.5])
@pytest.mark.factor("tokens", [1, 4])
@pytest.mark.factor("form", [(1, 64, 2), (3, 40, 2), (4, 24, 8), (20, 576, 2)])
def test_logits(
    place: Place,
    form: tuple[int, int, int],
    tokens: int,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    backend, device = place
    group, dim, choosers = form
    query, means, ids = make_case(group, dim, tokens, choosers, dtype)
    there = BlockMeans(
        means.keys.to(device), means.values.to(device), means.counts.to(device), means.block_len
    )
    logits = mean_logits(
        query.to(device), there, ids.to(device), scale=0.3, softcap=softcap, backend=backend
    )
    expected = logits_by_hand(query, means, ids, softcap)
    assert expected.isinf().any() and expected.isfinite().any()
    torch.testing.assert_close(logits.cpu().double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_step_joins_them(place: Place, sinks: bool, tokens: int) -> None:
    backend, device = place
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    query, key, value = draw(2, 6, 1, 32), draw(2, HEADS, 5, 32), draw(2, HEADS, 5, 16)
    others = Partials(draw(2, 6, 1, 3, 16), draw(2, 6, 1, 3))
    means = MeanTokens(draw(2, 6, 1, tokens), draw(2, HEADS, tokens, 16))
    means.logits[0, 0] = -math.inf
    logits = draw(6) if sinks else None
    options = {"scale": 0.3, "causal_offset": None, "sink_logits": logits, "backend": backend}
    out, lse = step_attention(query, key, value, others, means=means, **options)
    with_chunks = Partials(
        torch.cat([others.outs, means.partials().outs], dim=3),
        torch.cat([others.lses, means.logits], dim=3),
    )
    expected, wanted_lse = step_attention(query, key, value, with_chunks, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(2, HEADS, 1, 8, dtype=torch.float64)}, "mean tokens' keys"),
        ({"values": torch.zeros(2, HEADS, 8, 1).transpose(2, 3)[..., ::2]}, "mean tokens' values"),
        ({"counts": torch.zeros(2, 2, dtype=torch.int32)}, "mean tokens' counts"),
        ({"block_len": -1}, "block_len=-1"),
    ],
)
def test_means_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    options = {
        "keys": torch.zeros(2, HEADS, 1, 8),
        "values": torch.zeros(2, HEADS, 1, 8),
        "counts": torch.ones(2, 1, dtype=torch.int32),
    }
    means = BlockMeans(**{**options, **change})  # type: ignore[arg-type]
    ids = torch.zeros(2, HEADS, 1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        mean_logits(torch.zeros(2, 4, 1, 8), means, ids, scale=1.0)


@pytest.mark.parametrize(
    "ids", [torch.zeros(2, 3, 1, 3).int(), torch.zeros(2, 2, 2, 3).int(), torch.zeros(2, 2, 1, 3)]
)
def test_ids_that_do_not_fit_are_refused(ids: torch.Tensor) -> None:
    ones = torch.ones(2, HEADS, 1, 8)
    means = BlockMeans(ones, ones, torch.ones(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="ids"):
        mean_logits(torch.zeros(2, 4, 1, 8), means, ids, scale=1.0)
