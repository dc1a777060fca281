"""Where alternating least squares start: the paper's three choices, as running sums (B.6)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from hf_kvret.contracts.schema import Form, damaged
from hf_kvret.contracts.state import State, Tensors, tensor
from hf_kvret.methods.lrqk.factors import Sketch
from hf_kvret.methods.lrqk.grams import PIECE

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

    def claim(self, state: Tensors, form: Form) -> set[str]:
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
        for piece in rows.split(PIECE, dim=2):
            self._add_piece(piece.float(), rank, source)

    def _add_piece(self, rows: torch.Tensor, rank: int, source: RandomSource) -> None:
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


class Start(ABC):
    """A choice of A_Q and A_K to start from."""

    random = False

    @abstractmethod
    def sketches(self, queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
        """The sketches of A_Q and A_K."""


class RandomStart(Start):
    """``randn``: A_Q, A_K ~ N(0, 1) (eq. 22)."""

    random = True

    def sketches(self, queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
        return queries.random_start(), keys.random_start()


class TopStart(Start):
    """``top``: the r largest columns of Q, and of K, by L1 norm (eq. 23, 24)."""

    def sketches(self, queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
        of_q, of_k = (_sizes(x).topk(rank).indices for x in (queries, keys))
        return queries.column_start(of_q), keys.column_start(of_k)


class JointStart(Start):
    """``topcol``: the same columns of both, the largest by the sum of norms (eq. 25, 26)."""

    def sketches(self, queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
        columns = (_sizes(queries) + _sizes(keys)).topk(rank).indices
        return queries.column_start(columns), keys.column_start(columns)


def _sizes(moments: Moments) -> torch.Tensor:
    assert moments.sizes is not None, "rows were added"
    return moments.sizes


STARTS: dict[str, Start] = {"randn": RandomStart(), "top": TopStart(), "topcol": JointStart()}
