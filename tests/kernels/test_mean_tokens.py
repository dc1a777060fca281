"""Attention to the means of what is not selected, against float64."""

from __future__ import annotations

import pytest
import torch

from hf_kvret_kernels.mean_tokens import BlockMeans

HEADS, SCALE, BLOCK = 2, 0.3, 10


def make_case(group: int, blocks: int, choosers: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of means, tokens of each block, and ids of ``choosers`` heads."""
    generator = torch.Generator().manual_seed(group + blocks)
    query = torch.randn(2, HEADS * group, 3, 24, generator=generator)
    keys, values = torch.randn(2, 2, HEADS, blocks, 24, generator=generator).unbind()
    # Some tokens are not valid; row 1 leaves out nothing of its first block.
    counts = torch.randint(7, BLOCK, (2, blocks), generator=generator)
    counts[1, 0] = 3
    ids = torch.rand(2, choosers, 3, BLOCK * blocks, generator=generator).argsort(-1)[..., :6].int()
    ids[ids % BLOCK >= 7] = -1
    ids[1, :, :, :3] = torch.arange(3, dtype=torch.int32)
    ids[1, :, :, 3:][ids[1, :, :, 3:] < BLOCK] = -1
    return query, keys, values, counts, ids


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize(("group", "choosers"), [(1, 2), (3, 2), (4, 8)])
def test_each_mean_counts_for_the_tokens_that_are_left_out(
    group: int, choosers: int, blocks: int, softcap: float | None
) -> None:
    query, keys, values, counts, ids = make_case(group, blocks, choosers)
    means = BlockMeans(keys, values, counts, BLOCK if blocks > 1 else None)
    out, lse = means.attend(query, ids, SCALE, softcap)
    assert out.shape == query.shape and lse.shape == query.shape[:3]
    for b, h, q in torch.cartesian_prod(*(torch.arange(n) for n in lse.shape)).tolist():
        kv, own = h // group, ids[b, h * choosers // query.shape[1], q]
        logits = keys[b, kv].double() @ query[b, h, q].double() * SCALE
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        chosen = (own[own >= 0] // BLOCK).bincount(minlength=blocks)
        logits = logits + (counts[b] - chosen).double().log()
        expected = (logits.softmax(0) @ values[b, kv].double()).nan_to_num(0.0)
        torch.testing.assert_close(out[b, h, q].double(), expected, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(lse[b, h, q].double(), logits.logsumexp(0), rtol=1e-5, atol=2e-5)


def test_nothing_is_added_where_all_is_selected() -> None:
    query, keys, values, _, ids = make_case(2, 1, 2)
    means = BlockMeans(keys, values, torch.zeros(2, 1, dtype=torch.long))
    out, lse = means.attend(query, ids.fill_(-1), SCALE, None)
    assert not out.any() and bool((lse == -torch.inf).all())
