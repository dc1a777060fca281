"""What there is to choose in ``gather_attention``'s kernels, and the rule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.tuning.tunable import Tunable, dtype_name, power_of_two

VARIANTS = ("direct", "gather")


class GatherSize(NamedTuple):
    """Calls that share a choice.

    Attributes:
        dtype: of rows and query, as ``"bfloat16"``.
        key_dim, value_dim: Dk and Dv.
        group: query heads that share a selection.
        selections: B * H * Q, rounded up to a power of two.
        chosen: K, rounded up to a power of two.
        rows: ``"device"``, or ``"host"`` where some lie there.
    """

    dtype: str
    key_dim: int
    value_dim: int
    group: int
    selections: int
    chosen: int
    rows: str


@dataclass(frozen=True)
class GatherChoice:
    """How ``gather_attention`` is launched.

    Attributes:
        variant: ``"direct"``, the attention kernel follows ids to the rows where they lie;
            ``"gather"``, one kernel copies the rows to the device, another attends to the copy.
        copy_rows: rows that a program of the copying kernel asks for at once.
        block_k: rows of a tile.
        warps, stages: of a program, and of its pipeline.
        waves: programs per multiprocessor to aim at, by cutting selections into pieces.
        most_splits: pieces of a selection, at most.
    """

    variant: str
    copy_rows: int
    block_k: int
    warps: int
    stages: int
    waves: int
    most_splits: int


CHOICES = Tunable(
    name="gather_attention",
    version=1,
    size=GatherSize,
    kind=GatherChoice,
    space={
        "variant": VARIANTS,
        "copy_rows": (8, 16, 32, 64),
        "block_k": (16, 32, 64, 128),
        "warps": (2, 4, 8),
        # From 5 on, loads of rows are made a tile ahead: ids, table and addresses come before them.
        "stages": (1, 2, 3, 4, 5, 6),
        "waves": (1, 2, 4, 8, 16),
        "most_splits": (16, 32, 64, 128),
    },
    only={"copy_rows": ("variant", "gather")},
)


def size_of(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor) -> GatherSize:
    """The size class of a call."""
    batch, heads, queries, count = ids.shape
    return GatherSize(
        dtype_name(query.dtype),
        rows.key_dim,
        rows.value_dim,
        query.shape[1] // heads,
        power_of_two(batch * heads * queries),
        power_of_two(count),
        "device" if all(chunk.device == query.device for chunk in rows.chunks) else "host",
    )


@cache
def rule(size: GatherSize) -> GatherChoice:
    """What is taken where nothing was measured; not measured itself.

    Programs are many, because loads have a long way: several must be under way. In fp32, which has
    no tensor cores, larger tiles spill registers. Rows are read where they lie, also over the bus:
    a copy reads the same bytes there, and then writes and reads them once more.
    """
    columns = sum(max(16, power_of_two(dim)) for dim in (size.key_dim, size.value_dim))
    block_k = 16 if size.dtype == "float32" and columns > 128 else 32
    return GatherChoice("direct", 32, block_k, warps=4, stages=3, waves=4, most_splits=64)
