"""What ``bench kernels`` knows of an operation: its floor, how to call and check it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_inputs import Draw, KernelShape

from hf_kvret_kernels.host_attention import why_not

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
    """An operation of ``hf_kvret_kernels`` as ``bench kernels`` measures it.

    Attributes:
        name: on the command line, the folder first.
        read, written: bytes that a call needs, as ``KernelShape.count`` takes them; see ``Work``.
        products: its multiply-adds.
        inputs: draws inputs; what it returns takes ``backend`` and returns one tensor or several.
        check: the error of a way against plain torch, and the largest that rounding explains, maybe
            by dtype.
        error_of: makes the error of what ``inputs`` returned, where it depends on the inputs.
        sizes: what else the work depends on, for the table, as ``KernelShape.tell`` takes it.
        stored: bytes that lie in memory too, as a store of which a call reads some rows.
        copies: as many times its inputs and outputs a call may hold in memory, about; the way in
            torch needs the most.
        compiled: whether the compiled library has it, for CPU tensors.
    """

    name: str
    read: str
    written: str
    products: str = "0"
    inputs: Callable[[KernelShape, Draw], Callable[..., Any]]
    check: tuple[Error, float | Mapping[torch.dtype, float]]
    error_of: Callable[[Any], Error] | None = None
    sizes: str = ""
    stored: str = "0"
    copies: int = 4
    compiled: bool = False

    def work(self, shape: KernelShape) -> Work:
        """The bytes and multiply-adds that a call needs."""
        return Work(*map(shape.count, (self.read, self.written, self.products)))

    def held_bytes(self, shape: KernelShape) -> int:
        """Memory that a call takes with its inputs, about."""
        return self.copies * self.work(shape).moved_bytes + shape.count(self.stored)

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
