"""From keys to codes: the shared rotation, encoding and its inverse (ParisKV, section 4.1)."""

from __future__ import annotations

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import FLOATS, check_no_grad, check_tensor, run
from hf_kvret_kernels.paris import naive
from hf_kvret_kernels.paris.codes import (
    LEVELS,
    ParisCodes,
    check_codes,
    check_rotated,
    check_signs_of,
    rotation_stride,
)


def random_signs(dim: int, seed: int) -> torch.Tensor:
    """``[dim]`` fp32 on the CPU, each +1 or -1: the same for a seed on every machine.

    Args:
        dim: P, see ``rotated_dim``. Blocks take the signs one after the other.
        seed: of a generator of its own; torch's global state is left alone.
    """
    check_rotated("signs", dim)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(0, 2, (dim,), generator=generator, device="cpu").float() * 2 - 1


def scaled_signs(signs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """``[..., P]`` fp32 that turn a vector as ``signs [P]`` turn it times ``factors [..., D]``."""
    dim = len(signs)
    padded = torch.nn.functional.pad(factors, (0, dim - factors.shape[-1]), value=1.0)
    order = torch.arange(dim, device=signs.device) * rotation_stride(dim) % dim
    return signs * padded.index_select(-1, order)


def encode(
    keys: torch.Tensor,
    signs: torch.Tensor,
    levels: torch.Tensor,
    *,
    out: ParisCodes | None = None,
    backend: str = "auto",
) -> ParisCodes:
    """Codes of ``keys``; ``out`` itself where it is given, then written in place.

    With ``x`` the rotated key and per subspace ``r = |x_b|``, ``u = x_b / r``,
    ``v = sign(u) * nearest level of |u|``: the weight is ``r / alpha`` with
    ``alpha = <v, u>`` (eq. 7 and 9; normalizing the key first and multiplying by its norm
    afterwards, as the paper writes it, is the same number). Then ``<u, q>`` is estimated by
    ``<v, q> / alpha`` (eq. 8). A zero key, or a zero subspace, gets weight 0 and no NaN.
    Ours: weights are kept in eight bits (``code_weights``).

    Args:
        keys: ``[B, H, n, D]`` fp32, bf16 or fp16, any strides, n may be 0.
        signs: ``[P]`` fp32 of ``random_signs``, P as of ``rotate``.
        levels: ``[8]`` fp32 ascending, of ``magnitude_levels()``.
        out: views of n tokens to write, laid out as ``ParisCodes`` says.
        backend: "auto", "naive", "triton", or "cpp" for the compiled library, which "auto" takes on
            a CPU where there is one. Backends round in different orders, so a number that lies
            between two levels, or is nearly 0, may get another code.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit, or gradients are asked for.
    """
    check_no_grad(keys=keys)
    check_tensor("keys", keys, (None, None, None, None), FLOATS, keys.device)
    batch, heads, length, head_dim = keys.shape
    dim = check_signs_of(signs, head_dim, keys.device)
    check_tensor("levels", levels, (LEVELS,), [torch.float32], keys.device)
    if out is None:
        out = ParisCodes.empty(batch, heads, length, dim, device=keys.device)
    elif tuple(out.sign.shape[:3]) != (batch, heads, length):
        raise ValueError(
            f"out has room for {tuple(out.sign.shape[:3])} keys (B, H, n), there are "
            f"{(batch, heads, length)}; pass out.tokens(start, start + n)"
        )
    check_codes(out, dim, keys.device)
    if keys.is_meta:
        # There is nothing to write.
        return out
    if host_library.is_asked(backend, keys):
        planes = out.sign, out.record
        host_library.encode_paris(keys, signs, levels, planes, rotation_stride(dim))
    else:
        arguments = keys, signs, levels, out
        run(__package__, "encode", backend, *arguments, triton="triton_encode")
    return out


def decode(codes: ParisCodes, levels: torch.Tensor) -> torch.Tensor:
    """``[B, H, n, P]`` fp32: weight times dequantized direction, still rotated.

    ``<decode(codes), rotate(q)>`` is what ``rerank`` estimates ``<k, q>`` by. Plain
    torch on every device: for inspection and tests, not for the decode step.
    """
    device = codes.sign.device
    dim = codes.sign.shape[-1] * 8
    check_rotated("codes.sign", dim)
    check_codes(codes, dim, device)
    check_tensor("levels", levels, (LEVELS,), [torch.float32], device)
    return naive.decode(codes, levels)


# The authors' table (0.0420, 0.1266, ...) stops a little early.
_LEVELS = (
    *(0.0425086729, 0.128043666, 0.215201244, 0.305323839),
    *(0.400271297, 0.503022075, 0.619347692, 0.764835119),
)


def magnitude_levels() -> torch.Tensor:
    """``[8]`` fp32 on the CPU, ascending in (0, 1): levels for ``|u_j|``.

    ``u`` is uniform on the unit sphere of ``R^m``, m = 8, so that ``u_j`` has a density
    proportional to ``(1 - x^2)^((m - 3) / 2)`` (ParisKV, proposition 4.1, eq. 12). Among all
    quantizers with 8 levels these have the least mean squared error, where Lloyd's iteration ends:
    a level is the mean of the magnitudes nearest to it.
    """
    return torch.tensor(_LEVELS, dtype=torch.float32, device="cpu")
