"""What there is to choose in ``gather_scores``' kernel, and the rule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.tuning.tunable import Tunable, dtype_name, power_of_two

# Bytes of keys that a program asks for at once, and the most keys: several 16-byte loads a thread.
_TILE_BYTES = 16 << 10
_MOST_KEYS = 64


class ScoresSize(NamedTuple):
    """Calls that share a choice.

    Attributes:
        dtype: of rows and query, as ``"bfloat16"``.
        key_dim: Dk.
        group: query heads that share a selection.
        selections: B * H * Q, rounded up to a power of two.
        chosen: K, rounded up to a power of two.
        rows: ``"device"``, or ``"host"`` where some lie there.
    """

    dtype: str
    key_dim: int
    group: int
    selections: int
    chosen: int
    rows: str


@dataclass(frozen=True)
class ScoresChoice:
    """How ``gather_scores`` is launched.

    Attributes:
        block_k: keys of a program.
        warps: of a program.
    """

    block_k: int
    warps: int


CHOICES = Tunable(
    name="gather_scores",
    version=1,
    size=ScoresSize,
    kind=ScoresChoice,
    space={"block_k": (16, 32, 64, 128, 256), "warps": (1, 2, 4, 8)},
)


def size_of(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor) -> ScoresSize:
    """The size class of a call."""
    batch, heads, queries, count = ids.shape
    return ScoresSize(
        dtype_name(query.dtype),
        rows.key_dim,
        query.shape[1] // heads,
        power_of_two(batch * heads * queries),
        power_of_two(count),
        "device" if all(chunk.device == query.device for chunk in rows.chunks) else "host",
    )


@cache
def rule(size: ScoresSize) -> ScoresChoice:
    """What is taken where nothing was measured; not measured itself."""
    itemsize = 4 if size.dtype == "float32" else 2
    columns = max(16, power_of_two(size.key_dim))
    return ScoresChoice(max(16, min(_MOST_KEYS, _TILE_BYTES // (columns * itemsize))), warps=4)
