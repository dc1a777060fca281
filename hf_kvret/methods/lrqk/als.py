"""The published alternation: where it starts (B.6), and its updates at a step (algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from hf_kvret.contracts.schema import Schema, damaged
from hf_kvret.contracts.state import State, Tensors, tensor
from hf_kvret.methods.lrqk.factors import Sketch, solve
from hf_kvret.methods.lrqk.grams import CHUNK

_FP32 = torch.float32


class RandomSource(State):
    """A seeded random generator; forks and loaded copies continue the same sequence.

    A generator is not a tensor, so the operations of ``State`` are written by hand.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.reset()

    def reset(self) -> None:
        self._generator = torch.Generator().manual_seed(self._seed)
        self.is_drawn = False

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """``N(0, 1)`` on the CPU."""
        self.is_drawn = True
        # On the CPU, whatever device and dtype are the defaults: the same numbers everywhere.
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def fork(self) -> RandomSource:
        twin = RandomSource(self._seed)
        twin._generator.set_state(self._generator.get_state())
        twin.is_drawn = self.is_drawn
        return twin

    def state_dict(self) -> Tensors:
        """``state`` of the generator; empty before the first draw."""
        return {"state": self._generator.get_state()} if self.is_drawn else {}

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        self.reset()
        try:
            self._generator.set_state(state["state"].cpu())
        except (RuntimeError, TypeError) as error:
            raise damaged(f"index.chance.state is of no generator ({error})") from error
        self.is_drawn = True

    def claim(self, state: Tensors, schema: Schema) -> set[str]:
        """As for every state: ``state``, which the generator checks."""
        return {"state"} & state.keys()


class Moments(State):
    """Running sums over the rows of Q, or of K, of each query head, fp32.

    Attributes:
        gram: ``[B, Hq, D, D]``.
        sizes: ``[B, Hq, D]``, L1 norms of the columns (eq. 23).
        cross, own: with ``random``, the products of a random A ~ N(0, 1) with the rows and with
            itself (eq. 22).
    """

    gram: torch.Tensor | None = tensor(shared=True, dims="B Q D D", dtype=_FP32, finite=True)
    sizes: torch.Tensor | None = tensor(shared=True, dims="B Q D", dtype=_FP32, finite=True)
    cross: torch.Tensor | None = tensor(
        shared=True, optional=True, dims="B Q R D", dtype=_FP32, finite=True
    )
    own: torch.Tensor | None = tensor(
        shared=True, optional=True, dims="B Q R R", dtype=_FP32, finite=True
    )

    def __init__(self, random: bool) -> None:
        self.random = random

    def add(self, rows: torch.Tensor, rank: int, source: RandomSource) -> None:
        """Add ``rows [B, Hq, n, D]``, zeros for padding; a random A has ``rank`` columns."""
        for chunk in rows.split(CHUNK, dim=2):
            self._add_chunk(chunk.float(), rank, source)

    def _add_chunk(self, rows: torch.Tensor, rank: int, source: RandomSource) -> None:
        sums = {"gram": rows.mT @ rows, "sizes": rows.abs().sum(2)}
        if self.random:
            start = source.normal((*rows.shape[:3], rank)).to(rows.device)
            start = start * (rows != 0).any(-1, keepdim=True)
            sums |= {"cross": start.mT @ rows, "own": start.mT @ start}
        for name, more in sums.items():
            total = getattr(self, name)
            setattr(self, name, more if total is None else total + more)

    def random_start(self) -> Sketch:
        """The sketch of the random A."""
        assert self.cross is not None and self.own is not None, "rows were added"
        return Sketch(self.cross.double(), self.own.double())

    def column_start(self, columns: torch.Tensor) -> Sketch:
        """The sketch of A = the ``columns [B, Hq, r]`` of the rows (eq. 24)."""
        assert self.gram is not None, "rows were added"
        gram = self.gram.double()
        cross = gram.gather(2, columns.unsqueeze(-1).expand(*columns.shape, gram.shape[-1]))
        own = cross.gather(3, columns.unsqueeze(2).expand(*columns.shape, columns.shape[-1]))
        return Sketch(cross, own)

    def loaded(self) -> None:
        if self.random and (self.cross is None or self.own is None):
            raise KeyError("cross" if self.cross is None else "own")


def _sizes(moments: Moments) -> torch.Tensor:
    assert moments.sizes is not None, "rows were added"
    return moments.sizes


def _random_start(queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
    """A_Q, A_K ~ N(0, 1) (eq. 22)."""
    return queries.random_start(), keys.random_start()


def _top_start(queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
    """The r largest columns of Q, and of K, by L1 norm (eq. 23, 24)."""
    of_q, of_k = (_sizes(x).topk(rank).indices for x in (queries, keys))
    return queries.column_start(of_q), keys.column_start(of_k)


def _joint_start(queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
    """The same columns of both, the largest by the sum of norms (eq. 25, 26)."""
    columns = (_sizes(queries) + _sizes(keys)).topk(rank).indices
    return queries.column_start(columns), keys.column_start(columns)


RANDOM_START = "randn"
STARTS = {RANDOM_START: _random_start, "top": _top_start, "topcol": _joint_start}
"""Sketches of A_Q and A_K to start from, by the option's names."""


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
