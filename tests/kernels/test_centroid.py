"""Centroid lists: against loops in fp64, in pieces and at once, and around padding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from hf_kvret_kernels import centroid

BATCH, HEADS, DIM = 2, 2, 16
SCALE = 1 / math.sqrt(DIM)


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _pieces(keys: torch.Tensor, piece: int) -> centroid.Pieces:
    def give() -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, keys.shape[2], piece):
            yield start, keys[:, :, start : start + piece]

    return give


def _case(group: int, held: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and a ragged mask; what the mask hides is NaN."""
    queries, keys = _normal(1, BATCH, HEADS, 7, group, DIM), _normal(2, BATCH, HEADS, held, DIM)
    valid = torch.ones(BATCH, held, dtype=torch.bool)
    valid[0, 10:13] = False
    valid[1, :30] = False
    return 3 * queries, keys.masked_fill(~valid[:, None, :, None], float("nan")), valid


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 9, 60])
def test_lists_are_the_best_keys_by_the_largest_softmax_weight(
    group: int, softcap: float | None, causal: bool, count: int
) -> None:
    queries, keys, valid = _case(group)
    slots = torch.tensor([[5, 12, 20, 33, 40, 49, 60], [2, 31, 35, 40, 44, 48, 49]])
    ids = centroid.top_keys(
        queries,
        _pieces(keys, 16),
        count,
        valid=valid,
        scale=SCALE,
        softcap=softcap,
        positions=slots if causal else None,
    )
    assert ids.shape == (BATCH, HEADS, 7, count) and ids.dtype == torch.int32
    for b in range(BATCH):
        for h in range(HEADS):
            for c in range(7):
                logits = queries[b, h, c].double() @ keys[b, h].double().T * SCALE
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                seen = valid[b] & ((torch.arange(50) <= slots[b, c]) | (not causal))
                logits = logits.masked_fill(~seen, float("-inf"))
                shares = logits.softmax(-1).nan_to_num(nan=0.0).amax(0)
                expected = shares.argsort(descending=True)[: min(count, int(seen.sum()))]
                missing = [-1] * (count - len(expected))
                assert ids[b, h, c].tolist() == expected.tolist() + missing


@pytest.mark.parametrize("piece", [1, 7, 50])
@pytest.mark.parametrize("most_scores", [1, 900])
def test_pieces_do_not_change_the_lists(piece: int, most_scores: int) -> None:
    queries, keys, valid = _case(2)
    whole = centroid.top_keys(queries, _pieces(keys, 50), 9, valid=valid, scale=SCALE)
    cut = centroid.top_keys(
        queries, _pieces(keys, piece), 9, valid=valid, scale=SCALE, most_scores=most_scores
    )
    assert torch.equal(cut, whole)


def test_similarity_is_the_largest_cosine_of_the_group() -> None:
    query, centroids = _normal(1, BATCH, HEADS, 3, 2, DIM), _normal(2, BATCH, HEADS, 5, 2, DIM)
    norms = centroids.norm(dim=-1)
    found = centroid.similarity(query, centroids, 1 / norms)
    cosines = torch.nn.functional.cosine_similarity(
        query.unsqueeze(3).double(), centroids.unsqueeze(2).double(), dim=-1
    )
    assert found.shape == (BATCH, HEADS, 3, 5) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), cosines.amax(-1), atol=1e-6, rtol=0)


def test_united_lists_name_each_valid_token_once_and_where_it_came_first() -> None:
    drawn = torch.randint(-1, 40, (BATCH, HEADS, 3, 90), generator=torch.Generator().manual_seed(0))
    valid = _case(1, held=35)[2]
    ids, places = centroid.unite(drawn.int(), valid)
    assert ids.shape == drawn.shape and ids.dtype == torch.int32
    for b in range(BATCH):
        for named, mine, at in zip(
            drawn[b].flatten(0, 1).tolist(),
            ids[b].flatten(0, 1).tolist(),
            places[b].flatten(0, 1).tolist(),
            strict=True,
        ):
            wanted = sorted({x for x in named if 0 <= x < 35 and valid[b, x]})
            assert [x for x in mine if x >= 0] == wanted
            assert all(named.index(x) == p for x, p in zip(mine, at, strict=True) if x >= 0)


def test_what_does_not_fit_is_refused_by_name() -> None:
    queries, keys, valid = _case(2)
    pieces = _pieces(keys, 50)
    with pytest.raises(ValueError, match="queries"):
        centroid.top_keys(queries[0], pieces, 3, valid=valid, scale=SCALE)
    with pytest.raises(ValueError, match="count=0"):
        centroid.top_keys(queries, pieces, 0, valid=valid, scale=SCALE)
    with pytest.raises(ValueError, match="valid"):
        centroid.top_keys(queries, pieces, 3, valid=valid[:1], scale=SCALE)
    with pytest.raises(ValueError, match="positions"):
        positions = torch.zeros(1, 7)
        centroid.top_keys(queries, pieces, 3, valid=valid, scale=SCALE, positions=positions)
    with pytest.raises(ValueError, match="softcap"):
        centroid.top_keys(queries, pieces, 3, valid=valid, scale=SCALE, softcap=0.0)
    with pytest.raises(ValueError, match="third dimension"):
        centroid.similarity(queries, queries[:, :1], queries[:, :1].norm(dim=-1))
    with pytest.raises(ValueError, match="inverse_norms"):
        centroid.similarity(queries, queries, queries)
    with pytest.raises(ValueError, match="ids"):
        centroid.unite(torch.zeros(2, 3), valid)
    with pytest.raises(ValueError, match="no token"):
        centroid.unite(torch.zeros(2, 1, 1, 3, dtype=torch.int32), valid[:, :0])
