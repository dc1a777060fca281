"""The relevance of tokens to the heads of a group, and the best candidates, against float64."""

import pytest
import torch

from hf_kvret_kernels import relevance
from hf_kvret_kernels._dispatch import interpreted

from .draws import Place, best_places, best_share, draw, generator, run_at

INF = float("inf")


def some_scores(*shape: int, seed: int = 0, holes: float = 0.2) -> torch.Tensor:
    """Scores of several sizes, with holes."""
    scores = draw(*shape, seed=seed) * 5
    scores[torch.rand(shape, generator=generator(seed + 1)) < holes] = -INF
    return scores


def check_relevance(place: Place, scores: torch.Tensor, heads: int) -> None:
    result = run_at(place, relevance.group_relevance, scores, heads)
    assert result.dtype == torch.float32
    # fp32: a sum of 5,000 terms, and a difference of numbers up to 30.
    expected = best_share(scores.double(), heads)
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 6, 0, 9), (2, 8, 1, 37), (1, 4, 2, 2500)])
def test_relevance_is_the_largest_share_of_a_group(place: Place, shape: tuple[int, ...]) -> None:
    scores = some_scores(*shape)
    scores[0, 0] = -INF
    check_relevance(place, scores, 2)


def test_chunks_of_several_blocks_add_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows of more than 256 blocks are cut; the peak comes in the middle of a chunk."""
    if place[0] == "triton":
        from hf_kvret_kernels.relevance import triton

        monkeypatch.setattr(triton, "_CHUNKS", 2)
    scores = some_scores(1, 2, 1, 4500)
    scores[..., 1500] = 90.0
    scores[:, 1, :, :3072] = -INF
    check_relevance(place, scores, 1)


@pytest.mark.parametrize(("shape", "count"), [((2, 8, 1, 37), 37), ((1, 4, 2, 1025), 900)])
def test_the_most_relevant_are_taken(place: Place, shape: tuple[int, ...], count: int) -> None:
    """The first of equal ones, which rounding tells from each other by the last bits at most."""
    scores = some_scores(*shape).round()
    scores[0, :, 0, 12:] = -INF
    result = run_at(place, relevance.top_indices, scores, 2, count)
    assert result.dtype == torch.int32
    expected = best_share(scores.double(), 2).round(decimals=4)
    assert torch.equal(result, best_places(expected, count))


def check_best(
    place: Place, scores: torch.Tensor, count: int, ids: torch.Tensor | None = None
) -> None:
    """Against the float64 relevance; near ties may be taken either way."""
    lead, length = scores.shape[:3], scores.shape[4]
    if ids is None:
        # Distinct ids in random order.
        ids = torch.rand(*lead, 3 * length, generator=generator(0)).argsort(-1)[..., :length].int()
    result = run_at(place, relevance.best_ids, scores, ids, count)
    assert result.shape == (*lead, count) and result.dtype == torch.int32
    values = best_share(scores.double().transpose(2, 3).flatten(1, 2), lead[1])
    named = result.unsqueeze(-1) == ids.unsqueeze(-2)
    wanted = (values > -INF).sum(-1, keepdim=True).clamp(max=count)
    assert torch.equal(result >= 0, torch.arange(count) < wanted)
    assert torch.equal(named.any(-1), result >= 0)
    # They come in the order of the candidates, so none comes twice.
    at = named.int().argmax(-1)
    assert ((at.diff(dim=-1) > 0) | (result[..., 1:] < 0)).all()
    taken = named.any(-2)
    least = values.masked_fill(~taken, INF).amin(-1)
    most_left = values.masked_fill(taken, -INF).amax(-1)
    # fp32 tells log-shares around 30 apart to a few millionths.
    assert (least >= most_left - 1e-4).all()


@pytest.mark.factor("group", [1, 3])
@pytest.mark.factor("length, count", [(37, 36), (600, 100)])
def test_the_best_candidates_are_taken(place: Place, length: int, count: int, group: int) -> None:
    scores = some_scores(2, 2, 2, group, length)
    scores[0, 1, 0] = scores[1, 0, 1, 0] = -INF
    check_best(place, scores, count)


@pytest.mark.factor("group", [1, 4])
def test_more_candidates_than_a_program_holds(
    place: Place, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    if place[0] == "triton":
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

    scores = draw(1, 2, 1, 1, 2500, seed=5)
    ids = torch.arange(2500, dtype=torch.int32).expand(1, 2, 1, 2500)
    tickets = torch.zeros(1, 2, 1, dtype=torch.int32)
    first, again = (best_ids(scores, 30, ids, None, tickets) for _ in range(2))
    assert torch.equal(first, again) and first.ge(0).all()
    assert tickets.eq(0).all()


def test_of_equal_candidates_the_right_number_is_taken(place: Place) -> None:
    values = torch.randint(0, 3, (1, 2, 1, 1, 700), generator=generator(3)).float()
    values[0, 1] = 2.5
    ids = torch.arange(700, dtype=torch.int32).expand(1, 2, 1, 700)
    for count in (1, 300, 699):
        result = run_at(place, relevance.best_ids, values, ids, count)
        taken = values.squeeze(3).gather(-1, result.long()).sort().values
        assert torch.equal(taken, values.squeeze(3).sort().values[..., -count:])
        assert (result.diff(dim=-1) > 0).all()
    if place[0] == "triton":
        assert result[0, 1, 0].tolist() == list(range(699))


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
