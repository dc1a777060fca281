"""The kernels of a decode step in the shape of Llama-3.1-8B, and who launches them.

A step is cut into parts, as methods share them. Tensors are on the device ``meta``: they have
shapes and strides, and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hf_kvret_kernels import _dispatch, paris
from hf_kvret_kernels.higgs import CodedRows, HiggsCodec
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.paged import PagedRows

MULTIPROCESSORS = 132
"""Of an H200."""
_META = torch.device("meta")
_HALF = torch.bfloat16
PAGE_LEN = 64
WINDOW_LEN = 4 + 256 + 512
"""Sink tokens, recent ones, and those until a flush."""
LEAST_CONTEXT = 32_768
"""From there on ParisKV's shares and LRQK's budget are those below."""
PARIS_SHARES: tuple[float, ...] = ()
PARIS_LONG_ROW_SHARES = (0.15, 0.50, 1.0)
"""Of rows of more than 42 subspaces."""
PARIS_RHO, PARIS_BETA, PARIS_LONG, PARIS_LONG_BETA = 0.75, 0.08, 512 << 10, 0.07
PARIS_K, LRQK_K, LRQK_RANK, HIGGS_BITS = 100, 2048, 64, 4
PARIS_BLOCKS, A2ATS_RATIO, CODEWORDS = 64, 0.06, 4096
CENTROIDS, NPROBE, LIST_LEN, PENDING = 2048, 4, 2560, 512
CTKVR_K = FLAT_K = 1024
RECALLED = NPROBE * LIST_LEN + PENDING
"""Tokens that CTkvr compares by their keys."""


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step: B sequences of ``context`` tokens, Hkv KV heads of D, G query heads each."""

    context: int
    batch: int
    heads: int = 8
    group: int = 4
    head_dim: int = 128

    @property
    def query_heads(self) -> int:
        """Hq."""
        return self.heads * self.group

    @property
    def cold_len(self) -> int:
        """Tokens that an index chooses from: all but the sink and the recent ones."""
        return self.context - 260

    @property
    def candidates(self) -> int:
        """Of ParisKV's second stage."""
        share = PARIS_BETA if self.cold_len < PARIS_LONG else PARIS_LONG_BETA
        return max(PARIS_K, math.ceil(share * self.cold_len))

    @property
    def a2ats_k(self) -> int:
        """Tokens that A²ATS selects."""
        return int(A2ATS_RATIO * self.cold_len)

    @property
    def scale(self) -> float:
        """Factor of the dot products."""
        return self.head_dim**-0.5

    def query(self) -> torch.Tensor:
        """``[B, Hq, 1, D]``."""
        return torch.empty(
            self.batch, self.query_heads, 1, self.head_dim, dtype=_HALF, device=_META
        )

    def tokens(self, *width: int, dtype: torch.dtype) -> torch.Tensor:
        """``[B, Hkv, n, *width]``: the cold tokens, in a buffer with room for more."""
        shape = self.batch, self.heads, self.context + self.context // 16, *width
        return torch.empty(shape, dtype=dtype, device=_META)[:, :, : self.cold_len]

    def valid(self) -> torch.Tensor:
        """``[B, n]`` bool, of which tokens there are."""
        mask = torch.empty(self.batch, self.context, dtype=torch.bool, device=_META)
        return mask[:, : self.cold_len]

    def ids(self, count: int) -> torch.Tensor:
        """``[B, Hkv, 1, count]`` int32."""
        return torch.empty(self.batch, self.heads, 1, count, dtype=torch.int32, device=_META)

    def pages(self, width: int, key_width: int, dtype: torch.dtype) -> PagedRows:
        """A store of all cold rows, a row ``width`` numbers."""
        pages = -(-self.context // PAGE_LEN)
        shape = self.batch * pages, self.heads, PAGE_LEN, width
        chunk = torch.empty(shape, dtype=dtype, device=_META)
        table = torch.empty(self.batch, pages, dtype=torch.int32, device=_META)
        # Their own would look at the chunks' memory, which there is none of.
        address = torch.empty(len(chunk), dtype=torch.int64, device=_META)
        return PagedRows([chunk], table, key_width, address)


def _paris(shape: StepShape, shares: tuple[float, ...] = PARIS_SHARES) -> None:
    from hf_kvret_kernels.paris import triton

    grouped = shape.query().view(shape.batch, shape.heads, shape.group, 1, shape.head_dim)
    dim = paris.rotated_dim(shape.head_dim)
    planes = (shape.tokens(width, dtype=torch.uint8) for width in (dim // 8, dim // 2))
    codes = paris.ParisCodes(*planes)
    counts = torch.empty(shape.batch, shape.heads, dim // 8, 256, dtype=torch.int32, device=_META)
    signs, levels = torch.empty(dim, device=_META), torch.empty(8, device=_META)
    query, units = grouped.transpose(2, 3), paris.share_units(PARIS_RHO, shares)
    chosen, scored = (PARIS_K, shape.candidates, units), (shape.valid(), shape.scale, None)
    means = torch.empty(shape.batch, shape.heads, PARIS_BLOCKS, shape.head_dim, device=_META)
    blocks = means, -(-shape.context // PARIS_BLOCKS), None if units else means
    call = paris.SearchCall(query, signs, codes, counts, levels, *chosen, *scored, *blocks)
    triton.search(call)


def _wide_paris(shape: StepShape, heads: int, group: int, head_dim: int) -> None:
    """A search in such rows in place of the shape's own, and what a flush encodes."""
    from hf_kvret_kernels.paris import triton_encode

    shape = replace(shape, heads=heads, group=group, head_dim=head_dim)
    _paris(shape, PARIS_LONG_ROW_SHARES)
    dim = paris.rotated_dim(head_dim)
    signs, levels = torch.empty(dim, device=_META), torch.empty(8, device=_META)
    keys = torch.empty(shape.batch, heads, 512, head_dim, dtype=_HALF, device=_META)
    codes = paris.ParisCodes.empty(shape.batch, heads, 512, head_dim, device=_META)
    triton_encode.encode(keys, signs, levels, codes)
    triton_encode.count_centroids(codes.sign, None)


def _lrqk(shape: StepShape) -> None:
    from hf_kvret_kernels.proxy import KeptQueries, Projection, ProxyCall, triton

    query, proxies = shape.query(), shape.tokens(LRQK_RANK, dtype=torch.int8)
    maps = torch.empty(shape.batch, shape.heads, shape.head_dim, LRQK_RANK, device=_META)
    kept = KeptQueries(torch.cat([query] * 64, dim=2), maps.new_empty(2).long())
    options = shape.heads, shape.valid(), None, shape.scale, Projection(maps, maps[:, :, :1]), kept
    triton.top_indices(ProxyCall(query, proxies, *options), LRQK_K)


def _a2ats(shape: StepShape) -> None:
    from hf_kvret_kernels.codebook.triton import best_shares, code_counts, lookup
    from hf_kvret_kernels.proxy import ProxyCall, triton
    from hf_kvret_kernels.top_k.triton import top_k

    words = torch.empty(shape.heads, CODEWORDS, shape.head_dim, dtype=_HALF, device=_META)
    rows = words.expand(shape.batch, -1, -1, -1)
    call = ProxyCall(shape.query().float(), rows, shape.query_heads, None, None)
    table = triton.relevance(call)
    codes, valid = shape.tokens(dtype=torch.int16), shape.valid()
    counts = code_counts(codes, CODEWORDS, valid)
    top_k(lookup(best_shares(table, counts), codes, valid), shape.a2ats_k)


def _ctkvr(shape: StepShape) -> None:
    from hf_kvret_kernels.centroid import triton
    from hf_kvret_kernels.gather_attention.triton import gather_scores
    from hf_kvret_kernels.relevance.triton import best_ids

    lead = shape.batch, shape.heads
    queries = torch.empty(*lead, 1, shape.group, shape.head_dim, device=_META)
    centroids = queries.new_empty(*lead, CENTROIDS, *queries.shape[3:], dtype=_HALF)
    norms = torch.empty(*lead, CENTROIDS, shape.group, device=_META)
    triton.similarity(queries, centroids, norms, largest=False)
    low = torch.empty(*lead, CENTROIDS, LIST_LEN, dtype=torch.int16, device=_META)
    nearest = torch.empty(*lead, 1, NPROBE, dtype=torch.int64, device=_META)
    triton.take_lists(low, low.to(torch.uint8), nearest)
    ids = triton.unite(shape.ids(RECALLED), shape.valid())
    rows = shape.pages(2 * shape.head_dim, shape.head_dim, _HALF)
    scores = gather_scores(shape.query(), rows, ids, shape.scale, None)
    best_ids(scores.unflatten(1, (shape.heads, -1)).transpose(2, 3), ids, CTKVR_K)


def _flat(shape: StepShape) -> None:
    from hf_kvret_kernels.proxy import ProxyCall, triton

    keys, options = shape.tokens(shape.head_dim, dtype=_HALF), (shape.heads, shape.valid(), None)
    triton.top_indices(ProxyCall(shape.query(), keys, *options), FLAT_K)


def _count(shape: StepShape) -> None:
    from hf_kvret_kernels.relevance import triton

    triton.count_ids(shape.ids(PARIS_K), torch.empty((), dtype=torch.int64, device=_META))


def _attend(shape: StepShape, count: int) -> None:
    from hf_kvret_kernels.gather_attention import triton

    rows = shape.pages(2 * shape.head_dim, shape.head_dim, _HALF)
    triton.gather_partials(shape.query(), rows, shape.ids(count), shape.scale, None)


def _higgs(shape: StepShape) -> None:
    from hf_kvret_kernels.higgs import triton_attend

    dim = shape.head_dim
    codec = HiggsCodec(HIGGS_BITS, dim)
    codes, scales = 2 * codec.code_bytes(dim), 2 * codec.scale_bytes(dim)
    pages = replace(shape.pages(codes + scales, codes, torch.uint8), apart=True)
    mean = torch.empty(len(pages.table), pages.heads, dim, device=_META)
    rows = CodedRows(pages, codec, dim, dim, key_mean=mean)
    triton_attend.gather_partials(shape.query(), rows, shape.ids(LRQK_K), shape.scale, None)


def _resident(shape: StepShape) -> None:
    from hf_kvret_kernels.resident import SlotMap, triton

    ids, tokens, slots = (shape.ids(LRQK_K)[:, :, 0] for _ in range(3))
    where = shape.tokens(dtype=torch.int32)
    clock = torch.empty(1, dtype=torch.int32, device=_META)
    triton.assign(SlotMap(where, tokens, slots, clock), ids, shape.cold_len)
    width = 2 * shape.head_dim
    buffer = torch.empty(shape.batch, shape.heads, LRQK_K, width, dtype=_HALF, device=_META)
    triton.fetch(shape.pages(width, shape.head_dim, _HALF), ids, slots, buffer)


def _near(shape: StepShape) -> _dispatch.DenseCall:
    """Attention to the window, with its mask."""
    sizes = shape.batch, shape.heads, WINDOW_LEN, shape.head_dim
    keys, values = (torch.empty(sizes, dtype=_HALF, device=_META) for _ in range(2))
    mask = torch.empty(shape.batch, WINDOW_LEN, dtype=torch.bool, device=_META)
    return _dispatch.DenseCall(shape.query(), keys, values, shape.scale, None, mask, None)


def _pieces(shape: StepShape, count: int, tile_rows: int, waves: int) -> Partials:
    """As attention to ``count`` rows leaves them, ``waves`` programs a multiprocessor."""
    from hf_kvret_kernels._triton_shared import partial_buffers, split_plan

    programs = shape.batch * shape.heads
    splits, _ = split_plan(count, tile_rows, programs, _META, waves=waves, most=64)
    return Partials(*partial_buffers(shape.query(), splits, shape.head_dim))


def _finish(shape: StepShape, count: int) -> None:
    from hf_kvret_kernels.step_attention import NewToken, triton

    call = _near(shape)
    total = torch.empty((), dtype=torch.int64, device=_META)
    others, ids = _pieces(shape, count, 32, 4), shape.ids(count)
    column = torch.empty(1, dtype=torch.int64, device=_META)
    new = NewToken(call.key[:, :, :1].contiguous(), call.value[:, :, :1].contiguous(), column)
    lead, dim = (shape.batch, shape.heads), shape.head_dim
    sizes = (*lead, 1 + 2 * dim, dim), (*lead, 1, dim), (shape.batch, 1)
    moments, values, counts = (torch.empty(size, device=_META) for size in sizes)
    mean = MeanToken(moments, values, counts.long())
    triton.step_attention(call, others, None, ids, total, _HALF, new, mean)


def _window(shape: StepShape) -> None:
    from hf_kvret_kernels.prompt_attention import triton

    triton.prompt_partials(_near(shape))


def _probes(shape: StepShape) -> None:
    from hf_kvret_kernels.block_lse import triton

    query = shape.query().expand(-1, -1, 16, -1)
    slots = torch.empty(shape.batch, 16, dtype=torch.long, device=_META)
    keys = shape.tokens(shape.head_dim, dtype=_HALF)
    call = _dispatch.DenseCall(query, keys, keys, shape.scale, None, None, None)
    triton.block_lse(call, slots, PAGE_LEN)


def _merge(shape: StepShape) -> None:
    from hf_kvret_kernels.merge import triton

    near = _pieces(shape, WINDOW_LEN, 64, 1)
    out = torch.empty(shape.query().shape, device=_META)
    lse = torch.empty(shape.query().shape[:3], device=_META)
    triton.merge_partials([near.outs, out], [near.lses, lse], None, _HALF)


PARTS: dict[str, Callable[[StepShape], None]] = {
    "paris": _paris,
    "lrqk": _lrqk,
    "a2ats": _a2ats,
    "ctkvr": _ctkvr,
    "flat": _flat,
    "attend-100": lambda shape: _attend(shape, PARIS_K),
    "attend-2048": lambda shape: _attend(shape, LRQK_K),
    "higgs": _higgs,
    "resident": _resident,
    "finish-100": lambda shape: _finish(shape, PARIS_K),
    "finish-2048": lambda shape: _finish(shape, LRQK_K),
    "count": _count,
    "window": _window,
    "merge": _merge,
}
"""By name: what launches the kernels of a part.

A "finish" follows attention to as many selected rows; "count", "window" and "merge" stand in its
place where a store attends elsewhere, and gives its part when that is ready.
"""

WIDE_PARTS: dict[str, Callable[[StepShape], None]] = {
    "paris-576x16": lambda shape: _wide_paris(shape, 1, 16, 576),
    "paris-576x128": lambda shape: _wide_paris(shape, 1, 128, 576),
    "paris-512x8": lambda shape: _wide_paris(shape, 2, 8, 512),
    "paris-288x40": lambda shape: _wide_paris(shape, 1, 40, 288),
}
"""By the numbers of a row and the query heads of one: compiled too, but no step has them."""

PROMPT_PARTS: dict[str, Callable[[StepShape], None]] = {"probes": _probes}
"""What launches kernels of a prompt that is read by retrieval: a group's probes score blocks."""
