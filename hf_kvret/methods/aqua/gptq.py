"""Matrices of predictors in 4 bits: GPTQ.

Frantar et al., *GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers*
(2022), section 3. Columns are rounded one after the other; the error of a column is compensated by
those not rounded yet, as far as inputs are correlated. The Gram matrix is that of the ridge
regression, so rounding minimizes the same loss as the regression.
"""

from __future__ import annotations

import torch

BITS = 4
GROUP = 128
"""Most columns that share a scale; fewer where it does not divide their number."""

_TOP = 2**BITS - 1


def pack_matrix(
    matrix: torch.Tensor, gram: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(codes uint8 [a, b / 2], scale fp16 [a, b / g], low fp16 [a, b / g])`` of a matrix.

    Element ``[i, j]`` is ``low[i, j // g] + scale[i, j // g] * code[i, j]``; codes of columns 2j
    and 2j + 1 are in the low and the high half of byte j; g is the largest power of two up to
    ``GROUP`` that divides b.

    Args:
        matrix: ``[a, b]`` fp64, b even.
        gram: ``[b, b]`` fp64, second moments of the matrix's inputs, positive definite but for
            rounding.

    Raises:
        ValueError: an odd number of columns.
    """
    a, b = matrix.shape
    if b % 2:
        raise ValueError(f"a predictor with {b} inputs: two 4-bit codes share a byte, use 16 bits")
    group = min(GROUP, b & -b)
    spread = _spread(gram)
    rest, codes = matrix.clone(), torch.empty_like(matrix)
    scales, lows = [], []
    for start in range(0, b, group):
        end = start + group
        block = rest[:, start:end]
        low = block.amin(1).half().double()
        scale = ((block.amax(1) - low) / _TOP).half().double()
        errors = torch.zeros_like(block)
        for n, column in enumerate(range(start, end)):
            code = ((block[:, n] - low) / scale.where(scale > 0, 1.0)).round().clamp(0, _TOP)
            codes[:, column] = code
            errors[:, n] = (block[:, n] - low - scale * code) / spread[column, column]
            block[:, n + 1 :] -= torch.outer(errors[:, n], spread[column, column + 1 : end])
        rest[:, end:] -= errors @ spread[start:end, end:]
        scales.append(scale)
        lows.append(low)
    pairs = codes.to(torch.uint8).view(a, b // 2, 2)
    code_bytes = pairs[..., 0] | (pairs[..., 1] << BITS)
    return code_bytes, torch.stack(scales, 1).half(), torch.stack(lows, 1).half()


def unpack_matrix(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The matrix ``[a, b]`` fp32 that ``pack_matrix`` stored."""
    each = torch.stack([codes & _TOP, codes >> BITS], -1).flatten(1).float()
    groups = each.unflatten(1, (scale.shape[1], -1))
    return (low.float()[..., None] + scale.float()[..., None] * groups).flatten(1)


def _spread(gram: torch.Tensor) -> torch.Tensor:
    """How later inputs compensate the error of one: U of ``gram^-1 = U^T U``."""
    size = gram.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    # GPTQ's damping is 1e-2; the Gram matrix of a ridge regression needs much less.
    ridge_gram = gram + (1e-6 * size) * torch.eye(len(gram)).to(gram)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(ridge_gram))
    return torch.linalg.cholesky(inverse, upper=True)
