"""Natural log-sum-exps, and the best share of a group's heads, for the kernels that select.

Attention kernels take powers of 2 instead: see ``softmax_step`` of ``_triton_shared``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_base(peak):
    """What to take off scores before ``exp``: their ``peak``, 0 where it is -inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def log_total(base, total):
    """The log-sum-exp from a sum of ``exp(score - base)``; -inf for a sum of none."""
    some = total > 0.0
    return tl.where(some, base + tl.log(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit
def log_sum_exp(scores):
    """The log-sum-exp of ``scores [N]``; -inf where all are."""
    base = finite_base(tl.max(scores, axis=0))
    return log_total(base, tl.sum(tl.exp(scores - base), axis=0))


@triton.jit
def log_sum_exps(scores):
    """The log-sum-exps of the rows of ``scores [M, N]``; -inf where all of a row are."""
    base = finite_base(tl.max(scores, axis=1))
    return log_total(base, tl.sum(tl.exp(scores - base[:, None]), axis=1))


@triton.jit
def best_share(best, scores, lse):
    """The larger of ``best`` and the log-shares that a head with log-sum-exp ``lse`` gives.

    ``-inf`` stays so, also where a head's ``lse`` is.
    """
    return tl.maximum(best, scores - finite_base(lse))


@triton.jit
def sum_up(sums_ptr, pieces, PIECES: tl.constexpr):
    """The log-sum-exp of ``pieces`` log-sum-exps, PIECES at a time."""
    if PIECES == 1:
        # There is but one.
        return tl.load(sums_ptr)
    peaks = tl.full((PIECES,), float("-inf"), tl.float32)
    totals = tl.zeros((PIECES,), tl.float32)
    for start in range(0, pieces, PIECES):
        places = start + tl.arange(0, PIECES)
        part = tl.load(sums_ptr + places, mask=places < pieces, other=float("-inf"))
        peak = tl.maximum(peaks, part)
        base = finite_base(peak)
        totals = totals * tl.exp(peaks - base) + tl.exp(part - base)
        peaks = peak
    base = finite_base(tl.max(peaks, axis=0))
    return log_total(base, tl.sum(totals * tl.exp(peaks - base), axis=0))
