"""The bytes and multiply-adds of each operation, and the sizes that methods give it by default."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret_kernels.catalog import HIGGS_BITS, KernelShape
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
        tiers=_PARIS.tiers_for(rotated_dim(head_dim) // 8),
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
    "S": lambda s: s.rotated_dim // 8,
    "patterns": lambda s: 256,
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
    **dict.fromkeys(("f32", "i32"), lambda s: 4),
    **dict.fromkeys(("bf16", "i16"), lambda s: 2),
}
"""What ``count`` and ``describe`` know, by a letter or a word."""


def count(shape: KernelShape, terms: str) -> int:
    """A sum of products of numbers and ``SIZES``: ``"B H n D f32 + B n"`` are bytes of keys in
    fp32 and of a mask."""

    def size(word: str) -> int:
        return SIZES[word](shape) if word in SIZES else int(word)

    return sum(math.prod(map(size, term.split())) for term in terms.split("+"))


class Needs(NamedTuple):
    """What no way to compute an operation can do without, in the terms of ``count``.

    Every input byte that matters is read once; what is kept between, or read again, is a way's own
    affair. Every byte of the result is written once.

    Attributes:
        read: bytes.
        products: multiply-adds of its dot products; "0" where it has none. Comparisons,
            exponentials and additions without a product do not count.
        sizes: what else the work depends on, for the table, with ``SIZES`` in braces.
    """

    read: str
    products: str = "0"
    sizes: str = ""

    def describe(self, shape: KernelShape) -> str:
        """``sizes`` with numbers, as ``"rank 32"``."""
        return self.sizes.format(**{name: size(shape) for name, size in SIZES.items()})


# Rotations and transforms are additions alone, and a nearest point can be found without a product
# for each point, so these count no multiply-adds. Rows are read once for a group, and what takes
# two passes over its input is counted as if it took one. Values between gathered keys don't count.
NEEDS: dict[str, Needs] = {
    "paris.encode": Needs(read="B H n D x + B H D f32 + P f32"),
    "paris.search": Needs(
        read="B H n signs + B Hq D x + P f32 + B H S patterns i32 + B n + B H best signs "
        "+ B H best magnitudes + B H best S + 8 f32",
        products="B H best G P",
    ),
    "relevance.best_ids": Needs(read="B H best i32 + B H best G f32", sizes="{best:,} candidates"),
    "higgs.encode": Needs(read="B H n D x", sizes="{bits} bits, groups of {together}"),
    "higgs.decode": Needs(read="B H n coded", sizes="{bits} bits, groups of {together}"),
    "higgs.gather_attention": Needs(
        read="B H K i32 + 2 B H K coded + B Hq D x",
        products="2 B Hq K D",
        sizes="{K:,} rows, {bits} bits, groups of {together}",
    ),
    "gather_attention": Needs(
        read="B H K i32 + 2 B H K D x + B Hq D x", products="2 B Hq K D", sizes="{K:,} rows"
    ),
    "gather_scores": Needs(
        read="B H K i32 + B H K D x + B Hq D x", products="B Hq K D", sizes="{K:,} rows"
    ),
    "prompt_attention": Needs(read="2 B H n D x + B Hq D x + B n", products="2 B Hq n D"),
    "codebook.encode": Needs(
        read="B H n D f32 + H C D bf16 + H C f32", products="B H n C D", sizes="{C:,} codewords"
    ),
    "codebook.score_table": Needs(
        read="B Hq D f32 + H C D bf16", products="B Hq C D", sizes="{C:,} codewords"
    ),
    "codebook.lookup": Needs(read="B Hq C f32 + B H n i16 + B n", sizes="{C:,} codewords"),
    "codebook.lookup_scores": Needs(read="B Hq C f32 + B H n i16 + B n", sizes="{C:,} codewords"),
    "proxy.top_indices": Needs(
        read="B H n r + B Hq D x + B H D r f32 + B n", products="B Hq n r", sizes="rank {r}"
    ),
    "top_k": Needs(read="B H n f32", sizes="top {K:,}"),
    "centroid.top_keys": Needs(
        read="B H n D x + B H L G D x + B n",
        products="B H L G n D",
        sizes="{L:,} lists of {listed:,}",
    ),
    "centroid.similarity": Needs(
        read="B H G D x + B H L G D x + B H L G f32", products="B H L G D", sizes="{L:,} centroids"
    ),
}
"""By the names of the catalog; for others, their time is that of other operations' bytes."""
