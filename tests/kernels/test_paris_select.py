"""Stage 1: centroid counts, points by tiers, collisions, the choice of candidates."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch

from hf_kvret_kernels import paris

from .draws import (
    BACKENDS,
    BOTH,
    DEVICE,
    TIERS,
    candidates_by_sorting,
    generator,
    needs_triton,
    random_sign,
    random_valid,
)

pytestmark = pytest.mark.factor("backend", BACKENDS)


class Drawn(NamedTuple):
    """Few different keys, so that many have the same score."""

    q_rot: torch.Tensor
    counts: torch.Tensor
    sign: torch.Tensor
    valid: torch.Tensor

    @classmethod
    def of(cls, length: int, queries: int) -> Drawn:
        """Of three rows; the last one has no valid token."""
        patterns = random_sign(1, 1, 5, 1, seed=3).expand(3, -1, -1, -1)
        chosen = torch.randint(0, 5, (3, 1, length, 1), generator=generator(7)).to(DEVICE)
        sign, valid = patterns.gather(2, chosen), random_valid(3, length, seed=8)
        q_rot = torch.randn(3, 1, queries, 2, 8, generator=generator(9)).to(DEVICE)
        return cls(q_rot, paris.count_centroids(sign, m=4, valid=valid), sign, valid)

    def run(self, count: int, backend: str, masked: bool = True) -> torch.Tensor:
        """Its candidates, which are those of a stable sort of its scores."""
        valid = self.valid if masked else None
        options = {"rho": 0.6, "tiers": TIERS, "m": 4, "valid": valid}
        scores = paris.collisions(*self[:3], backend="naive", **options)
        ids = paris.candidates(*self[:3], count, backend=backend, **options)
        assert ids.shape == (*scores.shape[:3], count) and ids.dtype == torch.int32
        assert torch.equal(ids, candidates_by_sorting(scores, count))
        return ids


@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor("length, count", [(1, 4), (37, 0), (37, 37), (2600, 700)])
def test_candidates_are_the_head_of_a_stable_sort(
    length: int, count: int, backend: str, masked: bool
) -> None:
    Drawn.of(length, queries=2).run(count, backend, masked)


@needs_triton
def test_sums_of_many_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of more than 256 blocks do."""
    from hf_kvret_kernels.paris import triton

    monkeypatch.setattr(triton, "_BLOCKS", 2)
    Drawn.of(7100, queries=1).run(900, "triton")


@needs_triton
@pytest.mark.parametrize("part", [1, 2])
def test_a_program_may_take_any_number_of_subspaces(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's takes one; here one takes all of them, as the others can't be told apart."""
    from hf_kvret_kernels.paris import triton

    whole = Drawn.of(50, queries=1)
    signs = paris.random_signs(8, seed=3).to(DEVICE)
    query = whole.q_rot[..., :5].contiguous()
    shares = (100_000, 400_000)
    expected = triton.bonus(query, signs, whole.counts, shares, 4)
    monkeypatch.setattr(triton, "subspaces_of_program", lambda count: part)
    result = triton.bonus(query, signs, whole.counts, shares, 4)
    assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))
    rotated = paris.rotate(query, signs, backend="naive")
    torch.testing.assert_close(result.queries, triton.by_planes(rotated))
    assert result.histogram.eq(0).all() and result.tickets.eq(0).all()


def centroids(sign: torch.Tensor, m: int) -> torch.Tensor:
    """The id of each subspace of sign bytes ``[..., width]``: a byte, or its low and high half."""
    ids = sign.long()
    return ids if m == 8 else torch.stack([ids & 15, ids >> 4], -1).flatten(-2)


def counts_by_hand(sign: torch.Tensor, m: int, valid: torch.Tensor) -> torch.Tensor:
    named = torch.nn.functional.one_hot(centroids(sign, m), 1 << m)
    return (named * valid[:, None, :, None, None]).sum(2).int()


def points_by_hand(
    q_b: list[float], counts: list[int], rho: float, tiers: tuple[float, ...], m: int
) -> list[int]:
    """The walk of section 4.2.2, centroid after centroid, in exact fractions."""
    sims = [math.fsum(x if c >> j & 1 else -x for j, x in enumerate(q_b)) for c in range(1 << m)]
    walk = sorted(range(1 << m), key=lambda c: (-sims[c], c))
    keys, seen = sum(counts), 0
    points = [0] * (1 << m)
    for c in walk:
        for tier in tiers:
            if seen < math.ceil(keys * Fraction(str(rho)) * Fraction(str(tier))):
                points[c] += 1
        seen += counts[c]
    return points


@pytest.mark.parametrize("m", [4, 8])
def test_counts_are_those_of_the_valid_tokens(m: int, backend: str) -> None:
    sign, valid = random_sign(3, 2, 33, 2), random_valid(3, 33)
    counts = paris.count_centroids(sign, m=m, valid=valid, backend=backend)
    assert counts.dtype == torch.int32
    assert torch.equal(counts, counts_by_hand(sign, m, valid))
    everything = paris.count_centroids(sign, m=m, backend=backend)
    assert torch.equal(everything, counts_by_hand(sign, m, torch.ones_like(valid)))


def test_counts_of_blocks_add_up(backend: str) -> None:
    sign = random_sign(1, 2, 2500, 1)
    whole = paris.count_centroids(sign, backend=backend)
    parts = [
        paris.count_centroids(sign[:, :, start:end], backend=backend)
        for start, end in ((0, 1100), (1100, 1100), (1100, 2500))
    ]
    assert torch.equal(sum(parts), whole)
    assert whole.sum(-1).eq(2500).all()


def every_sign(batch: int, width: int) -> torch.Tensor:
    """``[batch, 1, 256, width]``: each byte once, each column in another order."""
    columns = [torch.arange(256).roll(37 * column) for column in range(width)]
    signs = torch.stack(columns, dim=-1).to(torch.uint8)
    return signs.expand(batch, 1, 256, width).contiguous().to(DEVICE)


@pytest.mark.factor("m", [4, 8])
@pytest.mark.factor("tables", [1, 5])
def test_points_are_those_of_a_literal_walk(tables: int, m: int, backend: str) -> None:
    """Five tables, where four share a word; the best of them counts."""
    width = 2
    # Integers make many equal similarities, whose order must be that of the ids.
    shape = (2, 1, 1, tables, 8 * width)
    q_rot = torch.randint(-2, 3, shape, generator=generator(0)).float()
    shape = (2, 1, 8 * width // m, 1 << m)
    counts = torch.randint(0, 4, shape, generator=generator(1), dtype=torch.int32)
    counts[1] *= 1000
    sign, valid = every_sign(2, width), random_valid(3, 256)[:2]
    scores = paris.collisions(
        q_rot.to(DEVICE),
        counts.to(DEVICE),
        sign,
        rho=0.3,
        tiers=TIERS,
        m=m,
        valid=valid,
        backend=backend,
    )
    assert scores.dtype == torch.uint8
    ids = centroids(sign[0, 0].cpu(), m)
    expected = torch.zeros(2, 1, 1, 256, dtype=torch.int64)
    for b, g in torch.cartesian_prod(torch.arange(2), torch.arange(tables)).tolist():
        total = torch.zeros(256, dtype=torch.int64)
        for s in range(8 * width // m):
            q_b = q_rot[b, 0, 0, g, s * m : (s + 1) * m].tolist()
            points = points_by_hand(q_b, counts[b, 0, s].tolist(), 0.3, TIERS, m)
            total += torch.tensor(points)[ids[:, s]]
        expected[b, 0, 0] = expected[b, 0, 0].maximum(total)
    expected.masked_fill_(~valid.cpu()[:, None, None], 255)
    assert torch.equal(scores.cpu().long(), expected)


def test_thresholds_are_exact_where_floats_are_not(backend: str) -> None:
    """0.07 * 100 is 7.000000000000001 in floats: an eighth key would earn a point."""
    q_rot = torch.tensor([4.0, 2.0, 1.0, 0.5, 0, 0, 0, 0], device=DEVICE).view(1, 1, 1, 1, 8)
    counts = torch.zeros(1, 1, 2, 16, dtype=torch.int32)
    # In order of similarity, the first subspace's centroids 15, 7, ... hold 7, 93, 0, ... keys. In
    # the second all are as similar, and 15 is the last.
    counts[..., 15], counts[..., 7] = 7, 93
    sign = torch.tensor([0xFF, 0xF7], dtype=torch.uint8, device=DEVICE).view(1, 1, 2, 1)
    scores = paris.collisions(
        q_rot, counts.to(DEVICE), sign, rho=0.07, tiers=(1.0,), m=4, backend=backend
    )
    assert math.ceil(100 * 0.07) == 8
    assert scores.flatten().tolist() == [1, 0]


def test_without_keys_there_are_no_points(backend: str) -> None:
    counts = torch.zeros(1, 1, 2, 16, dtype=torch.int32, device=DEVICE)
    q_rot = torch.ones(1, 1, 1, 1, 8, device=DEVICE)
    scores = paris.collisions(
        q_rot, counts, every_sign(1, 1), rho=1.0, tiers=TIERS, m=4, backend=backend
    )
    assert scores.eq(0).all()


@needs_triton
@pytest.mark.parametrize(
    "m, dim, tables, length",
    # More than one table of points in shared memory, the last one cut short at 160 numbers.
    [(4, 64, 2, 1), (8, 8, 2, 700), (8, 576, 1, 50), (4, 160, 5, 50)],
)
def test_triton_collides_as_the_reference_does(m: int, dim: int, tables: int, length: int) -> None:
    """Buffers with spare capacity full of other bytes, strided masks, several blocks."""
    sign = random_sign(2, 1, length + 60, dim // 8, seed=8)[:, :, :length]
    valid = random_valid(3, 2 * length)[:2, ::2]
    q_rot = torch.randn(2, 1, 1, tables, dim, generator=generator(6)).to(DEVICE)
    counts, same = (paris.count_centroids(sign, m=m, valid=valid, backend=way) for way in BOTH)
    assert torch.equal(counts, same)
    options = {"rho": 0.4, "tiers": (0.5, 1.0, 1.0)[: 254 * m // dim], "m": m, "valid": valid}
    naive, triton = (paris.collisions(q_rot, counts, sign, backend=way, **options) for way in BOTH)
    assert torch.equal(naive, triton)
    # From all parts of a token: bytes that are dropped or counted twice would show.
    assert length == 1 or naive[0].max() > naive[0].min()
    packed = paris.collisions(q_rot, counts, sign.contiguous(), **options)
    assert torch.equal(naive, packed)
    ids = paris.candidates(q_rot, counts, sign, 40, backend="triton", **options)
    assert torch.equal(ids, candidates_by_sorting(naive, 40))


@needs_triton
@pytest.mark.parametrize(("m", "most"), [(4, 12), (4, 62), (8, 63)])
def test_there_is_a_bin_for_every_sum_of_points(m: int, most: int) -> None:
    """A key earns 12 points at the most, or as many as fit into 64 bins beside the excluded."""
    tiers, length = (0.5,) + (1.0,) * (most * m // 8 - 1), 37
    sign, valid = random_sign(2, 1, length, 1), random_valid(2, length)
    q_rot = torch.randn(2, 1, 1, 3, 8, generator=generator(9)).to(DEVICE)
    counts = paris.count_centroids(sign, m=m, valid=valid)
    options = {"rho": 0.4, "tiers": tiers, "m": m, "valid": valid}
    naive, triton = (
        paris.collisions(q_rot, counts, sign, backend=backend, **options) for backend in BOTH
    )
    assert naive[naive < 255].max() == most
    assert torch.equal(naive, triton)
    ids = paris.candidates(q_rot, counts, sign, 20, backend="triton", **options)
    assert torch.equal(ids, candidates_by_sorting(naive, 20))


def test_the_greatest_score_is_not_taken_for_an_excluded_token(backend: str) -> None:
    """127 points in either subspace from each table: a sum that reached into another would show."""
    sign = random_sign(1, 1, 1, 1).expand(1, 1, 5, 1).contiguous()
    counts = paris.count_centroids(sign, m=4)
    q_rot = torch.randn(1, 1, 1, 5, 8, generator=generator(5)).to(DEVICE)
    options = {"rho": 1.0, "tiers": (1.0,) * 127, "m": 4, "backend": backend}
    assert paris.collisions(q_rot, counts, sign, **options).eq(254).all()
    ids = paris.candidates(q_rot, counts, sign, 3, **options)
    assert ids.flatten().tolist() == [0, 1, 2]


def test_an_empty_store_has_no_candidates(backend: str) -> None:
    sign = random_sign(1, 2, 0, 2)
    counts = paris.count_centroids(sign, backend=backend)
    assert counts.shape == (1, 2, 2, 256) and counts.eq(0).all()
    q_rot = torch.ones(1, 2, 1, 1, 16, device=DEVICE)
    options = {"rho": 0.5, "tiers": TIERS, "backend": backend}
    assert paris.collisions(q_rot, counts, sign, **options).shape == (1, 2, 1, 0)
    ids = paris.candidates(q_rot, counts, sign, 3, **options)
    assert ids.shape == (1, 2, 1, 3) and ids.eq(-1).all()
