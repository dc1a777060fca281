"""Rows as plain tensors: what a store must hold, and the reference for its answers."""

from collections.abc import Callable
from typing import Any

import torch

from hf_kvret import TokenBlock
from hf_kvret.stores import Store
from hf_kvret.stores.memory import PageMemory

from ..kernels.draws import attention64
from ..kernels.paged_rows import chosen_rows

CPU = torch.device("cpu")
HEADS, GROUP = 2, 2
SCALE = 0.7

Rows = tuple[torch.Tensor, torch.Tensor]
MakeMemory = Callable[[torch.device], PageMemory]


def poisoned(cls: type[PageMemory], filler: float, **options: Any) -> MakeMemory:
    """Memories whose new pages are full of ``filler``: whoever reads spare capacity shows it."""

    class Poisoned(cls):  # type: ignore[misc,valid-type]
        def allocate(self, *args: Any) -> torch.Tensor:
            return super().allocate(*args).fill_(filler)

    return lambda device: Poisoned(device, **options)


def draw(
    batch: int,
    count: int,
    dims: tuple[int, int] = (4, 6),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Rows:
    """Keys with a large constant offset, as real ones have, and values."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, HEADS, count, dim, generator=generator) for dim in dims)
    return (keys + 3.0).to(dtype), values.to(dtype)


def extend(
    *stores: Store, count: int, batch: int = 2, dims: tuple[int, int] = (4, 6), seed: int = 0
) -> Rows:
    """The rows of ``count`` tokens that all stores, of the same length, got."""
    rows = draw(batch, count, dims, seed=seed)
    for store in stores:
        store.append(TokenBlock(*rows, start=len(store)))
    return rows


def draw_ids(
    length: int, count: int, batch: int = 2, heads: int = HEADS, queries: int = 1, seed: int = 0
) -> torch.Tensor:
    """Ids ``[batch, heads, queries, count]`` of different tokens, a fifth of them -1."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, heads, queries, length, generator=generator).argsort(-1)
    ids = order[..., :count].int()
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return ids


def same_ids(*tokens: int, heads: int = HEADS, batch: int = 2) -> torch.Tensor:
    """Ids ``[batch, heads, 1, n]``: the same tokens for every head."""
    return torch.tensor(tokens, dtype=torch.int32).expand(batch, heads, 1, -1).contiguous()


def gathered(rows: Rows, ids: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values ``[B, H, Q, k, D]`` of ``ids``; zeros for -1."""
    none = (ids < 0).unsqueeze(-1)
    return [chosen_rows(x, ids, ids.shape[1]).masked_fill(none, 0.0) for x in rows]


def attention(
    query: torch.Tensor, rows: Rows, ids: torch.Tensor, softcap: float | None = None
) -> list[torch.Tensor]:
    """Output, lse and logits, in float64 rounded to fp32, of attention to the rows of ``ids``."""
    heads = query.shape[1]
    keys, values = (chosen_rows(x, ids, heads) for x in rows)
    seen = (ids >= 0).repeat_interleave(heads // ids.shape[1], dim=1).unsqueeze(3)
    results = attention64(query.unsqueeze(3), keys, values, seen, SCALE, softcap)
    return [x.squeeze(3).float() for x in results]
