"""What ``bench kernels`` knows of an operation: its sizes, its floor, how to call and check it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


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
    codewords: int
    rank: int

    @property
    def query_heads(self) -> int:
        """Hq."""
        return self.heads * self.group

    @property
    def all_heads(self) -> int:
        """KV heads of all sequences, B * H."""
        return self.batch * self.heads

    @property
    def scale(self) -> float:
        """Factor of the dot products."""
        return self.head_dim**-0.5

    def vectors(self, count: int) -> int:
        """Bytes of ``count`` vectors of the head dim in ``dtype``."""
        return count * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Rates:
    """What the machine reached in this run.

    Attributes:
        bandwidth: bytes a second, read or written.
        products: multiply-adds a second of matrix products, by dtype.
    """

    bandwidth: float
    products: Mapping[str, float]

    @property
    def best_products(self) -> float:
        """Of the quickest dtype."""
        return max(self.products.values())


@dataclass(frozen=True)
class Work:
    """What no way to compute an operation can do without.

    Every input byte that matters is read once, every output byte written once; what is kept
    between, or read again, is a way's own affair.

    Attributes:
        read_bytes, written_bytes: see the operation's ``work``.
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
        """The floor by multiply-adds."""
        return self.multiply_adds / rates.best_products

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
        error: ``(found, naive's)`` to a number, 0 for equal.
        tolerance: the largest error that rounding explains.
    """

    run: Callable[[str], tuple[torch.Tensor, ...]]
    error: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]
    tolerance: float


class Draw:
    """Random inputs on a device, the same for a seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self._generator, dtype=dtype, device=self.device)

    def integers(self, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """From 0 to ``high - 1``, all alike."""
        return torch.randint(
            high, shape, generator=self._generator, dtype=dtype, device=self.device
        )

    def tokens(self, length: int, lead: tuple[int, ...], count: int) -> torch.Tensor:
        """``[*lead, count]`` int32: distinct numbers below ``length`` in random order, each row
        others."""
        ids = torch.empty(*lead, count, dtype=torch.int32, device=self.device)
        for row in ids.view(-1, count):
            order = torch.randperm(length, generator=self._generator, device=self.device)
            row.copy_(order[:count])
        return ids

    def all_valid(self, shape: KernelShape) -> torch.Tensor:
        """``[B, n]`` bool: a batch without padding."""
        return torch.ones(shape.batch, shape.length, dtype=torch.bool, device=self.device)


class KernelOp(ABC):
    """An operation of ``hf_kvret_kernels`` as ``bench kernels`` measures it.

    Attributes:
        name: on the command line, the folder first.
        copies: as many times its inputs and outputs a call may hold in memory, about; the way in
            torch needs the most.
    """

    name: ClassVar[str]
    copies: ClassVar[int] = 4

    @abstractmethod
    def work(self, shape: KernelShape) -> Work:
        """The bytes and multiply-adds that a call needs; the docstring says which."""

    @abstractmethod
    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        """A call with inputs of its own."""

    def sizes(self, shape: KernelShape) -> str:
        """What else the work depends on, for the table; empty for nothing."""
        return ""

    def held_bytes(self, shape: KernelShape) -> int:
        """Memory that a call takes with its inputs, about."""
        return self.copies * self.work(shape).moved_bytes

    def backends(self, device: torch.device) -> tuple[str, ...]:
        """Those that this operation has there, the one that ``"auto"`` means first."""
        return ("triton", "naive") if device.type == "cuda" else ("naive",)


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
    """Share of the ids of ``want [..., K]`` that the same row of ``found`` lacks; distinct ids."""
    (one,), (other,) = found, want
    if one.shape != other.shape:
        return float("inf")
    both = torch.cat([one, other], dim=-1).sort(dim=-1).values
    pairs = (both[..., 1:] == both[..., :-1]).sum()
    return 1.0 - pairs.item() / other.numel()
