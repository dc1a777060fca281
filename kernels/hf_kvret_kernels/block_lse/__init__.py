"""How much of a query's attention lies on each block of keys."""

from __future__ import annotations

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import DenseCall, run

__all__ = ["BLOCKS", "block_lse"]

BLOCKS = (16, 32, 64, 128)
"""Tokens that a block may have."""


def block_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    block: int,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Log-sum-exp of a query's scores in each block of keys: ``[B, Hq, Q, ceil(T / block)]`` fp32.

    Args:
        query: ``[B, Hq, Q, D]``; key ``[B, Hkv, T, D]``; as of ``prompt_attention``.
        positions: ``[B, Q]`` int64, the last key that a query sees.
        scale: factor of the dot products.
        block: keys of a block, one of ``BLOCKS``.
        valid: ``[B, T]`` bool, False for padding and holes; None: all are valid.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        backend: ``"auto"``, ``"naive"``, ``"cpp"`` (the compiled library, on a CPU) or
            ``"triton"``.

    Returns:
        Natural logarithms; -inf where a query sees no key of a block. Sums are fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend, gradients.
        ImportError: ``"triton"`` without Triton, or ``"cpp"`` without the library.
        MemoryError: ``"cpp"`` has no room for its work space.
    """
    call = DenseCall(query, key, key, scale, None, valid, softcap).check()
    size = len(query), query.shape[2]
    fits = positions.shape == size and positions.device == query.device
    if not fits or positions.dtype != torch.int64 or block not in BLOCKS:
        raise ValueError(
            f"positions is {positions.dtype} {tuple(positions.shape)} on {positions.device} and "
            f"block {block}: pass int64 {list(size)} on {query.device}, and one of "
            f"{', '.join(map(str, BLOCKS))}"
        )
    if host_library.is_asked(backend, query):
        return host_library.sum_blocks(call, positions, block)
    return run(__name__, "block_lse", backend, call, positions, block, on=query)
