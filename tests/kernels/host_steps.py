"""Random steps for the compiled library's ``run_step``, and what it should choose and give.

Dimensions: B batch, H KV heads, G query heads of each, Q queries, n cold tokens, D head dim.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from hf_kvret_kernels import paris
from hf_kvret_kernels.host_step import FlatSearch, HostCold, HostWindow, ParisSearch
from hf_kvret_kernels.paged import PagedRows

from .draws import attention64, draw, generator
from .paged_rows import chosen_rows, dense_rows, paged

FP32_ERROR = 2e-5
"""Of sums of up to some hundred fp32 products of size 1 in another order: some roundings of 6e-8
each."""

# Of a window: rows of its buffer that it does not hold, and the share of its tokens that are valid.
_SPARE_ROWS = 5
_VALID_ROWS = 0.9
# Values have a head dim of their own, so that no code takes the one of keys for it.
_VALUE_DIM = 24
_PAGE_LEN = 16


@dataclass(frozen=True)
class Shape:
    """Of a step: sizes, and what its search is made of.

    Attributes:
        n: cold tokens.
        dim: head dim of queries and keys; that of values is 24.
        group: query heads of a KV head.
        heads: KV heads.
        queries: drafted tokens, each of which searches and attends.
        batch: rows.
        tiers: shares of centroids that get the same bonus; 0 for points by similarity.
        block_len: tokens of ParisKV's blocks with a mean key each; 0 for no means.
        samples: keys that tell how ParisKV's queries of a group compare; 0 for none.
        mean_query: whether ParisKV searches once for the mean of a group.
        dtype: of queries, keys and values.
        candidates: ParisKV's; None for a quarter of the tokens.
        valid: share of the cold tokens that are valid, about; above 1 for all, below 0 for none.
    """

    n: int
    dim: int = 128
    group: int = 2
    heads: int = 2
    queries: int = 1
    batch: int = 1
    tiers: int = 6
    block_len: int = 0
    samples: int = 0
    mean_query: bool = False
    dtype: torch.dtype = torch.float32
    candidates: int | None = None
    valid: float = 0.8

    def query(self, seed: int = 0) -> torch.Tensor:
        """``[B, H * G, Q, D]`` of ``dtype``, normal with a deviation of 2."""
        lead = self.batch, self.heads * self.group, self.queries
        return 2 * draw(*lead, self.dim, seed=seed, dtype=self.dtype)

    def mask(self) -> torch.Tensor:
        """``[B, n]`` bool: which cold tokens are valid."""
        return torch.rand(self.batch, self.n, generator=generator(1)) < self.valid


def paris_search(shape: Shape, valid: torch.Tensor) -> ParisSearch:
    """ParisKV's search among random keys, of which ``valid [B, n]`` are counted."""
    keys = draw(shape.batch, shape.heads, shape.n, shape.dim, seed=2)
    signs = paris.random_signs(paris.rotated_dim(shape.dim), 0)
    levels = paris.magnitude_levels()
    out = paris.ParisCodes.empty(*keys.shape)
    codes = paris.encode(keys, signs, levels, out=out)
    counts = paris.count_centroids(codes.sign, valid=valid)
    tiers = tuple((i + 1) / shape.tiers for i in range(shape.tiers))
    count = max(1, shape.n // 4) if shape.candidates is None else shape.candidates
    shares = paris.tier_shares(0.3, tiers)
    lead = shape.batch, shape.heads, shape.dim
    factors = torch.randint(-3, 4, lead, generator=generator(9)).float().exp2()
    signs = paris.scaled_signs(signs, factors)
    search = ParisSearch(codes, counts, signs, levels, shares, count, mean_query=shape.mean_query)
    if shape.block_len:
        search.block_len = shape.block_len
        search.means = draw(*lead[:2], -(-shape.n // shape.block_len), shape.dim, seed=5)
    if shape.samples:
        search.samples = draw(*lead[:2], shape.samples, shape.dim, seed=6)
    return search


def cold_rows(shape: Shape) -> tuple[PagedRows, torch.Tensor, torch.Tensor]:
    """Random rows on shuffled pages, and the same rows in order.

    Returns:
        The pages; their keys ``[B, H, n, D]`` and values ``[B, H, n, 24]``, of ``dtype``.
    """
    columns = -(-shape.n // _PAGE_LEN)
    order = torch.randperm(shape.batch * columns, generator=generator(4))
    table = order.view(shape.batch, columns).tolist()
    sizes: dict[str, Any] = {"kv_heads": shape.heads, "page_len": _PAGE_LEN, "dtype": shape.dtype}
    rows = paged("cpu", table, (len(order),), dims=(shape.dim, _VALUE_DIM), **sizes)
    keys, values = dense_rows(rows)[:, :, : shape.n].split([shape.dim, _VALUE_DIM], -1)
    return rows, keys, values


def near_window(shape: Shape, length: int) -> HostWindow:
    """A window of ``length`` random rows, whose newest are valid; room behind them holds NaN."""
    lead = (shape.batch, shape.heads, length + _SPARE_ROWS)
    keys = draw(*lead, shape.dim, seed=6, dtype=shape.dtype)
    values = draw(*lead, _VALUE_DIM, seed=7, dtype=shape.dtype)
    keys[:, :, length:] = values[:, :, length:] = math.nan
    valid = torch.rand(shape.batch, length, generator=generator(8)) < _VALID_ROWS
    valid[:, -shape.queries :] = True
    return HostWindow(keys, values, length, valid)


def flat_step(
    shape: Shape, budget: int, length: int = 20
) -> tuple[torch.Tensor, HostWindow, HostCold]:
    """Query, window and cold tokens of a step that compares all keys."""
    rows, keys, _ = cold_rows(shape)
    cold = HostCold(rows, FlatSearch(keys), shape.mask(), budget)
    return shape.query(), near_window(shape, length), cold


def check_best(ids: torch.Tensor, relevance: torch.Tensor) -> None:
    """``ids [B, H, Q, k]`` ascend, and no token with more than roundings to its credit is left.

    ``relevance [B, H, Q, n]`` is -inf for tokens that no head may choose.
    """
    budget, n = ids.shape[-1], relevance.shape[-1]
    counts = (relevance > -math.inf).sum(-1, keepdim=True).clamp(max=budget)
    assert torch.equal(ids >= 0, torch.arange(budget) < counts)
    assert ((ids.diff(dim=-1) > 0) | (ids[..., 1:] < 0)).all()
    chosen = torch.zeros(*relevance.shape[:-1], n + 1, dtype=torch.bool)
    chosen = chosen.scatter_(-1, ids.long().masked_fill(ids < 0, n), True)[..., :-1]
    assert (relevance[chosen] > -math.inf).all()
    least = relevance.masked_fill(~chosen, math.inf).amin(-1)
    most_left = relevance.masked_fill(chosen, -math.inf).amax(-1)
    assert (most_left <= least + FP32_ERROR * (1 + least.abs())).all()


def check_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    window: HostWindow,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    error: float = FP32_ERROR,
) -> None:
    """``out [B, Hq, Q, Dv]`` is attention to a window and chosen cold rows, worked out in float64.

    Args:
        query: ``[B, Hq, Q, D]``; of n queries, query i sees all of the window but its last
            ``n - 1 - i`` rows.
        keys: ``[B, Hkv, n, D]`` of the cold tokens, in order.
        values: ``[B, Hkv, n, Dv]``.
        ids: ``[B, H, Q, K]`` cold tokens that a query attends to; negative for none.
        window: rows that all query heads see.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        sink_logits: ``[Hq]`` learned attention sinks, or None.
        error: that rounding explains.
    """
    heads, queries, length = query.shape[1], query.shape[2], window.length
    seen = torch.arange(length) <= length - queries + torch.arange(queries).unsqueeze(1)
    if window.valid is not None:
        seen = seen & window.valid[:, None, None, :length]
    chosen = (ids >= 0).repeat_interleave(heads // ids.shape[1], 1)
    seen = torch.cat([seen.expand(*query.shape[:3], length), chosen], -1)

    def rows(near: torch.Tensor, cold: torch.Tensor) -> torch.Tensor:
        """``[B, Hq, Q, length + K, D]``: what each query may read."""
        own = near[:, :, None, :length].repeat_interleave(heads // near.shape[1], 1)
        own = own.expand(-1, -1, queries, -1, -1)
        return torch.cat([own, chosen_rows(cold, ids, heads)], 3)

    both = rows(window.keys, keys), rows(window.values, values)
    sinks = None if sink_logits is None else sink_logits.view(-1, 1, 1, 1)
    want, _, _ = attention64(query.unsqueeze(3), *both, seen.unsqueeze(3), scale, softcap, sinks)
    torch.testing.assert_close(out.double(), want.squeeze(3), rtol=1e-5, atol=error)
