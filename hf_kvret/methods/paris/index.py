"""ParisIndex: two stages over compact codes of the keys (ParisKV, sections 4.1 and 4.2)."""

from __future__ import annotations

import math
from typing import Self

import torch
from hf_kvret_kernels import paris

from hf_kvret.block import TokenBlock
from hf_kvret.growing import GrowingRows
from hf_kvret.index import Index
from hf_kvret.methods.paris.config import ParisConfig
from hf_kvret.recall import group_relevance

_PLANES = ("sign", "magnitude", "weight")


class ParisIndex(Index):
    """Codes of every cold key: a sign plane, a magnitude plane and subspace weights.

    Keys are centered, normalized, rotated by random signs and a Walsh-Hadamard transform, and
    cut into subspaces. Stage 1 gives each key points for subspaces whose sign pattern lies close
    to the query's, and keeps the keys with most points. Stage 2 estimates their inner products
    from the codes. New keys are encoded like old ones: nothing is learnt, nothing drifts.
    """

    def __init__(self, options: ParisConfig) -> None:
        self.options = options
        self._planes = {name: GrowingRows() for name in _PLANES}
        self._counts: torch.Tensor | None = None
        self._mean: torch.Tensor | None = None
        self._signs: torch.Tensor | None = None
        self._levels: torch.Tensor | None = None

    def observe(self, block: TokenBlock) -> None:
        if self._signs is None:
            self._prepare(block.keys.shape[-1], block.keys.device)
        if self._mean is None and self.options.center:
            self._mean = _mean_key(block.keys, block.valid)
        codes = paris.encode(
            block.keys, self._signs, self._levels, m=self.options.subspace_dim, mean=self._mean
        )
        for name, rows in self._planes.items():
            rows.append(getattr(codes, name))
        counts = paris.count_centroids(
            codes.sign, m=self.options.subspace_dim, valid=block.valid
        )
        self._counts = counts if self._counts is None else self._counts + counts

    def select(
        self, query: torch.Tensor, budget: int, valid: torch.Tensor, scale: float
    ) -> torch.Tensor:
        options, m = self.options, self.options.subspace_dim
        codes = self._codes()
        batch, heads, held, _ = codes.sign.shape
        grouped = query.float().view(batch, heads, -1, query.shape[2], query.shape[3])
        if options.group_reduce == "mean":
            grouped = grouped.mean(dim=2, keepdim=True)
        rotated = paris.rotate(grouped.transpose(2, 3), self._signs)
        _, rho = options.ratios(held)
        bonus = paris.bonus_table(rotated, self._counts, rho=rho, tiers=options.tiers, m=m)
        points, histogram = paris.collide(codes.sign, bonus, m=m, valid=valid)
        kept = paris.candidates(points, histogram, self.candidates(held, budget))
        estimates = paris.rerank(rotated, codes, kept, self._levels, m=m) * scale
        relevance = group_relevance(
            estimates.transpose(2, 3).flatten(1, 2), heads
        )
        best = relevance.topk(budget, dim=-1)
        ids = kept.gather(-1, best.indices)
        return ids.masked_fill(best.values == float("-inf"), -1)

    def candidates(self, cold_len: int, budget: int) -> int:
        beta, _ = self.options.ratios(cold_len)
        return min(cold_len, max(budget, math.ceil(beta * cold_len)))

    def reorder(self, rows: torch.Tensor) -> None:
        for plane in self._planes.values():
            plane.reorder(rows)
        if self._counts is not None:
            self._counts = self._counts.index_select(0, rows)
        if self._mean is not None:
            self._mean = self._mean.index_select(0, rows)

    def crop(self, cold_len: int) -> None:
        signs = self._planes["sign"]
        if cold_len >= signs.length:
            return
        dropped = paris.count_centroids(signs.rows[:, :, cold_len:], m=self.options.subspace_dim)
        self._counts = (self._counts - dropped).clamp(min=0)
        for plane in self._planes.values():
            plane.crop(cold_len)

    def fork(self) -> Self:
        twin = type(self)(self.options)
        twin._planes = {name: plane.fork() for name, plane in self._planes.items()}
        twin._counts, twin._mean = self._counts, self._mean
        twin._signs, twin._levels = self._signs, self._levels
        return twin

    def nbytes(self) -> int:
        tensors = [self._counts, self._mean, self._signs, self._levels]
        small = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        return small + sum(plane.nbytes() for plane in self._planes.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {name: plane.rows.contiguous() for name, plane in self._planes.items()}
        state["counts"] = self._counts
        if self._mean is not None:
            state["mean"] = self._mean
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name in _PLANES:
            self._planes[name] = GrowingRows()
            self._planes[name].append(state[name])
        self._counts = state["counts"]
        if self.options.center:
            self._mean = state["mean"]

    def _prepare(self, dim: int, device: torch.device) -> None:
        options = self.options
        padded = max(8, 1 << (dim - 1).bit_length())
        self._signs = paris.random_signs(padded, options.seed).to(device)
        if options.levels is None:
            self._levels = paris.magnitude_levels(options.subspace_dim).to(device)
        else:
            self._levels = torch.tensor(options.levels, dtype=torch.float32, device=device)

    def _codes(self) -> paris.ParisCodes:
        return paris.ParisCodes(**{name: plane.rows for name, plane in self._planes.items()})


def _mean_key(keys: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """``[B, Hkv, D]`` fp32 mean over the valid tokens of ``keys [B, Hkv, n, D]``; 0 for none."""
    if valid is None:
        return keys.float().mean(dim=2)
    weights = valid[:, None, :, None].float()
    return (keys.float() * weights).sum(dim=2) / weights.sum(dim=2).clamp(min=1)
