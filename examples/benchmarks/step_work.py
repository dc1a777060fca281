"""What the kernels of a decode step have to do: bytes they can't do without, trips of their loops.

Every input that matters is read once, every output written once, all from DRAM: what a kernel finds
in the L2 cache is not known here. Trips are those of the machine code that the pinned compiler
makes, in which a loop may be unrolled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from machine_model import H200
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

Grid = tuple[int, int, int]

# Tokens of a program of the selecting kernels, of a sum of proxies' scores, of selected rows.
_TOKENS, _PROXIES, _ROWS, _WINDOW_ROWS = 1024, 128, 32, 64
# Ids that a program counts at a time; pieces of the window that the last one merges at a time.
_IDS, _OWN_PIECES = 512, 16
# Most halvings of a range of 32 bits; bins of scores; log-sum-exps that are added up at a time.
_HALVINGS, _BINS, _SUMS = 32, 2048, 256


@dataclass(frozen=True)
class Work:
    """Of one launch.

    Attributes:
        trips: of each outermost loop, in the order of addresses; the last one also for those that
            follow.
        last_ctas: of which each is the last of several, and does what is left to it.
    """

    read_bytes: int
    written_bytes: int
    trips: tuple[float, ...] = (1,)
    last_ctas: int = 1

    @property
    def moved_bytes(self) -> int:
        """Read and written."""
        return self.read_bytes + self.written_bytes


def work_of(part: str, kernel: str, shape: StepShape, grid: Grid) -> Work:
    """The work of a launch.

    Args:
        kernel: as in ``kernel_launch.Launch``.

    Raises:
        KeyError: nobody has described this kernel in that part.
    """
    operation = kernel.partition(" ")[0]
    try:
        describe = _WORK[part][operation]
    except KeyError:
        raise KeyError(f"step_work.py has no {operation} in {part}: describe it there") from None
    return describe(shape, grid)


_Describe = Callable[[StepShape, Grid], Work]
_Length = Callable[[StepShape], int]


def _selection(length: _Length, count: _Length, grouped: bool = False) -> dict[str, _Describe]:
    """Of ``count`` in each KV head's row of fp32, or ``grouped`` in rows of its query heads."""

    def orders(s: StepShape) -> int:
        return 4 * s.batch * s.heads * length(s)

    def bins(s: StepShape) -> int:
        return 4 * _BINS * s.batch * s.heads

    def blocks(s: StepShape) -> int:
        return 4 * s.batch * s.heads * math.ceil(length(s) / _TOKENS)

    def chunks(s: StepShape) -> int:
        return math.ceil(length(s) / _TOKENS / 1024)

    return {
        "top_k.count": lambda s, grid: Work(
            (s.group if grouped else 1) * orders(s) + bins(s),
            orders(s) + bins(s),
            (s.group if grouped else 1,),
            s.batch * s.heads,
        ),
        # The threshold's bin is taken to have up to 1,024 scores, and no two at the threshold.
        "top_k.border": lambda s, grid: Work(
            orders(s), blocks(s), (1, 1, 1, 1, 0, 0, 0, 0, 1, chunks(s)), s.batch * s.heads
        ),
        "top_k.compact": lambda s, grid: Work(
            orders(s) + blocks(s), 4 * s.batch * s.heads * count(s), (0,)
        ),
    }


def _piece_sums(length: _Length) -> dict[str, _Describe]:
    """Log-sum-exps of pieces of the query heads' rows of fp32."""

    def blocks(s: StepShape) -> int:
        return math.ceil(math.ceil(length(s) / _TOKENS) / 256)

    return {
        "relevance.piece": lambda s, grid: Work(
            4 * s.batch * s.query_heads * length(s), 4 * grid[0], (blocks(s),)
        )
    }


def _attention(count: int, row_bytes: int, kernel: str) -> dict[str, _Describe]:
    """Attention to ``count`` selected rows of each KV head, in pieces that others merge."""

    def attend(s: StepShape, grid: Grid) -> Work:
        # An id, a page number and an address lead to a row.
        read = s.batch * s.heads * count * (row_bytes + 16) + _query_bytes(s)
        trips = math.ceil(math.ceil(count / _ROWS) / grid[1])
        return Work(read, _pieces_bytes(s, grid[1]), (trips,))

    return {kernel: attend}


def _piece_count(s: StepShape, length: int, least_len: int, waves: int) -> int:
    """Of attention to ``length`` rows, ``waves`` programs a multiprocessor, as ``split_plan``."""
    fill = waves * H200.multiprocessors // (s.batch * s.heads)
    return max(1, min(math.ceil(length / least_len), fill))


def _pieces_bytes(s: StepShape, count: int) -> int:
    """Of ``count`` pieces of each query: a mean and the logarithm of its weight, in fp32."""
    return 4 * s.batch * s.query_heads * count * (s.head_dim + 1)


def _finish(count: int) -> dict[str, _Describe]:
    """The window, merged with ``count`` rows that were attended to; their ids are counted."""

    def finish(s: StepShape, grid: Grid) -> Work:
        splits, programs, ids = grid[2], math.prod(grid), s.batch * s.heads * count
        others = _pieces_bytes(s, _piece_count(s, count, _ROWS, 4))
        tiles = math.ceil(math.ceil(WINDOW_LEN / _WINDOW_ROWS) / splits)
        # A program has a first block of ids before its loop; there is none over a single tile.
        of_ids = math.ceil(math.ceil(ids / _IDS) / programs) - 1
        of_all = (of_ids, math.ceil(splits / _OWN_PIECES))
        return Work(
            _window_bytes(s) + others + 4 * ids,
            _pieces_bytes(s, splits) + _query_bytes(s) + 4 * s.batch * s.query_heads + 8,
            of_all if tiles == 1 else (tiles, *of_all),
            last_ctas=s.batch * s.heads,
        )

    return {"step_attention.finish": finish}


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


def _collide(s: StepShape, grid: Grid) -> Work:
    """Sums of all tokens; the last program of a row plans what is taken, 256 blocks at a time."""
    rows = s.batch * s.heads
    # How many tokens of a block reach each sum, in two bytes, and how many come before it.
    bins = 1 << (16 * len(PARIS_SHARES) + 1).bit_length()
    planned = grid[0] * rows * (2 * bins + 8)
    return Work(
        16 * _rows(s) + s.batch * s.cold_len + _table_bytes(s),
        _rows(s) + _histogram_bytes(s) + planned,
        (math.ceil(grid[0] / 256),),
        last_ctas=rows,
    )


def _best(length: _Length, count: int, piece: int) -> dict[str, _Describe]:
    """The best of each block of candidates, and by the last program those of all.

    ``piece``: tokens of which there is a log-sum-exp.
    """

    def best(s: StepShape, grid: Grid) -> Work:
        rows, blocks, sums = s.batch * s.heads, grid[1], math.ceil(length(s) / piece)
        at_once = 256 if blocks == math.ceil(length(s) / _TOKENS) else 1024
        # An order and a place of each, written and read again.
        chosen = 8 * rows * blocks * count
        return Work(
            4 * s.group * rows * (length(s) + sums) + chosen,
            4 * rows * count + chosen,
            (s.group * math.ceil(sums / at_once), _HALVINGS, _HALVINGS),
            last_ctas=rows,
        )

    return {"top_k.best": best}


def _score_table_bytes(s: StepShape) -> int:
    """Of A²ATS: a score of fp32 for each codeword and query head."""
    return 4 * s.batch * s.query_heads * CODEWORDS


def _listed(s: StepShape, each: int) -> int:
    """Bytes of the ids in the lists that CTkvr recalls, ``each`` of one."""
    return each * s.batch * s.heads * NPROBE * LIST_LEN


def _recalled(s: StepShape, grid: Grid) -> int:
    """Ids of the rows that one launch takes."""
    return grid[0] // math.ceil(RECALLED / _TOKENS) * RECALLED


def _window_bytes(s: StepShape) -> int:
    """Of keys, values and mask of the window, and of the queries."""
    return s.batch * WINDOW_LEN * (4 * s.heads * s.head_dim + 1) + _query_bytes(s)


def _window(s: StepShape, grid: Grid) -> Work:
    tiles = math.ceil(math.ceil(WINDOW_LEN / _WINDOW_ROWS) / grid[2])
    return Work(_window_bytes(s), _pieces_bytes(s, grid[2]), (tiles,))


def _merge(s: StepShape, grid: Grid) -> Work:
    """The window's pieces and one of the rest, which has none that are loaded at once."""
    pieces = _piece_count(s, WINDOW_LEN, _WINDOW_ROWS, 1)
    return Work(_pieces_bytes(s, pieces + 1), _query_bytes(s))


def _proxy_sums(s: StepShape) -> int:
    return 4 * s.batch * s.query_heads * math.ceil(s.cold_len / _PROXIES)


def _total_trips(s: StepShape) -> tuple[int, int]:
    """Of blocks of 512 sums; the compiler unrolls the first loop four times."""
    blocks = math.ceil(s.cold_len / _PROXIES / 512)
    return math.ceil(blocks / 4), blocks


_WORK: dict[str, dict[str, _Describe]] = {
    "paris": {
        "paris.bonus": lambda s, grid: Work(
            _query_bytes(s) + _table_bytes(s),
            _table_bytes(s) + _rotated_bytes(s) + _histogram_bytes(s),
        ),
        "paris.collide": _collide,
        "paris.compact": lambda s, grid: Work(_rows(s) + 8 * grid[0] * grid[1], 4 * _kept(s), (0,)),
        # An id, signs, magnitudes and weights of a candidate.
        "paris.rerank": lambda s, grid: Work(
            (4 + 16 + 48 + 32) * _kept(s) + _rotated_bytes(s),
            4 * s.group * (_kept(s) + grid[0] * grid[1]),
        ),
        **_best(lambda s: s.candidates, PARIS_K, 128),
    },
    "lrqk": {
        "proxy.scores": lambda s, grid: Work(
            2 * LRQK_RANK * _rows(s) + s.batch * s.cold_len,
            4 * s.group * _rows(s) + _proxy_sums(s),
        ),
        "proxy.total": lambda s, grid: Work(
            _proxy_sums(s), 4 * s.batch * s.query_heads, _total_trips(s)
        ),
        **_selection(lambda s: s.cold_len, lambda s: LRQK_K, grouped=True),
    },
    "a2ats": {
        "proxy.scores": lambda s, grid: Work(
            2 * s.heads * CODEWORDS * s.head_dim + _rotated_bytes(s), _score_table_bytes(s)
        ),
        "codebook.count": lambda s, grid: Work(
            2 * _rows(s) + s.batch * s.cold_len, _score_table_bytes(s) // s.group
        ),
        "codebook.share": lambda s, grid: Work(
            _score_table_bytes(s) + _score_table_bytes(s) // s.group,
            _score_table_bytes(s) // s.group,
            (s.group,),
        ),
        "codebook.lookup": lambda s, grid: Work(
            2 * _rows(s) + s.batch * s.cold_len + _score_table_bytes(s) // s.group, 4 * _rows(s)
        ),
        **_selection(lambda s: s.cold_len, lambda s: s.a2ats_k),
    },
    "ctkvr": {
        "centroid.similarity": lambda s, grid: Work(
            s.batch * s.query_heads * CENTROIDS * (2 * s.head_dim + 4),
            4 * s.batch * s.heads * CENTROIDS,
            (s.group,),
        ),
        "centroid.take": lambda s, grid: Work(_listed(s, 3), _listed(s, 4)),
        # A mark for each id, somewhere in a row of all tokens; rows come in several launches.
        "centroid.mark": lambda s, grid: Work(_recalled(s, grid) * 5, _recalled(s, grid) * 4),
        "centroid.keep": lambda s, grid: Work(_recalled(s, grid) * 8, _recalled(s, grid) * 4),
        "gather_scores.gather_scores": lambda s, grid: Work(
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
    "count": {"relevance.count": lambda s, grid: Work(4 * s.batch * s.heads * PARIS_K, 8)},
    "attend-100": _attention(PARIS_K, 512, "gather_attention.attend"),
    "attend-2048": _attention(LRQK_K, 512, "gather_attention.attend"),
    # Codes of a key and a value, and a scale of two bytes for each.
    "higgs": _attention(LRQK_K, 2 * (HIGGS_BITS * 128 // 8 + 2), "higgs.attend"),
    "resident": {
        "resident.assign": lambda s, grid: Work(
            3 * 4 * s.batch * s.heads * LRQK_K,
            4 * 4 * s.batch * s.heads * LRQK_K,
            # The third halves the range of stamps.
            (1, 1, _HALVINGS, 1),
        ),
        "resident.fetch": lambda s, grid: Work(
            (512 + 16) * s.batch * s.heads * LRQK_K, 512 * s.batch * s.heads * LRQK_K
        ),
    },
    "finish-100": _finish(PARIS_K),
    "finish-2048": _finish(LRQK_K),
    "window": {"prompt_attention.attend": _window},
    "merge": {"merge.merge": _merge},
}
