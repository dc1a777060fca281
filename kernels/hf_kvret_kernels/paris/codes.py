"""How a key's code lies in memory, and the checks that all wrappers share."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import NamedTuple

import torch

from hf_kvret_kernels._dispatch import FLOATS, check_no_grad, check_tensor

LEVELS = 8
MAX_HEAD_DIM = 1024
# Up to here vectors are padded to a power of two; above, blocks are rotated apart.
_LARGEST_PADDED = 128
# The largest weight. The code after its own stands for a key that is padding.
_MOST_WEIGHT, _PADDING = 57344.0, 247
EXCLUDED = 255
# A centroid earns at most this by similarity: two heads share a byte of the scan on a CPU.
MOST_SIMILAR = 7
# Points of a similarity of 0.
ZERO_POINTS = 3
# Least sum of exponentials of a sample without its largest, which is 1.
LEAST_OTHERS = math.exp(-10)
# A share of the keys is a whole number of millionths.
SHARE_UNIT = 1_000_000


def rotated_dim(head_dim: int) -> int:
    """P: the length of a rotated vector.

    Up to 128 the next power of two of ``max(head_dim, 8)``, above the next multiple of 8.

    Raises:
        ValueError: ``head_dim`` outside 1 to 1,024.
    """
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head dim {head_dim}: Paris codes exist for 1 to {MAX_HEAD_DIM}")
    if head_dim > _LARGEST_PADDED:
        return -(-head_dim // 8) * 8
    return max(8, 1 << (head_dim - 1).bit_length())


@functools.cache
def rotation_blocks(dim: int) -> tuple[tuple[int, int], ...]:
    """First and last + 1 element of each block of a vector of P = ``dim``, the largest first.

    Blocks are the powers of two that add up to P: 576 is 512 + 64. Each is rotated by itself.
    """
    blocks, start = [], 0
    for bit in reversed(range(dim.bit_length())):
        if dim >> bit & 1:
            blocks.append((start, start + (1 << bit)))
            start += 1 << bit
    return tuple(blocks)


@functools.cache
def rotation_stride(dim: int) -> int:
    """Element i of the blocks takes coordinate ``i * stride % dim`` of a vector of P = ``dim``.

    So each block gets its share of every part of the vector. Parts differ: a latent and a rotated
    key that lie in one row have scales of their own, and a block of one part alone would earn as
    many points a subspace as the part that decides. About the golden section of P and coprime to
    it, so that blocks take their coordinates evenly; 1 where there is one block.
    """
    if dim & (dim - 1) == 0:
        return 1
    stride = int(0.618 * dim)
    while math.gcd(stride, dim) > 1:
        stride += 1
    return stride


@dataclass(frozen=True)
class ParisCodes:
    """Codes of ``n`` keys for every batch row and kv head.

    Both planes are token-major: a token's bytes are contiguous and tokens follow each other
    without gaps, while the strides of batch and heads are free. So planes may be views
    ``[:, :, :n]`` of buffers with spare capacity. A search reads all signs, and records of
    candidates: one cache line each for 128 dims.

    Attributes:
        sign: ``[B, H, n, P // 8]`` uint8. Bit j of byte i is set where rotated coordinate
            8 i + j is not negative. Byte s is subspace s's centroid id.
        record: ``[B, H, n, P // 2]`` uint8, magnitudes and then weights. Bytes 3 i to
            3 i + 2 are, lowest first, a word whose bits 3 j to 3 j + 2 number the level of
            coordinate 8 i + j. The last S are codes of ``|k| r / alpha`` (eq. 9).
    """

    sign: torch.Tensor
    record: torch.Tensor

    @property
    def magnitude(self) -> torch.Tensor:
        """View ``[B, H, n, 3 * P // 8]`` uint8."""
        return self.record[..., : 3 * self.sign.shape[-1]]

    @property
    def weight_codes(self) -> torch.Tensor:
        """View ``[B, H, n, S]`` uint8."""
        return self.record[..., 3 * self.sign.shape[-1] :]

    @property
    def weight(self) -> torch.Tensor:
        """``[B, H, n, S]`` fp32 of ``weight_codes``."""
        return (self.weight_codes.short() << 7).view(torch.float16).float()

    def is_valid(self) -> torch.Tensor:
        """``[B, n]`` bool: which keys are no padding, see ``mark_padding``."""
        return self.weight_codes[:, 0, :, 0] != _PADDING

    def mark_padding(self, valid: torch.Tensor) -> None:
        """Mark the keys that ``valid [B, n]`` leaves out."""
        self.weight_codes.masked_fill_(~valid[:, None, :, None], _PADDING)

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        tokens: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
    ) -> ParisCodes:
        """Uninitialized codes to be written by ``encode(..., out=...)``."""
        dim = rotated_dim(head_dim)
        widths = dim // 8, dim // 2
        lead = (batch, heads, tokens)
        return cls(*(torch.empty(*lead, x, dtype=torch.uint8, device=device) for x in widths))

    def tokens(self, start: int, end: int) -> ParisCodes:
        """Views of the codes of tokens ``start`` to ``end``."""
        return ParisCodes(self.sign[:, :, start:end], self.record[:, :, start:end])

    def nbytes(self) -> int:
        """Bytes of both planes as they are seen, spare capacity left out."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))


class SearchCall(NamedTuple):
    """Arguments of ``search``: ``budget`` is its count, ``shares`` of ``selection.share_units``.

    Without shares, points are ``naive.similarity_points``.
    """

    query: torch.Tensor
    signs: torch.Tensor | None
    codes: ParisCodes
    counts: torch.Tensor
    levels: torch.Tensor
    budget: int
    survivors: int
    shares: tuple[int, ...]
    valid: torch.Tensor | None
    scale: float
    softcap: float | None
    means: torch.Tensor | None
    block_len: int
    samples: torch.Tensor | None


def code_weights(weight: torch.Tensor) -> torch.Tensor:
    """uint8 codes of fp32 weights: fp16 without its sign and its last seven bits, rounded.

    Five bits of exponent and three of mantissa: a weight is off by a sixteenth at most, where a
    coordinate's four bits are off by a tenth of its subspace's length. Negative ones are padding.
    """
    halves = weight.clamp(max=_MOST_WEIGHT).half().view(torch.int16)
    return ((halves.int() + 64) >> 7).to(torch.uint8).masked_fill_(weight < 0, _PADDING)


def check_rotated(name: str, dim: int) -> None:
    if not 8 <= dim <= MAX_HEAD_DIM or rotated_dim(dim) != dim:
        raise ValueError(
            f"{name} holds vectors of {dim} dims, which is no power of two of at least 8 and no "
            f"multiple of 8 in {_LARGEST_PADDED}..{MAX_HEAD_DIM}; rotate(x, signs) makes such "
            "vectors of any head dim"
        )


def check_signs(x: torch.Tensor, signs: torch.Tensor) -> None:
    """ValueError for vectors that can't be rotated, or not with these signs."""
    if x.dim() < 1:
        raise ValueError("x is a scalar, expected [..., D]")
    check_no_grad(x=x)
    check_tensor("x", x, x.shape, FLOATS, x.device)
    check_signs_of(signs, x.shape[-1], x.device)


def check_signs_of(signs: torch.Tensor, head_dim: int, device: torch.device) -> int:
    """P of signs that rotate vectors of ``head_dim``; ValueError where they are none."""
    dim = rotated_dim(head_dim)
    check_tensor("signs", signs, (dim,), [torch.float32], device)
    return dim


def check_rows(name: str, plane: torch.Tensor) -> None:
    """The token-major layout that the kernels read and write."""
    width = plane.shape[-1]
    if plane.shape[2] > 0 and (
        (width > 1 and plane.stride(3) != 1) or (plane.shape[2] > 1 and plane.stride(2) != width)
    ):
        raise ValueError(
            f"{name} has strides {plane.stride()} for shape {tuple(plane.shape)}; tokens must be "
            "contiguous (slice whole tokens off a [B, H, capacity, width] buffer)"
        )


def check_codes(codes: ParisCodes, dim: int, device: torch.device) -> None:
    lead = tuple(codes.sign.shape[:3])
    check_tensor("codes.sign", codes.sign, (None, None, None, dim // 8), [torch.uint8], device)
    check_tensor("codes.record", codes.record, (*lead, dim // 2), [torch.uint8], device)
    for field in fields(codes):
        check_rows(f"codes.{field.name}", getattr(codes, field.name))


def most_points(shares: Sequence[int], counts: torch.Tensor) -> int:
    """The highest score there can be: a point a tier in each subspace, or by similarity."""
    return (len(shares) or MOST_SIMILAR) * counts.shape[2]


@functools.cache
def points_of_product(shares: tuple[int, ...]) -> float:
    """How many points a product with a mean key is worth, over ``naive.similarity_scale``.

    For rotated keys without their means, whose numbers have a root mean square of 1. If all were as
    long, and no points were cut off, a product of 1 would be worth a similarity of 1.25. With 0.8
    more of a model's top-k is found. Points by rank rise with a similarity as the densities at
    their shares say, as if similarities were normal; 1.4 makes both alike.
    """
    if not shares:
        return 0.8
    normal, parts = NormalDist(), (share / SHARE_UNIT for share in shares)
    slopes = [normal.pdf(normal.inv_cdf(part)) for part in parts if 0 < part < 1]
    return 1.4 * sum(slopes) / math.sqrt(8)


def log_of_share(call: SearchCall) -> float:
    """What is added to a log-sum-exp of samples without one, for ``naive.least_logs``.

    Shares of a selection begin at e^-2 of an equal one, or at one of all tokens. Without samples
    less of the top-k of models is found, and without the 2 long queries take the candidates of
    others.
    """
    others = 1 if call.samples is None else max(1, call.samples.shape[2] - 1)
    return max(0.0, math.log(call.codes.sign.shape[2] / call.budget) - 2) - math.log(others)


def has_similarities(subspaces: int) -> bool:
    """Whether keys of so many subspaces may get points by similarity."""
    return MOST_SIMILAR * subspaces < EXCLUDED
