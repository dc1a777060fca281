"""Stage 1: centroid counts, points by tiers, collisions, the choice of candidates."""

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_kvret_kernels import paris
from hf_kvret_kernels.paris import naive
from hf_kvret_kernels.paris.codes import log_of_share, most_points, points_of_product

from .draws import (
    DEVICE,
    NAIVE,
    TRITON,
    Place,
    best_places,
    draw,
    generator,
    needs_triton,
    paris_tools,
    run_at,
)

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)


def random_sign(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator(0), dtype=torch.uint8)


def random_valid(batch: int, length: int) -> torch.Tensor:
    """Holes everywhere, and a last row without any valid token."""
    valid = torch.rand(batch, length, generator=generator(1)) < 0.7
    valid[-1] = False
    return valid


def _call(
    query: torch.Tensor, sign: torch.Tensor, samples: torch.Tensor | None, scale: float
) -> Any:
    """A search for nine tokens, as far as samples count in it."""
    codes = SimpleNamespace(sign=sign)
    return SimpleNamespace(query=query, codes=codes, samples=samples, scale=scale, budget=9)


def collisions(
    q_rot: torch.Tensor,
    counts: torch.Tensor,
    sign: torch.Tensor,
    *,
    rho: float,
    tiers: tuple[float, ...],
    valid: torch.Tensor | None = None,
    means: torch.Tensor | None = None,
    block_len: int = 1,
    samples: torch.Tensor | None = None,
    scale: float = 1.0,
    backend: str = "naive",
) -> torch.Tensor:
    """The scores of all tokens, of stage 1."""
    shares = paris.share_units(rho, tiers)
    if backend == "naive":
        by_rank = naive.bonus_table(q_rot, counts, shares) if shares else None
        points = naive.similarity_points(q_rot) if by_rank is None else by_rank
        drops = None
        if means is not None:
            products, worth = naive.mean_products(q_rot, means), points_of_product(shares)
            call = _call(q_rot, sign, samples, scale)
            lost = naive.lost_points(products, q_rot, worth, naive.least_logs(call))
            drops = naive.Blocks(lost, block_len)
        return naive.collide(sign, points, valid, drops)
    from hf_kvret_kernels.paris import triton

    share = 0.0 if samples is None else log_of_share(_call(q_rot, sign, samples, scale))
    points = triton.bonus(q_rot, None, counts, shares, means, block_len, samples, scale, share)
    return triton.collide(points, sign, valid, most_points(shares, counts), 0).scores


def check_candidates(
    place: Place, inputs: tuple[torch.Tensor, ...], count: int, **options: Any
) -> torch.Tensor:
    """They are the best of the scores, of equal ones the last; returns these, which are torch's.

    A search that may take all of its candidates shows them.
    """
    scores = collisions(*inputs, **options)
    assert torch.equal(run_at(place, collisions, *inputs, **options), scores)
    query, counts, sign = inputs
    *lead, width = sign.shape
    if not lead[2]:
        return scores
    count = min(count, lead[2])
    record = torch.zeros(*lead, 4 * width, dtype=torch.uint8)
    codes = paris.ParisCodes(sign, record)
    given = query, None, codes, counts, paris.magnitude_levels(), count
    ids = run_at(place, paris.search, *given, survivors=count, **options)
    merit = scores.double().masked_fill(scores == 255, -math.inf)
    places = best_places(merit.flip(-1), count)
    newest = (lead[2] - 1 - places).where(places >= 0, lead[2]).sort().values
    assert ids.dtype == torch.int32
    assert torch.equal(ids, newest.masked_fill(newest == lead[2], -1).int())
    return scores


def few_keys(length: int, queries: int = 1) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Inputs of three rows of few different keys, many of which have the same score; a mask."""
    chosen = torch.randint(0, 5, (3, 1, length, 1), generator=generator(7))
    sign = random_sign(1, 1, 5, 1).expand(3, -1, -1, -1).gather(2, chosen)
    valid = random_valid(3, length)
    counts = paris.count_centroids(sign, valid=valid)
    return (draw(3, 1, queries, 2, 8, seed=9), counts, sign), valid


@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor("length, count", [(1, 1), (37, 37), (2100, 700)])
def test_candidates_are_the_best_and_of_equal_ones_the_last(
    length: int, count: int, place: Place, masked: bool
) -> None:
    inputs, valid = few_keys(length, queries=2)
    options = {"rho": 0.6, "tiers": TIERS, "valid": valid if masked else None}
    check_candidates(place, inputs, count, **options)


@needs_triton
def test_sums_of_many_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of more than 256 blocks do."""
    from hf_kvret_kernels.paris import triton

    monkeypatch.setattr(triton, "_BLOCKS", 2)
    inputs, valid = few_keys(7100)
    check_candidates(TRITON, inputs, 900, rho=0.6, tiers=TIERS, valid=valid)


@needs_triton
@pytest.mark.parametrize("part", [1, 2])
def test_a_program_may_take_several_subspaces(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's takes one; here one takes all of them, as the others can't be told apart."""
    from hf_kvret_kernels.paris import triton

    query, means = draw(3, 1, 1, 2, 11, seed=9).to(DEVICE), draw(3, 1, 9, 11, seed=2).to(DEVICE)
    counts = paris.count_centroids(random_sign(3, 1, 50, 2)).to(DEVICE)
    factors = (torch.arange(33.0).view(3, 1, 11) / 2 - 8).exp2()
    signs = paris.scaled_signs(paris.random_signs(16, seed=3), factors).to(DEVICE)
    given = query, signs, counts, (100_000, 400_000), means, 8
    expected = triton.bonus(*given)
    monkeypatch.setattr(triton, "subspaces_of_program", lambda count: part)
    monkeypatch.setattr(triton, "_MEANS", 8)
    result = triton.bonus(*given)
    assert all(torch.equal(*pair) for pair in zip(result[:5], expected[:5], strict=True))
    assert expected.bests is not None and result.bests is not None and expected.units is not None
    assert result.units is not None and torch.equal(result.units, expected.units)
    assert torch.equal(result.bests.amax(-1), expected.bests.amax(-1))
    rotated = naive.rotate(query, signs)
    torch.testing.assert_close(result.queries, triton.by_planes(rotated))
    assert result.histogram.eq(0).all() and result.tickets.eq(0).all()


@needs_triton
@pytest.mark.parametrize(("dim", "tiers"), [(64, ()), (16, TIERS), (60, ())])
def test_a_search_by_triton_takes_products_of_queries_as_they_are(
    dim: int, tiers: tuple[float, ...]
) -> None:
    """Rotations by a power of two and products of eighths are exact, so all numbers are."""
    query, means = draw(2, 2, 1, 3, dim, seed=4), 4 * draw(2, 2, 4, dim, seed=5)
    query, means = ((x * 8).round() / 8 for x in (query, means))
    signs, levels = paris_tools(dim)
    codes = paris.encode(draw(2, 2, 250, dim), signs, levels)
    given = query, signs, codes, paris.count_centroids(codes.sign), levels, 20
    options: dict[str, Any] = {"survivors": 60, "rho": 0.5, "tiers": tiers}
    options |= {"means": means, "block_len": 64}
    want, got = (run_at(place, paris.search, *given, **options) for place in (NAIVE, TRITON))
    assert torch.equal(want.sort().values, got.sort().values)
    without = run_at(NAIVE, paris.search, *given, **options | {"means": None})
    assert not torch.equal(want, without), "or the test shows nothing"


def points_by_hand(
    q_b: list[float], counts: list[int], rho: float, tiers: tuple[float, ...]
) -> list[int]:
    """The walk of section 4.2.2, centroid after centroid, in exact fractions."""
    sims = [math.fsum(x if c >> j & 1 else -x for j, x in enumerate(q_b)) for c in range(256)]
    walk = sorted(range(256), key=lambda c: (-sims[c], c))
    keys, seen = sum(counts), 0
    points = [0] * 256
    for c in walk:
        for tier in tiers:
            if seen < math.ceil(keys * Fraction(str(rho)) * Fraction(str(tier))):
                points[c] += 1
        seen += counts[c]
    return points


def test_counts_are_those_of_the_valid_tokens(place: Place) -> None:
    sign, valid = random_sign(3, 2, 33, 2), random_valid(3, 33)
    named = torch.nn.functional.one_hot(sign.long(), 256)
    for mask in (valid, None):
        counts = run_at(place, paris.count_centroids, sign, valid=mask)
        own = named if mask is None else named * valid[:, None, :, None, None]
        assert counts.dtype == torch.int32 and torch.equal(counts.long(), own.sum(2))


def test_counts_of_blocks_add_up(place: Place) -> None:
    sign = random_sign(1, 2, 2500, 1)
    parts = [
        run_at(place, paris.count_centroids, sign[:, :, start:end])
        for start, end in ((0, 1100), (1100, 1100), (1100, 2500))
    ]
    whole = run_at(place, paris.count_centroids, sign)
    assert torch.equal(sum(parts), whole) and whole.sum(-1).eq(2500).all()


def every_sign(batch: int, width: int) -> torch.Tensor:
    """``[batch, 1, 256, width]``: each byte once, each column in another order."""
    columns = [torch.arange(256).roll(37 * column) for column in range(width)]
    signs = torch.stack(columns, dim=-1).to(torch.uint8)
    return signs.expand(batch, 1, 256, width).contiguous()


@pytest.mark.factor("tables", [1, 5])
def test_points_are_those_of_a_literal_walk(place: Place, tables: int) -> None:
    """Five tables, where four share a word; the best of them counts."""
    # Integers make many equal similarities, whose order must be that of the ids.
    q_rot = torch.randint(-2, 3, (2, 1, 1, tables, 16), generator=generator(0)).float()
    counts = torch.randint(0, 4, (2, 1, 2, 256), generator=generator(1), dtype=torch.int32)
    counts[1] *= 1000
    sign, valid = every_sign(2, 2), random_valid(3, 256)[:2]
    options = {"rho": 0.3, "tiers": TIERS, "valid": valid}
    scores = check_candidates(place, (q_rot, counts, sign), 40, **options)
    assert scores.dtype == torch.uint8
    ids = sign[0, 0].long()
    expected = torch.zeros(2, 1, 1, 256, dtype=torch.int64)
    for b, g in torch.cartesian_prod(torch.arange(2), torch.arange(tables)).tolist():
        total = torch.zeros(256, dtype=torch.int64)
        for s in range(2):
            q_b = q_rot[b, 0, 0, g, s * 8 : (s + 1) * 8].tolist()
            points = points_by_hand(q_b, counts[b, 0, s].tolist(), 0.3, TIERS)
            total += torch.tensor(points)[ids[:, s]]
        expected[b, 0, 0] = expected[b, 0, 0].maximum(total)
    expected.masked_fill_(~valid[:, None, None], 255)
    assert torch.equal(scores.long(), expected)


@pytest.mark.parametrize(("dim", "tables"), [(8, 1), (64, 5), (192, 2), (288, 1)])
def test_points_by_similarity_are_those_of_a_literal_walk(
    place: Place, dim: int, tables: int
) -> None:
    q_rot = draw(2, 1, 1, tables, dim, seed=4) * torch.tensor([1e-3, 30.0]).view(2, 1, 1, 1, 1)
    q_rot[0, 0, 0, 0, :8] *= 40.0
    sign, valid = every_sign(2, dim // 8), random_valid(3, 256)[:2]
    counts = torch.zeros(2, 1, dim // 8, 256, dtype=torch.int32)
    options = {"rho": 1.0, "tiers": (), "valid": valid}
    scores = check_candidates(place, (q_rot, counts, sign), 40, **options)
    scales = naive.similarity_scale(q_rot)
    for b in range(2):
        totals = torch.zeros(tables, 256, dtype=torch.int64)
        for g, query in enumerate(q_rot[b, 0, 0].double()):
            scale = float(scales[b, 0, 0, g])
            wanted = 2 / 3 / float(query.square().mean().sqrt())
            assert wanted * 0.88 < scale < wanted * 1.00001
            patterns = (torch.arange(256)[:, None] >> torch.arange(8) & 1).double() * 2 - 1
            for s, part in enumerate(query.split(8)):
                points = ((patterns @ part) * scale).floor() + 3
                totals[g] += points.clamp(0, 7).long()[sign[b, 0, :, s].long()]
        want = totals.amax(0).masked_fill(~valid[b], 255)
        assert torch.equal(scores[b, 0, 0].long(), want)
    assert scores[scores < 255].max() > scores.min()


@pytest.mark.parametrize(
    ("tables", "dim", "blocks", "block_len"),
    # Tables in two words, long queries, blocks of programs, more than are taken at a time.
    [(5, 16, 3, 64), (2, 136, 5, 16), (1, 8, 3, 1024), (2, 8, 150, 2)],
)
@pytest.mark.parametrize("tiers", [(), (0.15, 0.5, 1.0)])
def test_the_tokens_of_a_block_lose_points_by_its_mean_key(
    place: Place, tables: int, dim: int, blocks: int, block_len: int, tiers: tuple[float, ...]
) -> None:
    """Products of eighths are exact. One query loses all that there is to lose in most blocks."""
    q_rot, means = draw(2, 1, 1, tables, dim, seed=4), draw(2, 1, blocks, dim, seed=5)
    q_rot, means = ((x * 8).round() / 8 for x in (q_rot, means))
    means[0] *= 64.0
    length = (blocks - 1) * block_len + 1
    sign = random_sign(2, 1, length, dim // 8)
    counts = paris.count_centroids(sign)
    options: dict[str, Any] = {"rho": 0.75, "tiers": tiers}
    # A normal number exceeds one of density .19109 with 11.25%; with 37.5% .37920, with 75% .31778.
    worth = 1.4 * (0.19109 + 0.37920 + 0.31778) / math.sqrt(8) if tiers else 0.8
    assert points_of_product(paris.share_units(0.75, tiers)) == pytest.approx(worth, rel=1e-4)
    worth = points_of_product(paris.share_units(0.75, tiers))
    blocked = options | {"means": means, "block_len": block_len}
    scores = check_candidates(place, (q_rot, counts, sign), 40, **blocked)
    # [B, 1, 1, G, blocks], of each token.
    products = torch.einsum("bhqgd,bhnd->bhqgn", q_rot.double(), means.double())
    # Units are fp32, as in the code under test.
    unit = (naive.similarity_scale(q_rot) * worth)[..., None]
    lost = (products.amax(-1, keepdim=True) - products).float() * unit
    lost = lost.repeat_interleave(block_len, -1)[..., :length]
    points = [collisions(q_rot[..., g : g + 1, :], counts, sign, **options) for g in range(tables)]
    left = torch.stack(points, dim=3).double() - lost.clamp(max=255).floor()
    want = left.amax(3).clamp(min=0)
    assert torch.equal(scores.long(), want) and want.any()
    assert not torch.equal(scores, collisions(q_rot, counts, sign, **options))


@pytest.mark.parametrize("count", [1, 2, 70])
@pytest.mark.parametrize(("tables", "dim"), [(5, 16), (2, 136), (9, 8)])
def test_points_of_a_group_count_from_what_selections_reach(
    place: Place, tables: int, dim: int, count: int
) -> None:
    """From the logit of e^-2 / 9 of a softmax on. Of two samples the lesser one tells."""
    means, samples = draw(2, 1, 5, dim, seed=5), draw(2, 1, count, dim, seed=6)
    # Queries of several lengths.
    q_rot = draw(2, 1, 1, tables, dim, seed=4) * torch.arange(1, tables + 1).view(-1, 1) / 4
    q_rot, means, samples = ((x * 8).round() / 8 for x in (q_rot, means, samples))
    sign = random_sign(2, 1, 5 * 64, dim // 8)
    counts = torch.zeros(2, 1, dim // 8, 256, dtype=torch.int32)
    options: dict[str, Any] = {"rho": 1.0, "tiers": (), "means": means, "block_len": 64}
    sampled = options | {"samples": samples, "scale": 0.25}
    scores = run_at(place, collisions, q_rot, counts, sign, **sampled)
    queries = q_rot.double()
    products = torch.einsum("bhqgd,bhnd->bhqgn", queries, means.double())
    logits = torch.einsum("bhqgd,bhnd->bhqgn", queries, samples.double()) * 0.25
    best = logits.amax(-1, keepdim=True)
    others = (logits - best).exp().sum(-1, keepdim=True) - 1
    least = (
        best
        + others.clamp(min=math.exp(-10)).log()
        + math.log(320 / 9)
        - 2
        - math.log(max(1, count - 1))
    )
    unit = (naive.similarity_scale(q_rot) * 0.8)[..., None]
    levels = (products - least / 0.25) * unit
    lost = (levels.amax((3, 4), keepdim=True) - levels).clamp(max=255).floor()
    lost = lost.repeat_interleave(64, -1)
    points = naive.similarity_points(q_rot)
    bits = torch.arange(dim // 8)
    of_tokens = [points[b, 0, 0][:, bits, sign[b, 0].long()] for b in range(2)]
    left = torch.stack(of_tokens).sum(-1).view_as(lost) - lost
    want = left.amax(3).clamp(min=0)
    assert (scores - want).abs().max() <= 1 and want.any()
    assert not torch.equal(scores, run_at(place, collisions, q_rot, counts, sign, **options))


@pytest.mark.parametrize("query", [0.0, math.inf, math.nan])
def test_queries_without_a_length_have_no_points_by_similarity(place: Place, query: float) -> None:
    q_rot = torch.full((1, 1, 1, 1, 16), query)
    counts = torch.zeros(1, 1, 2, 256, dtype=torch.int32)
    options = {"rho": 1.0, "tiers": ()}
    assert run_at(place, collisions, q_rot, counts, every_sign(1, 2), **options).eq(0).all()


def test_thresholds_are_exact_where_floats_are_not(place: Place) -> None:
    """0.07 * 100 is 7.000000000000001 in floats: an eighth key would earn a point."""
    q_rot = torch.tensor([64.0, 32, 16, 8, 4, 2, 1, 0.5]).view(1, 1, 1, 1, 8)
    counts = torch.zeros(1, 1, 1, 256, dtype=torch.int32)
    # In order of similarity, centroids 255, 127, ... hold 7, 93, 0, ... keys.
    counts[..., 255], counts[..., 127] = 7, 93
    sign = torch.tensor([0xFF, 0x7F], dtype=torch.uint8).view(1, 1, 2, 1)
    options = {"rho": 0.07, "tiers": (1.0,)}
    scores = run_at(place, collisions, q_rot, counts, sign, **options)
    assert math.ceil(100 * 0.07) == 8
    assert scores.flatten().tolist() == [1, 0]


def test_without_keys_there_are_no_points(place: Place) -> None:
    counts = torch.zeros(1, 1, 1, 256, dtype=torch.int32)
    options = {"rho": 1.0, "tiers": TIERS}
    query = torch.ones(1, 1, 1, 1, 8)
    assert run_at(place, collisions, query, counts, every_sign(1, 1), **options).eq(0).all()


@needs_triton
@pytest.mark.parametrize(
    "dim, tables, length",
    # More than one table of points in shared memory, the last one cut short at 160 numbers.
    [(64, 2, 1), (8, 2, 700), (576, 1, 50), (160, 5, 50)],
)
def test_triton_collides_as_the_reference_does(dim: int, tables: int, length: int) -> None:
    """Buffers with spare capacity full of other bytes, strided masks, several blocks."""
    sign = random_sign(2, 1, length + 60, dim // 8)[:, :, :length]
    valid = random_valid(3, 2 * length)[:2, ::2]
    q_rot = draw(2, 1, 1, tables, dim, seed=6)
    counts, same = (
        run_at(way, paris.count_centroids, sign, valid=valid) for way in (NAIVE, TRITON)
    )
    assert torch.equal(counts, same)
    options = {"rho": 0.4, "tiers": (0.5, 1.0, 1.0)[: 254 * 8 // dim], "valid": valid}
    scores = check_candidates(TRITON, (q_rot, counts, sign), 40, **options)
    # From all parts of a token: bytes that are dropped or counted twice would show.
    assert length == 1 or scores[0].max() > scores[0].min()


@needs_triton
@pytest.mark.parametrize("most", [12, 63])
def test_there_is_a_bin_for_every_sum_of_points(most: int) -> None:
    """A key earns 12 points at the most, or too many for 64 bins with the excluded ones."""
    sign, valid = random_sign(2, 1, 37, 1), random_valid(2, 37)
    counts = paris.count_centroids(sign, valid=valid)
    inputs = draw(2, 1, 1, 3, 8, seed=9), counts, sign
    options = {"rho": 0.4, "tiers": (0.5,) + (1.0,) * (most - 1), "valid": valid}
    scores = check_candidates(TRITON, inputs, 20, **options)
    assert scores[scores < 255].max() == most


def test_the_greatest_score_is_not_taken_for_an_excluded_token(place: Place) -> None:
    """254 points from each table: a sum that reached into another would show."""
    sign = random_sign(1, 1, 1, 1).expand(1, 1, 5, 1).contiguous()
    inputs = draw(1, 1, 1, 2, 8, seed=5), paris.count_centroids(sign), sign
    scores = check_candidates(place, inputs, 3, rho=1.0, tiers=(1.0,) * 254)
    assert scores.eq(254).all()


def test_an_empty_store_has_no_candidates(place: Place) -> None:
    sign = random_sign(1, 2, 0, 2)
    counts = run_at(place, paris.count_centroids, sign)
    assert counts.shape == (1, 2, 2, 256) and counts.eq(0).all()
    inputs = torch.ones(1, 2, 1, 1, 16), counts, sign
    assert check_candidates(place, inputs, 3, rho=0.5, tiers=TIERS).shape == (1, 2, 1, 0)
