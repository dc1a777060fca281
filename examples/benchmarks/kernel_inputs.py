"""Sizes of the operations that ``bench kernels`` measures, and inputs drawn for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.options.config import RetrievalConfig
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.paris import rotated_dim

PAGE_LEN = 64
CTKVR, PARIS = CTkvrConfig(), ParisConfig()
_BITS = RetrievalConfig.bits


@dataclass(frozen=True)
class KernelShape:
    """Sizes that the operations share; each takes what it needs.

    Attributes:
        length: tokens n of a sequence.
        batch: sequences B.
        heads, group, head_dim: KV heads H, query heads G of each, head dim D.
        dtype: of keys, values and queries as a model has them.
        top_k: tokens that a head selects, K.
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
    def pages(self) -> int:
        """Of a sequence in a paged store."""
        return -(-self.length // PAGE_LEN)

    @property
    def scale(self) -> float:
        """Factor of the dot products."""
        return self.head_dim**-0.5

    def count(self, terms: str) -> int:
        """A sum of products of numbers and ``SIZES``: ``"B H n D f32 + B n"`` are bytes of keys in
        fp32 and of a mask."""
        products = (math.prod(map(self._size, term.split())) for term in terms.split("+"))
        return sum(products)

    def tell(self, text: str) -> str:
        """A text with ``SIZES`` in braces, as ``"rank {r}"``."""
        known = {name: size(self) for name, size in SIZES.items() if f"{{{name}" in text}
        return text.format(**known)

    def _size(self, word: str) -> int:
        return SIZES[word](self) if word in SIZES else int(word)


def coded(shape: KernelShape) -> HiggsCodec:
    """With the largest groups that a head is made of."""
    return HiggsCodec(_BITS, shape.head_dim & -shape.head_dim)


def _candidates(shape: KernelShape) -> int:
    beta, _ = PARIS.ratios(shape.length)
    return min(shape.length, max(shape.top_k, math.ceil(beta * shape.length)))


SIZES: dict[str, Callable[[KernelShape], int]] = {
    "B": lambda s: s.batch,
    "H": lambda s: s.heads,
    "Hq": lambda s: s.query_heads,
    "G": lambda s: s.group,
    "D": lambda s: s.head_dim,
    "n": lambda s: s.length,
    "K": lambda s: s.top_k,
    "C": lambda s: s.codewords,
    "r": lambda s: s.rank,
    # Centroids of CTkvr at that length, and keys of a list.
    "L": lambda s: CTKVR.centroids_for(s.length),
    "listed": lambda s: CTKVR.list_len(s.length, s.top_k),
    # ParisKV: the head dim as it is rotated, subspaces, patterns of signs in one; candidates.
    "P": lambda s: rotated_dim(s.head_dim),
    "S": lambda s: rotated_dim(s.head_dim) // PARIS.subspace_dim,
    "patterns": lambda s: 1 << PARIS.subspace_dim,
    "best": _candidates,
    # Bytes of its sign bits, and of magnitudes, three bits a coordinate.
    "signs": lambda s: rotated_dim(s.head_dim) // 8,
    "magnitudes": lambda s: 3 * rotated_dim(s.head_dim) // 8,
    # Coded rows: bits of a number, numbers of a group, bytes of a vector with its scales.
    "bits": lambda s: _BITS,
    "together": lambda s: coded(s).group,
    "coded": lambda s: coded(s).code_bytes(s.head_dim) + coded(s).scale_bytes(s.head_dim),
    # Bytes of a number: of the model's, or of a dtype.
    "x": lambda s: s.dtype.itemsize,
    "f32": lambda s: 4,
    "i32": lambda s: 4,
    "bf16": lambda s: 2,
    "i16": lambda s: 2,
}
"""What ``count`` and ``tell`` know, by a letter or a word."""


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
