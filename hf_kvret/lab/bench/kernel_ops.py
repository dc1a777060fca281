"""The table of operations, by method, with the defaults of each.

``bench kernels``, the self-test, the tests of kernels and their compilation for GPUs that are not
at hand run these. ``STEP_OPS`` have no floor: their time is that of other operations' bytes.

Coded rows are as ``store="higgs"`` has them: with its default of bits, in groups of a head, and in
the dtype of the model. A2ATS brings keys and queries to the space of its codewords in fp32, and
LRQK keeps proxies in bf16, so that they don't depend on the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from hf_kvret.lab.bench.kernel_work import (
    ATTENTION_ERRORS,
    CTKVR,
    PAGE_LEN,
    PARIS,
    SCORE_ERROR,
    Draw,
    Error,
    KernelOp,
    KernelShape,
    coded,
    distance,
    not_shared,
    unequal,
)
from hf_kvret_kernels import centroid, codebook, higgs, paris, proxy, relevance
from hf_kvret_kernels.block_lse import block_lse
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.merge import Partials, merge_partials
from hf_kvret_kernels.page_copy import copy_pages
from hf_kvret_kernels.paged import PagedRows, lay_apart
from hf_kvret_kernels.prompt_attention import prompt_attention
from hf_kvret_kernels.resident import SlotMap, assign, fetch
from hf_kvret_kernels.step_attention import step_attention
from hf_kvret_kernels.top_k import top_k

_WEIGHT = torch.bfloat16
_M = PARIS.subspace_dim


def _encode(shape: KernelShape, draw: Draw) -> Any:
    keys, (signs, levels) = draw.keys(shape), _basis(shape, draw)
    mean = draw.normal(shape.batch, shape.heads, shape.head_dim)

    def run(backend: str) -> tuple[torch.Tensor, ...]:
        codes = paris.encode(
            keys, signs, levels, m=_M, mean=mean, weight_dtype=_WEIGHT, backend=backend
        )
        return codes.sign, codes.magnitude, codes.weight

    return run


def _code_error(found: Sequence[Any], want: Sequence[Any]) -> float:
    # A number between two levels goes to either, which changes the weight of its subspace: so the
    # weights are compared as a whole, not by the worst row.
    weights = [[each.reshape(1, -1) for each in part[2:]] for part in (found, want)]
    return max(unequal(found[:2], want[:2]), distance(*weights))


def _search(shape: KernelShape, draw: Draw) -> Any:
    codes, (signs, levels) = _draw_codes(shape, draw), _basis(shape, draw)
    query = draw.normal(shape.batch, shape.heads, 1, shape.group, shape.head_dim, dtype=shape.dtype)
    counts = paris.count_centroids(codes.sign, m=_M)
    return partial(
        paris.search,
        *(query, signs, codes, counts, levels, shape.top_k),
        survivors=shape.count("best"),
        **_stage_one_options(shape, draw),
    )


def _candidates(shape: KernelShape, draw: Draw) -> Any:
    query, counts, sign = _stage_one(shape, draw)
    options = _stage_one_options(shape, draw)
    return partial(paris.candidates, query, counts, sign, shape.count("best"), **options)


def _stage_one(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, ...]:
    sign = _draw_codes(shape, draw).sign
    return _draw_queries(shape, draw), paris.count_centroids(sign, m=_M), sign


def _stage_one_options(shape: KernelShape, draw: Draw) -> dict[str, Any]:
    _, rho = PARIS.ratios(shape.length)
    tiers = PARIS.tiers_for(paris.rotated_dim(shape.head_dim) // _M)
    return {"rho": rho, "tiers": tiers, "m": _M, "valid": draw.all_valid(shape)}


def _rerank(shape: KernelShape, draw: Draw) -> Any:
    codes, queries = _draw_codes(shape, draw), _draw_queries(shape, draw)
    ids, levels = _draw_best(shape, draw), _basis(shape, draw)[1]
    return partial(paris.rerank, queries, codes, ids, levels, m=_M)


def _best_ids(shape: KernelShape, draw: Draw) -> Any:
    scores = draw.normal(shape.batch, shape.heads, 1, shape.group, shape.count("best"))
    return partial(relevance.best_ids, scores, _draw_best(shape, draw), shape.top_k)


def _basis(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    signs = paris.random_signs(shape.count("P"), PARIS.seed)
    return signs.to(draw.device), paris.magnitude_levels(_M).to(draw.device)


def _draw_codes(shape: KernelShape, draw: Draw) -> paris.ParisCodes:
    """Of random bytes: the cost of a code does not depend on what it says."""
    lead = (shape.batch, shape.heads, shape.length)
    signs, magnitudes = (
        draw.integers(256, *lead, shape.count(part), dtype=torch.uint8)
        for part in ("signs", "magnitudes")
    )
    weight = draw.normal(*lead, shape.count("S"), dtype=_WEIGHT).abs()
    return paris.ParisCodes(signs, magnitudes, weight)


def _draw_queries(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.normal(shape.batch, shape.heads, 1, shape.group, shape.count("P"))


def _draw_best(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.ids(shape, shape.count("best")).sort(dim=-1).values


PARIS_OPS = (
    # Keys to their codes, the mean key of each head subtracted, as a flush does. The rotation is
    # additions alone, so no multiply-adds count.
    KernelOp(
        name="paris.encode",
        compiled=True,
        read="B H n D x + B H D f32 + P f32",
        written="B H n signs + B H n magnitudes + B H n S bf16",
        inputs=_encode,
        # Coordinates at the border of two levels go to either, and weights are rounded to bf16.
        check=(_code_error, 1e-2),
        copies=8,
    ),
    # All of a step's search: the tokens that matter most, by the full codes of the candidates.
    KernelOp(
        name="paris.search",
        read="B H n signs + B Hq D x + P f32 + B H S patterns i32 + B n + B H best signs "
        "+ B H best magnitudes + B H best S bf16 + 8 f32",
        written="B H K i32",
        products="B H best G P",
        inputs=_search,
        # Patterns at the border of two tiers go to either.
        check=(not_shared, 1e-2),
        copies=16,
        stored="B H n magnitudes + B H n S bf16",
    ),
    # Its first stage: the tokens with the most points by their sign patterns, of any query head.
    KernelOp(
        name="paris.candidates",
        read="B H n signs + B Hq P f32 + B H S patterns i32 + B n",
        written="B H best i32",
        inputs=_candidates,
        check=(not_shared, 1e-2),
        sizes="{best:,} candidates",
        copies=16,
    ),
    # Its second stage: estimated scores of the candidates, for each query head; 8 levels.
    KernelOp(
        name="paris.rerank",
        read="B H best i32 + B H best signs + B H best magnitudes + B H best S bf16 + B Hq P f32 "
        "+ 8 f32",
        written="B H best G f32",
        products="B H best G P",
        inputs=_rerank,
        check=(distance, SCORE_ERROR),
        sizes="{best:,} candidates",
        # Codes of all tokens.
        stored="B H n signs + B H n magnitudes + B H n S bf16",
    ),
    # The candidates that matter most to any query head of a group.
    KernelOp(
        name="relevance.best_ids",
        read="B H best i32 + B H best G f32",
        written="B H K i32",
        inputs=_best_ids,
        # Any of the candidates that matter equally is right.
        check=(not_shared, 1e-3),
        sizes="{best:,} candidates",
        copies=16,
    ),
)


def _window(shape: KernelShape, draw: Draw) -> Any:
    return partial(
        prompt_attention,
        draw.query(shape),
        draw.keys(shape),
        draw.keys(shape),
        scale=shape.scale,
        causal_offset=shape.length - 1,
        valid=draw.all_valid(shape),
        out_dtype=torch.float32,
    )


def _decode(shape: KernelShape, draw: Draw) -> Any:
    parts = _draw_coded(shape, draw, (shape.batch, shape.heads, shape.length), 1)
    return partial(coded(shape).decode, *parts, shape.dtype)


def _attend_coded(shape: KernelShape, draw: Draw) -> Any:
    codec, dim, table = coded(shape), shape.head_dim, draw.pages(shape)
    parts = _draw_coded(shape, draw, (table.numel(), shape.heads, PAGE_LEN), 2)
    code_bytes = 2 * codec.code_bytes(dim)
    # Elsewhere bytes of codes would be read as scales, some of them infinite.
    pages = lay_apart(torch.cat(parts, dim=-1), code_bytes)
    paged = PagedRows([pages], table, code_bytes, apart=True)
    rows = higgs.CodedRows(paged, codec, dim, dim)
    query, ids = draw.query(shape), draw.ids(shape, shape.top_k)
    return partial(higgs.attend, query, rows, ids, scale=shape.scale)


def _draw_coded(
    shape: KernelShape, draw: Draw, lead: tuple[int, ...], parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales of ``parts`` vectors a row: the cost does not depend on them."""
    codec, dim = coded(shape), shape.head_dim
    codes = draw.integers(256, *lead, parts * codec.code_bytes(dim), dtype=torch.uint8)
    scales = draw.normal(*lead, parts * codec.scale_bytes(dim) // 2, dtype=torch.float16)
    return codes, scales.abs().view(torch.uint8)


HIGGS_OPS = (
    # Keys, or values, to codes and scales, as a flush does. The transform is additions, and a
    # nearest point can be found without a product for each point, so no multiply-adds count.
    KernelOp(
        name="higgs.encode",
        compiled=True,
        read="B H n D x",
        written="B H n coded",
        inputs=lambda shape, draw: partial(coded(shape).encode, draw.keys(shape)),
        # Pairs nearly half-way between two points go to either; scales are rounded to fp16.
        check=(unequal, 1e-2),
        sizes="{bits} bits, groups of {together}",
        copies=16,
    ),
    # Codes and scales to vectors, as exact attention over a second prompt does.
    KernelOp(
        name="higgs.decode",
        compiled=True,
        read="B H n coded",
        written="B H n D x",
        inputs=_decode,
        # Both are rounded to the vectors' dtype.
        check=(distance, ATTENTION_ERRORS),
        sizes="{bits} bits, groups of {together}",
        copies=16,
    ),
    # This does the same as gather_attention, over coded rows.
    KernelOp(
        name="higgs.attend",
        compiled=True,
        read="B H K i32 + 2 B H K coded + B Hq D x",
        written="B Hq D f32 + B Hq f32",
        products="2 B Hq K D",
        inputs=_attend_coded,
        # Scaled grid points are rounded to the query's dtype too.
        check=(distance, {dtype: 2 * error for dtype, error in ATTENTION_ERRORS.items()}),
        sizes="{K:,} rows, {bits} bits, groups of {together}",
        stored="2 B H n coded",
        copies=64,
    ),
)
ATTENTION_OPS = (
    # Attention of a step's query over k chosen rows of each KV head: an output and a log-sum. Rows
    # are read once for a group; the page table is left out.
    KernelOp(
        name="gather_attention",
        read="B H K i32 + 2 B H K D x + B Hq D x",
        written="B Hq D f32 + B Hq f32",
        products="2 B Hq K D",
        inputs=lambda s, draw: partial(gather_attention, *draw.chosen_rows(s), scale=s.scale),
        check=(distance, ATTENTION_ERRORS),
        sizes="{K:,} rows",
        stored="2 B H n D x",
        compiled=True,
    ),
    # Exact scores of k chosen keys of each KV head; values between the keys don't count.
    KernelOp(
        name="gather_scores",
        read="B H K i32 + B H K D x + B Hq D x",
        written="B Hq K f32",
        products="B Hq K D",
        inputs=lambda s, draw: partial(gather_scores, *draw.chosen_rows(s), scale=s.scale),
        check=(distance, SCORE_ERROR),
        sizes="{K:,} rows",
        stored="2 B H n D x",
        compiled=True,
    ),
    # A decode step's query over a dense window of all tokens, masked; the output is to be merged.
    KernelOp(
        name="prompt_attention",
        read="2 B H n D x + B Hq D x + B n",
        written="B Hq D f32 + B Hq f32",
        products="2 B Hq n D",
        inputs=_window,
        check=(distance, ATTENTION_ERRORS),
        compiled=True,
    ),
)


# CTkvr reads its store in pieces of so many tokens.
_PIECE_LEN = 1 << 14
_SCORES = (distance, SCORE_ERROR)


def _encode_keys(shape: KernelShape, draw: Draw) -> Any:
    keys, book = draw.keys(shape, torch.float32), _draw_book(shape, draw)
    return partial(codebook.encode, keys, book, norms=codebook.half_norms(book))


def _score_table(shape: KernelShape, draw: Draw) -> Any:
    query = draw.normal(shape.batch, shape.query_heads, 1, shape.head_dim)
    return partial(codebook.score_table, query, _draw_book(shape, draw), scale=shape.scale)


def _draw_book(shape: KernelShape, draw: Draw) -> torch.Tensor:
    # `hf-kvret calibrate a2ats` saves codewords in this dtype by default.
    return draw.normal(shape.heads, shape.codewords, shape.head_dim, dtype=torch.bfloat16)


def _lookup(name: str, shape: KernelShape, draw: Draw) -> Any:
    table = draw.normal(shape.batch, shape.query_heads, 1, shape.codewords)
    lead = (shape.batch, shape.heads, shape.length)
    codes = draw.integers(shape.codewords, *lead, dtype=torch.int16)
    return partial(getattr(codebook, name), table, codes, valid=draw.all_valid(shape))


CODEBOOK_OPS = (
    # Keys to ids of their nearest codewords, the half norms given, as when tokens arrive. With
    # thousands of codewords the multiply-adds are the floor, not the bytes.
    KernelOp(
        name="codebook.encode",
        read="B H n D f32 + H C D bf16 + H C f32",
        written="B H n i16",
        products="B H n C D",
        inputs=_encode_keys,
        # Keys nearly half-way between two codewords go to either.
        check=(unequal, 1e-3),
        sizes="{C:,} codewords",
    ),
    # Products of a step's query and all codewords; the same for every length.
    KernelOp(
        name="codebook.score_table",
        read="B Hq D f32 + H C D bf16",
        written="B Hq C f32",
        products="B Hq C D",
        inputs=_score_table,
        check=_SCORES,
        sizes="{C:,} codewords",
    ),
    # Scores of all tokens for each query head, as budget_of="union" needs them.
    KernelOp(
        name="codebook.lookup",
        read="B Hq C f32 + B H n i16 + B n",
        written="B Hq n f32",
        inputs=partial(_lookup, "lookup"),
        check=(unequal, 0.0),
        sizes="{C:,} codewords",
    ),
    # Scores of all tokens for each KV head, as a step calls it. Codes are read once, although they
    # are first counted and then looked up.
    KernelOp(
        name="codebook.lookup_scores",
        read="B Hq C f32 + B H n i16 + B n",
        written="B H n f32",
        inputs=partial(_lookup, "lookup_scores"),
        check=_SCORES,
        sizes="{C:,} codewords",
    ),
)


def _top_places(shape: KernelShape, draw: Draw) -> Any:
    query = draw.normal(shape.batch, shape.query_heads, 1, shape.rank) * shape.scale
    lead = (shape.batch, shape.heads, shape.length)
    rows = draw.normal(*lead, shape.rank, dtype=torch.bfloat16)
    arguments = query, rows, shape.heads, shape.top_k
    return partial(proxy.top_indices, *arguments, valid=draw.all_valid(shape))


def _top_k(shape: KernelShape, draw: Draw) -> Any:
    return partial(top_k, draw.normal(shape.batch, shape.heads, 1, shape.length), shape.top_k)


def _top_k_error(call: Any) -> Error:
    """Which of equal scores are taken is open, so the scores of the ids are compared."""
    scores = call.args[0]

    def values(ids: Sequence[Any]) -> list[torch.Tensor]:
        # Ids out of range, and those that are there twice, are told by NaN.
        known = ((ids[0] >= 0) & (ids[0] < scores.shape[3])).all()
        taken = scores.gather(3, ids[0].long().clamp(0, scores.shape[3] - 1))
        distinct = ids[0].sort(dim=-1).values.diff(dim=-1).ne(0).all()
        return [torch.where(known & distinct, taken.sort(dim=-1).values, float("nan"))]

    return lambda result, want: unequal(values(result), values(want))


def _top_keys(shape: KernelShape, draw: Draw) -> Any:
    queries, keys, valid = _bundles(shape, draw), draw.keys(shape), draw.all_valid(shape)
    listed = CTKVR.list_len(shape.length, shape.top_k)

    def pieces() -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, shape.length, _PIECE_LEN):
            yield start, keys[:, :, start : start + _PIECE_LEN]

    return partial(centroid.top_keys, queries, pieces, listed, valid=valid, scale=shape.scale)


def _similarity(shape: KernelShape, draw: Draw) -> Any:
    query, centroids = _bundles(shape, draw, 1), _bundles(shape, draw)
    return partial(centroid.similarity, query, centroids, centroids.float().norm(dim=-1) ** -1)


def _bundles(shape: KernelShape, draw: Draw, count: int | None = None) -> torch.Tensor:
    """``[B, H, count, G, D]`` past queries, as many as there are centroids."""
    count = count or CTKVR.centroids_for(shape.length)
    sizes = (shape.batch, shape.heads, count, shape.group, shape.head_dim)
    return draw.normal(*sizes, dtype=shape.dtype)


SEARCH_OPS = (
    # The best tokens of each group by proxies of their keys. Proxies are read once, although a
    # softmax over tokens takes two passes or room for all scores.
    KernelOp(
        name="proxy.top_indices",
        read="B H n r bf16 + B Hq r f32 + B n",
        written="B H K i32",
        products="B Hq n r",
        inputs=_top_places,
        # Any of the tokens that score nearly the same is right.
        check=(not_shared, 1e-2),
        sizes="rank {r}",
        copies=8,
    ),
    # The highest scores of each KV head.
    KernelOp(
        name="top_k",
        read="B H n f32",
        written="B H K i32",
        inputs=_top_k,
        check=(unequal, 0.0),
        error_of=_top_k_error,
        sizes="top {K:,}",
    ),
    # Lists of the best keys for as many past queries as CTkvr has for that length. Keys are read
    # once, although with several heads in a group they are read for the denominators first.
    KernelOp(
        name="centroid.top_keys",
        read="B H n D x + B H L G D x + B n",
        written="B H L listed i32",
        products="B H L G n D",
        inputs=_top_keys,
        # Keys at the end of a list are nearly as good as those behind it.
        check=(not_shared, 1e-2),
        sizes="{L:,} lists of {listed:,}",
    ),
    # Cosines of a step's query and all centroids, the largest of a group.
    KernelOp(
        name="centroid.similarity",
        read="B H G D x + B H L G D x + B H L G f32",
        written="B H L f32",
        products="B H L G D",
        inputs=_similarity,
        check=_SCORES,
        sizes="{L:,} centroids",
    ),
)


def _merge(shape: KernelShape, draw: Draw) -> Any:
    outs, lses = zip(*(_partials(shape, draw, splits) for splits in (1, 3, 7)), strict=True)
    return partial(merge_partials, outs, lses, sink_logits=draw.normal(shape.query_heads))


def _partials(shape: KernelShape, draw: Draw, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    lead = (shape.batch, shape.query_heads, 1, splits)
    return draw.normal(*lead, shape.head_dim), draw.normal(*lead)


def _step(shape: KernelShape, draw: Draw) -> Any:
    return partial(
        step_attention,
        *(draw.query(shape), draw.keys(shape), draw.keys(shape)),
        Partials(*_partials(shape, draw, 5)),
        scale=shape.scale,
        causal_offset=shape.length - 1,
        valid=draw.all_valid(shape),
        out_dtype=torch.float32,
    )


def _block_sums(shape: KernelShape, draw: Draw) -> Any:
    probes = 4
    lead = (shape.batch, shape.query_heads, probes, shape.head_dim)
    last = torch.arange(probes, device=draw.device) * (shape.length // probes)
    positions = last.expand(shape.batch, probes).contiguous()
    queries = draw.normal(*lead, dtype=shape.dtype)
    return partial(
        block_lse, queries, draw.keys(shape), positions, scale=shape.scale, block=64,
    )  # fmt: skip


def _fetch(shape: KernelShape, draw: Draw) -> Any:
    """Which slots are taken, and what lies in them after a call; not who got which of them."""
    _, rows, ids = draw.chosen_rows(shape)
    tokens = ids[:, :, 0]

    def run(backend: str) -> torch.Tensor:
        lead, slots = tokens.shape[:2], shape.top_k
        empty = partial(torch.full, fill_value=-1, dtype=torch.int32, device=draw.device)
        table = empty((*lead, shape.length))
        token, stamp = empty((*lead, slots)), empty((*lead, slots))
        clock = torch.zeros(1, dtype=torch.int32, device=draw.device)
        buffer = rows.chunks[0].new_zeros(*lead, slots, rows.width)
        indices, fetched = assign(SlotMap(table, token, stamp, clock), tokens, backend=backend)
        fetch(rows, tokens, fetched, buffer, backend=backend)
        return buffer.gather(2, indices.long()[..., None].expand(*indices.shape, rows.width))

    return run


def _copied_pages(shape: KernelShape, draw: Draw) -> Any:
    _, rows, _ = draw.chosen_rows(shape)
    return partial(copy_pages, rows, 1, shape.pages - 1)


STEP_OPS = (
    KernelOp(name="merge", inputs=_merge, check=(distance, SCORE_ERROR)),
    KernelOp(name="step_attention", inputs=_step, check=(distance, ATTENTION_ERRORS)),
    KernelOp(name="block_lse", inputs=_block_sums, check=_SCORES, compiled=True),
    KernelOp(name="resident", inputs=_fetch, check=(unequal, 0.0)),
    KernelOp(name="copy_pages", inputs=_copied_pages, check=(unequal, 0.0)),
)

OPERATIONS: tuple[KernelOp, ...] = (
    *(*CODEBOOK_OPS, *SEARCH_OPS, *PARIS_OPS, *HIGGS_OPS, *ATTENTION_OPS, *STEP_OPS),
)
"""Every operation that has a kernel."""
