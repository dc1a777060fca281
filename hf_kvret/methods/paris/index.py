"""ParisIndex: two stages over compact codes of the keys (ParisKV, sections 4.1 and 4.2)."""

from __future__ import annotations

import dataclasses
import math
from typing import Self

import torch

from hf_kvret.core.block import TokenBlock
from hf_kvret.core.index import Index
from hf_kvret.core.token_buffer import GrowingRows
from hf_kvret.methods.paris.basis import Basis
from hf_kvret.methods.paris.config import ParisConfig
from hf_kvret_kernels import paris
from hf_kvret_kernels.relevance import best_ids

_MOST_POINTS = 254
_LARGEST_HEAD = 256
_PLANES = ("sign", "magnitude", "weight")


class ParisIndex(Index):
    """Codes of every cold key: a sign plane, a magnitude plane and subspace weights.

    Keys are centered, normalized, rotated by random signs and a Walsh-Hadamard transform, and
    cut into subspaces. Stage 1 gives each key points for subspaces whose sign pattern lies close
    to the query's, and keeps the keys with most points. Stage 2 estimates their inner products
    from the codes. New keys are encoded like old ones: nothing is learnt, nothing drifts.

    Args:
        options: of the method.
        basis_class: what encodes keys and turns queries; another one is for study.
    """

    def __init__(self, options: ParisConfig, basis_class: type[Basis] = Basis) -> None:
        self.options = options
        self._basis_class = basis_class
        self._planes = {name: GrowingRows() for name in _PLANES}
        self._counts: torch.Tensor | None = None
        self._basis: Basis | None = None

    def observe(self, block: TokenBlock) -> None:
        m = self.options.subspace_dim
        if self._basis is None:
            mean = block.mean_key() if self.options.center else None
            self._basis = self._make_basis(block.keys.shape[-1], block.keys.device, mean)
        codes = self._basis.encode(block.keys)
        if block.valid is not None:
            # A negative weight marks padding, so that a crop knows whom the counts never held.
            codes.weight.masked_fill_(~block.valid[:, None, :, None], -1)
        for name, rows in self._planes.items():
            rows.append(getattr(codes, name))
        counts = paris.count_centroids(codes.sign, m=m, valid=block.valid)
        self._counts = counts if self._counts is None else self._counts + counts

    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        options, m = self.options, self.options.subspace_dim
        basis, counts, codes = self._basis, self._counts, self._codes()
        if basis is None or counts is None:
            raise RuntimeError("the index is empty: observe a block first")
        batch, heads, held, _ = codes.sign.shape
        grouped = query.view(batch, heads, -1, query.shape[2], query.shape[3])
        if options.group_reduce == "mean":
            grouped = grouped.float().mean(dim=2, keepdim=True)
        rotated = basis.rotate(grouped.transpose(2, 3))
        _, rho = options.ratios(held)
        points, histogram = paris.collisions(
            rotated, counts, codes.sign, rho=rho, tiers=options.tiers, m=m, valid=valid
        )
        kept = paris.candidates(points, histogram, self.candidates(held, budget))
        offset = None
        if softcap is not None and basis.mean is not None:
            # A cap bends the whole score, the mean key's part included.
            offset = torch.einsum("bhgqd,bhd->bhqg", grouped.float(), basis.mean)
        estimates = paris.rerank(
            rotated, codes, kept, basis.levels, m=m, scale=scale, softcap=softcap, offset=offset
        )
        return best_ids(estimates, kept, budget)

    def uncapturable(self) -> str | None:
        return None

    def candidates(self, cold_len: int, budget: int) -> int:
        beta, _ = self.options.ratios(cold_len)
        return min(cold_len, max(budget, math.ceil(beta * cold_len)))

    def reorder(self, rows: torch.Tensor) -> None:
        for plane in self._planes.values():
            plane.reorder(rows)
        if self._counts is not None:
            self._counts = self._counts.index_select(0, rows)
        if self._basis is not None and self._basis.mean is not None:
            mean = self._basis.mean.index_select(0, rows)
            self._basis = dataclasses.replace(self._basis, mean=mean)

    def crop(self, cold_len: int) -> None:
        if self._counts is None or cold_len >= self._planes["sign"].length:
            return
        dropped = self._codes()
        counted = dropped.weight[:, 0, cold_len:, 0] >= 0
        self._counts = self._counts - paris.count_centroids(
            dropped.sign[:, :, cold_len:], m=self.options.subspace_dim, valid=counted
        )
        for plane in self._planes.values():
            plane.crop(cold_len)

    def fork(self) -> Self:
        twin = type(self)(self.options, self._basis_class)
        twin._planes = {name: plane.fork() for name, plane in self._planes.items()}
        twin._counts, twin._basis = self._counts, self._basis
        return twin

    def nbytes(self) -> int:
        tensors = [self._counts]
        if self._basis is not None:
            tensors += [self._basis.signs, self._basis.levels, self._basis.mean]
        small = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        return small + sum(plane.nbytes() for plane in self._planes.values())

    def select_nbytes(self) -> int:
        sign = self._planes["sign"]
        if not sign.length:
            return 0
        # Stage 1 reads the signs of all tokens, stage 2 the whole codes of the candidates.
        code = sum(plane.rows.nbytes for plane in self._planes.values()) / sign.length
        return sign.rows.nbytes + int(self.candidates(sign.length, 0) * code)

    def state_dict(self) -> dict[str, torch.Tensor]:
        if not self._planes["sign"].length:
            return {}
        state = {name: plane.rows.contiguous() for name, plane in self._planes.items()}
        if self._counts is not None:
            state["counts"] = self._counts
        if self._basis is not None and self._basis.mean is not None:
            state["mean"] = self._basis.mean
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name in _PLANES:
            self._planes[name] = GrowingRows()
            self._planes[name].append(state[name])
        self._counts = state["counts"]
        mean = state["mean"] if self.options.center else None
        # The rotated dimension is all that the basis needs to know of the keys.
        self._basis = self._make_basis(8 * state["sign"].shape[-1], state["sign"].device, mean)

    def _make_basis(self, dim: int, device: torch.device, mean: torch.Tensor | None) -> Basis:
        options = self.options
        if dim > _LARGEST_HEAD:
            raise ValueError(
                f"head dim {dim}: paris codes exist up to {_LARGEST_HEAD}; use "
                "cache_implementation='flat'"
            )
        subspaces = paris.rotated_dim(dim) // options.subspace_dim
        if len(options.tiers) * subspaces > _MOST_POINTS:
            raise ValueError(
                f"{len(options.tiers)} tiers in {subspaces} subspaces (head dim {dim}, "
                f"subspace_dim={options.subspace_dim}) make scores above {_MOST_POINTS}, which a "
                "byte can't hold: use subspace_dim=8 or fewer tiers"
            )
        signs = paris.random_signs(paris.rotated_dim(dim), options.seed).to(device)
        if options.levels is None:
            levels = paris.magnitude_levels(options.subspace_dim).to(device)
        else:
            levels = torch.tensor(options.levels, dtype=torch.float32, device=device)
        return self._basis_class(signs, levels, mean, options.subspace_dim)

    def _codes(self) -> paris.ParisCodes:
        return paris.ParisCodes(**{name: plane.rows for name, plane in self._planes.items()})
