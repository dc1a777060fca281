"""Bytes that the kernels of a decode step can't do without: every input that matters is read once,
every output written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from machine_code import MULTIPROCESSORS
from step_kernels import (
    CENTROIDS,
    CODEWORDS,
    CTKVR_K,
    FLAT_K,
    HIGGS_BITS,
    LIST_LEN,
    LRQK_K,
    LRQK_RANK,
    NPROBE,
    PARIS_K,
    PARIS_SHARES,
    RECALLED,
    WINDOW_LEN,
    StepShape,
)

Grid = Sequence[int]

# Tokens of a program of the selecting kernels, of a sum of proxies' scores, of selected rows.
_TOKENS, _PROXIES, _ROWS, _WINDOW_ROWS = 1024, 128, 32, 64
_BINS = 2048
"""Of scores."""


class Bytes(NamedTuple):
    """Of one launch."""

    read: int
    written: int


def moved_bytes(part: str, kernel: str, shape: StepShape, grid: Grid) -> Bytes:
    """What a launch reads and writes.

    Args:
        kernel: as in ``machine_code.Launch``.

    Raises:
        KeyError: nobody has described this kernel in that part.
    """
    operation = kernel.partition(" ")[0]
    try:
        describe = _KERNELS[part][operation]
    except KeyError:
        raise KeyError(f"step_bytes.py has no {operation} in {part}: describe it there") from None
    return Bytes(*describe(shape, grid))


_Describe = Callable[[StepShape, Grid], tuple[int, int]]
_Length = Callable[[StepShape], int]


def _selection(length: _Length, count: _Length, grouped: bool = False) -> dict[str, _Describe]:
    """Of ``count`` in each KV head's row of fp32, or ``grouped`` in rows of its query heads."""

    def orders(s: StepShape) -> int:
        return 4 * s.batch * s.heads * length(s)

    def bins(s: StepShape) -> int:
        return 4 * _BINS * s.batch * s.heads

    def blocks(s: StepShape) -> int:
        return 4 * s.batch * s.heads * math.ceil(length(s) / _TOKENS)

    return {
        "top_k.count": lambda s, grid: (
            (s.group if grouped else 1) * orders(s) + bins(s),
            orders(s) + bins(s),
        ),
        "top_k.border": lambda s, grid: (orders(s), blocks(s)),
        "top_k.compact": lambda s, grid: (
            orders(s) + blocks(s),
            4 * s.batch * s.heads * count(s),
        ),
    }


def _piece_sums(length: _Length) -> dict[str, _Describe]:
    """Log-sum-exps of pieces of the query heads' rows of fp32."""
    return {
        "relevance.piece": lambda s, grid: (4 * s.batch * s.query_heads * length(s), 4 * grid[0])
    }


def _attention(count: int, row_bytes: int, kernel: str) -> dict[str, _Describe]:
    """Attention to ``count`` selected rows of each KV head, in pieces that others merge."""
    return {
        # An id, a page number and an address lead to a row.
        kernel: lambda s, grid: (
            s.batch * s.heads * count * (row_bytes + 16) + _query_bytes(s),
            _pieces_bytes(s, grid[1]),
        )
    }


def _piece_count(s: StepShape, length: int, least_len: int, waves: int) -> int:
    """Of attention to ``length`` rows, ``waves`` programs a multiprocessor, as ``split_plan``."""
    fill = waves * MULTIPROCESSORS // (s.batch * s.heads)
    return max(1, min(math.ceil(length / least_len), fill))


def _pieces_bytes(s: StepShape, count: int) -> int:
    """Of ``count`` pieces of each query: a mean and the logarithm of its weight, in fp32."""
    return 4 * s.batch * s.query_heads * count * (s.head_dim + 1)


def _finish(count: int) -> dict[str, _Describe]:
    """The window, merged with ``count`` rows that were attended to; their ids are counted."""
    return {
        "step_attention.finish": lambda s, grid: (
            _window_bytes(s)
            + _pieces_bytes(s, _piece_count(s, count, _ROWS, 4))
            + 4 * s.batch * s.heads * count,
            _pieces_bytes(s, grid[2]) + _query_bytes(s) + 4 * s.batch * s.query_heads + 8,
        )
    }


def _query_bytes(s: StepShape) -> int:
    return 2 * s.batch * s.query_heads * s.head_dim


def _rotated_bytes(s: StepShape) -> int:
    return 2 * _query_bytes(s)


def _table_bytes(s: StepShape) -> int:
    """Of ParisKV: one number of 32 bits for each centroid of 16 subspaces."""
    return 4 * 16 * 256 * s.batch * s.heads


def _histogram_bytes(s: StepShape) -> int:
    return 4 * 256 * s.batch * s.heads


def _rows(s: StepShape) -> int:
    """Cold tokens of all KV heads."""
    return s.batch * s.heads * s.cold_len


def _kept(s: StepShape) -> int:
    """Candidates of all KV heads."""
    return s.batch * s.heads * s.candidates


def _collide(s: StepShape, grid: Grid) -> tuple[int, int]:
    """Sums of all tokens; the last program of a row plans what is taken."""
    # How many tokens of a block reach each sum, in two bytes, and how many come before it.
    bins = 1 << (16 * len(PARIS_SHARES) + 1).bit_length()
    planned = grid[0] * s.batch * s.heads * (2 * bins + 8)
    read = 16 * _rows(s) + s.batch * s.cold_len + _table_bytes(s)
    return read, _rows(s) + _histogram_bytes(s) + planned


def _best(length: _Length, count: int, piece: int) -> dict[str, _Describe]:
    """The best of each block of candidates, and by the last program those of all.

    ``piece``: tokens of which there is a log-sum-exp.
    """

    def best(s: StepShape, grid: Grid) -> tuple[int, int]:
        rows, sums = s.batch * s.heads, math.ceil(length(s) / piece)
        # An order and a place of each, written and read again.
        chosen = 8 * rows * grid[1] * count
        return 4 * s.group * rows * (length(s) + sums) + chosen, 4 * rows * count + chosen

    return {"top_k.best": best}


def _score_table_bytes(s: StepShape) -> int:
    """Of A²ATS: a score of fp32 for each codeword and query head."""
    return 4 * s.batch * s.query_heads * CODEWORDS


def _listed(s: StepShape, each: int) -> int:
    """Bytes of the ids in the lists that CTkvr recalls, ``each`` of one."""
    return each * s.batch * s.heads * NPROBE * LIST_LEN


def _recalled(grid: Grid) -> int:
    """Ids of the rows that one launch takes."""
    return grid[0] // math.ceil(RECALLED / _TOKENS) * RECALLED


def _window_bytes(s: StepShape) -> int:
    """Of keys, values and mask of the window, and of the queries."""
    return s.batch * WINDOW_LEN * (4 * s.heads * s.head_dim + 1) + _query_bytes(s)


def _proxy_sums(s: StepShape) -> int:
    return 4 * s.batch * s.query_heads * math.ceil(s.cold_len / _PROXIES)


_KERNELS: dict[str, dict[str, _Describe]] = {
    "paris": {
        "paris.bonus": lambda s, grid: (
            _query_bytes(s) + _table_bytes(s),
            _table_bytes(s) + _rotated_bytes(s) + _histogram_bytes(s),
        ),
        "paris.collide": _collide,
        "paris.compact": lambda s, grid: (_rows(s) + 8 * grid[0] * grid[1], 4 * _kept(s)),
        # An id, signs, magnitudes and weights of a candidate.
        "paris.rerank": lambda s, grid: (
            (4 + 16 + 48 + 32) * _kept(s) + _rotated_bytes(s),
            4 * s.group * (_kept(s) + grid[0] * grid[1]),
        ),
        **_best(lambda s: s.candidates, PARIS_K, 128),
    },
    "lrqk": {
        "proxy.scores": lambda s, grid: (
            2 * LRQK_RANK * _rows(s) + s.batch * s.cold_len,
            4 * s.group * _rows(s) + _proxy_sums(s),
        ),
        "proxy.total": lambda s, grid: (_proxy_sums(s), 4 * s.batch * s.query_heads),
        **_selection(lambda s: s.cold_len, lambda s: LRQK_K, grouped=True),
    },
    "a2ats": {
        "proxy.scores": lambda s, grid: (
            2 * s.heads * CODEWORDS * s.head_dim + _rotated_bytes(s),
            _score_table_bytes(s),
        ),
        "codebook.count": lambda s, grid: (
            2 * _rows(s) + s.batch * s.cold_len,
            _score_table_bytes(s) // s.group,
        ),
        "codebook.share": lambda s, grid: (
            _score_table_bytes(s) + _score_table_bytes(s) // s.group,
            _score_table_bytes(s) // s.group,
        ),
        "codebook.lookup": lambda s, grid: (
            2 * _rows(s) + s.batch * s.cold_len + _score_table_bytes(s) // s.group,
            4 * _rows(s),
        ),
        **_selection(lambda s: s.cold_len, lambda s: s.a2ats_k),
    },
    "ctkvr": {
        "centroid.similarity": lambda s, grid: (
            s.batch * s.query_heads * CENTROIDS * (2 * s.head_dim + 4),
            4 * s.batch * s.heads * CENTROIDS,
        ),
        "centroid.take": lambda s, grid: (_listed(s, 3), _listed(s, 4)),
        # A mark for each id, somewhere in a row of all tokens; rows come in several launches.
        "centroid.mark": lambda s, grid: (_recalled(grid) * 5, _recalled(grid) * 4),
        "centroid.keep": lambda s, grid: (_recalled(grid) * 8, _recalled(grid) * 4),
        "gather_scores.gather_scores": lambda s, grid: (
            s.batch * s.heads * RECALLED * (2 * s.head_dim + 16) + _query_bytes(s),
            4 * s.batch * s.query_heads * RECALLED,
        ),
        **_piece_sums(lambda s: RECALLED),
        **_best(lambda s: RECALLED, CTKVR_K, _TOKENS),
    },
    "flat": {
        **_piece_sums(lambda s: s.cold_len),
        **_selection(lambda s: s.cold_len, lambda s: FLAT_K, grouped=True),
    },
    "count": {"relevance.count": lambda s, grid: (4 * s.batch * s.heads * PARIS_K, 8)},
    "attend-100": _attention(PARIS_K, 512, "gather_attention.attend"),
    "attend-2048": _attention(LRQK_K, 512, "gather_attention.attend"),
    # Codes of a key and a value, and a scale of two bytes for each.
    "higgs": _attention(LRQK_K, 2 * (HIGGS_BITS * 128 // 8 + 2), "higgs.attend"),
    "resident": {
        "resident.assign": lambda s, grid: (
            3 * 4 * s.batch * s.heads * LRQK_K,
            4 * 4 * s.batch * s.heads * LRQK_K,
        ),
        "resident.fetch": lambda s, grid: (
            (512 + 16) * s.batch * s.heads * LRQK_K,
            512 * s.batch * s.heads * LRQK_K,
        ),
    },
    "finish-100": _finish(PARIS_K),
    "finish-2048": _finish(LRQK_K),
    "window": {
        "prompt_attention.attend": lambda s, grid: (_window_bytes(s), _pieces_bytes(s, grid[2]))
    },
    # The window's pieces and one of what was selected.
    "merge": {
        "merge.merge": lambda s, grid: (
            _pieces_bytes(s, _piece_count(s, WINDOW_LEN, _WINDOW_ROWS, 1) + 1),
            _query_bytes(s),
        )
    },
}
