"""FlatIndex: the oracle's selection against plain top-k."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from hf_kvret.methods.flat import FlatIndex

from .codebooks import GROUP, HEADS
from .index_runs import SEQUENCES, IndexRun, draw, ragged, slot_sets

LENGTH, QUERIES = 50, 3


def _best(run: IndexRun, query: torch.Tensor, valid: torch.Tensor, budget: int) -> list[set[int]]:
    """The best slots by the largest softmax share over a group, in fp64, row by row."""
    answer = []
    for b, h, q in product(range(SEQUENCES), range(HEADS), range(QUERIES)):
        heads = query[b, h * GROUP : (h + 1) * GROUP, q].double()
        scores = heads @ run.keys[b, h, :LENGTH].double().T * run.scale
        if run.softcap is not None:
            scores = run.softcap * torch.tanh(scores / run.softcap)
        shares = scores.masked_fill(~valid[b], float("-inf")).softmax(-1).amax(0)
        count = min(budget, int(valid[b].sum()))
        answer.append(set(shares.topk(count).indices.tolist()))
    return answer


@pytest.mark.parametrize("budget", [1, 7, LENGTH])
@pytest.mark.parametrize("cuts", [(), (1, 2, 33)])
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_the_selection_is_the_exact_top_k(
    budget: int, cuts: tuple[int, ...], softcap: float | None
) -> None:
    """Heads of a group compete by shares, which the scale and the cap of scores change."""
    valid = ragged(SEQUENCES, LENGTH)
    run = IndexRun(FlatIndex, range(SEQUENCES), softcap=softcap)
    run.prompt(draw(0, LENGTH), valid, cuts, recent=0)
    query, keys = draw(9, QUERIES)
    run.see(query, keys)
    ids = run.select(query, budget)
    assert ids.shape == (SEQUENCES, HEADS, QUERIES, budget) and ids.dtype == torch.int32
    assert slot_sets(ids) == _best(run, query, valid, budget)
