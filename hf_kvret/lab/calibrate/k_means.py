"""k-means for codebooks: k-means++ seeds, Lloyd rounds, no empty clusters.

Seeds are drawn one after the other with probability proportional to the squared distance from the
nearest one so far (Arthur and Vassilvitskii, 2007), the better of two candidates each time, from a
sample of the points: seeding would otherwise take longer than all rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_kvret_kernels import codebook as codebook_ops

# So many fp32 elements of points are worked on at once; a temporary has the second count.
_MOST_NUMBERS = 1 << 26
_CHUNK_NUMBERS = 1 << 22
# Seeds are drawn from so many points, or so many a codeword if that is more; each is the better of
# so many candidates.
_SAMPLE = 1 << 14
_SAMPLE_OF_WORD = 4
_CANDIDATES = 2
# Nearer than this share of the mean square a point is taken for the codeword itself.
_SAME = 1e-8


def k_means(
    points: torch.Tensor,
    count: int,
    *,
    rounds: int = 300,
    tolerance: float = 1e-3,
    seed: int,
    progress: Callable[[int], object] = lambda heads: None,
) -> torch.Tensor:
    """``codebook [H, C, D]`` fp32 on the points' device.

    A head ends when a round lowers its mean squared distance by no more than the share
    ``tolerance``, or after ``rounds``. After each round, codewords of empty clusters move to the
    points that are farthest from theirs; a head may end with some empty. With fewer
    distinct points than codewords, the extra codewords are duplicates.

    Args:
        points: ``[H, n, D]`` fp32, n at least 1, D at most 1024.
        count: C, 1 to 32768; may exceed n.
        rounds: most Lloyd rounds, 0 for the seeds alone. 300 is the A2ATS authors' choice.
        tolerance: 0 or more, without unit. The authors end when no codeword moves by 1e-4; that
            takes three times as many rounds and lowers the error by less than half a percent.
        seed: of a generator of its own; torch's global state is left alone.
        progress: called with the number of heads that have ended since the last call, a batch of
            them at a time, H in all. Fits ``update`` of a tqdm bar.

    Raises:
        ValueError: points that are not finite.
    """
    if not points.isfinite().all():
        raise ValueError("points holds NaN or infinity: leave out the tokens that have them")
    H, n, D = points.shape
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand((H, count, _CANDIDATES), generator=generator, dtype=torch.float64)
    size = max(_SAMPLE, _SAMPLE_OF_WORD * count)
    sample = torch.randperm(n, generator=generator)[:size].sort().values.to(points.device)
    codebook = points.new_empty(H, count, D)
    # One head keeps a CPU busy; a GPU needs several at a time, or launches dominate.
    step = max(1, _MOST_NUMBERS // (n * D)) if points.is_cuda else 1
    for first in range(0, H, step):
        heads = slice(first, first + step)
        # Inner products of centred points lose fewer digits; keys often have a large common part.
        mean = points[heads].double().mean(1, keepdim=True).float()
        deviations = points[heads] - mean
        seeds = _seed(deviations[:, sample], draws[heads].to(points.device))
        codebook[heads] = _lloyd(deviations, seeds, rounds, tolerance) + mean
        progress(len(mean))
    return codebook


def _seed(points: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """``[h, C, D]``: points drawn by greedy k-means++.

    For each seed several candidates are drawn with probability proportional to the squared
    distance from the nearest seed, and the one that leaves the smallest total is kept. Once all
    distances are 0, all points are as likely.

    Args:
        points: ``[h, n, D]`` fp32.
        draws: ``[h, C, m]`` float64 from 0 to 1.
    """
    squares = points.square().sum(-1)
    ones = torch.ones_like(squares)
    uniform = ones.double().cumsum(1)
    distances = torch.full_like(squares, float("inf"))
    seeds = points.new_empty(*draws.shape[:2], points.shape[2])
    rows = torch.arange(len(points), device=points.device)
    sums = uniform
    for index in range(draws.shape[1]):
        targets = draws[:, index] * sums[:, -1:]
        ids = torch.searchsorted(sums, targets, right=True).clamp_(max=points.shape[1] - 1)
        candidates = points[rows.unsqueeze(1), ids]
        misses = torch.baddbmm(squares.unsqueeze(1), candidates, points.mT, alpha=-2)
        misses.add_(squares.gather(1, ids).unsqueeze(2)).clamp_(min=0.0)
        torch.minimum(misses, distances.unsqueeze(1), out=misses)
        best = torch.bmm(misses, ones.unsqueeze(2)).squeeze(2).argmin(1)
        seeds[:, index] = candidates[rows, best]
        distances = misses[rows, best]
        by_distance = distances.double().cumsum(1)
        sums = torch.where(by_distance[:, -1:] > 0, by_distance, uniform)
    return seeds


def _lloyd(
    points: torch.Tensor,
    codebook: torch.Tensor,
    rounds: int,
    tolerance: float,
) -> torch.Tensor:
    """``codebook [h, C, D]`` from centred points and seeds.

    Heads whose error has stopped falling are removed from the batch.
    """
    result = torch.empty_like(codebook)
    heads = torch.arange(len(points), device=points.device)
    near = _SAME * points.square().sum(-1).double().mean(1, keepdim=True)
    last = torch.full((len(points),), float("inf"), dtype=torch.float64, device=points.device)
    for round_count in range(rounds + 1):
        codes = codebook_ops.encode(points.unsqueeze(0), codebook).squeeze(0).long()
        misses = _squared_distances(points, codebook, codes)
        errors = misses.double().mean(1)
        stop = last - errors <= tolerance * errors
        result[heads] = codebook
        if round_count == rounds or stop.all():
            break
        if stop.any():
            heads, points, codebook, codes, misses, near, errors = (
                x[~stop] for x in (heads, points, codebook, codes, misses, near, errors)
            )
        last = errors
        codebook, empty = _means(points, codes, codebook)
        _reseed(codebook, empty, points, misses, near)
    return result


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
    points: torch.Tensor, codes: torch.Tensor, codebook: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster means ``[h, C, D]``, unchanged for empty clusters, and ``[h, C]`` bool, which are."""
    h, n, D = points.shape
    C = codebook.shape[1]
    means = codebook.clone()
    empty = torch.empty(h, C, dtype=torch.bool, device=points.device)
    step = max(1, _CHUNK_NUMBERS // D)
    for head in range(h):
        counts = codes[head].bincount(minlength=C)
        sums = torch.zeros(C, D, dtype=torch.float64, device=points.device)
        for start in range(0, n, step):
            chunk = slice(start, start + step)
            sums.index_add_(0, codes[head, chunk], points[head, chunk].double())
        empty[head] = counts == 0
        centroids = sums / counts.clamp(min=1).unsqueeze(1)
        means[head] = torch.where(empty[head].unsqueeze(1), means[head], centroids.float())
    return means, empty


def _reseed(
    means: torch.Tensor,
    empty: torch.Tensor,
    points: torch.Tensor,
    misses: torch.Tensor,
    near: torch.Tensor,
) -> None:
    """Move empty clusters, in ``means``, to the farthest points.

    A point whose squared distance is at most ``near [h, 1]`` is never taken.
    """
    for head in empty.any(1).nonzero()[:, 0].tolist():
        free = empty[head].nonzero()[:, 0]
        worst = misses[head].topk(min(len(free), misses.shape[1]))
        targets = worst.indices[worst.values > near[head]]
        means[head, free[: len(targets)]] = points[head, targets]
