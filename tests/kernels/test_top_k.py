"""The highest scores against a stable sort."""

import pytest
import torch

from hf_kvret_kernels.top_k import top_k

from .draws import Place, best_places, draw, generator, moved_with_room, run_at

INF = float("inf")


def check_top_k(place: Place, scores: torch.Tensor, count: int) -> None:
    """Against a stable sort: the first of equal scores, and positions that ascend."""
    ids = run_at(place, top_k, scores, count)
    if place[0] == "triton":
        # Where there are more scores than one program holds; the results are the same.
        from hf_kvret_kernels.top_k.triton import split_top_k

        moved = moved_with_room(scores, place[1])
        assert torch.equal(ids, split_top_k(moved.unsqueeze(3), count).cpu())
    assert ids.dtype == torch.int32 and torch.equal(ids, best_places(scores, count))


@pytest.mark.parametrize(("length", "count"), [(37, 37), (1025, 1024), (2100, 700)])
def test_the_highest_scores_are_taken(place: Place, length: int, count: int) -> None:
    """Spare room of +inf, rows that are steps apart, holes, and a row of holes alone."""
    scores = torch.full((2, 2, 1, length + 3), INF)
    scores[..., :length] = draw(2, 2, 1, length, seed=7) * 100
    scores[0, 1, :, :length][torch.rand(1, length, generator=generator(8)) < 0.5] = -INF
    scores[1, 1, :, :length] = -INF
    check_top_k(place, scores[..., :length], count)


@pytest.mark.parametrize("count", [1, 500, 2000])
def test_of_equal_scores_the_first_are_taken(place: Place, count: int) -> None:
    """Few different values: the threshold lies in the middle of hundreds of equal ones."""
    scores = torch.randint(-2, 3, (1, 2, 2, 2100), generator=generator(9)).float()
    scores[0, 0, 0] = 1.5
    # A score too many would be written here.
    scores[0, 1, 1] = -INF
    check_top_k(place, scores, count)


@pytest.mark.parametrize("count", [5, 10, 12])
def test_the_order_is_that_of_the_numbers(place: Place, count: int) -> None:
    """Both signs and zeros, denormals, the greatest numbers and infinity."""
    tiny, huge = 1.4e-45, torch.finfo(torch.float32).max
    values = [-0.0, 0.0, -tiny, tiny, -0.0, 3 * tiny, -huge, huge, INF, -INF, 1.0, -1.0]
    values += [1.0 + 2**-23, -1.0 - 2**-23, 1e-38, -1e-38, 65504.0, INF, -0.0]
    check_top_k(place, torch.tensor(values).view(1, 1, 1, -1), count)


def test_neighbours_in_the_last_bit_are_told_apart(place: Place) -> None:
    """1500 numbers that only the last two digits of eight bits separate, in both signs."""
    bits = 0x40490000 + torch.randperm(1500, generator=generator(10))
    up = bits.int().view(torch.float32)
    check_top_k(place, torch.stack([up, -up]).view(1, 2, 1, -1), 256)


def test_sums_of_many_blocks_add_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of more blocks, and of a fuller bin, than the last program takes at once."""
    if place[0] == "triton":
        from hf_kvret_kernels.top_k import triton

        monkeypatch.setattr(triton, "_TOKENS", 32)
        monkeypatch.setattr(triton, "_CHUNK", 16)
    check_top_k(place, draw(1, 1, 1, 1700, seed=12), 450)


def test_scores_may_be_strided_and_of_no_query(place: Place) -> None:
    scores = draw(40, 2, 1, 2, seed=11).permute(3, 2, 1, 0)[..., ::2]
    check_top_k(place, scores, 7)
    assert run_at(place, top_k, scores[:, :, :0], 7).shape == (2, 1, 0, 7)
