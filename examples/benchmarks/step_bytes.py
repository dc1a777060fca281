"""Bytes that the kernels of a decode step can't do without: every input that matters is read once,
every output written once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    NPROBE,
    PARIS_K,
    PARIS_SHARES,
    RECALLED,
    WINDOW_LEN,
    StepShape,
)

# Tokens of a program of the selecting kernels, of a sum of proxies' scores, of a log-sum-exp.
_TOKENS, _SUM = 1024, 128


class Bytes(NamedTuple):
    """Of one launch."""

    read: int
    written: int


def moved_bytes(part: str, kernel: str, shape: StepShape, grid: Sequence[int]) -> Bytes:
    """What a launch reads and writes; ``kernel`` is as in ``machine_code.Launch``.

    KeyError where nobody has described this kernel in that part.
    """
    operation = kernel.partition(" ")[0]
    try:
        terms = _KERNELS[part][operation]
    except KeyError:
        raise KeyError(f"step_bytes.py has no {operation} in {part}: describe it there") from None
    sizes = _sizes(shape, grid)
    return Bytes(*(_count(text, sizes) for text in terms))


def _count(terms: str, sizes: dict[str, int]) -> int:
    """A sum of products of numbers and names of ``sizes``: ``"4 B H n + B n"``."""
    products = (
        math.prod(sizes[word] if word in sizes else int(word) for word in term.split())
        for term in terms.split("+")
    )
    return sum(products)


def _sizes(s: StepShape, grid: Sequence[int]) -> dict[str, int]:
    """Sizes by the names that the table below uses; ``g0`` to ``g2`` are those of the grid."""

    def pieces(length: int, least_len: int, waves: int) -> int:
        """Of attention to ``length`` rows, ``waves`` programs a multiprocessor: ``split_plan``."""
        fill = waves * MULTIPROCESSORS // (s.batch * s.heads)
        return max(1, min(math.ceil(length / least_len), fill))

    return {
        **{"B": s.batch, "H": s.heads, "Hq": s.query_heads, "G": s.group, "D": s.head_dim},
        **{"n": s.cold_len, "blocks": math.ceil(s.cold_len / _TOKENS)},
        **{f"g{axis}": size for axis, size in enumerate(grid)},
        "sums": math.ceil(s.cold_len / _SUM),
        # ParisKV: centroids of 16 subspaces, candidates, what a block plans to take of each sum.
        "table": 16 * 256,
        "best": s.candidates,
        "best_sums": math.ceil(s.candidates / _SUM),
        "planned": 2 * (1 << (16 * len(PARIS_SHARES) + 1).bit_length()) + 8,
        "C": CODEWORDS,
        "a2ats_k": s.a2ats_k,
        # CTkvr: ids in its lists, tokens that it compares, and those that one launch takes.
        "centroids": CENTROIDS,
        "listed": NPROBE * LIST_LEN,
        "recalled": RECALLED,
        "recalled_sums": math.ceil(RECALLED / _TOKENS),
        "taken": grid[0] // math.ceil(RECALLED / _TOKENS) * RECALLED,
        "W": WINDOW_LEN,
        "near": pieces(WINDOW_LEN, 64, 1) + 1,
        f"pieces{PARIS_K}": pieces(PARIS_K, 32, 4),
        f"pieces{LRQK_K}": pieces(LRQK_K, 32, 4),
    }


_Kernels = dict[str, tuple[str, str]]
"""What each kernel reads and writes, as ``_count`` takes it."""
_QUERY = "2 B Hq D"
_WINDOW = f"4 B W H D + B W + {_QUERY}"


def _selection(count: int | str, heads: str = "") -> _Kernels:
    """Of ``count`` in each KV head's row of fp32; ``heads`` is "G" for rows of its query heads."""
    return {
        "top_k.count": (f"4 B H n {heads} + 8192 B H", "4 B H n + 8192 B H"),
        "top_k.border": ("4 B H n", "4 B H blocks"),
        "top_k.compact": ("4 B H n + 4 B H blocks", f"4 B H {count}"),
    }


def _best(length: str, count: int) -> _Kernels:
    """The best of each block of candidates, an order and a place each; then those of all."""
    chosen = f"8 B H g1 {count}"
    read = f"4 G B H {length} + 4 G B H {length}_sums + {chosen}"
    return {"top_k.best": (read, f"4 B H {count} + {chosen}")}


def _pieces(count: str) -> str:
    """Of ``count`` pieces of each query: a mean and the logarithm of its weight, in fp32."""
    return f"4 B Hq {count} D + 4 B Hq {count}"


def _attention(count: int, row_bytes: int) -> tuple[str, str]:
    """To ``count`` rows of each KV head; an id, a page number and an address lead to a row."""
    return f"{row_bytes + 16} B H {count} + {_QUERY}", _pieces("g1")


def _finish(count: int) -> _Kernels:
    """The window, merged with ``count`` rows that were attended to; their ids are counted."""
    read = f"{_WINDOW} + {_pieces(f'pieces{count}')} + 4 B H {count}"
    return {"step_attention.finish": (read, f"{_pieces('g2')} + {_QUERY} + 4 B Hq + 8")}


_KERNELS: dict[str, _Kernels] = {
    "paris": {
        "paris.bonus": (f"{_QUERY} + 4 B H table", "4 B H table + 4 B Hq D + 1024 B H"),
        "paris.collide": (
            "16 B H n + B n + 4 B H table",
            "B H n + 1024 B H + g0 B H planned",
        ),
        "paris.compact": ("B H n + 8 g0 g1", "4 B H best"),
        # An id, signs, magnitudes and weights of a candidate.
        "paris.rerank": ("100 B H best + 4 B Hq D", "4 G B H best + 4 G g0 g1"),
        **_best("best", PARIS_K),
    },
    "lrqk": {
        "proxy.scores": ("64 B H n + B n", "4 G B H n + 4 B Hq sums"),
        "proxy.total": ("4 B Hq sums", "4 B Hq"),
        **_selection(LRQK_K, "G"),
    },
    "a2ats": {
        "proxy.scores": ("2 H C D + 4 B Hq D", "4 B Hq C"),
        "codebook.count": ("2 B H n + B n", "4 B H C"),
        "codebook.share": ("4 B Hq C + 4 B H C", "4 B H C"),
        "codebook.lookup": ("2 B H n + B n + 4 B H C", "4 B H n"),
        **_selection("a2ats_k"),
    },
    "ctkvr": {
        "centroid.similarity": ("2 B Hq centroids D + 4 B Hq centroids", "4 B H centroids"),
        "centroid.take": ("3 B H listed", "4 B H listed"),
        # A mark for each id, somewhere in a row of all tokens; rows come in several launches.
        "centroid.mark": ("5 taken", "4 taken"),
        "centroid.keep": ("8 taken", "4 taken"),
        "gather_scores.gather_scores": (
            f"2 B H recalled D + 16 B H recalled + {_QUERY}",
            "4 B Hq recalled",
        ),
        "relevance.chunk": ("4 B Hq recalled", "4 g0"),
        **_best("recalled", CTKVR_K),
    },
    "flat": {"relevance.chunk": ("4 B Hq n", "4 g0"), **_selection(FLAT_K, "G")},
    "count": {"relevance.count": (f"4 B H {PARIS_K}", "8")},
    "attend-100": {"gather_attention.attend": _attention(PARIS_K, 512)},
    "attend-2048": {"gather_attention.attend": _attention(LRQK_K, 512)},
    # Codes of a key and a value, and a scale of two bytes for each.
    "higgs": {"higgs.attend": _attention(LRQK_K, 2 * (HIGGS_BITS * 128 // 8 + 2))},
    "resident": {
        "resident.assign": (f"12 B H {LRQK_K}", f"16 B H {LRQK_K}"),
        "resident.fetch": (f"528 B H {LRQK_K}", f"512 B H {LRQK_K}"),
    },
    "finish-100": _finish(PARIS_K),
    "finish-2048": _finish(LRQK_K),
    "window": {"prompt_attention.attend": (_WINDOW, _pieces("g2"))},
    # The window's pieces and one of what was selected.
    "merge": {"merge.merge": (_pieces("near"), _QUERY)},
}
