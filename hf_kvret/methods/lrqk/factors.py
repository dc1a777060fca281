"""Factors: linear maps that make proxies of queries and keys, and how they are found.

Everything here works on Gram matrices, G_Q = Q^T Q and G_K = K^T K of all queries and keys, which
add up over blocks of tokens. No l x r or l x l matrix is ever made. Computed in fp64: Grams of
real heads have eigenvalues over many orders of magnitude. Dimensions: F sets of factors, D head
dim, r rank; leading dimensions ``...`` are batch and sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Squared singular values below this share of the largest are rounding, not directions.
_LEAST_SQUARE = 1e-13


@dataclass(frozen=True, eq=False)
class Factors:
    """Maps of queries and keys to their proxies, ``q @ to_query`` and ``k @ to_key``.

    Both ``[..., D, r]`` fp32; the inner product of two proxies stands for that of query and key.
    """

    to_query: torch.Tensor
    to_key: torch.Tensor

    def error(self, query_gram: torch.Tensor, key_gram: torch.Tensor) -> torch.Tensor:
        """``[...]`` fp64 share of the squared scores ``|Q K^T|^2`` that proxies miss, exactly.

        With E = I - to_query to_key^T it is ``tr(G_Q E G_K E^T) / tr(G_Q G_K)``: the relative
        squared Frobenius error over all pairs of the queries and keys in the Grams. 0 where there
        are no scores.
        """
        g_q, g_k = query_gram.double(), key_gram.double()
        difference = -self.to_query.double() @ self.to_key.double().mT
        difference.diagonal(dim1=-2, dim2=-1).add_(1.0)
        loss = (g_q @ difference @ g_k * difference).sum((-2, -1)).clamp(min=0.0)
        return loss / (g_q * g_k).sum((-2, -1)).clamp(min=torch.finfo(torch.float64).tiny)


def closed_form(query_gram: torch.Tensor, key_gram: torch.Tensor, rank: int) -> Factors:
    """The factors of the best rank-r approximation of ``Q K^T``, from ``[..., D, D]`` Grams.

    With G_K = L L^T and the eigenvectors V of L^T G_Q L, whose eigenvalues are the squared
    singular values S of Q K^T: to_query = L V S^(-1/2), to_key = G_Q L V S^(-3/2), for the r
    largest. Directions without weight are left out, so that Grams may be singular.

    The paper solves for the same optimum by alternating least squares (section 4.2), with
    penalties that keep the factors close to Q and K themselves, which nothing here needs.

    Raises:
        ValueError: a Gram that is not finite.
    """
    g_q, g_k = _finite(query_gram, key_gram)
    values, vectors = torch.linalg.eigh(g_k)
    root = vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)
    squares, turns = torch.linalg.eigh(root.mT @ g_q @ root)
    squares, turns = squares[..., -rank:].flip(-1), turns[..., -rank:].flip(-1)
    mask = squares > squares[..., :1].clamp(min=0.0) * _LEAST_SQUARE
    singular = squares.masked_fill(~mask, 1.0).sqrt()
    to_query = root @ turns * singular.rsqrt().unsqueeze(-2)
    to_key = g_q @ root @ turns * singular.pow(-1.5).unsqueeze(-2)
    to_query, to_key = (
        part.masked_fill(~mask.unsqueeze(-2), 0.0).float() for part in (to_query, to_key)
    )
    return Factors(to_query, to_key)


@dataclass(frozen=True, eq=False)
class Sketch:
    """A factor A ``[l, r]`` of Q or K, known by its products alone, fp64.

    Attributes:
        cross: ``A^T Q`` (or ``A^T K``), ``[..., r, D]``.
        own: ``A^T A``, ``[..., r, r]``.
    """

    cross: torch.Tensor
    own: torch.Tensor

    @classmethod
    def of_map(cls, factor_map: torch.Tensor, gram: torch.Tensor) -> Sketch:
        """Of ``A = Q X`` with ``X [..., D, r]`` and the Gram of Q."""
        cross = factor_map.mT @ gram
        return cls(cross, cross @ factor_map)

    def basis(self) -> torch.Tensor:
        """``B = (A^T A)^-1 A^T Q``, ``[..., r, D]``: least squares of ``Q = A B`` (eq. 6)."""
        return solve(self.own, self.cross)


@dataclass(frozen=True, eq=False)
class AlternatingFactors:
    """Result of algorithm 1: A_Q = Q X_Q, A_K = K X_K, and B_Q, B_K fitted to them.

    ``to_query``, ``to_key`` ``[..., D, r]`` are X_Q, X_K; ``query_basis``, ``key_basis``
    ``[..., r, D]`` are B_Q, B_K; all fp32.
    """

    to_query: torch.Tensor
    to_key: torch.Tensor
    query_basis: torch.Tensor
    key_basis: torch.Tensor


def alternating(
    query_gram: torch.Tensor,
    key_gram: torch.Tensor,
    query_start: Sketch,
    key_start: Sketch,
    iterations: int,
    penalty: float,
) -> AlternatingFactors:
    """Algorithm 1: ``iterations`` rounds of B_Q, B_K, A_K, A_Q (eq. 6), then B_Q, B_K once more.

    Each update needs A_Q and A_K by their products with Q, K and themselves only, and gives
    A_K = K X_K: so Grams are enough, and l doesn't matter. B is refitted at the end, as the
    authors' code does, because decoding starts from it. A fixed number of rounds stands for the
    paper's tolerance, which may stop earlier.
    """
    g_q, g_k = _finite(query_gram, key_gram)
    a_q, a_k = query_start, key_start
    to_query = to_key = g_q.new_empty(0)
    for _ in range(iterations):
        b_q, b_k = a_q.basis(), a_k.basis()
        to_key = _update(a_q, b_k, penalty)
        a_k = Sketch.of_map(to_key, g_k)
        to_query = _update(a_k, b_q, penalty)
        a_q = Sketch.of_map(to_query, g_q)
    return AlternatingFactors(
        to_query.float(), to_key.float(), a_q.basis().float(), a_k.basis().float()
    )


def _update(other: Sketch, basis: torch.Tensor, penalty: float) -> torch.Tensor:
    """X ``[..., D, r]`` of eq. 6: (C^T + penalty B^T)(M + penalty B B^T)^-1."""
    numerator = other.cross.mT + penalty * basis.mT
    return solve(other.own + penalty * basis @ basis.mT, numerator.mT).mT


def _finite(*grams: torch.Tensor) -> list[torch.Tensor]:
    """The same in fp64, after one wait for the device. ValueError where one is not finite."""
    doubles = [gram.double() for gram in grams]
    # In fp64 a sum of finite numbers of a Gram stays finite.
    if not bool(torch.isfinite(torch.stack([gram.abs().sum() for gram in doubles]).sum())):
        raise ValueError(
            "queries or keys of this layer are NaN or infinite, or too large for sums of squares "
            "in fp32, so lrqk has no factors for them: run the model in bfloat16 or float32 rather "
            "than float16, or use cache_implementation='paris'"
        )
    return doubles


def solve(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``matrix^-1 @ right`` for symmetric, positive ``[..., r, r]``; never waits for the device.

    A ridge of 1e-12 of the mean diagonal entry (1e-6 in fp32) makes singular matrices solvable.
    """
    r = matrix.shape[-1]
    share = 1e-12 if matrix.dtype == torch.float64 else 1e-6
    ridge = matrix.diagonal(dim1=-2, dim2=-1).mean(-1) * share
    ridge = ridge.clamp(min=torch.finfo(matrix.dtype).tiny)
    eye = torch.eye(r, dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve_ex(matrix + ridge[..., None, None] * eye, right).result
