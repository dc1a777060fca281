"""How a key's code lies in memory, and the checks that all wrappers share."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from hf_kvret_kernels._dispatch import FLOATS, check_no_grad, check_tensor

SUBSPACE_DIMS = (4, 8)
LEVELS = 8
MAX_HEAD_DIM = 1024
# Up to here vectors are padded to a power of two; above, blocks are rotated apart.
_LARGEST_PADDED = 128
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXCLUDED = 255


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

    Every plane is token-major: a token's bytes are contiguous and tokens follow each other
    without gaps, while the strides of batch and heads are free. So planes may be views
    ``[:, :, :n]`` of buffers with spare capacity.

    Attributes:
        sign: ``[B, H, n, P // 8]`` uint8. Bit j of byte i is set where rotated coordinate
            8 i + j is not negative. With m = 8, byte s is subspace s's centroid id; with
            m = 4 a byte holds two, the lower subspace in the low nibble.
        magnitude: ``[B, H, n, 3 * P // 8]`` uint8. Bytes 3 i to 3 i + 2 are, lowest first, a
            word whose bits 3 j to 3 j + 2 number the level of coordinate 8 i + j.
        weight: ``[B, H, n, S]`` bf16, fp16 or fp32: ``|k| r / alpha`` of eq. 9.
    """

    sign: torch.Tensor
    magnitude: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        tokens: int,
        head_dim: int,
        *,
        m: int = 8,
        weight_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> ParisCodes:
        """Uninitialized codes to be written by ``encode(..., out=...)``."""
        dim = rotated_dim(head_dim)
        check_subspace_dim(m)
        if weight_dtype not in WEIGHT_DTYPES:
            raise ValueError(f"weight_dtype={weight_dtype}: choose one of {WEIGHT_DTYPES}")
        lead = (batch, heads, tokens)
        return cls(
            sign=torch.empty(*lead, dim // 8, dtype=torch.uint8, device=device),
            magnitude=torch.empty(*lead, 3 * dim // 8, dtype=torch.uint8, device=device),
            weight=torch.empty(*lead, dim // m, dtype=weight_dtype, device=device),
        )

    def tokens(self, start: int, end: int) -> ParisCodes:
        """Views of the codes of tokens ``start`` to ``end``."""
        return ParisCodes(
            self.sign[:, :, start:end],
            self.magnitude[:, :, start:end],
            self.weight[:, :, start:end],
        )

    def nbytes(self) -> int:
        """Bytes of the three planes as they are seen, spare capacity left out."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))


def check_subspace_dim(m: int) -> None:
    if m not in SUBSPACE_DIMS:
        raise ValueError(f"m={m}: subspaces have {SUBSPACE_DIMS[0]} or {SUBSPACE_DIMS[1]} dims")


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


def check_codes(codes: ParisCodes, dim: int, m: int, device: torch.device) -> None:
    lead = tuple(codes.sign.shape[:3])
    check_tensor("codes.sign", codes.sign, (None, None, None, dim // 8), [torch.uint8], device)
    check_tensor("codes.magnitude", codes.magnitude, (*lead, 3 * dim // 8), [torch.uint8], device)
    check_tensor("codes.weight", codes.weight, (*lead, dim // m), WEIGHT_DTYPES, device)
    for field in fields(codes):
        check_rows(f"codes.{field.name}", getattr(codes, field.name))


def check_valid(valid: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    if valid is not None:
        check_tensor("valid", valid, shape, [torch.bool], device)


def most_points(shares: Sequence[int], counts: torch.Tensor) -> int:
    """The highest score there can be: a point a tier in each subspace."""
    return len(shares) * counts.shape[2]
