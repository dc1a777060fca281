"""Sizes of the operations that ``bench kernels`` measures, and inputs drawn for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvret_kernels.paged import PagedRows

PAGE_LEN = 64


@dataclass(frozen=True)
class KernelShape:
    """Sizes that the operations share; each takes what it needs.

    Attributes:
        length: tokens n of a sequence.
        batch: sequences B.
        heads, group, head_dim: KV heads H, query heads G of each, head dim D.
        dtype: of keys, values and queries as a model has them.
        top_k: tokens that a head selects.
        codewords: C of a codebook.
        rank: numbers of a proxy, r.
    """

    length: int
    batch: int
    heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    top_k: int
    codewords: int = 1
    rank: int = 1

    @property
    def query_heads(self) -> int:
        """Hq."""
        return self.heads * self.group

    @property
    def all_heads(self) -> int:
        """KV heads of all sequences, B * H."""
        return self.batch * self.heads

    @property
    def queries(self) -> int:
        """Query heads of all sequences, B * Hq."""
        return self.batch * self.query_heads

    @property
    def tokens(self) -> int:
        """Of all KV heads, B * H * n."""
        return self.all_heads * self.length

    @property
    def selected(self) -> int:
        """Tokens that all KV heads select."""
        return self.all_heads * self.top_k

    @property
    def mask_bytes(self) -> int:
        """A byte a token of a sequence."""
        return self.batch * self.length

    @property
    def pages(self) -> int:
        """Of a sequence in a paged store."""
        return -(-self.length // PAGE_LEN)

    @property
    def scale(self) -> float:
        """Factor of the dot products."""
        return self.head_dim**-0.5

    def vectors(self, count: int) -> int:
        """Bytes of ``count`` vectors of the head dim in ``dtype``."""
        return count * self.head_dim * self.dtype.itemsize


class Draw:
    """Random inputs on a device, the same for a seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=dtype, device=self.device)

    def integers(self, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """From 0 to ``high - 1``, all alike."""
        return torch.randint(high, shape, generator=self.generator, dtype=dtype, device=self.device)

    def tokens(self, length: int, lead: tuple[int, ...], count: int) -> torch.Tensor:
        """``[*lead, count]`` int32: distinct numbers below ``length`` in random order, each row
        others."""
        ids = torch.empty(*lead, count, dtype=torch.int32, device=self.device)
        for row in ids.view(-1, count):
            order = torch.randperm(length, generator=self.generator, device=self.device)
            row.copy_(order[:count])
        return ids

    def all_valid(self, shape: KernelShape) -> torch.Tensor:
        """``[B, n]`` bool: a batch without padding."""
        return torch.ones(shape.batch, shape.length, dtype=torch.bool, device=self.device)

    def query(self, shape: KernelShape) -> torch.Tensor:
        """``[B, Hq, 1, D]`` in the shape's dtype."""
        return self.normal(shape.batch, shape.query_heads, 1, shape.head_dim, dtype=shape.dtype)

    def keys(self, shape: KernelShape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[B, H, n, D]``, in the shape's dtype unless another is given."""
        sizes = (shape.batch, shape.heads, shape.length, shape.head_dim)
        return self.normal(*sizes, dtype=dtype or shape.dtype)

    def ids(self, shape: KernelShape, count: int) -> torch.Tensor:
        """``[B, H, 1, count]`` int32: tokens of each KV head, in random order."""
        return self.tokens(shape.length, (shape.batch, shape.heads, 1), count)

    def pages(self, shape: KernelShape) -> torch.Tensor:
        """``[B, pages]`` int32: the page table of a store in which pages lie in random order."""
        count = shape.batch * shape.pages
        return self.tokens(count, (), count).view(shape.batch, -1)

    def chosen_rows(
        self, shape: KernelShape, rows: str = "device"
    ) -> tuple[torch.Tensor, PagedRows, torch.Tensor]:
        """Query, a paged store of normal rows, ids of ``top_k``; ``rows`` "host" pins the store."""
        table = self.pages(shape)
        sizes = (table.numel(), shape.heads, PAGE_LEN, 2 * shape.head_dim)
        chunk = self.normal(*sizes, dtype=shape.dtype)
        if rows == "host":
            chunk = chunk.cpu().pin_memory()
        ids = self.ids(shape, shape.top_k)
        return self.query(shape), PagedRows([chunk], table, shape.head_dim), ids
