"""Both stages of a search in Triton kernels, which leave to one another what they have in hand.

1. ``bonus`` makes tables of what a key earns by its centroid, four tables in a word. It also turns
   queries into the coordinates of the codes, takes their products with the mean keys of blocks, and
   zeroes the numbers that later kernels count up.
2. ``collide`` looks the points of all tokens up. Each program takes a block of tokens, holds the
   tables in shared memory, and counts how many tokens reach each sum. The last program of a row to
   arrive adds these counts up: it finds the lowest sum that is taken, and how many tokens the
   blocks before each block contribute.
3. ``rank`` writes down the tokens of the highest scores of a block, behind those of the blocks
   before it, gathers their codes and takes inner products with all G queries. Long codes are taken
   in chunks; else threads hold whole codes. The last program of a row to arrive chooses among these
   candidates. Where that would take many rounds, ``top_k`` does so in launches of its own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels import _dispatch as dispatch
from hf_kvret_kernels._triton_shared import (
    add_logs,
    best_share,
    capped_scores,
    finite_base,
    load_mask,
    log_sum_exp,
    mask_bytes,
    mask_layout,
    score_factors,
    sum_up,
    walsh_hadamard,
)
from hf_kvret_kernels.paris.codes import (
    EXCLUDED,
    LEAST_OTHERS,
    LEVELS,
    MOST_SIMILAR,
    SHARE_UNIT,
    ZERO_POINTS,
    SearchCall,
    log_of_share,
    most_points,
    points_of_product,
    rotation_blocks,
    rotation_stride,
)
from hf_kvret_kernels.paris.triton_encode import source_columns
from hf_kvret_kernels.top_k.triton import best_ids, choose, order_of, warm_up

_SHARE_UNIT = tl.constexpr(SHARE_UNIT)
_EXCLUDED = tl.constexpr(EXCLUDED)
_MOST_SIMILAR = tl.constexpr(float(MOST_SIMILAR))
_ZERO_POINTS = tl.constexpr(ZERO_POINTS)
_LEAST_OTHERS = tl.constexpr(LEAST_OTHERS)
# Programs that share the mean keys of blocks, at most, and their numbers that one takes at a time.
_PARTS = tl.constexpr(32)
_MEANS = 1024
# Tables whose points one load brings. Sums of points stay below 255: none reaches into the next.
PER_WORD = 4
# Bytes of a token's signs that are taken at once, if their number is a power of two.
_WHOLE = 32
# Sign bytes that a program of eight warps looks up at a time, and tokens of a program at most.
# Bytes of a token, where they are not taken at once.
_LOOKUPS = 1 << 14
_TOKENS = 1024
_CHUNKS = (16, 8)
# Blocks whose counts the last program adds up at a time.
_BLOCKS = 256
# Bytes that rows of scores start at multiples of.
ALIGN = 16
# Coordinates that eight warps take at once of whole codes; four take chunks of longer ones, which
# need more registers. Bytes of signs of a chunk, at most, and of a thread.
_TILE, _WIDE_TILE = 1 << 13, 1 << 12
_CHUNK = 16
_INNER = 4
# Candidates that the last program of a row chooses among at once, most of them new; rounds of this,
# at most; and log-sum-exps that it adds up at a time.
_LAST = 1 << 11
_ROUNDS = 8
_SUMS = tl.constexpr(256)


def search(call: SearchCall) -> torch.Tensor:
    """See ``hf_kvret_kernels.paris.search``."""
    points = most_points(call.shares, call.counts)
    tables = bonus(
        *(call.query, call.signs, call.counts, call.shares, call.means, call.block_len),
        *(call.samples, call.scale, log_of_share(call)),
    )
    collisions = collide(tables, call.codes.sign, call.valid, points, call.survivors)
    return rank(tables, collisions, call).best


class Bonus(NamedTuple):
    """What the kernels of a search read, and what they count in.

    Attributes:
        words: ``[B, H, Q, W, S, 256, 4]`` uint8: four tables side by side, those beyond G of
            zeros.
        queries: ``[B, H, Q, G, 8, P // 8]`` fp32, the rotated queries: coordinate ``8 b + j`` is at
            ``[j, b]``, so that kernels that take bytes of signs read their coordinates in a row.
        histogram: ``[B, H, Q, 256]`` int32 of zeros.
        tickets: ``[B, H, Q]`` int32 of zeros.
        products: ``[B, H, Q, G, blocks]`` fp32: see ``naive.mean_products``; None without means.
        bests: ``[B, H, Q, G, parts]`` fp32, whose largest is that of ``products``.
        logs: ``[B, H, Q, G, parts, 2]`` fp32: log-sum-exps of the logits of samples, and the
            largest of these; None without samples.
        units: ``[B, H, Q, G]`` fp32: points that a product of 1 is worth.
        block_bits: a block has two to the power of that many tokens.
        scale: factor of the products in a softmax.
        share: of ``codes.log_of_share``.
    """

    words: torch.Tensor
    queries: torch.Tensor
    histogram: torch.Tensor
    tickets: torch.Tensor
    products: torch.Tensor | None
    bests: torch.Tensor | None
    logs: torch.Tensor | None
    units: torch.Tensor | None
    block_bits: int
    scale: float
    share: float


def by_planes(q_rot: torch.Tensor) -> torch.Tensor:
    """``Bonus.queries`` of ``[..., P]``."""
    return q_rot.unflatten(-1, (-1, 8)).mT.contiguous()


def subspaces_of_program(count: int) -> int:
    """How many of a table's ``count`` subspaces one program takes.

    One, by a warp, on a GPU: many are in flight, and nothing crosses warps. The interpreter's time
    goes with the number of operations, not of numbers, so it takes all.
    """
    return count if dispatch.interpreted() else 1


def bonus(
    query: torch.Tensor,
    signs: torch.Tensor | None,
    counts: torch.Tensor,
    shares: tuple[int, ...],
    means: torch.Tensor | None = None,
    block_len: int = 1,
    samples: torch.Tensor | None = None,
    scale: float = 1.0,
    share: float = 0.0,
) -> Bonus:
    """Tables of ``query [B, H, Q, G, D]``, which is in the codes' coordinates without ``signs``."""
    batch, heads, queries, tables, head_dim = query.shape
    device, rows = query.device, batch * heads * queries
    subspaces = counts.shape[2]
    dim, words = subspaces * 8, triton.cdiv(tables, PER_WORD)
    lead = batch, heads, queries
    points = torch.empty(*lead, words, subspaces, 256, PER_WORD, dtype=torch.uint8, device=device)
    histogram = torch.empty(*lead, 256, dtype=torch.int32, device=device)
    tickets = torch.empty(lead, dtype=torch.int32, device=device)
    first, end = rotation_blocks(dim)[0]
    products = bests = logs = units = None
    if means is not None:
        parts = (end - first) // 8 // subspaces_of_program((end - first) // 8)
        products = means.new_empty(*lead, tables, means.shape[2])
        bests = means.new_empty(*lead, tables, parts)
        units = means.new_empty(*lead, tables)
        means = means.contiguous() if signs is not None else by_planes(means)
        if samples is not None:
            logs = means.new_empty(*bests.shape, 2)
            samples = samples.contiguous() if signs is not None else by_planes(samples)
    if signs is None:
        planes = by_planes(query)
        source = planes
    else:
        planes = torch.empty(*lead, tables, 8, dim // 8, dtype=torch.float32, device=device)
        source = query.contiguous()
    bits = block_len.bit_length() - 1
    kept = products, bests, logs, units, bits, scale, share
    result = Bonus(points, planes, histogram, tickets, *kept)
    if not rows:
        return result
    wide = triton.next_power_of_2(dim)
    for first, end in rotation_blocks(dim):
        own = (end - first) // 8
        part = subspaces_of_program(own)
        # The long axis first: a grid has 2**31 - 1 programs there, and 65,535 on the others.
        _bonus_kernel[(rows * words * PER_WORD, own // part)](
            source,
            source if signs is None else signs.contiguous(),
            0 if signs is None or signs.dim() == 1 else dim,
            counts.contiguous(),
            planes,
            points,
            histogram,
            tickets,
            *(planes if x is None else x for x in (means, products, bests, samples, logs, units)),
            queries,
            head_dim,
            0 if means is None else means.shape[2],
            0 if samples is None else samples.shape[2],
            points_of_product(shares),
            (end - first) ** -0.5,
            scale,
            HAS_MEANS=means is not None,
            HAS_SAMPLES=samples is not None,
            MEANS=max(1, _MEANS // wide),
            ROTATE=signs is not None,
            TABLES=tables,
            WORDS=words,
            PER_WORD=PER_WORD,
            SHARES=shares,
            SUBSPACES=subspaces,
            WIDE=wide,
            FIRST=first,
            DIM=end - first,
            STRIDE=rotation_stride(dim),
            PART=part,
            LOG_DIM=(end - first).bit_length() - 1,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return result


@triton.jit(do_not_specialize=["blocks", "samples"])
def _bonus_kernel(
    query_ptr, signs_ptr, signs_stride, counts_ptr, planes_ptr, points_ptr, histogram_ptr,
    tickets_ptr, means_ptr, products_ptr, bests_ptr, samples_ptr, logs_ptr, units_ptr, queries,
    head_dim, blocks, samples, worth, shrink, scale,
    HAS_MEANS: tl.constexpr, HAS_SAMPLES: tl.constexpr, MEANS: tl.constexpr, ROTATE: tl.constexpr,
    TABLES: tl.constexpr, WORDS: tl.constexpr, PER_WORD: tl.constexpr,
    SHARES: tl.constexpr, SUBSPACES: tl.constexpr, WIDE: tl.constexpr,
    FIRST: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, PART: tl.constexpr,
    LOG_DIM: tl.constexpr,
):  # fmt: skip
    """PART subspaces of one table: points of their centroids, by rank or by similarity.

    They are of the block of DIM elements from FIRST on, which is rotated by itself.
    """
    CENTROIDS: tl.constexpr = 256
    WHOLE: tl.constexpr = SUBSPACES * 8
    table = tl.program_id(0) % (WORDS * PER_WORD)
    row = (tl.program_id(0) // (WORDS * PER_WORD)).to(tl.int64)
    part = tl.program_id(1)
    subspaces = FIRST // 8 + part * PART + tl.arange(0, PART)[:, None]
    if (table == 0) & (part == 0) & (FIRST == 0):
        tl.store(histogram_ptr + row * 256 + tl.arange(0, 256), tl.zeros((256,), tl.int32))
        tl.store(tickets_ptr + row, 0)
    ids = tl.arange(0, CENTROIDS)[None, :]
    offset = ((row * WORDS + table // PER_WORD) * SUBSPACES + subspaces) * CENTROIDS
    points_ptr += offset * PER_WORD + table % PER_WORD
    if table < TABLES:
        source = row * TABLES + table
        signs_ptr += row // queries * signs_stride if ROTATE else 0
        if HAS_MEANS and FIRST == 0:
            place, head = source * tl.num_programs(1) + part, row // queries * head_dim
            best, _ = _take_products(
                *(query_ptr + source * head_dim, means_ptr + head * blocks),
                *(products_ptr + source * blocks, head_dim, blocks, part, 1.0, MEANS, WIDE, False),
            )
            tl.store(bests_ptr + place, best)
            if HAS_SAMPLES:
                best, log_sum = _take_products(
                    *(query_ptr + source * head_dim, samples_ptr + head * samples, products_ptr),
                    *(head_dim, samples, part, scale, MEANS, WIDE, True),
                )
                tl.store(logs_ptr + 2 * place, log_sum)
                tl.store(logs_ptr + 2 * place + 1, best)
        if ROTATE:
            indices = tl.arange(0, DIM)[None, :]
            x = _signed(
                query_ptr + source * head_dim, signs_ptr, FIRST + indices, head_dim, WHOLE, STRIDE
            )
            x = walsh_hadamard(x, DIM, LOG_DIM, 1) * shrink
            own = indices // (8 * PART) == part
            tl.store(planes_ptr + source * WHOLE + _plane(FIRST + indices, WHOLE), x, mask=own)
            # The program reads what all its threads have written.
            tl.debug_barrier()
        sims = tl.zeros((PART, CENTROIDS), dtype=tl.float32)
        # Added in the order of the coordinates, as the reference does.
        for j in tl.static_range(8):
            value = tl.load(planes_ptr + source * WHOLE + _plane(subspaces * 8 + j, WHOLE))
            sims += tl.where(((ids >> j) & 1) == 1, value, -value)
        if HAS_MEANS or len(SHARES) == 0:
            all_of_it = tl.arange(0, WIDE)[None, :]
            if ROTATE:
                x = _signed(
                    query_ptr + source * head_dim, signs_ptr, all_of_it, head_dim, WHOLE, STRIDE
                )
            else:
                inside = all_of_it < WHOLE
                x = tl.load(planes_ptr + source * WHOLE + all_of_it, mask=inside, other=0.0)
            x = x.to(tl.float64)
            factor = (tl.sqrt(WHOLE / tl.sum(x * x, axis=1)) * (2 / 3)).to(tl.float32)
            factor = (factor.to(tl.int32, bitcast=True) & -(1 << 20)).to(tl.float32, bitcast=True)
            if HAS_MEANS:
                first = (part == 0) & (FIRST == 0) & (tl.arange(0, 1) == 0)
                tl.store(units_ptr + source + tl.arange(0, 1), factor * worth, mask=first)
        if len(SHARES) == 0:
            points = tl.floor(sims * factor[:, None]) + _ZERO_POINTS
            points = tl.minimum(tl.where(points > 0, points, 0.0), _MOST_SIMILAR)
            tl.store(points_ptr + ids * PER_WORD, points.to(tl.int32).to(tl.uint8))
        else:
            # Integers that compare as the floats do; descending, equal ones by their number.
            bits = sims.to(tl.int32, bitcast=True)
            bits = tl.where(bits == -2147483648, 0, bits)
            order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
            ranked = (_sort((-order << 8) | ids, PART, 8) & (CENTROIDS - 1)).to(tl.int32)
            of_head = ((row // queries) * SUBSPACES + subspaces) * CENTROIDS
            key_counts = tl.load(counts_ptr + of_head + ranked)
            before = tl.cumsum(key_counts, axis=1) - key_counts
            total = tl.sum(key_counts, axis=1).to(tl.int64)[:, None]
            points = tl.zeros((PART, CENTROIDS), dtype=tl.int32)
            for t in tl.static_range(len(SHARES)):
                reach = (total * SHARES[t] + _SHARE_UNIT - 1) // _SHARE_UNIT
                points += (before < reach).to(tl.int32)
            tl.store(points_ptr + ranked * PER_WORD, points.to(tl.uint8))
    else:
        tl.store(points_ptr + ids * PER_WORD, tl.zeros((PART, CENTROIDS), tl.uint8))


@triton.jit
def _take_products(
    query_ptr, keys_ptr, products_ptr, head_dim, count, part, scale,
    MEANS: tl.constexpr, WIDE: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Products of a query and the keys that are this part's, MEANS of them at a time.

    Returns the largest. Those with SAMPLES are scaled, and are not written; then their log-sum-exp.
    """
    best = tl.full((MEANS,), float("-inf"), tl.float32)
    logs = best
    columns = tl.arange(0, WIDE)[None, :]
    inside = columns < head_dim
    query = tl.load(query_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for first in range(part * MEANS, count, tl.num_programs(1) * MEANS):
        own = first + tl.arange(0, MEANS)
        here = inside & (own < count)[:, None]
        key = tl.load(keys_ptr + own[:, None] * head_dim + columns, mask=here, other=0.0)
        product = tl.sum(key * query, axis=1) * scale
        some = tl.where(own < count, product, float("-inf"))
        best = tl.maximum(best, some)
        if SAMPLES:
            logs = add_logs(logs, some)
        else:
            tl.store(products_ptr + own, product, mask=own < count)
    return tl.max(best, axis=0), log_sum_exp(logs)


@triton.jit
def _signed(
    query_ptr, signs_ptr, indices, head_dim, WHOLE: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """A query's numbers times random signs, in the order of the rotation; 0 beyond them."""
    columns = source_columns(indices, WHOLE, STRIDE)
    inside = (indices < WHOLE) & (columns < head_dim)
    x = tl.load(query_ptr + columns, mask=inside, other=0.0)
    return x.to(tl.float32) * tl.load(signs_ptr + indices, mask=indices < WHOLE, other=0.0)


@triton.jit
def _sort(x, ROWS: tl.constexpr, LOG: tl.constexpr):
    """The rows of ``x [ROWS, 2**LOG]`` int64 in ascending order, by a bitonic network.

    As ``tl.sort``, whose exclusive or of two numbers takes the interpreter a hundred times as long
    as their sum, which serves as well.
    """
    x = tl.reshape(x, [ROWS] + [2] * LOG)
    for stage in tl.static_range(1, LOG + 1):
        for bit in tl.static_range(stage - 1, -1, -1):
            x = _exchange(x, bit, stage, LOG)
    return tl.reshape(x, [ROWS, 1 << LOG])


@triton.jit
def _exchange(x, BIT: tl.constexpr, STAGE: tl.constexpr, LOG: tl.constexpr):
    """Numbers whose places differ in BIT put in order, which bit STAGE of the places turns."""
    partner = tl.sum(x, axis=LOG - BIT, keep_dims=True) - x
    last = _bit(BIT, LOG) == 1
    if STAGE < LOG:
        last = last != (_bit(STAGE, LOG) == 1)
    return tl.where((x > partner) != last, partner, x)


@triton.jit
def _bit(BIT: tl.constexpr, LOG: tl.constexpr):
    """That bit of the places of a row."""
    return tl.reshape(tl.arange(0, 2), [1] * (LOG - BIT) + [2] + [1] * BIT)


@triton.jit
def _plane(coordinate, DIM: tl.constexpr):
    """Where a coordinate stands in ``Bonus.queries``."""
    return coordinate % 8 * (DIM // 8) + coordinate // 8


class Collisions(NamedTuple):
    """Of all tokens, for each query.

    Attributes:
        scores: ``[B, H, Q, n]`` uint8. Rows begin at multiples of ``ALIGN`` bytes, and score 255
            behind their end.
        plan: ``[B, H, Q, 4]`` int32: the lowest score that is taken, how many tokens of that score
            are left out, the first ones, how many are taken in all; the fourth is not used.
        before: ``[B, H, Q, blocks, 2]`` int32: of the blocks before each block, the tokens above
            the lowest score, and on it.
        block: tokens of a block.
    """

    scores: torch.Tensor
    plan: torch.Tensor
    before: torch.Tensor
    block: int


def chunk_of(width: int) -> int:
    """How many of a token's ``width`` sign bytes a program takes at a time, a power of two."""
    if _is_whole(width):
        return width
    return next((chunk for chunk in _CHUNKS if width % chunk == 0), _CHUNKS[-1])


def _is_whole(width: int) -> bool:
    """Whether a program takes a token's ``width`` sign bytes at once."""
    return width <= _WHOLE and width & (width - 1) == 0


def collide(
    bonus: Bonus, sign: torch.Tensor, valid: torch.Tensor | None, points: int, count: int
) -> Collisions:
    """See ``naive.collide``; ``points`` is the highest score there can be.

    ``count`` of the highest scores are to be taken.
    """
    batch, heads, queries, words = bonus.words.shape[:4]
    length, width = sign.shape[2:]
    device, lead = sign.device, (batch, heads, queries)
    chunk = chunk_of(width)
    block = min(_TOKENS, _LOOKUPS // chunk)
    # An empty row has a block too, which plans that nothing is taken.
    blocks = max(1, triton.cdiv(length, block))
    # A bin for each sum there can be, and one for what is not counted: fewer bins, less work.
    bins = max(64, triton.next_power_of_2(points + 2))
    # Rows start at multiples of 16 bytes, for loads and stores of so many.
    stride = triton.cdiv(length, ALIGN) * ALIGN
    scores = torch.empty(*lead, stride, dtype=torch.uint8, device=device)
    reaching = torch.empty(*lead, blocks, bins, dtype=torch.int16, device=device)
    plan = torch.empty(*lead, 4, dtype=torch.int32, device=device)
    before = torch.empty(*lead, blocks, 2, dtype=torch.int32, device=device)
    offsets = bonus.products, bonus.bests, bonus.logs, bonus.units
    if plan.numel():
        _collide_kernel[(blocks, batch * heads * queries)](
            sign,
            bonus.words.view(torch.int32),
            mask_bytes(valid, sign),
            scores,
            bonus.histogram,
            bonus.tickets,
            *(before if x is None else x for x in offsets),
            reaching,
            plan,
            before,
            length,
            stride // ALIGN,
            heads,
            queries,
            count,
            0 if bonus.products is None else bonus.products.shape[4],
            bonus.block_bits,
            1 / bonus.scale if bonus.logs is not None else 0.0,
            bonus.share,
            *sign.stride()[:2],
            *mask_layout(valid),
            HAS_VALID=valid is not None,
            HAS_MEANS=bonus.units is not None,
            HAS_SAMPLES=bonus.logs is not None,
            SAME_MEAN=(1 << bonus.block_bits) % block == 0,
            TABLES=bonus.queries.shape[3],
            HEADS=triton.next_power_of_2(bonus.queries.shape[3]),
            PARTS=1 if bonus.bests is None else bonus.bests.shape[4],
            WORDS=words,
            PER_WORD=PER_WORD,
            BINS=bins,
            BYTES=width,
            CHUNK=chunk,
            BLOCK=block,
            BLOCKS=_BLOCKS,
            ALIGN=ALIGN,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return Collisions(scores[..., :length], plan, before, block)


@triton.jit(do_not_specialize=["length", "stride", "count", "mean_blocks", "valid_stride_b"])
def _collide_kernel(
    sign_ptr, words_ptr, valid_ptr, scores_ptr, histogram_ptr, tickets_ptr, products_ptr, bests_ptr,
    logs_ptr, units_ptr, reaching_ptr, plan_ptr, before_ptr, length, stride, heads, queries, count,
    mean_blocks, block_bits, per_log, share, sign_stride_b, sign_stride_h, valid_stride_b,
    valid_stride_n, VALID_UNIT: tl.constexpr, HAS_VALID: tl.constexpr, HAS_MEANS: tl.constexpr,
    HAS_SAMPLES: tl.constexpr, SAME_MEAN: tl.constexpr, TABLES: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, WORDS: tl.constexpr, PER_WORD: tl.constexpr, BINS: tl.constexpr,
    BYTES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """A block of tokens for one query; a word of four bytes holds the points of four tables."""
    ENTRIES: tl.constexpr = BYTES * 256
    OF_CHUNK: tl.constexpr = CHUNK * 256
    row = tl.program_id(1).to(tl.int64)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    b = row // queries // heads
    h = row // queries % heads
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < length
    counted = inside
    if HAS_VALID:
        counted = load_mask(
            valid_ptr, b, tokens, length, valid_stride_b, valid_stride_n, VALID_UNIT
        )
    column = tl.arange(0, CHUNK)[None, :]
    indices = b * sign_stride_b + h * sign_stride_h + tokens.to(tl.int64)[:, None] * BYTES + column
    if CHUNK == BYTES:
        byte = tl.load(sign_ptr + indices, mask=inside[:, None], other=0).to(tl.int32)

    best = tl.zeros((BLOCK,), dtype=tl.int32)
    words_ptr += row * WORDS * ENTRIES
    # All tokens of this program have one mean key, unless blocks are shorter than its own.
    mean_ids = block * BLOCK >> block_bits
    if not SAME_MEAN:
        mean_ids = tl.minimum(tokens >> block_bits, mean_blocks - 1)
    if HAS_MEANS:
        of_group = row * TABLES + tl.arange(0, HEADS)
        bests = _bests(
            *(bests_ptr, logs_ptr, units_ptr, of_group, per_log, share),
            *(HAS_SAMPLES, TABLES, HEADS, PARTS),
        )
    for w in range(WORDS):
        total = tl.zeros((BLOCK,), dtype=tl.uint32)
        if CHUNK == BYTES:
            table = tl.load(words_ptr + w * ENTRIES + tl.arange(0, ENTRIES))
            total = _add_points(total, table, byte, column, BLOCK, CHUNK)
        else:
            # The tables of a whole token don't fit into registers on their way to shared memory.
            for first in range(0, BYTES, CHUNK):
                here = inside[:, None] & (first + column < BYTES)
                byte = tl.load(sign_ptr + indices + first, mask=here, other=0).to(tl.int32)
                entry = first * 256 + tl.arange(0, OF_CHUNK)
                table = tl.load(words_ptr + w * ENTRIES + entry, mask=entry < ENTRIES, other=0)
                total = _add_points(total, table, byte, column, BLOCK, CHUNK)
        lost = tl.zeros((), dtype=tl.uint32)
        if HAS_MEANS:
            for t in tl.static_range(PER_WORD):
                # Tables behind the last one have no points.
                table = row * TABLES + tl.minimum(w * PER_WORD + t, TABLES - 1)
                behind = tl.sum(tl.where(of_group == table, bests, 0.0), axis=0)
                behind -= tl.load(products_ptr + table * mean_blocks + mean_ids)
                behind *= tl.load(units_ptr + table)
                behind = tl.minimum(tl.where(behind > 0, behind, 0.0), 255.0)
                lost |= behind.to(tl.uint32) << (8 * t)
        for t in tl.static_range(PER_WORD):
            points = ((total >> (8 * t)) & 255).to(tl.int32)
            best = tl.maximum(best, points - ((lost >> (8 * t)) & 255).to(tl.int32))
    score = tl.where(counted, best, _EXCLUDED).to(tl.uint8)
    # To the end of the row, in whole words.
    tl.store(scores_ptr + row * stride * ALIGN + tokens, score, mask=tokens < stride * ALIGN)

    # Tokens that do not count go to the last bin, which no sum reaches.
    bins = tl.arange(0, BINS)
    bin_counts = tl.histogram(tl.where(counted, best, BINS - 1), BINS)
    bin_counts = tl.where(bins < BINS - 1, bin_counts, 0)
    histogram_ptr += row * 256
    tl.atomic_add(histogram_ptr + bins, bin_counts, mask=bin_counts > 0, sem="relaxed")
    at_least = tl.sum(bin_counts, axis=0) - tl.cumsum(bin_counts, axis=0) + bin_counts
    reaching_ptr += row * blocks * BINS
    tl.store(reaching_ptr + block * BINS + bins, at_least.to(tl.int16))
    # All that the program has written is there for whoever takes a later ticket.
    tl.debug_barrier()
    if tl.atomic_add(tickets_ptr + row, 1, sem="acq_rel") == blocks - 1:
        tl.store(tickets_ptr + row, 0)
        before_ptr += row * blocks * 2
        _plan(
            histogram_ptr, reaching_ptr, plan_ptr + row * 4, before_ptr, blocks, count, BINS, BLOCKS
        )


@triton.jit
def _bests(
    bests_ptr, logs_ptr, units_ptr, tables, per_log, share,
    HAS_SAMPLES: tl.constexpr, TABLES: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The products ``[HEADS]`` at which ``tables``, of a row, lose none: ``naive.lost_points``."""
    parts = tl.arange(0, _PARTS)[None, :]
    is_table = tl.arange(0, HEADS) < TABLES
    places, here = tables[:, None] * PARTS + parts, is_table[:, None] & (parts < PARTS)
    bests = tl.max(tl.load(bests_ptr + places, mask=here, other=float("-inf")), axis=1)
    if HAS_SAMPLES:
        logs = tl.load(logs_ptr + 2 * places, mask=here, other=float("-inf"))
        peaks = tl.load(logs_ptr + 2 * places + 1, mask=here, other=float("-inf"))
        peak = finite_base(tl.max(peaks, axis=1))
        others = tl.sum(tl.exp(logs - peak[:, None]), axis=1) - 1
        least = (peak + tl.log(tl.maximum(others, _LEAST_OTHERS)) + share) * per_log
        units = tl.load(units_ptr + tables, mask=is_table, other=1.0)
        levels = (bests - least) * units
        levels = tl.where(is_table & (tl.abs(levels) < float("inf")), levels, float("-inf"))
        bests = least + tl.max(levels, axis=0) / units
    return bests


@triton.jit
def _add_points(total, table, byte, column, BLOCK: tl.constexpr, BYTES: tl.constexpr):
    """``total [BLOCK]`` and the words of ``table`` that ``byte [BLOCK, BYTES]`` stand for."""
    found = tl.gather(table, tl.reshape(column * 256 + byte, (BLOCK * BYTES,)), 0)
    found = tl.reshape(found.to(tl.uint32, bitcast=True), (BLOCK, BYTES))
    return total + tl.sum(found, axis=1)


@triton.jit
def _plan(
    histogram_ptr, reaching_ptr, plan_ptr, before_ptr, blocks, count,
    BINS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What is taken of a row, from what all its blocks have counted: ``plan`` and ``before``."""
    bins = tl.arange(0, BINS)
    bin_counts = tl.load(histogram_ptr + bins, cache_modifier=".cg")
    total = tl.sum(bin_counts, axis=0)
    at_least = total - tl.cumsum(bin_counts, axis=0) + bin_counts
    threshold = tl.max(tl.where((at_least >= count) & (bins < BINS - 1), bins, 0), axis=0)
    tl.store(plan_ptr, threshold)
    reached = tl.sum(tl.where(bins >= threshold, bin_counts, 0), axis=0)
    tl.store(plan_ptr + 1, tl.maximum(reached - count, 0))
    tl.store(plan_ptr + 2, tl.minimum(total, count))
    above_before = tl.zeros((), tl.int32)
    equal_before = tl.zeros((), tl.int32)
    for start in range(0, blocks, BLOCKS):
        others = start + tl.arange(0, BLOCKS)
        mask = others < blocks
        address = reaching_ptr + others * BINS + threshold
        above = tl.load(address + 1, mask=mask, other=0, cache_modifier=".cg").to(tl.int32)
        equal = tl.load(address, mask=mask, other=0, cache_modifier=".cg").to(tl.int32) - above
        above_address = before_ptr + 2 * others
        tl.store(above_address, above_before + tl.cumsum(above, axis=0) - above, mask=mask)
        tl.store(above_address + 1, equal_before + tl.cumsum(equal, axis=0) - equal, mask=mask)
        above_before += tl.sum(above, axis=0)
        equal_before += tl.sum(equal, axis=0)


class Ranked(NamedTuple):
    """Of the candidates of a search.

    Attributes:
        ids: ``[B, H, Q, C]`` int32, ascending. Behind the last candidate nothing is written.
        scores: ``[B, H, Q, G, C]`` fp32 estimates of these.
        best: ``[B, H, Q, count]`` int32, the result of the search.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    best: torch.Tensor


def rank(tables: Bonus, collisions: Collisions, call: SearchCall) -> Ranked:
    """The best of the candidates; ``tables`` and ``collisions`` were made for the same call."""
    count, survivors, levels, products = call.budget, call.survivors, call.levels, tables.products
    *lead, group, _, width = tables.queries.shape
    device, blocks = tables.queries.device, collisions.before.shape[3]
    ids = torch.empty(*lead, survivors, dtype=torch.int32, device=device)
    scores = torch.empty(*lead, group, survivors, dtype=torch.float32, device=device)
    log_sums = torch.empty(*lead, group, blocks, dtype=torch.float32, device=device)
    best = torch.empty(*lead, count, dtype=torch.int32, device=device)
    if not best.numel():
        return Ranked(ids, scores, best)
    record = call.codes.record
    # Words of magnitudes are those of four bytes of signs.
    layout = (*record.stride()[:3], record.storage_offset(), record.data_ptr())
    in_words = width % 4 == 0 and all(step % 4 == 0 for step in layout)
    words = record.view(torch.int32) if in_words else record
    # The largest power of two that divides the width: chunks of a row are all alike.
    is_whole = _is_whole(width)
    chunk = width if is_whole else min(_CHUNK, width & -width)
    tile = (_TILE if is_whole else _WIDE_TILE) // (8 * chunk)
    arguments = (
        *(collisions.scores, collisions.plan, collisions.before, tables.tickets, tables.queries),
        *(call.codes.sign, words, record, levels.contiguous()),
        *(levels if products is None else products, ids, scores, log_sums, best),
        *score_factors(call.scale, call.softcap),
        *(collisions.scores.stride(2) // ALIGN, survivors, count),
        *(0 if products is None else products.shape[4], tables.block_bits),
        *lead[1:],
        *call.codes.sign.stride()[:2],
        *words.stride()[:2],
        *record.stride()[:2],
    )
    constants = {
        "IN_WORDS": in_words and chunk % 4 == 0,
        "HAS_MEANS": products is not None,
        "SOFTCAP": call.softcap is not None,
        "TABLES": group,
        "HEADS": triton.next_power_of_2(group),
        "LEVELS": LEVELS,
        "BYTES": width,
        "CHUNK": chunk,
        "INNER": min(_INNER, chunk),
        "TILE": tile,
        "BLOCK": collisions.block,
        "ALIGN": ALIGN,
        "LAST": _LAST,
        "num_warps": 8 if is_whole else 4,
        "enable_fp_fusion": True,
    }
    is_last_step = _chooses_at_once(survivors, count)
    growth = dispatch.growth()
    if growth is not None and is_last_step:
        choices = growth.choices(survivors, count)
        later = [choice for choice in choices if not _chooses_at_once(*choice)]
        if later:
            dispatch.warm_up(_rank_kernel, arguments, {**constants, "CHOOSE": False})
            warm_up(scores, count, ids, None if group == 1 else log_sums, choices=later)
    grid = blocks, math.prod(lead)
    _rank_kernel[grid](*arguments, CHOOSE=is_last_step, **constants)
    if not is_last_step:
        best = best_ids(scores, count, ids, log_sums, tables.tickets)
    return Ranked(ids, scores, best)


def _chooses_at_once(survivors: int, count: int) -> bool:
    """Whether the last program of a row chooses among its candidates, in a few rounds."""
    new = _LAST - count
    return 2 * count <= _LAST and survivors - count <= _ROUNDS * new


@triton.jit(do_not_specialize=["stride", "survivors", "count", "mean_blocks"])
def _rank_kernel(
    points_ptr, plan_ptr, before_ptr, tickets_ptr, q_ptr, sign_ptr, words_ptr, record_ptr,
    levels_ptr, products_ptr, ids_ptr, scores_ptr, sums_ptr, best_ptr, inner, outer, stride,
    survivors, count, mean_blocks, block_bits, heads, queries, sign_stride_b, sign_stride_h,
    words_stride_b, words_stride_h, record_stride_b, record_stride_h,
    IN_WORDS: tl.constexpr, HAS_MEANS: tl.constexpr, SOFTCAP: tl.constexpr, TABLES: tl.constexpr,
    HEADS: tl.constexpr, LEVELS: tl.constexpr, BYTES: tl.constexpr,
    CHUNK: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr, LAST: tl.constexpr, CHOOSE: tl.constexpr,
):  # fmt: skip
    """The candidates of a block of tokens, a tile of them after the other.

    For each tile four queries come after each other, and for these chunk after chunk.
    """
    DIM: tl.constexpr = 8 * BYTES
    SHAPE: tl.constexpr = (TILE, CHUNK // INNER, INNER)
    # All numbers of a sum have one weight, where there is one chunk.
    WEIGH_SUMS: tl.constexpr = CHUNK == BYTES
    row = tl.program_id(1).to(tl.int64)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    b = row // queries // heads
    h = row // queries % heads
    plan_ptr += row * 4
    ids_ptr += row * survivors
    scores_ptr += row * TABLES * survivors
    sums_ptr += row * TABLES * blocks
    first_slot, end = _compact(
        points_ptr + row * stride * ALIGN,
        *(plan_ptr, before_ptr + (row * blocks + block) * 2, ids_ptr),
        *(block * BLOCK, stride * ALIGN, BLOCK),
    )
    # Threads read back what others have written.
    tl.debug_barrier()

    # A thread holds whole bytes of signs. Their eight coordinates are taken one after the other, so
    # that nothing crosses threads before the sums over a key; and as many bytes in a row as make
    # loads of the queries 16 bytes wide, for several keys at once.
    byte_ids = tl.arange(0, CHUNK // INNER)[:, None] * INNER + tl.arange(0, INNER)[None, :]
    byte_ids = byte_ids[None, :, :]
    sign_ptr += b * sign_stride_b + h * sign_stride_h
    words_ptr += b * words_stride_b + h * words_stride_h
    record_ptr += b * record_stride_b + h * record_stride_h
    pairs = pairs_of_levels(levels_ptr, LEVELS)
    last = row * TABLES + TABLES - 1
    table_ids = tl.arange(0, HEADS)
    log_sums = tl.full((HEADS,), float("-inf"), tl.float32)
    for tile in range(first_slot, end, TILE):
        slots = tile + tl.arange(0, TILE)
        inside = slots < end
        # Where there is no candidate, the first token is read, and its result is dropped.
        rows = tl.load(ids_ptr + slots, mask=inside, other=0).to(tl.int64)
        if CHUNK == BYTES:
            byte, word, weight = _load_codes(
                sign_ptr, words_ptr, record_ptr, rows, byte_ids, 0, IN_WORDS, BYTES, CHUNK
            )
        for first in range(0, TABLES, 4):
            sum0 = tl.zeros(SHAPE, dtype=tl.float32)
            sum1 = sum0
            sum2 = sum0
            sum3 = sum0
            # Where there are no more queries, the last one is read again.
            q0 = q_ptr + (row * TABLES + first) * DIM
            q1 = q_ptr + tl.minimum(row * TABLES + first + 1, last) * DIM
            q2 = q_ptr + tl.minimum(row * TABLES + first + 2, last) * DIM
            q3 = q_ptr + tl.minimum(row * TABLES + first + 3, last) * DIM
            for start in range(0, BYTES, CHUNK):
                if CHUNK < BYTES:
                    byte, word, weight = _load_codes(
                        *(sign_ptr, words_ptr, record_ptr, rows, byte_ids, start),
                        *(IN_WORDS, BYTES, CHUNK),
                    )
                for half in tl.static_range(4):
                    numbers = (word >> (6 * half)) & (LEVELS * LEVELS - 1)
                    pair = tl.gather(pairs, tl.reshape(numbers, (TILE * CHUNK,)), 0)
                    pair = tl.reshape(pair, SHAPE)
                    for odd in tl.static_range(2):
                        level = (pair >> (32 * odd)).to(tl.uint32)
                        # A sign bit of 0 in the code makes the level negative.
                        turn = (~byte << (31 - 2 * half - odd)).to(tl.uint32, bitcast=True)
                        v = (level ^ (turn & 0x80000000)).to(tl.float32, bitcast=True)
                        if not WEIGH_SUMS:
                            v *= weight
                        plane = (2 * half + odd) * BYTES + start + byte_ids
                        sum0 += v * tl.load(q0 + plane)
                        if TABLES > 1:
                            sum1 += v * tl.load(q1 + plane)
                        if TABLES > 2:
                            sum2 += v * tl.load(q2 + plane)
                        if TABLES > 3:
                            sum3 += v * tl.load(q3 + plane)
            for g in tl.static_range(4):
                if g < TABLES:
                    total = sum0 if g == 0 else sum1 if g == 1 else sum2 if g == 2 else sum3
                    if WEIGH_SUMS:
                        total *= weight
                    estimate = tl.sum(tl.sum(total, axis=2), axis=1)
                    table = first + g
                    if HAS_MEANS:
                        own = products_ptr + tl.minimum(row * TABLES + table, last) * mean_blocks
                        estimate += tl.load(own + (rows >> block_bits))
                    estimate = capped_scores(estimate, inner, outer, SOFTCAP)
                    estimate = tl.where(inside, estimate, float("-inf"))
                    # Nothing is stored where there is no such query.
                    here = slots < tl.where(table < TABLES, end, 0)
                    tl.store(scores_ptr + table * survivors + slots, estimate, mask=here)
                    if TABLES > 1:
                        both = add_logs(log_sums, log_sum_exp(estimate))
                        log_sums = tl.where(table_ids == table, both, log_sums)

    if TABLES > 1:
        tl.store(sums_ptr + table_ids * blocks + block, log_sums, mask=table_ids < TABLES)
    number = tl.load(plan_ptr + 2)
    if CHOOSE:
        # All that the program has written is there for whoever takes a later ticket.
        tl.debug_barrier()
        if tl.atomic_add(tickets_ptr + row, 1, sem="acq_rel") == blocks - 1:
            tl.store(tickets_ptr + row, 0)
            _choose_in_rounds(
                *(scores_ptr, sums_ptr, ids_ptr, best_ptr + row * count),
                *(number, survivors, blocks, count, TABLES, HEADS, LAST),
            )
    else:
        nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(number + block * BLOCK, survivors, blocks * BLOCK):
            slots = start + tl.arange(0, BLOCK)
            for table in range(TABLES):
                address = scores_ptr + table * survivors + slots
                tl.store(address, nothing, mask=slots < survivors)


@triton.jit
def _compact(points_ptr, plan_ptr, before_ptr, ids_ptr, first, row_end, BLOCK: tl.constexpr):
    """``(first, end)`` slots of the tokens of a block that are taken, which are written there.

    They come behind those of the blocks before it.
    """
    threshold, surplus = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    tokens = first + tl.arange(0, BLOCK)
    fill = tl.full((BLOCK,), _EXCLUDED, tl.uint8)
    score = tl.load(points_ptr + tokens, mask=tokens < row_end, other=fill).to(tl.int32)
    above = (score > threshold) & (score < _EXCLUDED)
    # Counts above the threshold in the upper half and on it in the lower: one prefix sum for both,
    # and neither reaches 2**15.
    pair = tl.where(above, 65536, (score == threshold).to(tl.int32))
    ahead = tl.cumsum(pair, axis=0) - pair
    above_before, equal_before = tl.load(before_ptr), tl.load(before_ptr + 1)
    equal_ahead = equal_before + (ahead & 65535)
    selection = above | ((pair == 1) & (equal_ahead >= surplus))
    slots = above_before + (ahead >> 16) + tl.maximum(equal_ahead - surplus, 0)
    tl.store(ids_ptr + slots, tokens, mask=selection)
    start = above_before + tl.maximum(equal_before - surplus, 0)
    return start, start + tl.sum(selection.to(tl.int32), axis=0)


@triton.jit
def _choose_in_rounds(
    scores_ptr, sums_ptr, ids_ptr, best_ptr, number, survivors, blocks, count,
    TABLES: tl.constexpr, HEADS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The best ``count`` of a row's ``number`` candidates, which other programs have scored.

    A round chooses among the best so far, whose slots stand where the result will, and new ones.
    """
    table_ids = tl.arange(0, HEADS)
    log_sums = tl.zeros((HEADS,), tl.float32)
    if TABLES > 1:
        for table in range(TABLES):
            total = sum_up(sums_ptr + table * blocks, blocks, _SUMS, ".cg")
            log_sums = tl.where(table_ids == table, total, log_sums)
    places = tl.arange(0, LAST)
    first = tl.zeros((), tl.int32)
    kept = tl.zeros((), tl.int32)
    while first < number:
        slots = tl.load(best_ptr + places, mask=places < kept, other=0)
        slots = tl.where(places < kept, slots, first + places - kept)
        best = tl.full((LAST,), float("-inf"), tl.float32)
        for table in range(TABLES):
            score = tl.load(
                scores_ptr + table * survivors + slots,
                mask=slots < number,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            log_sum = tl.sum(tl.where(table_ids == table, log_sums, 0.0), axis=0)
            best = best_share(best, score, log_sum)
        first += LAST - kept
        selection, targets, kept = choose(order_of(best), count)
        # All threads have read the best so far.
        tl.debug_barrier()
        tl.store(best_ptr + targets, slots, mask=selection)
        tl.debug_barrier()
    slots = tl.load(best_ptr + places, mask=places < kept, other=0)
    ids = tl.load(ids_ptr + slots, mask=places < kept, other=-1, cache_modifier=".cg")
    tl.store(best_ptr + places, ids, mask=places < count)


@triton.jit
def _load_codes(
    sign_ptr, words_ptr, record_ptr, rows, byte_ids, start,
    IN_WORDS: tl.constexpr, BYTES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """``(byte, word, weight)``: CHUNK sign bytes of each of ``rows``, from ``start`` on.

    A word has the eight levels of a byte, three bits each. Weights: see ``codes.code_weights``.
    """
    WIDTH: tl.constexpr = 4 * BYTES
    columns = start + byte_ids
    byte = tl.load(sign_ptr + rows[:, None, None] * BYTES + columns).to(tl.int32)
    record_ptr += rows[:, None, None] * WIDTH
    if IN_WORDS:
        word = split_words(words_ptr + 3 * (start // 4), rows, WIDTH, CHUNK)
    else:
        word = tl.load(record_ptr + 3 * columns).to(tl.int32)
        for i in tl.static_range(1, 3):
            word += tl.load(record_ptr + 3 * columns + i).to(tl.int32) << (8 * i)
    weight = tl.load(record_ptr + 3 * BYTES + columns).to(tl.int16) << 7
    return byte, word, weight.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pairs_of_levels(levels_ptr, LEVELS: tl.constexpr):
    """Two levels in 64 bits, for each number that codes two: one lookup for two coordinates."""
    numbers = tl.arange(0, LEVELS * LEVELS)
    first = tl.load(levels_ptr + numbers % LEVELS).to(tl.uint32, bitcast=True)
    second = tl.load(levels_ptr + numbers // LEVELS).to(tl.uint32, bitcast=True)
    return (second.to(tl.uint64) << 32) | first.to(tl.uint64)


@triton.jit
def split_words(words_ptr, rows, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """``[rows, CHUNK // 4, 4]`` int32, in whose lowest 24 bits are eight codes of three bits.

    Of CHUNK bytes of signs, in rows of WIDTH bytes. There are three words to each four of signs.
    """
    QUARTER: tl.constexpr = CHUNK // 4
    words_ptr += rows[:, None] * (WIDTH // 4) + 3 * tl.arange(0, QUARTER)[None, :]
    first = tl.load(words_ptr).to(tl.uint32, bitcast=True)
    second = tl.load(words_ptr + 1).to(tl.uint32, bitcast=True)
    third = tl.load(words_ptr + 2).to(tl.uint32, bitcast=True)
    even = tl.join(first, (second >> 16) | (third << 16))
    odd = tl.join((first >> 24) | (second << 8), third >> 8)
    return tl.reshape(tl.join(even, odd), (rows.shape[0], QUARTER, 4)).to(tl.int32)
