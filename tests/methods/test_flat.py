"""FlatIndex: the oracle's selection against plain top-k."""

from __future__ import annotations

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.methods.flat import FlatIndex
from hf_kvret.testing.cold import cold_tokens

from .watched_stores import slot_sets

HEADS, GROUP, DIM, LENGTH = 2, 3, 16, 50


def _index(keys: torch.Tensor, *cuts: int) -> FlatIndex:
    index, start = FlatIndex(), 0
    for end in (*cuts, keys.shape[2]):
        block = keys[:, :, start:end]
        index.add(TokenBlock(block, block, start))
        start = end
    return index


def _case(batch: int = 2, queries: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(batch, HEADS, LENGTH, DIM, generator=generator)
    query = torch.randn(batch, HEADS * GROUP, queries, DIM, generator=generator)
    valid = torch.ones(batch, LENGTH, dtype=torch.bool)
    valid[0, :20] = False
    valid[-1, 30:35] = False
    return keys, query, valid


def _best(keys: torch.Tensor, query: torch.Tensor, valid: torch.Tensor, budget: int) -> list:
    """The best slots by the largest softmax share over a group, in fp64, row by row."""
    answer = []
    for b in range(len(keys)):
        for h in range(HEADS):
            for q in range(query.shape[2]):
                heads = query[b, h * GROUP : (h + 1) * GROUP, q].double()
                scores = (heads @ keys[b, h].double().T * 0.25).masked_fill(
                    ~valid[b], float("-inf")
                )
                shares = scores.softmax(-1).amax(0)
                count = min(budget, int(valid[b].sum()))
                answer.append(set(shares.topk(count).indices.tolist()))
    return answer


@pytest.mark.parametrize("budget", [1, 7, 40, LENGTH])
@pytest.mark.parametrize("cuts", [(), (1, 2, 33)])
def test_the_selection_is_the_exact_top_k(budget: int, cuts: tuple[int, ...]) -> None:
    keys, query, valid = _case()
    ids = _index(keys, *cuts).search(query, cold_tokens(valid, 0.25, budget))
    assert ids.shape == (2, HEADS, 3, budget) and ids.dtype == torch.int32
    assert slot_sets(ids) == _best(keys, query, valid, budget)


def test_a_scale_changes_which_head_decides() -> None:
    """Head 0 scores 3, 2.9, 0 and head 1 scores 0, 1, 0: a large scale makes 1 the clearer lead."""
    keys = torch.tensor([[3.0, 0.0], [2.9, 1.0], [0.0, 0.0]]).view(1, 1, 3, 2)
    query = torch.eye(2).view(1, 2, 1, 2)
    valid = torch.ones(1, 3, dtype=torch.bool)
    assert _index(keys).search(query, cold_tokens(valid, 0.3, 1)).item() == 0
    assert _index(keys).search(query, cold_tokens(valid, 10.0, 1)).item() == 1


def test_a_soft_cap_counts_where_heads_of_a_group_compete() -> None:
    """Without a cap head 1 gives token 1 the largest weight; a cap evens out tokens 1 and 2."""
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.93]]).view(1, 1, 3, 2)
    query = torch.tensor([[2.0, 0.0], [0.0, 20.0]]).view(1, 2, 1, 2)
    valid = torch.ones(1, 3, dtype=torch.bool)
    assert _index(keys).search(query, cold_tokens(valid, 1.0, 1)).item() == 1
    assert _index(keys).search(query, cold_tokens(valid, 1.0, 1, 5.0)).item() == 0
