"""k-means: clusters that are there, errors that fall, empty clusters, one result."""

from typing import Any

import pytest
import torch

from hf_kvret.lab.calibrate import a2ats as module
from hf_kvret.lab.calibrate.a2ats import k_means

from .draws import draw


def errors_of(points: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """``[H]`` mean squared distance to the nearest codeword, in float64."""
    return torch.cdist(points.double(), codebook.double()).amin(-1).square().mean(1)


def in_order(codebook: torch.Tensor) -> torch.Tensor:
    """Each head's codewords by their first number."""
    first = codebook[..., 0].argsort(1)
    return codebook.gather(1, first.unsqueeze(-1).expand_as(codebook))


def test_clusters_that_are_apart_are_found() -> None:
    """So far from the origin that inner products would drown; each mean is found, up to fp32."""
    centres = draw(2, 12, 8, seed=0) * 2 + 5000
    member = torch.arange(12).repeat_interleave(torch.arange(1, 13) * 5)
    points = centres[:, member] + 0.02 * draw(2, len(member), 8, seed=1)
    codebook = k_means(points, 12, seed=0, rounds=3)
    assert codebook.shape == (2, 12, 8) and codebook.dtype == torch.float32
    means = torch.stack([points[:, member == c].double().mean(1) for c in range(12)], 1)
    assert (in_order(codebook) - in_order(means.float())).abs().max() <= 1e-3


def test_seeds_are_drawn_by_distance() -> None:
    """One far point among thousands is a seed; drawn alike it would be missed."""
    points = draw(1, 5000, 4, seed=4)
    points[0, 77] = 1000.0
    codebook = k_means(points, 3, seed=0, rounds=0)
    assert (codebook[0] - 1000).abs().amax(-1).min() <= 1e-3
    clusters = torch.arange(30.0).repeat_interleave(20).view(1, 600, 1) * 100
    spread = k_means(clusters + 0.01 * draw(1, 600, 1, seed=5), 30, seed=0, rounds=0)
    assert (in_order(spread)[0, :, 0] / 100 - torch.arange(30.0)).abs().max() <= 1e-2


def test_empty_clusters_are_given_the_farthest_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that are all the same point: without a new place 19 codewords would be of no use."""
    points = draw(2, 400, 5, seed=6)

    def first_point(points: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        return points[:1].repeat(len(draws), 1)

    monkeypatch.setattr(module, "_seed", first_point)
    nearest = torch.cdist(points, k_means(points, 20, seed=0)).argmin(-1)
    assert all(len(head.unique()) == 20 for head in nearest)
    first = k_means(points, 20, seed=0, rounds=1)
    farthest = (points[0] - points[0, 0]).norm(dim=-1).topk(19).indices
    distances = torch.cdist(points[0, farthest].double(), first[0].double())
    assert (distances.amin(1) <= 1e-6).all()


def test_fewer_distinct_points_than_codewords_are_met_exactly() -> None:
    distinct = draw(2, 7, 5, seed=7) + 10
    codebook = k_means(distinct.repeat(1, 6, 1), 50, seed=0)
    assert codebook.isfinite().all()
    assert (torch.cdist(distinct.double(), codebook.double()).amin(-1) <= 1e-5).all()
    assert (torch.cdist(codebook.double(), distinct.double()).amin(-1) <= 1e-5).all()
    # With as many points as codewords each point is one, in their order.
    torch.testing.assert_close(k_means(distinct, 7, seed=0), distinct)


def test_one_seed_gives_one_codebook(monkeypatch: pytest.MonkeyPatch) -> None:
    points = draw(2, 500, 6, seed=8)
    state = torch.get_rng_state()
    first = k_means(points, 30, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, k_means(points, 30, seed=4))
    # Chunks make no difference.
    monkeypatch.setattr(module, "_CHUNK_NUMBERS", 100)
    assert torch.equal(first, k_means(points, 30, seed=3))


def test_means_are_of_their_points_whatever_their_sizes() -> None:
    points = draw(3000, 6, seed=12) * torch.logspace(-3, 3, 3000).view(-1, 1)
    codes = torch.randint(0, 5, (3000,), generator=torch.Generator().manual_seed(14))
    means, empty = module._means(points, codes, torch.zeros(6, 6))
    assert empty.tolist() == [5] and not means[5].any()
    for word in range(5):
        expected = points[codes == word].double().mean(0)
        assert torch.allclose(means[word].double(), expected, rtol=1e-6)


def test_seeds_are_drawn_from_a_sample_of_many_points(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codewords of a sample's seeds fit all points about as well as those of all points' seeds."""
    points = draw(1, 6000, 6, seed=24)
    whole = k_means(points, 40, seed=0)
    monkeypatch.setattr(module, "_SAMPLE", 100)
    shapes = watch(module, "_seed", lambda points, draws: tuple(points.shape))
    sampled = k_means(points, 40, seed=0)
    assert shapes == [(160, 6)]
    assert errors_of(points, sampled) <= 1.03 * errors_of(points, whole)
