"""Attention in pieces: what several kernels do to merge them, in Triton.

A piece is ``out [Dv]`` and ``lse``, a natural logarithm, of one query over some of its tokens. The
pieces of a query follow each other in memory. R queries are merged at a time, S pieces of each.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from hf_kvret_kernels._triton_log_sums import finite_base, log_total


@triton.jit
def load_pieces(
    outs,
    lses,
    rows,
    row_mask,
    splits,
    first,
    last,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CACHE: tl.constexpr,
):
    """``(logs [S, R, 1], means [S, R, Dv])`` of pieces ``first .. last``, at most BLOCK_S of them.

    Args:
        outs, lses: pointers to ``[rows, splits, DV]`` and ``[rows, splits]``.
        rows: ``[R]`` int64; where ``row_mask [R]`` is false, a query has no pieces.
        CACHE: modifier of the loads, ``".cg"`` for what other programs of the launch wrote.
    """
    pieces = tl.arange(0, BLOCK_S)[:, None, None]
    columns = tl.arange(0, BLOCK_DV)[None, None, :]
    piece_mask = (pieces < last - first) & row_mask[None, :, None]
    # What differs between the pieces of a query is known when this is compiled.
    starts = (rows * splits + first)[None, :, None]
    logs = tl.load(
        lses + starts + pieces, mask=piece_mask, other=float("-inf"), cache_modifier=CACHE
    )
    means = tl.load(
        outs + starts * DV + pieces * DV + columns,
        mask=piece_mask & (columns < DV),
        other=0.0,
        cache_modifier=CACHE,
    )
    return logs, means


@triton.jit
def no_pieces(ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """A running merge at first: ``(peak [R, 1], mass [R, 1], total [R, Dv])``."""
    peak = tl.full([ROWS, 1], float("-inf"), tl.float32)
    return peak, tl.zeros([ROWS, 1], tl.float32), tl.zeros([ROWS, BLOCK_DV], tl.float32)


@triton.jit
def add_pieces(logs, means, peak, mass, total):
    """Pieces ``logs [S, R, 1]`` and ``means [S, R, Dv]`` into a running merge.

    ``total`` and ``mass`` are sums relative to ``peak``. Weights are relative to the largest: large
    logits would lose digits in a difference to the sum.
    """
    new_peak = tl.maximum(peak, tl.max(logs, 0))
    base = finite_base(new_peak)
    weights = tl.exp(logs - base[None, :, :])
    shrink = tl.exp(peak - base)
    total = total * shrink + tl.sum(weights * means.to(tl.float32), 0)
    return new_peak, mass * shrink + tl.sum(weights, 0), total


@triton.jit
def add_all_pieces(
    outs,
    lses,
    rows,
    row_mask,
    splits,
    peak,
    mass,
    total,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CACHE: tl.constexpr,
):
    """All pieces of ``rows`` into a running merge; arguments as of ``load_pieces``."""
    for first in range(0, splits, BLOCK_S):
        logs, means = load_pieces(
            outs, lses, rows, row_mask, splits, first, splits, DV, BLOCK_S, BLOCK_DV, CACHE
        )
        peak, mass, total = add_pieces(logs, means, peak, mass, total)
    return peak, mass, total


@triton.jit
def add_sinks(sink, peak, mass, total):
    """Tokens without values, whose logits are ``sink [R, 1]``, into a running merge."""
    new_peak = tl.maximum(peak, sink)
    base = finite_base(new_peak)
    shrink = tl.exp(peak - base)
    return new_peak, mass * shrink + tl.exp(sink - base), total * shrink


@triton.jit
def add_tokens(logits, values, peak, mass, total):
    """A token a query, of ``logits [R, 1]`` and ``values [1, Dv]`` fp32, into a running merge."""
    new_peak = tl.maximum(peak, logits)
    base = finite_base(new_peak)
    shrink, weights = tl.exp(peak - base), tl.exp(logits - base)
    return new_peak, mass * shrink + weights, total * shrink + weights * values


@triton.jit
def finish_pieces(peak, mass, total):
    """``(mean [R, Dv], lse [R, 1])`` of a running merge; 0 and -inf where there was no token."""
    # At least 1 where there is a peak, and 0 without.
    return total * (1.0 / tl.maximum(mass, 1.0)), log_total(finite_base(peak), mass)
