"""Stage 2, and both stages together: estimates of inner products, recall of the true top-k."""

import pytest
import torch

from hf_kvret_kernels import paris
from hf_kvret_kernels.paris import naive
from hf_kvret_kernels.paris.codes import points_of_product
from hf_kvret_kernels.relevance import best_ids

from .draws import NAIVE, TRITON, Place, draw, needs_triton, paris_tools, run_at

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)


def stages(
    q_rot: torch.Tensor,
    codes: paris.ParisCodes,
    counts: torch.Tensor,
    levels: torch.Tensor,
    survivors: int,
    *,
    backend: str = "naive",
    count: int = 1,
    rho: float = 0.5,
    valid: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    means: torch.Tensor | None = None,
    block_len: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates of a search, their estimates ``[B, H, Q, G, C]`` and the best ``count``."""
    shares = paris.share_units(rho, TIERS)
    if backend == "naive":
        points = naive.bonus_table(q_rot, counts, shares)
        offsets = drops = None
        if means is not None:
            products, worth = naive.mean_products(q_rot, means), points_of_product(shares)
            offsets = naive.Blocks(products, block_len)
            drops = naive.Blocks(naive.lost_points(products, q_rot, worth, None), block_len)
        ids = naive.candidates(naive.collide(codes.sign, points, valid, drops), survivors)
        scores = naive.rerank(q_rot, codes, ids, levels, scale, softcap, offsets)
        return ids, scores, best_ids(scores, ids, count, backend="naive")
    from hf_kvret_kernels.paris import triton

    tables = triton.bonus(q_rot, None, counts, shares, means, block_len)
    most = len(shares) * counts.shape[2]
    collisions = triton.collide(tables, codes.sign, valid, most, survivors)
    options = count, survivors, shares, valid, scale, softcap, means, block_len, None
    return triton.rank(
        tables, collisions, paris.SearchCall(q_rot, None, codes, counts, levels, *options)
    )


def test_estimates_are_close_and_not_shrunk() -> None:
    signs, levels = paris_tools(128)
    keys, query = draw(1, 1, 4096, 128), draw(1, 1, 4, 2, 128, seed=1)
    codes = paris.encode(keys, signs, levels)
    ids = torch.arange(4096, dtype=torch.int32).expand(1, 1, 4, -1)
    estimates = naive.rerank(paris.rotate(query, signs), codes, ids, levels, 1.0, None, None)
    assert estimates.shape == (1, 1, 4, 2, 4096) and estimates.dtype == torch.float32
    exact = torch.einsum("bhnd,bhqgd->bhqgn", keys, query).flatten()
    assert torch.corrcoef(torch.stack([estimates.flatten(), exact]))[0, 1] > 0.996
    # Without alpha the estimates shrink by the cosine, 0.993 to 0.995; the error of this
    # slope is 0.075 / sqrt(32,768) = 0.0004.
    slope = (estimates.flatten() * exact).sum() / exact.square().sum()
    assert abs(slope - 1) < 0.002


@needs_triton
@pytest.mark.parametrize(
    ("head_dim", "heads", "last", "rounds"),
    [(64, 2, 2048, 8), (133, 1, 16, 8), (16, 1, 16, 0)],
)
def test_triton_ranks_as_the_reference_does(
    head_dim: int, heads: int, last: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one round, in several, and in launches of its own; one row has fewer candidates.

    Spare capacity is poisoned.
    """
    from hf_kvret_kernels.paris import triton

    monkeypatch.setattr(triton, "_LAST", last)
    monkeypatch.setattr(triton, "_ROUNDS", rounds)
    signs, levels = paris_tools(head_dim)
    length, few = 61, 9
    room = paris.ParisCodes.empty(2, heads, length + 11, head_dim)
    room.weight.fill_(float("nan"))
    codes = room.tokens(0, length)
    paris.encode(draw(2, heads, length, head_dim), signs, levels, out=codes)
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, few:] = False
    counts = paris.count_centroids(codes.sign, valid=valid)
    q_rot = paris.rotate(draw(2, heads, 1, 3, head_dim, seed=1), signs)
    options = {"count": 5, "valid": valid, "rho": 0.2}
    want, got = (
        run_at(place, stages, q_rot, codes, counts, levels, 50, **options)
        for place in (NAIVE, TRITON)
    )
    for row, number in ((0, 50), (1, few)):
        assert torch.equal(got[0][row, ..., :number], want[0][row, ..., :number])
        # fp32 sums of up to 256 terms of size 1 in another order.
        estimates = (each[1][row, ..., :number] for each in (got, want))
        torch.testing.assert_close(*estimates, rtol=1e-5, atol=5e-5)
    assert torch.equal(got[2], want[2]) and (want[2] >= 0).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_scale_means_and_cap_apply_to_estimates(softcap: float | None, place: Place) -> None:
    signs, levels = paris_tools(16)
    codes = paris.encode(draw(2, 2, 9, 16), signs, levels)
    q_rot = paris.rotate(3 * draw(2, 2, 2, 3, 16, seed=1), signs)
    given = q_rot, codes, paris.count_centroids(codes.sign), levels, 9
    means = draw(3, 2, 2, 16, seed=2).permute(1, 2, 0, 3)
    ids, plain, _ = run_at(place, stages, *given)
    products = torch.einsum("bhqgd,bhnd->bhqgn", q_rot.double(), means.double())
    offsets = products.gather(4, (ids.long() // 4).unsqueeze(3).expand_as(plain))
    scores = (plain.double() + offsets) * 0.7
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    options = {"scale": 0.7, "softcap": softcap, "means": means, "block_len": 4}
    result = run_at(place, stages, *given, **options)[1]
    assert result.dtype == torch.float32
    # fp32 of numbers around 20.
    torch.testing.assert_close(result.double(), scores, rtol=1e-5, atol=2e-5)
