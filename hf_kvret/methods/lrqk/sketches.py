"""Where alternating least squares start: the paper's three choices, as running sums (B.6)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch

from hf_kvret.methods.lrqk.factors import Sketch
from hf_kvret.methods.lrqk.grams import PIECE


class Moments:
    """Running sums over the rows of Q, or of K, of each query head, fp32.

    ``gram [B, Hq, D, D]``, ``sizes [B, Hq, D]`` (L1 norms of the columns, eq. 23), and with
    ``random`` the products of a random A ~ N(0, 1) with the rows and with itself (eq. 22).
    """

    def __init__(self, random: bool) -> None:
        self.random = random
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, rows: torch.Tensor, rank: int, chance: torch.Generator) -> None:
        """Take in ``rows [B, Hq, n, D]``, zeros where there is padding; r columns of a random A."""
        for piece in rows.split(PIECE, dim=2):
            self._add_piece(piece.float(), rank, chance)

    def _add_piece(self, rows: torch.Tensor, rank: int, chance: torch.Generator) -> None:
        sums = {"gram": rows.mT @ rows, "sizes": rows.abs().sum(2)}
        if self.random:
            shape = (*rows.shape[:3], rank)
            start = torch.randn(shape, generator=chance).to(rows.device)
            start = start * (rows != 0).any(-1, keepdim=True)
            sums |= {"cross": start.mT @ rows, "own": start.mT @ start}
        self.sums = {name: self.sums[name] + x for name, x in sums.items()} if self.sums else sums

    def random_start(self) -> Sketch:
        """Of the random A."""
        return Sketch(self.sums["cross"].double(), self.sums["own"].double())

    def column_start(self, columns: torch.Tensor) -> Sketch:
        """Of A = the ``columns [B, Hq, r]`` of the rows (eq. 24)."""
        gram = self.sums["gram"].double()
        cross = gram.gather(2, columns.unsqueeze(-1).expand(*columns.shape, gram.shape[-1]))
        own = cross.gather(3, columns.unsqueeze(2).expand(*columns.shape, columns.shape[-1]))
        return Sketch(cross, own)

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        self.sums = {name: x.index_select(0, rows) for name, x in self.sums.items()}

    def fork(self) -> Self:
        """A copy; tensors are shared, as none is ever written to."""
        twin = type(self)(self.random)
        twin.sums = dict(self.sums)
        return twin

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Have these sums. KeyError names a missing one."""
        names = ("gram", "sizes", "cross", "own") if self.random else ("gram", "sizes")
        self.sums = {name: state[name] for name in names}

    def nbytes(self) -> int:
        """Bytes of all sums."""
        return sum(x.nbytes for x in self.sums.values())


class Start(ABC):
    """A choice of A_Q and A_K to start from."""

    random = False

    @abstractmethod
    def sketches(self, queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
        """Those of A_Q and A_K."""


class RandomStart(Start):
    """``randn``: A_Q, A_K ~ N(0, 1) (eq. 22)."""

    random = True

    def sketches(self, queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
        return queries.random_start(), keys.random_start()


class TopStart(Start):
    """``top``: the r largest columns of Q, and of K, by L1 norm (eq. 23, 24)."""

    def sketches(self, queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
        of_q, of_k = (x.sums["sizes"].topk(rank).indices for x in (queries, keys))
        return queries.column_start(of_q), keys.column_start(of_k)


class JointStart(Start):
    """``topcol``: the same columns of both, the largest by the sum of norms (eq. 25, 26)."""

    def sketches(self, queries: Moments, keys: Moments, rank: int) -> tuple[Sketch, Sketch]:
        chosen = (queries.sums["sizes"] + keys.sums["sizes"]).topk(rank).indices
        return queries.column_start(chosen), keys.column_start(chosen)


STARTS: dict[str, Start] = {"randn": RandomStart(), "top": TopStart(), "topcol": JointStart()}
