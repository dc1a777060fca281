"""Plain torch for every op: the meaning of the kernels, and what runs on a CPU.

Rows (batch, head, query) are walked one by one where a whole batch's temporaries would leave
the processor's caches. Inputs were checked by the wrappers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hf_kvret_kernels.paris.codes import (
    EXCLUDED,
    LEAST_OTHERS,
    LEVELS,
    MOST_SIMILAR,
    SHARE_UNIT,
    ZERO_POINTS,
    ParisCodes,
    SearchCall,
    code_weights,
    log_of_share,
    points_of_product,
    rotation_blocks,
    rotation_stride,
)
from hf_kvret_kernels.relevance.naive import best_ids
from hf_kvret_kernels.soft_cap import soft_cap_

_ENCODE_TOKENS = 512


def search(call: SearchCall) -> torch.Tensor:
    """See ``hf_kvret_kernels.paris.search``."""
    query, signs, codes, counts, levels, budget, survivors, shares, *_ = call
    q_rot, offsets, drops = query if signs is None else rotate(query, signs), None, None
    if call.means is not None:
        products, worth = mean_products(query, call.means), points_of_product(shares)
        offsets = Blocks(products, call.block_len)
        logs = least_logs(call)
        drops = Blocks(lost_points(products, q_rot, worth, logs), call.block_len)
    points = bonus_table(q_rot, counts, shares) if shares else similarity_points(q_rot)
    scores = collide(codes.sign, points, call.valid, drops)
    ids = candidates(scores, survivors)
    estimates = rerank(q_rot, codes, ids, levels, call.scale, call.softcap, offsets)
    return best_ids(estimates, ids, budget)


class Blocks(NamedTuple):
    """``numbers [B, H, Q, G, blocks]`` for the tokens of each block, ``length`` of them."""

    numbers: torch.Tensor
    length: int

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, G, C]`` of tokens ``[B, H, Q, C]``."""
        places = (ids.long().clamp(min=0) // self.length).unsqueeze(3)
        return self.numbers.gather(4, places.expand(*self.numbers.shape[:4], -1))


def hadamard(dim: int, device: torch.device) -> torch.Tensor:
    """``[dim, dim]`` fp32 of +1 and -1: the parity of the bits that row and column share."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while matrix.shape[0] < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """``[..., P]`` fp32: ``x`` zero-padded, times ``signs``, Walsh-Hadamard over ``sqrt(P)``.

    Where P is no power of two, coordinates change places (``rotation_stride``), and each of the
    blocks whose sizes add up to P (``rotation_blocks``, 512 + 64) is transformed by itself.

    The map is orthogonal: inner products and norms of padded vectors stay as they are
    (section 4.1.1, SRHT). Nothing is normalized. Padding and blocks are ours.

    Args:
        x: ``[..., D]`` fp32, bf16 or fp16, any strides.
        signs: ``[P]`` fp32 with P = ``rotated_dim(D)``; or ``[B, H, P]`` for ``[B, H, ..., D]``.
    """
    dim, head_dim = signs.shape[-1], x.shape[-1]
    signs = signs.view(*signs.shape[:-1], *[1] * (x.dim() - signs.dim()), dim)
    if dim & (dim - 1) == 0:
        # Zero padding meets the matrix's last rows, so leave those out.
        x = x.float() * signs[..., :head_dim]
        return x @ hadamard(dim, x.device)[:head_dim] * dim**-0.5
    order = torch.arange(dim, device=x.device) * rotation_stride(dim) % dim
    x, parts = torch.nn.functional.pad(x.float(), (0, dim - head_dim)), []
    for start, end in rotation_blocks(dim):
        part = x.index_select(-1, order[start:end]) * signs[..., start:end]
        parts.append(part @ hadamard(end - start, x.device) * (end - start) ** -0.5)
    return torch.cat(parts, dim=-1)


def encode(
    keys: torch.Tensor,
    signs: torch.Tensor,
    levels: torch.Tensor,
    out: ParisCodes,
) -> None:
    boundaries = (levels[1:] + levels[:-1]) / 2
    shifts = torch.arange(8, dtype=torch.int32, device=keys.device)
    for start in range(0, keys.shape[2], _ENCODE_TOKENS):
        end = min(start + _ENCODE_TOKENS, keys.shape[2])
        x = rotate(keys[:, :, start:end], signs)
        x_b = x.unflatten(-1, (-1, 8))
        r = x_b.square().sum(-1).sqrt()
        u = x_b.abs() * (1 / torch.where(r > 0, r, 1.0)).unsqueeze(-1)
        # Seven comparisons take a fifth of bucketize's time.
        level_ids = torch.zeros_like(u, dtype=torch.uint8)
        for boundary in boundaries:
            level_ids += u > boundary
        level_ids = level_ids.int()
        alpha = (u * levels.index_select(0, level_ids.flatten()).view_as(u)).sum(-1)
        weight = r / torch.where(alpha > 0, alpha, 1.0)
        out.weight_codes[:, :, start:end] = code_weights(weight)

        bits = (x >= 0).int().unflatten(-1, (-1, 8))
        out.sign[:, :, start:end] = (bits << shifts).sum(-1, dtype=torch.int32)
        words = (level_ids.flatten(-2).unflatten(-1, (-1, 8)) << 3 * shifts).sum(
            -1, dtype=torch.int32
        )
        three = torch.stack([words & 255, (words >> 8) & 255, words >> 16], dim=-1)
        out.magnitude[:, :, start:end] = three.flatten(-2)


def decode(codes: ParisCodes, levels: torch.Tensor) -> torch.Tensor:
    """``[..., P]`` fp32 of planes ``[..., P // 8]`` and ``[..., P // 2]``.

    Four levels are 12 bits, so one row of a table of 4,096 gives four coordinates at once.
    """
    sign, device = codes.sign, codes.sign.device
    numbers = torch.arange(1 << 12, device=device).unsqueeze(1)
    four_levels = levels[(numbers >> 3 * torch.arange(4, device=device)) & (LEVELS - 1)]
    numbers = torch.arange(256, device=device).unsqueeze(1)
    eight_signs = ((numbers >> torch.arange(8, device=device)) & 1).float() * 2 - 1

    low, middle, high = codes.magnitude.int().unflatten(-1, (-1, 3)).unbind(-1)
    halves = torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=-1)
    values = four_levels.index_select(0, halves.flatten()).view(*sign.shape, 8)
    values *= eight_signs.index_select(0, sign.int().flatten()).view(*sign.shape, 8)
    values *= codes.weight.unsqueeze(-1)
    return values.flatten(-2)


def count_centroids(sign: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    batch, heads, length, subspaces = sign.shape
    counts = torch.zeros(batch, heads, subspaces, 256, dtype=torch.int32, device=sign.device)
    if valid is None:
        ones = counts.new_ones(1).expand(batch, heads, length)
    else:
        ones = valid.int().unsqueeze(1).expand(batch, heads, length)
    for s in range(subspaces):
        counts[:, :, s].scatter_add_(2, sign[..., s].long(), ones)
    return counts


def bonus_table(q_rot: torch.Tensor, counts: torch.Tensor, shares: tuple[int, ...]) -> torch.Tensor:
    """``[B, H, Q, G, S, 256]`` uint8: the points that a centroid earns a key.

    In each subspace the centroids are ordered by the inner product of the query with their
    sign pattern, descending, ties by lower id; ``before(c)`` is the number of keys that the
    centroids ahead of c hold, and c earns one point for each tier t with
    ``before(c) < ceil(N * rho * t)``, N the keys counted. Each ``rho * t`` is rounded to a
    millionth and the rest is integer arithmetic, so that all backends agree to the last key.

    Args:
        q_rot: ``[B, H, Q, G, P]`` fp32 after ``rotate``. Their lengths don't matter.
        shares: the tiers' shares of all keys, in units of 1 / SHARE_UNIT.
    """
    sims = _similarities(q_rot)
    order = sims.argsort(dim=-1, descending=True, stable=True)

    key_counts = counts[:, :, None, None].expand(sims.shape).gather(-1, order).long()
    before = key_counts.cumsum(-1) - key_counts
    total = key_counts.sum(-1, keepdim=True)
    points = torch.zeros_like(order, dtype=torch.uint8)
    for share in shares:
        points += before < (total * share + SHARE_UNIT - 1) // SHARE_UNIT
    return torch.empty_like(points).scatter_(-1, order, points)


def similarity_points(q_rot: torch.Tensor) -> torch.Tensor:
    """``[B, H, Q, G, S, 256]`` uint8: points that rise with the similarity to a centroid.

    They are ours. A key's sum of them estimates its similarity; the paper's points go by rank. A
    similarity of 0 earns three points, and seven are the most.

    Args:
        q_rot: as in ``bonus_table``.
    """
    scale = similarity_scale(q_rot)[..., None, None]
    points = (_similarities(q_rot) * scale).floor_() + ZERO_POINTS
    return points.where(points > 0, 0.0).clamp(max=MOST_SIMILAR).to(torch.uint8)


def similarity_scale(q_rot: torch.Tensor) -> torch.Tensor:
    """``[...]``: points for a similarity of 1 to queries ``[..., P]``.

    Two thirds over the root mean square of their numbers, in fp64. It has three bits behind the
    first one, so that backends agree, in whatever order they add the squares.
    """
    squares = q_rot.double().square().sum(-1)
    return _few_bits(((q_rot.shape[-1] / squares).sqrt() * (2 / 3)).float())


def mean_products(query: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """``[B, H, Q, G, blocks]`` fp32, of queries ``[B, H, Q, G, D]`` and ``[B, H, blocks, D]``."""
    return torch.einsum("bhqgd,bhnd->bhqgn", query.float(), means)


def least_logs(call: SearchCall) -> torch.Tensor | None:
    """``[B, H, Q, G, 1]`` fp32: logits that a query's selection is taken to reach, as products.

    They are ours. A softmax over the samples tells what it takes off, and so the logit of a share,
    see ``codes.log_of_share``. The largest sample is left out: a key that one query asks for would
    stand for many. The others are taken for at least ``LEAST_OTHERS`` of it. A soft cap does not
    count.
    """
    if call.samples is None:
        return None
    logits = mean_products(call.query, call.samples) * call.scale
    peak = logits.amax(-1, keepdim=True)
    others = (logits - peak).exp().sum(-1, keepdim=True) - 1
    return (peak + others.clamp(min=LEAST_OTHERS).log() + log_of_share(call)) / call.scale


def lost_points(
    products: torch.Tensor, q_rot: torch.Tensor, worth: float, logs: torch.Tensor | None
) -> torch.Tensor:
    """uint8 of ``products [..., G, blocks]``: the points that a block's mean key costs its tokens.

    They are ours. The block of the largest product loses none. With ``logs`` of ``least_logs``,
    products of all queries of a group count from there, and the block of the most points loses
    none. So a place among the candidates takes as many points from each. Other backends add the
    terms of products in another order, and may take a point more or less. ``worth`` is of
    ``codes.points_of_product``.
    """
    unit = similarity_scale(q_rot).unsqueeze(-1) * worth
    if logs is None:
        behind = (products.amax(-1, keepdim=True) - products) * unit
    else:
        levels = (products - logs) * unit
        # A query of zeros has no level.
        levels = levels.where(levels.isfinite(), float("-inf"))
        behind = levels.amax((-2, -1), keepdim=True) - levels
    return behind.where(behind > 0, 0.0).clamp(max=EXCLUDED).to(torch.uint8)


def _few_bits(x: torch.Tensor) -> torch.Tensor:
    """``x`` fp32, towards 0, with three bits behind the first one."""
    return (x.contiguous().view(torch.int32) & -(1 << 20)).view(torch.float32)


def _similarities(q_rot: torch.Tensor) -> torch.Tensor:
    """``[..., S, 256]``: of queries ``[..., P]`` with sign patterns.

    One coordinate is added after the other, as kernels do, so that all see the same fp32 numbers.
    """
    q_b = q_rot.unflatten(-1, (-1, 8))
    ids = torch.arange(256, device=q_rot.device)
    sims = q_b.new_zeros(*q_b.shape[:-1], 256)
    for j in range(8):
        sims += q_b[..., j, None] * ((ids >> j & 1).float() * 2 - 1)
    return sims


def collide(
    sign: torch.Tensor,
    bonus: torch.Tensor,
    valid: torch.Tensor | None,
    drops: Blocks | None,
) -> torch.Tensor:
    """Scores ``[B, H, Q, n]`` uint8 of all tokens, from the points of ``bonus_table``.

    A query gives a token the sum over subspaces of its centroids' points, less what its block
    loses, and 0 at least. The score is the greatest of the G queries, and 255 for tokens that are
    not valid.
    """
    batch, heads, queries = bonus.shape[:3]
    length = sign.shape[2]
    device = sign.device
    scores = torch.empty(batch, heads, queries, length, dtype=torch.uint8, device=device)
    starts = torch.arange(bonus.shape[4], dtype=torch.int32, device=device) << 8
    for b in range(batch):
        for h in range(heads):
            entries = (sign[b, h].int() + starts).t().contiguous()
            for q in range(queries):
                rows = bonus[b, h, q].flatten(1)
                points = torch.stack([_points(entries, row) for row in rows])
                if drops is not None:
                    lost = drops.numbers[b, h, q][:, torch.arange(length) // drops.length]
                    points = points.maximum(lost) - lost
                scores[b, h, q] = points.amax(0)
    if valid is not None:
        scores.masked_fill_(~valid[:, None, None], EXCLUDED)
    return scores


def _points(entries: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``[n]`` sums over subspaces: ``entries [S, n]`` int32 into ``table [S * 256]``."""
    total = table.index_select(0, entries[0])
    for row in entries[1:]:
        total += table.index_select(0, row)
    return total


def candidates(scores: torch.Tensor, count: int) -> torch.Tensor:
    """``[B, H, Q, count]`` int32 positions of the ``count`` highest ``scores``, ascending.

    Of equal scores the last are taken, as newer tokens matter to a query more often. Tokens that
    are not valid never are: where a row has fewer than ``count``, the tail is -1. Nothing is sorted
    and the host never waits: histograms give the lowest score taken, prefix sums the slots.
    """
    histogram = torch.zeros(*scores.shape[:3], 256, dtype=torch.int64, device=scores.device)
    histogram.scatter_add_(-1, scores.long(), histogram.new_ones(1).expand(scores.shape))
    bin_counts = histogram[..., :EXCLUDED]
    at_least = bin_counts.flip(-1).cumsum(-1).flip(-1)
    levels = torch.arange(EXCLUDED, device=scores.device)
    threshold = torch.where(at_least >= count, levels, 0).amax(-1, keepdim=True)
    surplus = (bin_counts * (levels >= threshold)).sum(-1, keepdim=True) - count

    candidates = scores != EXCLUDED
    equal = scores == threshold
    late = equal.cumsum(-1, dtype=torch.int32) > surplus
    selection = candidates & ((scores > threshold) | (equal & late))
    # Tokens that were not chosen go to one index past the end, which is cut off.
    slot = (selection.cumsum(-1, dtype=torch.int32) - 1).masked_fill_(~selection, count)
    ids = torch.full((*scores.shape[:-1], count + 1), -1, dtype=torch.int32, device=scores.device)
    positions = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    ids.scatter_(-1, slot.long(), positions.expand(scores.shape))
    return ids[..., :count].contiguous()


def rerank(
    q_rot: torch.Tensor,
    codes: ParisCodes,
    ids: torch.Tensor,
    levels: torch.Tensor,
    scale: float,
    softcap: float | None,
    offsets: Blocks | None,
) -> torch.Tensor:
    """``[B, H, Q, G, C]`` fp32 estimates of ``scale * <k, q>``; -inf for ids of -1.

    ``sum_b w_b <v_b, q_b>`` over the rotated query as it is: the paper's
    ``|q| sum_b w_b <v_b, q_b / |q|>`` (eq. 10). Products and sums are fp32; the published kernel
    sums in bf16.
    """
    batch, heads, queries, tables, _ = q_rot.shape
    count = ids.shape[-1]
    out = q_rot.new_full((batch, heads, queries, tables, count), -math.inf)
    for b in range(batch):
        for h in range(heads):
            for q in range(queries):
                rows = ids[b, h, q].clamp(min=0)
                planes = (plane[b, h].index_select(0, rows) for plane in (codes.sign, codes.record))
                out[b, h, q] = q_rot[b, h, q] @ decode(ParisCodes(*planes), levels).t()
    if offsets is not None:
        out += offsets.of(ids)
    soft_cap_(out.mul_(scale), softcap)
    return out.masked_fill_(ids.unsqueeze(3) < 0, -math.inf)
