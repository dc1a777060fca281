"""From keys to codes: the shared rotation, encoding and its inverse (ParisKV, section 4.1)."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

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
    check_subspace_dim,
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
    m: int = 8,
    mean: torch.Tensor | None = None,
    out: ParisCodes | None = None,
    backend: str = "auto",
) -> ParisCodes:
    """Codes of ``keys``; ``out`` itself where it is given, then written in place.

    With ``x`` the rotated ``k - mean`` and per subspace ``r = |x_b|``, ``u = x_b / r``,
    ``v = sign(u) * nearest level of |u|``: the weight is ``r / alpha`` with
    ``alpha = <v, u>`` (eq. 7 and 9; normalizing the key first and multiplying by its norm
    afterwards, as the paper writes it, is the same number). Then ``<u, q>`` is estimated by
    ``<v, q> / alpha`` (eq. 8). A zero key, or a zero subspace, gets weight 0 and no NaN.
    Ours: weights are kept in eight bits (``code_weights``), and a mean key per head is subtracted.
    The mean shifts all scores of a query by one constant, so the ranking stays, and directions
    spread out where keys share a large common part.

    Args:
        keys: ``[B, H, n, D]`` fp32, bf16 or fp16, any strides, n may be 0.
        signs: ``[P]`` fp32 of ``random_signs``, P as of ``rotate``.
        levels: ``[8]`` fp32 ascending, of ``magnitude_levels(m)``.
        m: coordinates of a subspace, 4 or 8.
        mean: ``[B, H, D]`` fp32 to subtract from every key of the head, or None.
        out: views of n tokens to write, laid out as ``ParisCodes`` says.
        backend: "auto", "naive", "triton", or "cpp" for the compiled library, which "auto" takes on
            a CPU where there is one. Backends round in different orders, so a number that lies
            between two levels, or is nearly 0, may get another code.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit, or gradients are asked for.
    """
    check_subspace_dim(m)
    check_no_grad(keys=keys)
    check_tensor("keys", keys, (None, None, None, None), FLOATS, keys.device)
    batch, heads, length, head_dim = keys.shape
    dim = check_signs_of(signs, head_dim, keys.device)
    check_tensor("levels", levels, (LEVELS,), [torch.float32], keys.device)
    if mean is not None:
        check_tensor("mean", mean, (batch, heads, head_dim), [torch.float32], keys.device)
    if out is None:
        out = ParisCodes.empty(batch, heads, length, dim, m=m, device=keys.device)
    elif tuple(out.sign.shape[:3]) != (batch, heads, length):
        raise ValueError(
            f"out has room for {tuple(out.sign.shape[:3])} keys (B, H, n), there are "
            f"{(batch, heads, length)}; pass out.tokens(start, start + n)"
        )
    check_codes(out, dim, m, keys.device)
    if keys.is_meta:
        # There is nothing to write.
        return out
    if host_library.is_asked(backend, keys):
        planes = out.sign, out.record
        host_library.encode_paris(keys, signs, levels, m, mean, planes, rotation_stride(dim))
    else:
        arguments = keys, signs, levels, m, mean, out
        run(__package__, "encode", backend, *arguments, triton="triton_encode")
    return out


def decode(codes: ParisCodes, levels: torch.Tensor, *, m: int = 8) -> torch.Tensor:
    """``[B, H, n, P]`` fp32: weight times dequantized direction, still rotated.

    ``<decode(codes), rotate(q)>`` is what ``rerank`` estimates ``<k - mean, q>`` by. Plain
    torch on every device: for inspection and tests, not for the decode step.
    """
    check_subspace_dim(m)
    device = codes.sign.device
    dim = codes.sign.shape[-1] * 8
    check_rotated("codes.sign", dim)
    check_codes(codes, dim, m, device)
    check_tensor("levels", levels, (LEVELS,), [torch.float32], device)
    return naive.decode(codes, levels, m)


_GRID = 1 << 16
_MAX_ROUNDS = 20_000
_TOLERANCE = 1e-9


def magnitude_levels(m: int, count: int = 8) -> torch.Tensor:
    """``[count]`` fp32 on the CPU, ascending in (0, 1): levels for ``|u_j|``.

    ``u`` is uniform on the unit sphere of ``R^m``, so that ``u_j`` has a density proportional
    to ``(1 - x^2)^((m - 3) / 2)`` (ParisKV, proposition 4.1, eq. 12). Among all quantizers
    with ``count`` levels these have the least mean squared error; a magnitude belongs to the
    nearest level, so the boundaries are the midpoints. Converged here, where the authors'
    table (0.0420, 0.1266, ... for m = 8) stops a little early.

    Raises:
        ValueError: ``m`` below 3 (the density has a pole at 1) or ``count`` below 1.
    """
    if m < 3:
        raise ValueError(f"m={m}: subspaces of at least 3 coordinates have such levels")
    if count < 1:
        raise ValueError(f"count={count}: at least one level is needed")
    # Whatever a user has made torch's default device.
    with torch.device("cpu"):
        return _converged_levels(m, count).clone()


@lru_cache(maxsize=16)
def _converged_levels(m: int, count: int) -> torch.Tensor:
    """Lloyd's iteration in fp64: levels to midpoints to the means between the midpoints.

    In Python's own numbers, as there are few: calls of torch would take ten times as long.
    """
    width = 1.0 / _GRID
    centre = (torch.arange(_GRID, dtype=torch.float64) + 0.5) * width
    density = (1.0 - centre.square()).pow((m - 3) / 2)
    start = torch.zeros(1, dtype=torch.float64)
    mass = (torch.cat([start, density.cumsum(0)]) * width).tolist()
    moment = (torch.cat([start, (density * centre).cumsum(0)]) * width).tolist()

    levels = [(number + 0.5) / count for number in range(count)]
    for _ in range(_MAX_ROUNDS):
        edges = [0.0, *((low + high) / 2 for low, high in pairwise(levels)), 1.0]
        moments, masses = _differences(moment, edges), _differences(mass, edges)
        new_levels = [x / y for x, y in zip(moments, masses, strict=True)]
        change = max(abs(x - y) for x, y in zip(new_levels, levels, strict=True))
        levels = new_levels
        if change < _TOLERANCE:
            break
    return torch.tensor(levels, dtype=torch.float64).float()


def _differences(table: list[float], edges: list[float]) -> list[float]:
    """Between ``edges`` in [0, 1], of a function given on the grid and linear in between."""
    values = []
    for x in edges:
        index = min(int(x * _GRID), _GRID - 1)
        share = x * _GRID - index
        values.append(table[index] * (1 - share) + table[index + 1] * share)
    return [high - low for low, high in pairwise(values)]
