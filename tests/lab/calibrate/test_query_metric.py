"""The metric of the queries, and that codebooks made in it give better scores."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret.lab.calibrate.a2ats import query_metric, score_error
from hf_kvret.lab.calibrate.k_means import k_means
from hf_kvret_kernels import codebook as book


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moments(queries: torch.Tensor) -> torch.Tensor:
    """``[H, D, D]`` fp64 mean of q^T q of ``queries [H, m, D]``."""
    queries = queries.double()
    return queries.mT @ queries / queries.shape[1]


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_the_factor_reproduces_the_second_moment(size: float) -> None:
    """Whatever its unit: divided by the rms entry, with the ridge on the diagonal."""
    second = moments(draw(3, 100, 16, seed=0) * draw(16, seed=1).exp()) * size
    factor, inverse = query_metric(second)
    assert factor.dtype == inverse.dtype == torch.float32
    assert factor.shape == inverse.shape == (3, 16, 16)
    assert torch.equal(factor, factor.tril())
    rms = second.square().mean((1, 2), keepdim=True).sqrt()
    expected = second / rms + 1e-6 * torch.eye(16)
    # The factor is rounded to fp32, and sums of 16 of its products are compared.
    product = factor.double() @ factor.double().mT
    assert (product - expected).abs().max() <= 1e-6 * expected.abs().max()
    identity = factor.double() @ inverse.double() - torch.eye(16)
    assert identity.abs().max() <= 1e-5


def test_distances_in_the_metric_are_errors_of_scores() -> None:
    queries, keys, other = (
        draw(2, 200, 12, seed=2),
        draw(2, 30, 12, seed=3),
        draw(2, 30, 12, seed=4),
    )
    second = moments(queries)
    factor, _ = query_metric(second)
    distances = ((keys - other) @ factor).square().sum(-1)
    errors = torch.einsum("hmd,hnd->hnm", queries, keys - other).square().mean(-1)
    unit = second.square().mean((1, 2)).sqrt().float()
    assert torch.allclose(distances * unit[:, None], errors, rtol=1e-4)


def test_few_queries_suffice_in_float64() -> None:
    """A matrix of rank 5 is lifted by the ridge."""
    factor, inverse = query_metric(moments(draw(2, 5, 32, seed=8)))
    assert factor.isfinite().all() and inverse.isfinite().all()
    assert (factor.double() @ inverse.double() - torch.eye(32)).abs().max() <= 1e-3


def test_codebooks_aware_of_queries_give_better_scores() -> None:
    """Queries look along few directions, along which keys vary least; on keys not seen before."""
    widths = torch.logspace(0.5, -0.5, 16)
    keys, fresh = (draw(2, n, 16, seed=s) * widths for n, s in ((3000, 9), (500, 10)))
    queries = draw(2, 400, 16, seed=11) / widths.square()
    second, held_out = moments(queries[:, :200]), moments(queries[:, 200:])
    plain = k_means(keys, 64, seed=0)
    factor, inverse = query_metric(second)
    aware = k_means(keys @ factor, 64, seed=0)

    def restored(z: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        codes = book.encode(z[None], words)[0].long()
        return words.gather(1, codes.unsqueeze(-1).expand_as(z))

    plain_error = score_error(fresh, restored(fresh, plain), held_out)
    decoded = restored(fresh @ factor, aware) @ inverse
    aware_error = score_error(fresh, decoded, held_out)
    assert (aware_error < 0.7 * plain_error).all(), (aware_error, plain_error)
    # And not since it is better at all: the keys themselves are farther off.
    assert (decoded - fresh).square().mean() > (restored(fresh, plain) - fresh).square().mean()


def test_the_error_is_that_of_scores() -> None:
    queries, keys = draw(2, 50, 8, seed=12), draw(2, 20, 8, seed=13)
    restored = keys + 0.1 * draw(2, 20, 8, seed=14)
    missed = torch.einsum("hmd,hnd->hmn", queries, keys - restored).square().mean((1, 2))
    exact = torch.einsum("hmd,hnd->hmn", queries, keys).square().mean((1, 2))
    error = score_error(keys, restored, moments(queries))
    assert torch.allclose(error, missed / exact, rtol=1e-5)
    assert score_error(keys, keys, moments(queries)).tolist() == [0.0, 0.0]
    assert score_error(keys, torch.zeros_like(keys), moments(queries)).tolist() == [1.0, 1.0]


def test_matrices_that_are_no_second_moments_are_refused() -> None:
    good = moments(draw(3, 50, 4, seed=15))
    for number in (math.nan, math.inf):
        broken = good.clone()
        broken[1, 2, 3] = number
        with pytest.raises(ValueError, match="of head 1 are zero, not finite or"):
            query_metric(broken)
    empty = good.clone()
    empty[[0, 2]] = 0
    with pytest.raises(ValueError, match="of head 0, 2 are zero"):
        query_metric(empty)
    with pytest.raises(ValueError, match=r"of head 0, 1, 2 are .*not positive definite"):
        query_metric(good - 2 * torch.eye(4))
