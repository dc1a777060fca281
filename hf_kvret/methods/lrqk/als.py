"""The published alternation: algorithm 1 from a random start, and a step of algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from hf_kvret.contracts.state import State, tensor
from hf_kvret.methods.lrqk.factors import finite, float_chunks

_FP32 = torch.float32


@dataclass(frozen=True, eq=False)
class Sketch:
    """A factor A ``[l, r]`` of Q or K, described by its products alone.

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

    @classmethod
    def of_rows(cls, factor: torch.Tensor, rows: torch.Tensor) -> Sketch:
        """Of A = ``factor [..., l, r]`` and K = ``rows [..., l, D]`` in fp32."""
        factor, rows = factor.float(), rows.float()
        return cls((rows.mT @ factor).mT, factor.mT @ factor)

    def plus(self, other: Sketch) -> Sketch:
        """Of the rows of both."""
        return Sketch(self.cross + other.cross, self.own + other.own)

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
    A_K = K X_K: so Grams are enough. B is refitted at the end, as the authors' code does, because
    decoding starts from it.
    """
    g_q, g_k = finite(query_gram, key_gram)
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


class RandomSource(State):
    """A seeded sequence of random numbers; forks and loaded copies continue it.

    Attributes:
        state: of torch's generator on the CPU; None before the first draw.
    """

    state: torch.Tensor | None = tensor(batched=False, shared=True)

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """``N(0, 1)`` on the CPU, whatever device and dtype are the defaults."""
        generator = torch.Generator().manual_seed(self._seed)
        if self.state is not None:
            generator.set_state(self.state)
        draw = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        self.state = generator.get_state()
        return draw

    def loaded(self) -> None:
        assert self.state is not None, "it is loaded"
        self.state = self.state.cpu()


class Moments(State):
    """Running sums over the rows of Q, or of K, of each query head, fp32.

    Attributes:
        gram: ``[B, Hq, D, D]``.
        cross, own: the products of a random A ~ N(0, 1) with the rows and with itself (eq. 22).
    """

    gram: torch.Tensor | None = tensor(shared=True, dims="B Q D D", dtype=_FP32)
    cross: torch.Tensor | None = tensor(shared=True, dims="B Q r D", dtype=_FP32)
    own: torch.Tensor | None = tensor(shared=True, dims="B Q r r", dtype=_FP32)

    def add(self, rows: torch.Tensor, rank: int, source: RandomSource) -> None:
        """Add ``rows [B, Hq, n, D]``, zeros for padding; A has ``rank`` columns."""
        for chunk in float_chunks(rows, None):
            start = source.normal((*chunk.shape[:3], rank)).to(chunk.device)
            start = start * (chunk != 0).any(-1, keepdim=True)
            products = {
                "gram": chunk.mT @ chunk,
                "cross": start.mT @ chunk,
                "own": start.mT @ start,
            }
            for name, product in products.items():
                total = getattr(self, name)
                setattr(self, name, product if total is None else total + product)

    def start(self) -> Sketch:
        """The sketch of the random A."""
        assert self.cross is not None and self.own is not None, "rows were added"
        return Sketch(self.cross.double(), self.own.double())


@dataclass(frozen=True, eq=False)
class Bases:
    """B_Q and B_K, ``[B, Hq, r, D]`` fp32: they map proxies back to queries and keys."""

    query: torch.Tensor
    key: torch.Tensor

    def guess(self, keys: torch.Tensor) -> torch.Tensor:
        """Proxies ``[B, Hq, n, r]`` of ``keys [B, Hkv, n, D]``: k B_K^T (B_K B_K^T)^-1."""
        keys = keys.repeat_interleave(self.key.shape[1] // keys.shape[1], dim=1)
        return solve(self.key @ self.key.mT, self.key @ keys.float().mT).mT

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        omega: Sketch | None,
        iterations: int,
        penalty: float,
    ) -> tuple[torch.Tensor, torch.Tensor, Self]:
        """One token's proxies, and the bases after it (eq. 9 to 12).

        Args:
            query, key: ``[B, Hq, D]`` fp32.
            omega: of the keys on the device in the step before (Omega, eq. 7) and their proxies;
                None when nothing was selected yet.
            iterations: rounds.
            penalty: lambda_d1 and lambda_d2.

        Returns:
            ``q_hat, k_hat [B, Hq, r]`` fp32, and the new bases.
        """
        q, k = query.unsqueeze(2), key.unsqueeze(2)
        dots = (q * k).sum(-1, keepdim=True)
        own_q, own_k = self.query @ self.query.mT, self.key @ self.key.mT
        from_q, from_k = q @ self.query.mT, k @ self.key.mT
        if omega is not None:
            own_q = own_q + penalty * omega.own
            from_q = from_q + penalty * q @ omega.cross.mT
        k_hat = solve(own_k, from_k.mT).mT
        q_hat = torch.zeros_like(k_hat)
        for _ in range(iterations):
            q_hat = _solve_proxy(own_q, from_q, k_hat, penalty, dots)
            k_hat = _solve_proxy(own_k, from_k, q_hat, penalty, dots)
        bases = type(self)(_correct(self.query, q_hat, q), _correct(self.key, k_hat, k))
        return q_hat.squeeze(2), k_hat.squeeze(2), bases


def _solve_proxy(
    own: torch.Tensor,
    right: torch.Tensor,
    other: torch.Tensor,
    penalty: float,
    dots: torch.Tensor,
) -> torch.Tensor:
    """(right + penalty (q.k) other)(own + penalty other^T other)^-1, ``[B, Hq, 1, r]``."""
    matrix = own + penalty * other.mT @ other
    return solve(matrix, (right + penalty * dots * other).mT).mT


def _correct(basis: torch.Tensor, proxy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One gradient step (eq. 10) of the optimal size: eq. 11 and 12 come to 1 / |proxy|^2."""
    error = proxy @ basis - target
    return basis - proxy.mT @ error / proxy.square().sum(-1, keepdim=True).clamp(min=1e-30)
