"""Query-aware vector quantization of keys: the space in which plain k-means is query-aware.

The error of a score is ``q . (k - k~)``; its mean square over the queries is ``(k - k~) H (k -
k~)^T`` with H their second moment. With ``H = L L^T`` that is ``|z - z~|^2`` of ``z = k L``, so
k-means on z minimizes the error of scores (A2ATS, section 4.2, equations 13 to 19). Here keys are
those before RoPE, and queries are rotated to the fixed distance.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_kvret_model_patches.rope import Rope

# Added to the diagonal of H in units of its rms entry, as the authors' code does.
_RIDGE = 1e-6
# Tolerated asymmetry in units of the rms entry: fp32 sums in different orders differ.
_ASYMMETRY = 1e-3


def at_distance(query: torch.Tensor, rope: Rope, window: int) -> torch.Tensor:
    """``[B, Hq, n, D]`` fp32: queries whose dot products with keys before RoPE are the scores of
    keys ``window`` tokens back (equation 10).

    YaRN multiplies the rotated numbers of queries and of keys by its factor. Keys before RoPE don't
    have it, so these queries have it twice; numbers that RoPE leaves alone have it in neither.

    Args:
        query: ``[B, Hq, n, D]`` before RoPE, any float dtype.
        rope: that of the layer, on the same device.
        window: b, in tokens.
    """
    square_rope = replace(rope, attention_factor=rope.attention_factor**2)
    return square_rope.rotate_to(query, window, dtype=torch.float32)


def query_metric(second_moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(L, L_inverse)``, both ``[H, D, D]`` fp32 on the same device, L lower triangular.

    H is divided by the root mean square of its entries, 1e-6 is added to its diagonal, and
    ``L @ L.mT`` is the result; computed in float64.

    Args:
        second_moments: ``[H, D, D]`` fp32 or fp64, for each KV head the mean of ``q^T q`` over
            tokens and the query heads of its group. Fewer than D queries will do, where they were
            summed up in float64.

    Raises:
        ValueError: another shape or dtype, numbers that are not finite, or a head whose matrix is
            zero, not symmetric, or not positive definite with what is added.
    """
    shape = tuple(second_moments.shape)
    floats = (torch.float32, torch.float64)
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape or second_moments.dtype not in floats:
        raise ValueError(
            f"second_moments is {second_moments.dtype} {shape}: pass fp32 or fp64 [H, D, D]"
        )
    moments = second_moments.double()
    _refuse(
        ~moments.isfinite().flatten(1).all(1),
        "has NaN or infinity: leave out tokens that are padding, and sum up in float64",
    )
    size = moments.square().mean((1, 2), keepdim=True).sqrt()
    _refuse(size.flatten() == 0, "is zero: no query was seen, calibrate on a longer text")
    moments = moments / size
    _refuse(
        (moments - moments.mT).abs().amax((1, 2)) > _ASYMMETRY,
        "is not symmetric: pass the mean of q^T q, not of q^T k or of single heads' products",
    )
    moments = (moments + moments.mT) / 2
    eye = torch.eye(shape[1], dtype=torch.float64, device=moments.device)
    factor, info = torch.linalg.cholesky_ex(moments + _RIDGE * eye)
    _refuse(
        info > 0,
        "is not positive definite: sum q^T q up in float64, over more queries than D",
    )
    inverse = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return factor.float(), inverse.float()


def to_metric(keys: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``z = k L``, ``[..., H, n, D]`` fp32 (equation 15).

    Args:
        keys: ``[..., H, n, D]``, any float dtype.
        factor: L, ``[H, D, D]`` fp32 on the same device.
    """
    _check_last("keys", keys, factor)
    return keys.float() @ factor


def from_metric(z: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``k = z L^-1``, ``[..., H, n, D]`` fp32, of codewords too (equation 19).

    Args:
        z: ``[..., H, n, D]``, any float dtype.
        inverse: ``L_inverse``, ``[H, D, D]`` fp32 on the same device.
    """
    _check_last("z", z, inverse)
    return z.float() @ inverse


def score_error(
    keys: torch.Tensor, approximation: torch.Tensor, second_moments: torch.Tensor
) -> torch.Tensor:
    """``[H]`` fp32: mean squared error of scores over that of leaving the keys out.

    0 where nothing is lost, 1 where all scores would be 0 (equation 13, over the mean of ``k H
    k^T``); for held-out tokens pass their keys and the second moment of their queries.

    Args:
        keys: ``[H, n, D]`` before quantization, any float dtype.
        approximation: ``[H, n, D]`` their codewords, in the space of the keys.
        second_moments: ``[H, D, D]`` fp32 or fp64.

    Raises:
        ValueError: shapes that do not fit.
    """
    if keys.ndim != 3 or approximation.shape != keys.shape:
        raise ValueError(
            f"keys has shape {tuple(keys.shape)}, approximation {tuple(approximation.shape)}: pass "
            "both as [H, n, D]"
        )
    _check_last("keys", keys, second_moments)
    exact, metric = keys.double(), second_moments.double()
    errors = exact - approximation.double()
    loss = ((errors @ metric) * errors).sum((1, 2))
    return (loss / ((exact @ metric) * exact).sum((1, 2))).float()


def _refuse(bad: torch.Tensor, why: str) -> None:
    if bad.any():
        heads = bad.nonzero()[:, 0].tolist()
        raise ValueError(f"second_moments of head {', '.join(map(str, heads))} {why}")


def _check_last(name: str, x: torch.Tensor, matrices: torch.Tensor) -> None:
    H, D = matrices.shape[0], matrices.shape[-1]
    if x.ndim < 3 or x.shape[-3] != H or x.shape[-1] != D:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: pass [..., {H}, n, {D}]")
