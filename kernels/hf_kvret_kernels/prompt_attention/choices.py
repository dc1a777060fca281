"""What there is to choose in ``prompt_attention``'s kernel, and the rules.

Measured choices are for few query rows, as a decode step has them: there the keys are split over
programs. Prompts go by the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from hf_kvret_kernels.tuning.tunable import Tunable, dtype_name, power_of_two

FEW_ROWS = 64
"""Query rows ``Q * G`` of a KV head up to which a call looks up what was measured."""


class DecodeSize(NamedTuple):
    """Calls with few query rows that share a choice.

    Attributes:
        dtype: of query, key and value, as ``"bfloat16"``.
        key_dim, value_dim: Dk and Dv.
        rows: Q * G, rounded up to a power of two.
        heads: B * Hkv, rounded up to a power of two.
        tokens: T, rounded up to a power of two.
        masked: whether there is a mask of valid tokens.
    """

    dtype: str
    key_dim: int
    value_dim: int
    rows: int
    heads: int
    tokens: int
    masked: bool


@dataclass(frozen=True)
class PromptChoice:
    """How ``prompt_attention`` is launched; ``tile_rows`` gives the query rows of a tile.

    Attributes:
        block_n: keys of a tile.
        warps, stages: of a program, and of its pipeline.
        waves: programs per multiprocessor to aim at, by cutting the keys into pieces.
        most_splits: pieces, at most.
        least_split_len: keys of a piece, at least: it must be worth its share of the merge.
    """

    block_n: int
    warps: int
    stages: int
    waves: int
    most_splits: int
    least_split_len: int


CHOICES = Tunable(
    name="prompt_attention",
    version=1,
    size=DecodeSize,
    kind=PromptChoice,
    space={
        "least_split_len": (32, 64, 128, 256),
        "waves": (1, 2, 4),
        "block_n": (16, 32, 64, 128),
        "warps": (2, 4, 8),
        "stages": (1, 2, 3, 4),
        "most_splits": (16, 32, 64, 128),
    },
)


def size_of(
    query: torch.Tensor, value: torch.Tensor, masked: bool, tokens: int | None = None
) -> DecodeSize:
    """The size class of a call, with other ``tokens`` than those of ``value`` if given."""
    batch, query_heads, queries, key_dim = query.shape
    heads, held, value_dim = value.shape[1:]
    return DecodeSize(
        dtype_name(query.dtype),
        key_dim,
        value_dim,
        power_of_two(queries * (query_heads // heads)),
        power_of_two(batch * heads),
        power_of_two(held if tokens is None else tokens),
        masked,
    )


def tile_rows(rows: int, columns: int, itemsize: int) -> int:
    """Query rows of a tile, for ``rows`` of them and K plus V of ``columns`` columns."""
    widest, most = (128, 64) if itemsize == 4 else (256, 128)
    if columns > widest:
        most //= 2
    if columns > 2 * widest:
        # Sums of values take the registers.
        most = 16
    return min(most, max(16, power_of_two(rows)))


@cache
def rule(rows: int, columns: int, itemsize: int, shared_bytes: int) -> PromptChoice:
    """What is taken where nothing was measured; arguments as in ``tile_rows``.

    In 16 bits, 128 x 64 with 8 warps suits heads of 128 (a query tile of 32 KiB, 32 KiB a stage).
    fp32 has no tensor cores, registers are what it lacks. The number of stages is what fits into
    ``shared_bytes`` of shared memory.
    """
    if itemsize == 4:
        block_n, warps, most_stages = (32, 8, 2) if columns <= 128 else (16, 8, 2)
    else:
        block_n, warps, most_stages = (64, 8, 3) if columns <= 256 else (32, 4, 3)
        if rows <= FEW_ROWS:
            warps = 4
        if columns > 256 and (columns != 512 or rows > 32):
            # Parts of keys, values of 512, tiles of 64 rows: with fewer warps registers spill.
            warps = 8
        if columns == 1024:
            # Of a third stage, too.
            most_stages = 2
    row_bytes = columns * itemsize
    room = shared_bytes - tile_rows(rows, columns, itemsize) * row_bytes // 2
    stages = max(1, min(most_stages, room // (block_n * row_bytes)))
    return PromptChoice(block_n, warps, stages, waves=1, most_splits=64, least_split_len=64)
