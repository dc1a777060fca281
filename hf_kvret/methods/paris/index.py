"""ParisIndex: two stages over compact codes of the keys (ParisKV, sections 4.1 and 4.2)."""

from __future__ import annotations

import math
from typing import Self

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import CapturableIndex, ColdTokens, Estimates, Index, SearchCost
from hf_kvret.contracts.schema import FLOATS, Form, damaged
from hf_kvret.contracts.state import tensor
from hf_kvret.contracts.token_buffer import TokenBuffer, tokens
from hf_kvret.methods.paris.config import ParisConfig
from hf_kvret_kernels import paris
from hf_kvret_kernels.host_step import HostSearch, ParisSearch
from hf_kvret_kernels.paris.codes import check_widths


class ParisIndex(CapturableIndex, Index):
    """Codes of every cold key: a sign plane, a magnitude plane and subspace weights.

    Keys are centered, normalized, rotated by random signs and a Walsh-Hadamard transform (long ones
    in blocks), and cut into subspaces. Stage 1 gives each key points for subspaces whose sign
    pattern lies close to the query's, and keeps the keys with most points. Stage 2 estimates their
    inner products from the codes. New keys are encoded like old ones: nothing is learnt, nothing
    drifts.

    Args:
        options: of the method.
    """

    # Codes of the tokens, as in ``ParisCodes``; a negative weight marks padding.
    _sign: TokenBuffer = tokens(dims="B H N p", dtype=torch.uint8)
    _magnitude: TokenBuffer = tokens(dims="B H N q", dtype=torch.uint8)
    _weight: TokenBuffer = tokens(dims="B H N s", dtype=FLOATS)
    # Keys in each centroid of each subspace.
    _counts: torch.Tensor | None = tensor(shared=True, dims="B H s c", dtype=torch.int32)
    # Of the first block: [B, Hkv, D] fp32.
    _mean: torch.Tensor | None = tensor(
        shared=True, optional=True, dims="B H D", dtype=torch.float32
    )
    # Random signs of the rotation, [P] fp32, and the [8] fp32 levels of magnitudes.
    _signs: torch.Tensor | None = tensor(saved=False, batched=False, shared=True)
    _levels: torch.Tensor | None = tensor(saved=False, batched=False, shared=True)

    def __init__(self, options: ParisConfig) -> None:
        self.options = options
        # The last one, and what it was made for beside the codes.
        self._host_search: ParisSearch | None = None
        self._form: tuple[object, ...] = ()

    def add(self, block: TokenBlock) -> None:
        if self._counts is None:
            self._make_basis(block.keys.shape[-1], block.keys.device)
            self._mean = block.mean_key() if self.options.center else None
        codes = self.encode(block.keys)
        if block.valid is not None:
            # So that a crop knows which tokens the counts never held.
            codes.weight.masked_fill_(~block.valid[:, None, :, None], -1)
        self._sign.append(codes.sign)
        self._magnitude.append(codes.magnitude)
        self._weight.append(codes.weight)
        counts = paris.count_centroids(codes.sign, m=self.options.subspace_dim, valid=block.valid)
        self._counts = counts if self._counts is None else self._counts + counts

    def rotate(self, query: torch.Tensor) -> torch.Tensor:
        """``[..., P]`` fp32 of ``query [..., D]``, in the coordinates of the codes."""
        if self._signs is None:
            raise RuntimeError("the index is empty: add a block first")
        return paris.rotate(query, self._signs)

    def encode(self, keys: torch.Tensor) -> paris.ParisCodes:
        """Codes of ``keys [B, Hkv, n, D]``."""
        if self._signs is None or self._levels is None:
            raise RuntimeError("the index is empty: add a block first")
        m = self.options.subspace_dim
        return paris.encode(keys, self._signs, self._levels, m=m, mean=self._mean)

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        options, m = self.options, self.options.subspace_dim
        counts, levels = self._counts, self._levels
        if counts is None or levels is None:
            raise RuntimeError("the index is empty: add a block first")
        codes = self._codes()
        batch, heads, held, _ = codes.sign.shape
        grouped = query.view(batch, heads, -1, query.shape[2], query.shape[3])
        if options.group_reduce == "mean":
            grouped = grouped.float().mean(dim=2, keepdim=True)
        _, rho = options.ratios(held)
        # A cap bends the whole score, the mean key's part included.
        offset = None if cold.softcap is None else self._mean_part(grouped)
        return paris.search(
            *self.search_query(grouped.transpose(2, 3)),
            codes,
            counts,
            levels,
            cold.budget,
            survivors=self._candidates(held, cold.budget),
            rho=rho,
            tiers=options.tiers_for(counts.shape[2]),
            m=m,
            valid=cold.valid,
            scale=cold.scale,
            softcap=cold.softcap,
            offset=offset,
        )

    def estimate(self, query: torch.Tensor, cold: ColdTokens) -> Estimates:
        """By the codes of all tokens, for each query head whatever ``group_reduce`` is."""
        if self._levels is None:
            raise RuntimeError("the index is empty: add a block first")
        codes = self._codes()
        batch, heads, _, _ = codes.sign.shape
        grouped = query.view(batch, heads, -1, query.shape[2], query.shape[3])
        rows, signs = self.search_query(grouped.transpose(2, 3))
        logits = paris.estimates(
            rows if signs is None else paris.rotate(rows, signs),
            codes,
            self._levels,
            m=self.options.subspace_dim,
            scale=cold.scale,
            softcap=cold.softcap,
            offset=self._mean_part(grouped),
        )
        return Estimates(logits.transpose(2, 3).flatten(1, 2))

    def _mean_part(self, grouped: torch.Tensor) -> torch.Tensor | None:
        """``[B, Hkv, Q, G]`` fp32: products of ``grouped [B, Hkv, G, Q, D]`` with the mean key."""
        if self._mean is None:
            return None
        return torch.einsum("bhgqd,bhd->bhqg", grouped.float(), self._mean)

    def search_query(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``query [B, Hkv, Q, G, D]`` as ``paris.search`` takes it, and signs of a rotation."""
        return query, self._signs

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> HostSearch | None:
        options = self.options
        counts, signs, levels = self._counts, self._signs, self._levels
        if counts is None or signs is None or levels is None:
            raise RuntimeError("the index is empty: add a block first")
        form = options, cold.budget, cold.softcap is None
        search = self._host_search
        # Whatever changes the codes makes new counts.
        if search is None or search.counts is not counts or self._form != form:
            _, rho = options.ratios(len(self._sign))
            self._form = form
            search = self._host_search = ParisSearch(
                self._codes(),
                counts,
                signs,
                levels,
                paris.tier_shares(rho, options.tiers_for(counts.shape[2])),
                options.subspace_dim,
                self._candidates(len(self._sign), cold.budget),
                # A cap bends the whole score, the mean key's part included.
                mean=None if cold.softcap is None else self._mean,
                mean_query=options.group_reduce == "mean",
            )
        return search

    def _candidates(self, n: int, budget: int) -> int:
        beta, _ = self.options.ratios(n)
        return min(n, max(budget, math.ceil(beta * n)))

    def cost(self, n: int, budget: int) -> SearchCost:
        """Stage 1 reads the signs of all tokens, stage 2 the whole codes of the candidates."""
        count, candidates = len(self._sign), self._candidates(n, budget)
        if not count:
            return SearchCost(candidates, 0)
        planes = (self._sign, self._magnitude, self._weight)
        code = sum(plane.rows_nbytes for plane in planes) / count
        fewest = self._candidates(count, 0)
        return SearchCost(candidates, self._sign.rows_nbytes + int(fewest * code))

    def crop(self, length: int) -> None:
        """As every state's; what is dropped is no longer counted either."""
        if length == 0:
            self.reset()
        if self._counts is None or length >= len(self._sign):
            return
        dropped = self._codes()
        counted = dropped.weight[:, 0, length:, 0] >= 0
        self._counts = self._counts - paris.count_centroids(
            dropped.sign[:, :, length:], m=self.options.subspace_dim, valid=counted
        )
        super().crop(length)

    def reset(self) -> None:
        super().reset()
        self._host_search = None

    def reorder(self, rows: torch.Tensor) -> None:
        super().reorder(rows)
        self._host_search = None

    def fork(self) -> Self:
        """As every state's; the original's codes are not kept alive by a description of them."""
        twin = super().fork()
        twin._host_search = None
        return twin

    def check_loaded(self, form: Form) -> None:
        """ValueError for codes of another length, or counts that are not those of the tokens."""
        m, counts, weight = self.options.subspace_dim, self._counts, self._weight.rows
        if counts is None:
            return
        check_widths(self._codes(), form["D"], m)
        counted = (weight[:, 0, :, 0] >= 0).sum(dim=1)[:, None, None]
        if counts.shape[3] != 1 << m or bool((counts < 0).any() | (counts.sum(3) != counted).any()):
            raise damaged("index.counts do not add up to the tokens")

    def loaded(self) -> None:
        """Make the rotation anew, from the seed."""
        if self.options.center and self._mean is None:
            raise KeyError("mean")
        # The rotated dimension is all that it takes to know of the keys.
        self._make_basis(8 * self._sign.rows.shape[-1], self._sign.rows.device)

    def _make_basis(self, dim: int, device: torch.device) -> None:
        """For keys of ``dim`` numbers, or that are so long when they are rotated."""
        options = self.options
        options.check_dim(dim)
        self._signs = paris.random_signs(paris.rotated_dim(dim), options.seed).to(device)
        if options.levels is None:
            self._levels = paris.magnitude_levels(options.subspace_dim).to(device)
        else:
            self._levels = torch.tensor(options.levels, dtype=torch.float32, device=device)

    def _codes(self) -> paris.ParisCodes:
        return paris.ParisCodes(self._sign.rows, self._magnitude.rows, self._weight.rows)
