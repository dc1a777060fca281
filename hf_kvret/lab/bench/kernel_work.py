"""The bytes and multiply-adds of each operation, and the sizes that methods give it by default."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret_kernels.catalog import HIGGS_BITS, SUBSPACE_DIM, KernelShape
from hf_kvret_kernels.paris import rotated_dim

_CTKVR, _PARIS = CTkvrConfig(), ParisConfig()


def method_shape(length: int, top_k: int, head_dim: int, **sizes: Any) -> KernelShape:
    """A shape with as many candidates, lists and tiers as methods have for that length."""
    beta, rho = _PARIS.ratios(length)
    return KernelShape(
        length=length,
        top_k=top_k,
        head_dim=head_dim,
        candidates=min(length, max(top_k, math.ceil(beta * length))),
        centroids=_CTKVR.centroids_for(length),
        listed=_CTKVR.list_len(length, top_k),
        tiers=_PARIS.tiers_for(rotated_dim(head_dim) // SUBSPACE_DIM),
        rho=rho,
        **sizes,
    )


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
    # Centroids of CTkvr, and keys of a list.
    "L": lambda s: s.centroids,
    "listed": lambda s: s.listed,
    # ParisKV: the head dim as it is rotated, subspaces, patterns of signs in one; candidates.
    "P": lambda s: s.rotated_dim,
    "S": lambda s: s.rotated_dim // SUBSPACE_DIM,
    "patterns": lambda s: 1 << SUBSPACE_DIM,
    "best": lambda s: s.candidates,
    # Bytes of its sign bits, and of magnitudes, three bits a coordinate.
    "signs": lambda s: s.rotated_dim // 8,
    "magnitudes": lambda s: 3 * s.rotated_dim // 8,
    # Coded rows: bits of a number, numbers of a group, bytes of a vector with its scales.
    "bits": lambda s: HIGGS_BITS,
    "together": lambda s: s.codec.group,
    "coded": lambda s: s.codec.code_bytes(s.head_dim) + s.codec.scale_bytes(s.head_dim),
    # Bytes of a number: of the model's, or of a dtype.
    "x": lambda s: s.dtype.itemsize,
    "f32": lambda s: 4,
    "i32": lambda s: 4,
    "bf16": lambda s: 2,
    "i16": lambda s: 2,
}
"""What ``count`` and ``describe`` know, by a letter or a word."""


def count(shape: KernelShape, terms: str) -> int:
    """A sum of products of numbers and ``SIZES``: ``"B H n D f32 + B n"`` are bytes of keys in
    fp32 and of a mask."""

    def size(word: str) -> int:
        return SIZES[word](shape) if word in SIZES else int(word)

    return sum(math.prod(map(size, term.split())) for term in terms.split("+"))


@dataclass(frozen=True)
class Rates:
    """What the machine reached in this run.

    Attributes:
        bandwidth: bytes a second, read or written.
        products: multiply-adds a second of matrix products, by dtype.
    """

    bandwidth: float
    products: Mapping[str, float]


@dataclass(frozen=True)
class Work:
    """What no way to compute an operation can do without.

    Every input byte that matters is read once, every output byte written once; what is kept
    between, or read again, is a way's own affair.

    Attributes:
        multiply_adds: of its dot products; 0 where it has none. Comparisons, exponentials and
            additions without a product do not count.
    """

    read_bytes: int
    written_bytes: int
    multiply_adds: int = 0

    @property
    def moved_bytes(self) -> int:
        """Read and written."""
        return self.read_bytes + self.written_bytes

    def byte_seconds(self, rates: Rates) -> float:
        """The floor by bytes."""
        return self.moved_bytes / rates.bandwidth

    def product_seconds(self, rates: Rates) -> float:
        """The floor by multiply-adds, in the quickest dtype."""
        return self.multiply_adds / max(rates.products.values())

    def bound(self, rates: Rates) -> str:
        """Which floor is the higher one: ``"bytes"`` or ``"products"``."""
        return "products" if self.product_seconds(rates) > self.byte_seconds(rates) else "bytes"

    def seconds(self, rates: Rates) -> float:
        """The higher of both: bytes may move while products are computed."""
        return max(self.byte_seconds(rates), self.product_seconds(rates))


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a call of an operation reads and writes at least, in the terms of ``count``.

    Attributes:
        read, written: bytes; see ``Work``.
        products: multiply-adds.
        sizes: what else the work depends on, for the table, with ``SIZES`` in braces.
        stored: bytes that lie in memory too, as a store of which a call reads some rows.
        copies: as many times its inputs and outputs a call may hold in memory, about; the way in
            torch needs the most.
    """

    read: str
    written: str
    products: str = "0"
    sizes: str = ""
    stored: str = "0"
    copies: int = 4

    def work(self, shape: KernelShape) -> Work:
        """The bytes and multiply-adds that a call needs."""
        read, written, products = (
            count(shape, terms) for terms in (self.read, self.written, self.products)
        )
        return Work(read, written, products)

    def held_bytes(self, shape: KernelShape) -> int:
        """Memory that a call takes with its inputs, about."""
        return self.copies * self.work(shape).moved_bytes + count(shape, self.stored)

    def describe(self, shape: KernelShape) -> str:
        """``sizes`` with numbers, as ``"rank 32"``."""
        known = {name: size(shape) for name, size in SIZES.items() if f"{{{name}" in self.sizes}
        return self.sizes.format(**known)


# Rotations and transforms are additions alone, and a nearest point can be found without a product
# for each point, so these count no multiply-adds. Rows are read once for a group, and what takes
# two passes over its input is counted as if it took one. Values between gathered keys don't count.
NEEDS: dict[str, Needs] = {
    "paris.encode": Needs(
        read="B H n D x + B H D f32 + P f32",
        written="B H n signs + B H n magnitudes + B H n S bf16",
        copies=8,
    ),
    "paris.search": Needs(
        read="B H n signs + B Hq D x + P f32 + B H S patterns i32 + B n + B H best signs "
        "+ B H best magnitudes + B H best S bf16 + 8 f32",
        written="B H K i32",
        products="B H best G P",
        stored="B H n magnitudes + B H n S bf16",
        copies=16,
    ),
    "paris.candidates": Needs(
        read="B H n signs + B Hq P f32 + B H S patterns i32 + B n",
        written="B H best i32",
        sizes="{best:,} candidates",
        copies=16,
    ),
    "paris.rerank": Needs(
        read="B H best i32 + B H best signs + B H best magnitudes + B H best S bf16 + B Hq P f32 "
        "+ 8 f32",
        written="B H best G f32",
        products="B H best G P",
        sizes="{best:,} candidates",
        stored="B H n signs + B H n magnitudes + B H n S bf16",
    ),
    "relevance.best_ids": Needs(
        read="B H best i32 + B H best G f32",
        written="B H K i32",
        sizes="{best:,} candidates",
        copies=16,
    ),
    "higgs.encode": Needs(
        read="B H n D x",
        written="B H n coded",
        sizes="{bits} bits, groups of {together}",
        copies=16,
    ),
    "higgs.decode": Needs(
        read="B H n coded",
        written="B H n D x",
        sizes="{bits} bits, groups of {together}",
        copies=16,
    ),
    "higgs.gather_attention": Needs(
        read="B H K i32 + 2 B H K coded + B Hq D x",
        written="B Hq D f32 + B Hq f32",
        products="2 B Hq K D",
        sizes="{K:,} rows, {bits} bits, groups of {together}",
        stored="2 B H n coded",
        copies=64,
    ),
    "gather_attention": Needs(
        read="B H K i32 + 2 B H K D x + B Hq D x",
        written="B Hq D f32 + B Hq f32",
        products="2 B Hq K D",
        sizes="{K:,} rows",
        stored="2 B H n D x",
    ),
    "gather_scores": Needs(
        read="B H K i32 + B H K D x + B Hq D x",
        written="B Hq K f32",
        products="B Hq K D",
        sizes="{K:,} rows",
        stored="2 B H n D x",
    ),
    "prompt_attention": Needs(
        read="2 B H n D x + B Hq D x + B n",
        written="B Hq D f32 + B Hq f32",
        products="2 B Hq n D",
    ),
    "codebook.encode": Needs(
        read="B H n D f32 + H C D bf16 + H C f32",
        written="B H n i16",
        products="B H n C D",
        sizes="{C:,} codewords",
    ),
    "codebook.score_table": Needs(
        read="B Hq D f32 + H C D bf16",
        written="B Hq C f32",
        products="B Hq C D",
        sizes="{C:,} codewords",
    ),
    "codebook.lookup": Needs(
        read="B Hq C f32 + B H n i16 + B n",
        written="B Hq n f32",
        sizes="{C:,} codewords",
    ),
    "codebook.lookup_scores": Needs(
        read="B Hq C f32 + B H n i16 + B n",
        written="B H n f32",
        sizes="{C:,} codewords",
    ),
    "proxy.top_indices": Needs(
        read="B H n r bf16 + B Hq r f32 + B n",
        written="B H K i32",
        products="B Hq n r",
        sizes="rank {r}",
        copies=8,
    ),
    "top_k": Needs(read="B H n f32", written="B H K i32", sizes="top {K:,}"),
    "centroid.top_keys": Needs(
        read="B H n D x + B H L G D x + B n",
        written="B H L listed i32",
        products="B H L G n D",
        sizes="{L:,} lists of {listed:,}",
    ),
    "centroid.similarity": Needs(
        read="B H G D x + B H L G D x + B H L G f32",
        written="B H L f32",
        products="B H L G D",
        sizes="{L:,} centroids",
    ),
}
"""By the names of the catalog; for others, their time is that of other operations' bytes."""
