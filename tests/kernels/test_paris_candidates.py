"""Stage 1: the choice of candidates by their collisions."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from hf_kvret_kernels import paris

from .paris_draws import (
    BACKENDS,
    DEVICE,
    TIERS,
    candidates_by_sorting,
    generator,
    needs_triton,
    random_sign,
    random_valid,
)


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
@pytest.mark.factor("backend", BACKENDS)
@pytest.mark.factor(
    "length, count", [(1, 1), (1, 4), (37, 0), (37, 10), (37, 37), (1024, 100), (2600, 700)]
)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_of_several_blocks_stay_empty(backend: str) -> None:
    drawn = Drawn.of(3500, queries=1)
    drawn.valid.fill_(False)
    drawn.valid[1, 1500] = True
    ids = drawn.run(3400, backend)
    assert ids[0].eq(-1).all() and ids[1, 0, 0, 0] == 1500 and ids[1, 0, 0, 1:].eq(-1).all()


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
    found = triton.bonus(query, signs, whole.counts, shares, 4)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    rotated = paris.rotate(query, signs, backend="naive")
    torch.testing.assert_close(found.queries, triton.by_planes(rotated))
    assert found.histogram.eq(0).all() and found.tickets.eq(0).all()
