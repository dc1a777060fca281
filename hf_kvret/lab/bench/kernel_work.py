"""An operation as ``bench kernels`` knows it: sizes, random inputs, floor, call and check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.options.config import RetrievalConfig
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_kernels.host_attention import why_not
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

    def describe(self, text: str) -> str:
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
"""What ``count`` and ``describe`` know, by a letter or a word."""


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

    def chosen_rows(self, shape: KernelShape) -> tuple[torch.Tensor, PagedRows, torch.Tensor]:
        """Query, a paged store of normal rows, ids of ``top_k``."""
        table = self.pages(shape)
        sizes = (table.numel(), shape.heads, PAGE_LEN, 2 * shape.head_dim)
        chunk = self.normal(*sizes, dtype=shape.dtype)
        ids = self.ids(shape, shape.top_k)
        return self.query(shape), PagedRows([chunk], table, shape.head_dim), ids


SCORE_ERROR = 1e-3
"""Of sums of products in fp32, taken in another order."""
ATTENTION_ERRORS = {torch.float32: 1e-4, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Kernels round softmax weights to the rows' dtype before they meet the values."""

Error = Callable[[Sequence[Any], Sequence[Any]], float]
"""``(found, naive's)`` to a number, 0 for equal."""


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


@dataclass(frozen=True)
class Call:
    """An operation with its inputs.

    Attributes:
        run: takes a backend, returns a tuple of tensors.
        error: of what it returns.
        tolerance: the largest error that rounding explains.
    """

    run: Callable[[str], tuple[torch.Tensor, ...]]
    error: Error
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class KernelOp:
    """An operation of ``hf_kvret_kernels``, to be compared with plain torch and with its floor.

    Attributes:
        name: on the command line, the folder first.
        inputs: draws inputs; what it returns takes ``backend`` and returns one tensor or several.
        check: the error of a way against plain torch, and the largest that rounding explains, maybe
            by dtype.
        error_of: makes the error of what ``inputs`` returned, where it depends on the inputs.
        compiled: whether the compiled library has it, for CPU tensors.
        read, written: bytes that a call needs, as ``KernelShape.count`` takes them; see ``Work``.
            Empty for operations whose time is that of other operations' bytes.
        products: its multiply-adds.
        sizes: what else the work depends on, for the table, as ``KernelShape.describe`` takes it.
        stored: bytes that lie in memory too, as a store of which a call reads some rows.
        copies: as many times its inputs and outputs a call may hold in memory, about; the way in
            torch needs the most.
    """

    name: str
    inputs: Callable[[KernelShape, Draw], Callable[..., Any]]
    check: tuple[Error, float | Mapping[torch.dtype, float]]
    error_of: Callable[[Any], Error] | None = None
    compiled: bool = False
    read: str = ""
    written: str = ""
    products: str = "0"
    sizes: str = ""
    stored: str = "0"
    copies: int = 4

    def backends(self, device: torch.device) -> tuple[str, ...]:
        """Those that this operation has there, the one that ``"auto"`` means first."""
        if device.type == "cuda":
            return ("triton", "naive")
        return ("cpp", "naive") if self.compiled and not why_not() else ("naive",)

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        """A call with inputs of its own, and its check."""
        call, (error, allowed) = self.inputs(shape, draw), self.check
        if self.error_of is not None:
            error = self.error_of(call)
        tolerance = allowed[shape.dtype] if isinstance(allowed, Mapping) else allowed
        return Call(lambda backend: as_tuple(call(backend=backend)), error, tolerance)

    def work(self, shape: KernelShape) -> Work:
        """The bytes and multiply-adds that a call needs."""
        return Work(*map(shape.count, (self.read, self.written, self.products)))

    def held_bytes(self, shape: KernelShape) -> int:
        """Memory that a call takes with its inputs, about."""
        return self.copies * self.work(shape).moved_bytes + shape.count(self.stored)


def as_tuple(returned: Any) -> tuple[torch.Tensor, ...]:
    """What a call returned: a tensor alone as a tuple of one."""
    return (returned,) if isinstance(returned, torch.Tensor) else returned


def distance(found: Sequence[Any], want: Sequence[Any]) -> float:
    """Root mean square of the difference over that of what is wanted: the worst row of any tensor.

    Infinite where infinities or NaN stand in other places.
    """
    worst = 0.0
    for one, other in zip(found, want, strict=True):
        finite = other.isfinite()
        if one.shape != other.shape or not torch.equal(finite, one.isfinite()):
            return float("inf")
        off = (one.float() - other.float()).masked_fill(~finite, 0.0).square().mean(-1)
        size = other.float().masked_fill(~finite, 0.0).square().mean(-1)
        worst = max(worst, (off / size.clamp_min(1e-30)).sqrt().max().item())
    return worst


def unequal(found: Sequence[Any], want: Sequence[Any]) -> float:
    """Share of elements that differ, of the tensor in which most do."""
    return max(
        (one != other).float().mean().item() if one.shape == other.shape else float("inf")
        for one, other in zip(found, want, strict=True)
    )


def not_shared(found: Sequence[Any], want: Sequence[Any]) -> float:
    """Share of the ids of ``want [..., K]`` that the same row of ``found [..., K]`` lacks."""
    (one,), (other,) = found, want
    if one.shape != other.shape:
        return float("inf")
    own = one.sort(dim=-1).values
    place = torch.searchsorted(own, other).clamp(max=own.shape[-1] - 1)
    return (own.gather(-1, place) != other).float().mean().item()
