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
_CHUNK_NUMBERS = 1 << 22
# Bits of an int64 sum, without the sign.
_BITS = 62


@dataclass(frozen=True)
class KMeansReport:
    """Statistics of a k-means run, one entry per head.

    Attributes:
        rounds: Lloyd rounds until the end.
        converged: whether the last of them moved no codeword further than the tolerance.
        errors: mean squared distance to the nearest codeword, first that of the seeds, then after
            each round; it never rises, except by rounding.
        reseeded: how many empty clusters were moved.
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
    of empty clusters move to the points that are farthest from theirs. With fewer distinct points
    than codewords, the extra codewords are duplicates.

    Args:
        points: ``[H, n, D]`` fp32, n at least 1, D at most 1024.
        count: C, 1 to 32768; may exceed n.
        rounds: most Lloyd rounds, 0 for the seeds alone. 300 is the A2ATS authors' choice.
        tolerance: 0 or more, without unit. 1e-4 is the A2ATS authors' choice.
        seed: of a generator of its own; torch's global state is left alone.
        weights: ``[H, n]`` fp32, 0 or more, how much each point counts; None for all alike. Those
            below 1e-9 of a head's largest may count as 0.
        progress: called with the number of rounds since the last call, ``H * rounds`` in all; a
            head that ends early counts all its rounds at once. Fits ``update`` of a tqdm bar.

    Raises:
        ValueError: shapes, dtypes, devices or ranges that do not fit, points or weights that are
            not finite, or a head whose weights are all 0.
    """
    weights = _check(points, count, rounds, tolerance, weights)
    H, n, D = points.shape
    generator = torch.Generator().manual_seed(seed)
    # As many candidates for each seed as in Arthur and Vassilvitskii's own program.
    shape = (H, count, 2 + int(math.log(count)))
    draws = torch.rand(shape, generator=generator, dtype=torch.float64)
    codebook = points.new_empty(H, count, D)
    runs: list[_Run] = []
    # One head keeps a CPU busy; a GPU needs several at a time, or launches dominate.
    step = max(1, _MOST_NUMBERS // (n * D)) if points.is_cuda else 1
    for first in range(0, H, step):
        heads = slice(first, first + step)
        # Inner products of centred points lose fewer digits; keys often have a large common part.
        total = weights[heads].double().sum(1)[:, None, None]
        mean = torch.stack(
            [w @ x for w, x in zip(weights[heads].double(), points[heads].double(), strict=True)]
        )
        mean = (mean.unsqueeze(1) / total).float()
        deviations = points[heads] - mean
        seeds = _seed(deviations, weights[heads], draws[heads].to(points.device))
        words, head_runs = _lloyd(deviations, weights[heads], seeds, rounds, tolerance, progress)
        codebook[heads] = words + mean
        runs += head_runs
    report = KMeansReport(
        tuple(len(run.errors) - 1 for run in runs),
        tuple(run.converged for run in runs),
        tuple(tuple(run.errors) for run in runs),
        tuple(run.reseeded for run in runs),
    )
    return codebook, report


@dataclass
class _Run:
    """Statistics of one head."""

    errors: list[float]
    reseeded: int = 0
    converged: bool = False


def _seed(points: torch.Tensor, weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """``[h, C, D]``: points drawn by greedy k-means++.

    For each place several candidates are drawn with probability proportional to the squared
    distance from the nearest seed, and the one that leaves the smallest total is kept. Once all
    distances are 0, candidates are drawn by weight.

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
        places = torch.searchsorted(sums, targets, right=True)
        candidates = points[rows.unsqueeze(1), places]
        misses = torch.baddbmm(squares.unsqueeze(1), candidates, points.mT, alpha=-2)
        misses.add_(squares.gather(1, places).unsqueeze(2)).clamp_(min=0.0)
        torch.minimum(misses, distances.unsqueeze(1), out=misses)
        best = torch.bmm(misses, weights.unsqueeze(2)).squeeze(2).argmin(1)
        seeds[:, place] = candidates[rows, best]
        distances = misses[rows, best]
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

    Converged heads are removed from the batch.
    """
    runs = [_Run([]) for _ in codebook]
    result = torch.empty_like(codebook)
    heads = torch.arange(len(points), device=points.device)
    totals = weights.double().sum(1)
    squares = points.square().sum(-1)
    sizes = ((squares * weights).double().sum(1) / totals).sqrt()
    stop = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for round_count in range(rounds + 1):
        codes = codebook_ops.encode(points.unsqueeze(0), codebook).squeeze(0).long()
        misses = _squared_distances(points, codebook, codes)
        errors = (misses * weights).double().sum(1) / totals
        for head, error in zip(heads.tolist(), errors.tolist(), strict=True):
            runs[head].errors.append(error)
        if stop.any() or round_count == rounds:
            result[heads] = codebook
            keep = ~stop
            for head in heads[stop].tolist():
                runs[head].converged = True
                if progress is not None:
                    progress(rounds - round_count)
            if round_count == rounds or not keep.any():
                break
            heads, points, weights, codebook = (x[keep] for x in (heads, points, weights, codebook))
            codes, misses, totals, sizes = (x[keep] for x in (codes, misses, totals, sizes))
        means, empty = _means(points, weights, codes, codebook)
        # Reseeding to a nearer point would not count as a move.
        far = (tolerance * sizes).square().unsqueeze(1)
        moves = _reseed(means, empty, points, misses * (weights > 0), far)
        for head, number in zip(heads.tolist(), moves.tolist(), strict=True):
            runs[head].reseeded += number
        shift = (means - codebook).norm(dim=-1).amax(1)
        stop = shift <= tolerance * sizes
        codebook = means
        if progress is not None:
            progress(len(heads))
    return result, runs


def _squared_distances(
    points: torch.Tensor, codebook: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """``[h, n]``: squared distance of each point to its codeword, from differences."""
    result = torch.empty_like(points[..., 0])
    step = max(1, _CHUNK_NUMBERS // points.shape[2])
    for head in range(len(points)):
        for start in range(0, points.shape[1], step):
            chunk = slice(start, start + step)
            nearest = codebook[head].index_select(0, codes[head, chunk])
            result[head, chunk] = (points[head, chunk] - nearest).square_().sum(-1)
    return result


def _means(
    points: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor, codebook: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster means ``[h, C, D]``, unchanged for empty clusters, and ``[h, C]`` bool, which are."""
    h, n, D = points.shape
    C = codebook.shape[1]
    means = codebook.clone()
    empty = torch.empty(h, C, dtype=torch.bool, device=points.device)
    bits = 2.0 ** (_BITS - n.bit_length())
    step = max(1, _CHUNK_NUMBERS // D)
    for head in range(h):
        share = weights[head].double() / weights[head].max()
        unit = bits / points[head].abs().max().double().clamp(min=1e-300)
        counts = torch.zeros(C, dtype=torch.int64, device=points.device)
        counts.index_add_(0, codes[head], (share * bits).round_().long())
        sums = torch.zeros(C, D, dtype=torch.int64, device=points.device)
        for start in range(0, n, step):
            chunk = slice(start, start + step)
            terms = points[head, chunk].double() * (share[chunk] * unit).unsqueeze(1)
            sums.index_add_(0, codes[head, chunk], terms.round_().long())
        empty[head] = counts == 0
        centroids = sums.double() / unit / (counts.clamp(min=1).double() / bits).unsqueeze(1)
        means[head] = torch.where(empty[head].unsqueeze(1), means[head], centroids.float())
    return means, empty


def _reseed(
    means: torch.Tensor,
    empty: torch.Tensor,
    points: torch.Tensor,
    misses: torch.Tensor,
    far: torch.Tensor,
) -> torch.Tensor:
    """``[h]`` int64 how many empty clusters moved to points further than ``far``, in ``means``."""
    counts = torch.zeros(len(means), dtype=torch.int64, device=means.device)
    for head in empty.any(1).nonzero()[:, 0].tolist():
        free = empty[head].nonzero()[:, 0]
        worst = misses[head].topk(min(len(free), misses.shape[1]))
        targets = worst.indices[worst.values > far[head]]
        means[head, free[: len(targets)]] = points[head, targets]
        counts[head] = len(targets)
    return counts


def _check(
    points: torch.Tensor,
    count: int,
    rounds: int,
    tolerance: float,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Validate the arguments; returns the weights, all 1 for None."""
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
    form = tuple(points.shape[:2])
    if weights.dtype != torch.float32 or tuple(weights.shape) != form:
        raise ValueError(f"weights is {weights.dtype} {tuple(weights.shape)}: pass fp32 {form}")
    if weights.device != points.device:
        raise ValueError(f"weights is on {weights.device}, points on {points.device}: move it")
    if not weights.isfinite().all() or (weights < 0).any():
        raise ValueError("weights holds NaN, infinity or a number below 0: pass 0 or more")
    if (weights.amax(1) == 0).any():
        raise ValueError("weights of a head are all 0: leave the head out, or give a point weight")
    return weights.contiguous()
