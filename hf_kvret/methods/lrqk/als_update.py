"""The paper's decode updates: a query's and a key's proxies by alternation (algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from hf_kvret.methods.lrqk.factors import solve


@dataclass(frozen=True, eq=False)
class OmegaProducts:
    """Products of the keys on the device and their proxies, over Omega (eq. 7), fp32.

    ``cross [B, Hq, D, r]`` is K^T A_K, ``own [B, Hq, r, r]`` is A_K^T A_K.
    """

    cross: torch.Tensor
    own: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, proxies: torch.Tensor) -> Self:
        """Of ``keys [B, Hq, n, D]`` and ``proxies [B, Hq, n, r]``; rows of zeros do not count."""
        keys, proxies = keys.float(), proxies.float()
        return cls(keys.mT @ proxies, proxies.mT @ proxies)

    def plus(self, other: Self) -> Self:
        """Of both sets of keys."""
        return type(self)(self.cross + other.cross, self.own + other.own)


@dataclass(frozen=True, eq=False)
class Bases:
    """B_Q and B_K, ``[B, Hq, r, D]`` fp32: they map proxies back to queries and keys."""

    query: torch.Tensor
    key: torch.Tensor

    def guess(self, keys: torch.Tensor) -> torch.Tensor:
        """Proxies ``[B, Hq, n, r]`` of ``keys [B, Hq, n, D]``: k B_K^T (B_K B_K^T)^-1."""
        return solve(self.key @ self.key.mT, self.key @ keys.float().mT).mT

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        omega: OmegaProducts | None,
        iterations: int,
        penalty: float,
    ) -> tuple[torch.Tensor, torch.Tensor, Self]:
        """One token's proxies, and the bases after it (eq. 9 to 12).

        Args:
            query, key: ``[B, Hq, D]`` fp32.
            omega: Omega of the step before; None when nothing was selected yet.
            iterations: rounds; the published tolerance may stop earlier.
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
            from_q = from_q + penalty * q @ omega.cross
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
    """One gradient step (eq. 10) of the optimal size, for which eq. 11 is 1 / |proxy|^2."""
    error = proxy @ basis - target
    return basis - proxy.mT @ error / proxy.square().sum(-1, keepdim=True).clamp(min=1e-30)
