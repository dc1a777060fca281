"""k-means for codebooks: k-means++ seeds, Lloyd rounds, no empty clusters.

Seeds are drawn one after the other with probability proportional to the squared distance from the
nearest one so far (Arthur and Vassilvitskii, 2007), the best of some candidates each time. What is
drawn from and what is averaged are sums of integers, which don't depend on the order of summation:
one seed gives one codebook on one machine, on GPUs too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvret_kernels import codebook as codebook_ops

# fp32 numbers of points that are worked on at once, and of a temporary.
_MOST_NUMBERS = 1 << 26
_PIECE_NUMBERS = 1 << 22
# Bits of a sum of integers, the sign left out.
_BITS = 62


@dataclass(frozen=True)
class KMeansReport:
    """How k-means went, head by head.

    Attributes:
        rounds: Lloyd rounds until the end.
        converged: whether the last of them moved no codeword further than the tolerance.
        errors: mean squared distance to the nearest codeword after each round, the first before
            any, the last that of the codebook; it never rises but for rounding.
        reseeded: how many empty clusters were given a new place.
    """

    rounds: tuple[int, ...]
    converged: tuple[bool, ...]
    errors: tuple[tuple[float, ...], ...]
    reseeded: tuple[int, ...]


def k_means(
    points: torch.Tensor,
    count: int,
    *,
    rounds: int = 300,
    tolerance: float = 1e-4,
    seed: int,
    weights: torch.Tensor | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[torch.Tensor, KMeansReport]:
    """``codebook [H, C, D]`` fp32 on the points' device, and a report.

    A head ends when a round moves no codeword further than ``tolerance`` times the root mean
    square distance of its points from their mean, or after ``rounds``. After each round, codewords
    of empty clusters go to the points that are farthest from theirs. With fewer distinct points
    than codewords, what is left over stays at points that have a codeword already.

    Args:
        points: ``[H, n, D]`` fp32, n at least 1, D at most 256.
        count: C, 1 to 32768; may exceed n.
        rounds: most Lloyd rounds, 0 for the seeds alone. 300 is the A2ATS authors' choice.
        tolerance: 0 or more, without unit. 1e-4 is the A2ATS authors' choice.
        seed: of a generator of its own; torch's global state is left alone.
        weights: ``[H, n]`` fp32, 0 or more, how much each point counts; None for all alike. Those
            below 1e-9 of a head's largest may count as 0.
        progress: called with the rounds that are done since the last call, heads that end early
            give all of theirs at once: ``H * rounds`` in all, as ``update`` of a bar wants it.

    Raises:
        ValueError: shapes, dtypes, devices or ranges that do not fit, points or weights that are
            not finite, or a head whose weights are all 0.
    """
    weights = _checked(points, count, rounds, tolerance, weights)
    H, n, D = points.shape
    generator = torch.Generator().manual_seed(seed)
    # As many candidates for each seed as in Arthur and Vassilvitskii's own program.
    shape = (H, count, 2 + int(math.log(count)))
    draws = torch.rand(shape, generator=generator, dtype=torch.float64)
    codebook = points.new_empty(H, count, D)
    runs: list[_Run] = []
    # One head keeps a processor busy; a GPU waits for launches unless it is given several.
    step = max(1, _MOST_NUMBERS // (n * D)) if points.is_cuda else 1
    for first in range(0, H, step):
        heads = slice(first, first + step)
        # Inner products of centred points lose fewer digits; keys often have a large common part.
        total = weights[heads].double().sum(1)[:, None, None]
        mean = torch.stack(
            [w @ x for w, x in zip(weights[heads].double(), points[heads].double(), strict=True)]
        )
        mean = (mean.unsqueeze(1) / total).float()
        centred = points[heads] - mean
        seeds = _seed(centred, weights[heads], draws[heads].to(points.device))
        found, done = _lloyd(centred, weights[heads], seeds, rounds, tolerance, progress)
        codebook[heads] = found + mean
        runs += done
    report = KMeansReport(
        tuple(len(run.errors) - 1 for run in runs),
        tuple(run.converged for run in runs),
        tuple(tuple(run.errors) for run in runs),
        tuple(run.reseeded for run in runs),
    )
    return codebook, report


@dataclass
class _Run:
    """What is known of one head so far."""

    errors: list[float]
    reseeded: int = 0
    converged: bool = False


def _seed(points: torch.Tensor, weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """``[h, C, D]``: points drawn by greedy k-means++.

    For each place several are drawn by their squared distance from the nearest seed, and the one
    stays that leaves the least of it. Where all points have a seed, further ones are drawn by
    weight.

    Args:
        points: ``[h, n, D]`` fp32.
        weights: ``[h, n]`` fp32, contiguous.
        draws: ``[h, C, m]`` float64 from 0 to 1.
    """
    squares = points.square().sum(-1)
    by_weight = _shares(weights, weights.amax(1)).cumsum(1)
    # No squared distance is greater than four times the greatest square.
    peak = 4 * squares.amax(1) * weights.amax(1)
    distances = torch.full_like(squares, float("inf"))
    seeds = points.new_empty(*draws.shape[:2], points.shape[2])
    rows = torch.arange(len(points), device=points.device)
    sums = by_weight
    for place in range(draws.shape[1]):
        most = sums[:, -1:]
        targets = torch.minimum((draws[:, place] * most).long(), most - 1)
        chosen = torch.searchsorted(sums, targets, right=True)
        drawn = points[rows.unsqueeze(1), chosen]
        left = torch.baddbmm(squares.unsqueeze(1), drawn, points.mT, alpha=-2)
        left.add_(squares.gather(1, chosen).unsqueeze(2)).clamp_(min=0.0)
        torch.minimum(left, distances.unsqueeze(1), out=left)
        best = torch.bmm(left, weights.unsqueeze(2)).squeeze(2).argmin(1)
        seeds[:, place] = drawn[rows, best]
        distances = left[rows, best]
        by_distance = _shares(distances * weights, peak).cumsum(1)
        sums = torch.where(by_distance[:, -1:] > 0, by_distance, by_weight)
    return seeds


def _shares(x: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """``x [h, n]`` of 0 to ``peak [h]`` as int64, scaled so that its sums over n fit."""
    unit = 2.0 ** (_BITS - x.shape[1].bit_length()) / peak.double().clamp(min=1e-300)
    return (x.double() * unit.unsqueeze(1)).long()


def _lloyd(
    points: torch.Tensor,
    weights: torch.Tensor,
    codebook: torch.Tensor,
    rounds: int,
    tolerance: float,
    progress: Callable[[int], object] | None,
) -> tuple[torch.Tensor, list[_Run]]:
    """``(codebook [h, C, D], runs)`` from centred points and seeds.

    Heads that end are taken out, so that the others don't carry them along.
    """
    runs = [_Run([]) for _ in codebook]
    result = torch.empty_like(codebook)
    working = torch.arange(len(points), device=points.device)
    totals = weights.double().sum(1)
    squares = points.square().sum(-1)
    sizes = ((squares * weights).double().sum(1) / totals).sqrt()
    ended = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for done in range(rounds + 1):
        codes = codebook_ops.encode(points.unsqueeze(0), codebook).squeeze(0).long()
        misses = _squared_distances(points, codebook, codes)
        errors = (misses * weights).double().sum(1) / totals
        for head, error in zip(working.tolist(), errors.tolist(), strict=True):
            runs[head].errors.append(error)
        if ended.any() or done == rounds:
            result[working] = codebook
            keep = ~ended
            for head in working[ended].tolist():
                runs[head].converged = True
                if progress is not None:
                    progress(rounds - done)
            if done == rounds or not keep.any():
                break
            working, points, weights, codebook = (
                x[keep] for x in (working, points, weights, codebook)
            )
            codes, misses, totals, sizes = (x[keep] for x in (codes, misses, totals, sizes))
        means, empty = _means(points, weights, codes, codebook)
        # Nearer ones would not count as a move.
        far = (tolerance * sizes).square().unsqueeze(1)
        moved = _reseed(means, empty, points, misses * (weights > 0), far)
        for head, number in zip(working.tolist(), moved.tolist(), strict=True):
            runs[head].reseeded += number
        shift = (means - codebook).norm(dim=-1).amax(1)
        ended = shift <= tolerance * sizes
        codebook = means
        if progress is not None:
            progress(len(working))
    return result, runs


def _squared_distances(
    points: torch.Tensor, codebook: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """``[h, n]`` from each point to the codeword of its code, by differences."""
    result = torch.empty_like(points[..., 0])
    step = max(1, _PIECE_NUMBERS // points.shape[2])
    for head in range(len(points)):
        for start in range(0, points.shape[1], step):
            piece = slice(start, start + step)
            nearest = codebook[head].index_select(0, codes[head, piece])
            result[head, piece] = (points[head, piece] - nearest).square_().sum(-1)
    return result


def _means(
    points: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor, codebook: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means ``[h, C, D]`` of the clusters, old places for empty ones, and ``[h, C]`` which are."""
    h, n, D = points.shape
    C = codebook.shape[1]
    means = codebook.clone()
    empty = torch.empty(h, C, dtype=torch.bool, device=points.device)
    bits = 2.0 ** (_BITS - n.bit_length())
    step = max(1, _PIECE_NUMBERS // D)
    for head in range(h):
        share = weights[head].double() / weights[head].max()
        unit = bits / points[head].abs().max().double().clamp(min=1e-300)
        counts = torch.zeros(C, dtype=torch.int64, device=points.device)
        counts.index_add_(0, codes[head], (share * bits).round_().long())
        sums = torch.zeros(C, D, dtype=torch.int64, device=points.device)
        for start in range(0, n, step):
            piece = slice(start, start + step)
            scaled = points[head, piece].double() * (share[piece] * unit).unsqueeze(1)
            sums.index_add_(0, codes[head, piece], scaled.round_().long())
        empty[head] = counts == 0
        found = sums.double() / unit / (counts.clamp(min=1).double() / bits).unsqueeze(1)
        means[head] = torch.where(empty[head].unsqueeze(1), means[head], found.float())
    return means, empty


def _reseed(
    means: torch.Tensor,
    empty: torch.Tensor,
    points: torch.Tensor,
    misses: torch.Tensor,
    far: torch.Tensor,
) -> torch.Tensor:
    """``[h]`` int64 how many empty clusters moved to points further than ``far``, in ``means``."""
    moved = torch.zeros(len(means), dtype=torch.int64, device=means.device)
    for head in empty.any(1).nonzero()[:, 0].tolist():
        free = empty[head].nonzero()[:, 0]
        worst = misses[head].topk(min(len(free), misses.shape[1]))
        taken = worst.indices[worst.values > far[head]]
        means[head, free[: len(taken)]] = points[head, taken]
        moved[head] = len(taken)
    return moved


def _checked(
    points: torch.Tensor,
    count: int,
    rounds: int,
    tolerance: float,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """The weights, 1 where there are none, when all arguments fit."""
    if points.ndim != 3 or points.dtype != torch.float32 or 0 in points.shape:
        raise ValueError(
            f"points is {points.dtype} {tuple(points.shape)}: pass fp32 [H, n, D], none of them 0"
        )
    if points.shape[2] > codebook_ops.MOST_DIM:
        raise ValueError(f"points have D={points.shape[2]}: at most {codebook_ops.MOST_DIM}")
    if not 1 <= count <= codebook_ops.MOST_CODEWORDS:
        raise ValueError(f"count={count}: 1 to {codebook_ops.MOST_CODEWORDS} codewords")
    if rounds < 0:
        raise ValueError(f"rounds={rounds}: pass 0 or more")
    if not 0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance={tolerance}: pass 0 or more, 1e-4 is usual")
    if not points.isfinite().all():
        raise ValueError("points holds NaN or infinity: leave out the tokens that have them")
    if weights is None:
        return torch.ones_like(points[..., 0])
    expected = tuple(points.shape[:2])
    if weights.dtype != torch.float32 or tuple(weights.shape) != expected:
        raise ValueError(f"weights is {weights.dtype} {tuple(weights.shape)}: pass fp32 {expected}")
    if weights.device != points.device:
        raise ValueError(f"weights is on {weights.device}, points on {points.device}: move it")
    if not weights.isfinite().all() or (weights < 0).any():
        raise ValueError("weights holds NaN, infinity or a number below 0: pass 0 or more")
    if (weights.amax(1) == 0).any():
        raise ValueError("weights of a head are all 0: leave the head out, or give a point weight")
    return weights.contiguous()
