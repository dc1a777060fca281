"""The relevance of tokens to the heads of a group, and the best candidates, against float64."""

from __future__ import annotations

import pytest
import torch

from hf_kvret_kernels import relevance
from hf_kvret_kernels._dispatch import interpreted

from .draws import Place, best_share, generator

INF = float("inf")


def some_scores(*shape: int, seed: int = 0, holes: float = 0.2) -> torch.Tensor:
    """Scores of several sizes, with holes."""
    scores = torch.randn(shape, generator=generator(seed)) * 5
    scores[torch.rand(shape, generator=generator(seed + 1)) < holes] = -INF
    return scores


@pytest.mark.factor(
    "batch, heads, group, queries, tokens",
    [(1, 2, 3, 0, 9), (2, 2, 4, 1, 37), (1, 1, 3, 2, 2500)],
)
def test_relevance_is_the_largest_share_of_a_group(
    place: Place, batch: int, heads: int, group: int, queries: int, tokens: int
) -> None:
    backend, device = place
    scores = some_scores(batch, heads * group, queries, tokens)
    scores[0, 0] = -INF
    result = relevance.group_relevance(scores.to(device), heads, backend=backend)
    assert result.shape == (batch, heads, queries, tokens) and result.dtype == torch.float32
    assert result.device.type == device
    # fp32: a sum of 5,000 terms, and a difference of numbers up to 30.
    expected = best_share(scores.double(), heads)
    torch.testing.assert_close(result.cpu().double(), expected, rtol=1e-6, atol=1e-5)


def test_chunks_of_several_blocks_add_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows of more than 256 blocks are cut; the peak comes in the middle of a chunk."""
    backend, device = place
    if backend == "triton":
        from hf_kvret_kernels.relevance import triton

        monkeypatch.setattr(triton, "_CHUNKS", 2)
    scores = some_scores(1, 2, 1, 4500)
    scores[..., 1500] = 90.0
    scores[:, 1, :, :3072] = -INF
    result = relevance.group_relevance(scores.to(device), 1, backend=backend)
    expected = best_share(scores.double(), 1)
    torch.testing.assert_close(result.cpu().double(), expected, rtol=1e-6, atol=1e-5)


def test_large_scores_stay_finite(place: Place) -> None:
    backend, device = place
    scores = torch.tensor([3e4, 3e4 - 1, -3e4, -INF]).view(1, 1, 1, 4).repeat(1, 2, 1, 1)
    scores[0, 1] *= -1
    scores[0, 1, 0, 3] = -INF
    result = relevance.group_relevance(scores.to(device), 1, backend=backend)
    assert result.isfinite().tolist() == [[[[True, True, True, False]]]]
    assert result[0, 0, 0, 2] == 0.0


@pytest.mark.factor(
    "batch, heads, group, queries, tokens, count",
    [(2, 2, 4, 1, 37, 37), (1, 1, 2, 2, 1025, 900)],
)
def test_the_tokens_that_matter_most_are_taken(
    place: Place,
    batch: int,
    heads: int,
    group: int,
    queries: int,
    tokens: int,
    count: int,
) -> None:
    """The first of equal ones, which rounding tells from each other by the last bits at most."""
    backend, device = place
    scores = some_scores(batch, heads * group, queries, tokens).round()
    scores[0, :, 0, tokens // 3 :] = -INF
    result = relevance.top_indices(scores.to(device), heads, count, backend=backend).cpu()
    assert result.shape == (batch, heads, queries, count) and result.dtype == torch.int32
    expected = best_share(scores.double(), heads).round(decimals=4)
    order = expected.sort(dim=-1, descending=True, stable=True)
    missing = order.values[..., :count] == -INF
    best = order.indices[..., :count].masked_fill(missing, tokens).sort(-1).values
    assert torch.equal(result.long(), best.masked_fill(best == tokens, -1))


def check_best(
    place: Place, scores: torch.Tensor, count: int, ids: torch.Tensor | None = None
) -> None:
    """Against a sort of the float64 relevance; near ties may be taken either way."""
    backend, device = place
    batch, heads, queries, _, length = scores.shape
    if ids is None:
        lead = (batch, heads, queries)
        draws = [torch.randperm(3 * length, generator=generator(i))[:length] for i in range(3)]
        rows = [draws[i % 3] for i in range(lead[0] * lead[1] * lead[2])]
        ids = torch.stack(rows).view(*lead, length).int()
    result = relevance.best_ids(scores.to(device), ids.to(device), count, backend=backend)
    assert result.shape == (batch, heads, queries, count) and result.dtype == torch.int32
    expected = best_share(scores.double().transpose(2, 3).flatten(1, 2), heads)
    for row in torch.cartesian_prod(*map(torch.arange, result.shape[:3])).view(-1, 3).tolist():
        values, own = expected[tuple(row)], ids[tuple(row)].tolist()
        chosen = result[tuple(row)].tolist()
        taken = [own.index(each) for each in chosen if each != -1]
        wanted = min(count, int((values > -INF).sum()))
        assert len(taken) == wanted and chosen[wanted:] == [-1] * (count - wanted)
        # In the order of the candidates, so none twice.
        assert taken == sorted(set(taken))
        left = [place for place in range(length) if place not in set(taken)]
        if taken and left:
            # fp32 tells log-shares around 30 apart to a few millionths.
            assert values[taken].min() >= values[left].max() - 1e-4


@pytest.mark.factor("group", [1, 3])
@pytest.mark.factor("length, count", [(37, 36), (600, 100)])
def test_the_best_candidates_are_taken(place: Place, length: int, count: int, group: int) -> None:
    scores = some_scores(2, 2, 2, group, length)
    scores[0, 1, 0] = -INF
    scores[1, 0, 1, 0] = -INF
    check_best(place, scores, count)


@pytest.mark.factor("group", [1, 4])
def test_more_candidates_than_a_program_holds(
    place: Place, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    backend, _ = place
    if backend == "triton":
        from hf_kvret_kernels.top_k import triton

        monkeypatch.setattr(triton, "_SIZES", ())
    scores = some_scores(1, 2, 2, group, 1300)
    scores[0, 1, 1, :, 20:] = -INF
    check_best(place, scores, 150)


def test_tickets_are_zeros_again() -> None:
    pytest.importorskip("triton")
    if not interpreted():
        pytest.skip("Triton's interpreter is off")
    from hf_kvret_kernels.top_k.triton import best_ids

    scores = torch.randn(1, 2, 1, 1, 2500, generator=generator(5))
    ids = torch.arange(2500, dtype=torch.int32).expand(1, 2, 1, 2500)
    tickets = torch.zeros(1, 2, 1, dtype=torch.int32)
    first, again = (best_ids(scores, 30, ids, None, tickets) for _ in range(2))
    assert torch.equal(first, again) and first.ge(0).all()
    assert tickets.eq(0).all()


def test_heads_of_another_scale_do_not_decide_alone(place: Place) -> None:
    """The scores of the second head are larger, its shares are not."""
    backend, device = place
    scores = torch.zeros(1, 1, 1, 2, 4)
    scores[..., 0, :] = torch.tensor([5.0, 0.0, 0.0, 0.0])
    scores[..., 1, :] = torch.tensor([99.0, 100.0, 100.0, 100.0])
    ids = torch.tensor([7, 5, 3, 1], dtype=torch.int32, device=device).view(1, 1, 1, 4)
    result = relevance.best_ids(scores.to(device), ids, 1, backend=backend)
    assert result.item() == 7


def test_of_equal_candidates_the_right_number_is_taken(place: Place) -> None:
    backend, device = place
    values = torch.randint(0, 3, (1, 2, 1, 1, 700), generator=generator(3)).float()
    values[0, 1] = 2.5
    ids = torch.arange(700, dtype=torch.int32).expand(1, 2, 1, 700)
    for count in (1, 5, 300, 699):
        result = relevance.best_ids(values.to(device), ids.to(device), count, backend=backend)
        for head in range(2):
            row, chosen = values[0, head, 0, 0], result[0, head, 0].tolist()
            assert sorted(row[chosen].tolist()) == sorted(row.sort().values[-count:].tolist())
            assert chosen == sorted(set(chosen))
    if backend == "triton":
        assert chosen == list(range(699))


def test_candidates_of_any_layout_and_of_no_query(place: Place) -> None:
    scores = some_scores(40, 3, 2, 2, 2).permute(4, 3, 2, 1, 0)
    ids = torch.arange(80, dtype=torch.int32).expand(2, 2, 2, 80)[..., ::2]
    check_best(place, scores, 7, ids)
    check_best(place, scores[:, :, :0], 7, ids[:, :, :0])


@pytest.mark.factor("dtype", [torch.int32, torch.int64])
@pytest.mark.factor("shape", [(1,), (2, 2, 1, 700), (0, 3)])
def test_ids_are_counted_into_a_total(
    place: Place, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    backend, device = place
    ids = torch.randint(-1, 2, shape, generator=generator(4)).to(device, dtype)
    total = torch.full((), 2**40, dtype=torch.int64, device=device)
    for _ in range(2):
        relevance.count_ids(ids, total, backend=backend)
    assert total.item() == 2**40 + 2 * sum(each >= 0 for each in ids.flatten().tolist())
