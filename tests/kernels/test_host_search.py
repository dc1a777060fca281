"""What searches of the compiled library choose, against the naive code of each operation."""

import ctypes
import math
import struct
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from hf_kvret_kernels import centroid, codebook, host_library as library, host_step, proxy
from hf_kvret_kernels.host_step import (
    CodebookSearch,
    FlatSearch,
    Generation,
    HostCold,
    HostSearch,
    HostWindow,
    ListSearch,
    ParisSearch,
    ProxySearch,
    run_step,
)
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.paged import HostRows, PagedRows
from hf_kvret_kernels.paris import naive
from hf_kvret_kernels.paris.codes import SearchCall, points_of_product
from hf_kvret_kernels.relevance import group_relevance, naive as naive_relevance

from .draws import best_places, draw, generator, library_threads
from .host_steps import (
    FP32_ERROR,
    Shape,
    check_best,
    cold_rows,
    flat_step,
    near_window,
    paris_search,
)
from .paged_rows import Kind, dense_rows

# The path goes to the tests that take it.
pytestmark = [
    pytest.mark.skipif(bool(host_step.why_not()), reason="the library is not compiled"),
    pytest.mark.factor("path", list(library.PATHS), indirect=True),
]

SCALE, BUDGET = 0.1, 20

LIST_SHAPES = {
    "plain": Shape(1000),
    "three heads": Shape(333, group=3, queries=2, batch=2, dim=80),
    "one head": Shape(700, group=1, queries=3, dim=64, dtype=torch.float16),
    "bf16": Shape(900, group=5, dtype=torch.bfloat16),
    "few tokens": Shape(12, group=2),
    "nothing valid": Shape(100, valid=-1.0),
}


def _found(
    shape: Shape,
    search: HostSearch,
    softcap: float | None = None,
    rows: HostRows | None = None,
    scale: float = SCALE,
) -> torch.Tensor:
    """Ids that a step of the library finds, however many threads it has."""
    cold = HostCold(rows or cold_rows(shape)[0], search, shape.mask(), min(BUDGET, shape.n))
    results = []
    for threads in (1, 3):
        with library_threads(threads):
            step = run_step(
                shape.query(), near_window(shape, 9), cold, scale=scale, softcap=softcap
            )
        results.append(step[1])
    assert torch.equal(*results)
    return results[0]


@pytest.mark.factor("name", list(LIST_SHAPES))
def test_the_best_codewords_are_chosen(name: str, path: str) -> None:
    shape, words = LIST_SHAPES[name], 60
    table = 3 * draw(shape.batch, shape.heads * shape.group, shape.queries, words, seed=11)
    # A view of more codes than there are tokens, as of a buffer with room.
    form = (shape.batch, shape.heads, shape.n + 7)
    codes = torch.randint(0, words, form, generator=generator(12)).short()[..., : shape.n]
    ids = _found(shape, CodebookSearch(table, codes))
    check_best(ids, codebook.lookup_scores(table, codes, valid=shape.mask(), backend="naive"))


@pytest.mark.parametrize("code", [4, 300, -1, 32767, -32768])
def test_a_code_beyond_the_codebook_is_refused(path: str, code: int) -> None:
    shape = replace(LIST_SHAPES["plain"], valid=1.1)
    table = torch.zeros(1, shape.heads * shape.group, 1, 4)
    codes = torch.zeros(1, shape.heads, shape.n, dtype=torch.int16)
    codes[:, -1, -1] = code
    with pytest.raises(WrongIdError, match="of 4 codewords: allowed are 0 to 3"):
        _found(shape, CodebookSearch(table, codes))


def _generation(
    shape: Shape,
    count: int,
    width: int,
    seed: int,
    wide: bool,
    metric: torch.Tensor | None = None,
) -> Generation:
    """Random centroids with lists of random tokens, some of them none."""
    form = (shape.batch, shape.heads, count + 3, shape.group, shape.dim)
    queries = draw(*form, seed=seed, dtype=shape.dtype)[:, :, :count]
    inverse = centroid.units(queries, metric)[1]
    slots = torch.arange(count).repeat(shape.batch, 1)
    slots[:, ::7] = -1
    lists = torch.randint(
        0, shape.n + 1, (*form[:2], count, width), generator=generator(seed + 1), dtype=torch.int32
    )
    low = ((lists + 0x8000) % 0x10000 - 0x8000).short()
    return Generation(queries, inverse, slots, low, (lists >> 16).byte() if wide else None)


def _expected_relevance(
    shape: Shape, search: ListSearch, softcap: float | None, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """``[B, H, Q, n]``: -inf for tokens that are not recalled."""
    batch, heads, queries, n = shape.batch, shape.heads, shape.queries, shape.n
    bundles = shape.query().unflatten(1, (heads, shape.group)).transpose(2, 3)
    scores, lists = [], []
    for part in search.generations:
        units, _ = centroid.units(bundles, search.metric)
        similarity = centroid.similarity(
            units, part.queries, part.inverse, largest=search.largest, backend="naive"
        )
        scores.append(similarity.masked_fill((part.slots < 0)[:, None, None], -math.inf))
        every = torch.arange(part.low.shape[2]).expand(batch, heads, 1, -1).contiguous()
        lists.append(centroid.take_lists(part.low, part.high, every, backend="naive")[:, :, 0])
    similarity, ids = torch.cat(scores, dim=-1), torch.cat(lists, dim=2)
    best = similarity.topk(min(search.nprobe, similarity.shape[-1]), dim=-1)
    recalled = torch.zeros(batch, heads, queries, n + 1, dtype=torch.bool)
    for b, h, q in torch.cartesian_prod(*map(torch.arange, (batch, heads, queries))).tolist():
        near = best.indices[b, h, q][best.values[b, h, q] > -math.inf]
        recalled[b, h, q, ids[b, h, near].flatten().long()] = True
        for first in ids[b, h, near, : search.following].flatten().tolist():
            end = min(n, first + search.following + 1)
            recalled[b, h, q, first:end] |= first >= 0
    recalled = recalled[..., :-1]
    recalled[..., n - search.pending :] = True
    recalled &= shape.mask()[:, None, None]
    keys = cold_rows(shape)[1] if keys is None else keys
    logits = SCALE * bundles.float().transpose(2, 3) @ keys.float()[:, :, None].transpose(-1, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~recalled[:, :, None], -math.inf)
    return group_relevance(logits.flatten(1, 2), heads)


@pytest.mark.factor("softcap", [None, 4.0])
@pytest.mark.factor("largest", [False, True])
@pytest.mark.factor("following", [0, 3])
@pytest.mark.factor("fresh", [0, 9])
@pytest.mark.factor("wide", [False, True])
@pytest.mark.factor("scored", [False, True])
@pytest.mark.factor("name", list(LIST_SHAPES))
def test_the_best_of_the_nearest_lists_are_chosen(
    name: str,
    scored: bool,
    wide: bool,
    fresh: int,
    following: int,
    largest: bool,
    softcap: float | None,
    path: str,
) -> None:
    shape = LIST_SHAPES[name]
    metric = None
    if scored:
        keys = draw(shape.batch, shape.heads, 3 * shape.dim, shape.dim, seed=25)
        keys[..., 0] *= 30
        metric = keys.mT @ keys
    generations = [_generation(shape, 40, 15, 21, wide, metric)]
    if fresh:
        generations.append(_generation(shape, fresh, 15, 23, wide, metric))
    search = ListSearch(tuple(generations), 4, min(6, shape.n), following, largest, metric)
    check_best(_found(shape, search, softcap), _expected_relevance(shape, search, softcap))


def test_lists_score_the_keys_that_codes_stand_for(path: str) -> None:
    kind, table = Kind((64, 24), 4, offset=2.0), [[0, 4, 2, 7], [3, 5, 6, 1]]
    shape = Shape(64, dim=64, batch=2)
    rows, plain = kind.rows("cpu", table, (8,), page_len=16)
    search = ListSearch((_generation(shape, 12, 20, 21, False),), nprobe=12, pending=0)
    expected = _expected_relevance(shape, search, None, dense_rows(plain)[..., :64])
    check_best(_found(shape, search, rows=rows), expected)


def test_more_threads_than_heads_find_the_same(path: str) -> None:
    shape = Shape(5000, heads=1, group=2)
    _found(shape, ListSearch((_generation(shape, 500, 200, 21, False),), nprobe=5, pending=300))
    _found(shape, paris_search(shape, shape.mask()))


def test_a_token_may_have_a_number_of_more_than_16_bits(path: str) -> None:
    shape = Shape(100_000, dim=8, heads=1, group=2)
    search = ListSearch((_generation(shape, 30, 60, 21, True),), nprobe=8, pending=0)
    ids = _found(shape, search)
    assert bool((ids > 1 << 16).any())
    check_best(ids, _expected_relevance(shape, search, None))


def test_lists_of_no_live_centroid_leave_the_pending_tokens(path: str) -> None:
    shape = Shape(100, valid=1.1)
    part = _generation(shape, 8, 15, 21, False)
    search = ListSearch((part._replace(slots=torch.full((1, 8), -1)),), nprobe=4, pending=3)
    ids = _found(shape, search)
    assert ids[..., :3].unique().tolist() == [97, 98, 99]
    assert bool((ids[..., 3:] == -1).all())


SHAPES = {
    "plain": Shape(1000),
    "four heads": Shape(777, group=4, queries=2, batch=2),
    "one head": Shape(4099, dim=64, group=1, queries=2, dtype=torch.float16),
    "wide": Shape(515, dim=256, group=3),
    "odd candidates of two heads": Shape(400, group=2, candidates=77),
    "many heads": Shape(300, dim=32, group=9),
    "tiny head": Shape(130, dim=5, queries=3),
    "latents": Shape(333, dim=576, heads=1, group=16, tiers=3),
    "short latents": Shape(270, dim=160, group=5, queries=2),
    "five bytes": Shape(300, dim=320, group=2),
    "one block": Shape(300, dim=512, tiers=3, group=8),
    "odd bytes": Shape(259, dim=133, group=3),
    "many blocks": Shape(150, dim=1000, tiers=2, mean_query=True),
    "mean, many tiers": Shape(900, group=4, mean_query=True, tiers=10, dtype=torch.bfloat16),
    "one token": Shape(1, valid=1.1),
    "all are candidates": Shape(200, candidates=200),
    "nothing valid": Shape(100, valid=-1.0),
    "similar, blocks": Shape(700, group=3, queries=2, batch=2, tiers=0, block_len=64),
    "similar, many heads": Shape(600, dim=64, group=9, tiers=0, block_len=256, samples=70),
    "similar, odd bytes": Shape(
        300, dim=133, group=2, tiers=0, block_len=128, samples=1, dtype=torch.bfloat16
    ),
    "mean of blocks": Shape(300, dim=80, block_len=64, mean_query=True),
    "few points": Shape(900, dim=8, tiers=0, block_len=64, group=2),
}


# hfk_paris_trace: six addresses.
_TRACE = struct.Struct("@6P")


class ParisTrace(NamedTuple):
    """What each stage of a search leaves: C the candidates, G queries of a group.

    Attributes:
        rotated: ``[B, H, Q, G, P]`` fp32.
        points: ``[B, H, Q, G, P // 8, 256]`` uint8, of each sign byte.
        drops: ``[B, H, Q, G, blocks]`` uint8: points that the tokens of a block lose.
        scores: ``[B, H, Q, n]`` uint8: one more than points left, 0 for tokens that are not valid.
        candidates: ``[B, H, Q, C]`` int32, -1 behind the last one.
        estimates: ``[B, H, Q, G, C]`` fp32, -inf behind the last one.
        ids: ``[B, H, Q, budget]`` int32.
    """

    rotated: torch.Tensor
    points: torch.Tensor
    drops: torch.Tensor
    scores: torch.Tensor
    candidates: torch.Tensor
    estimates: torch.Tensor
    ids: torch.Tensor


def trace_paris(
    query: torch.Tensor,
    search: ParisSearch,
    valid: torch.Tensor,
    budget: int,
    *,
    softcap: float | None = None,
) -> ParisTrace:
    """Of ``query [B, Hq, Q, Dk]`` with a scale of 0.1; arguments as of ``run_step``."""
    batch, query_heads, queries, dim = query.shape
    heads, n = search.counts.shape[1], valid.shape[1]
    tables = 1 if search.mean_query else query_heads // heads
    lead, rotated_dim = (batch, heads, queries), search.signs.shape[2]
    trace = ParisTrace(
        query.new_empty(*lead, tables, rotated_dim, dtype=torch.float32),
        query.new_empty(*lead, tables, rotated_dim // 8, 256, dtype=torch.uint8),
        query.new_empty(*lead, tables, -(-n // search.block_len), dtype=torch.uint8),
        query.new_empty(*lead, n, dtype=torch.uint8),
        query.new_empty(*lead, search.candidates, dtype=torch.int32),
        query.new_full((*lead, tables, search.candidates), -math.inf, dtype=torch.float32),
        query.new_empty(*lead, budget, dtype=torch.int32),
    )
    empty = query.new_empty(batch, heads, 0, dim)
    no_rows = PagedRows([query.new_empty(1, heads, 1, 2 * dim)], trace.ids[0, :1, 0], dim)
    cold, window = HostCold(no_rows, search, valid, budget), HostWindow(empty, empty, 0)
    scores = 0.1, softcap, None
    step, _keep = host_step._pack_step(
        query, window, cold, scores, trace.ids, trace.rotated, None, 1
    )
    arrays = trace[:-1]
    find = library.load().hfk_search_ids
    find.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    assert find(step, _TRACE.pack(*(array.data_ptr() for array in arrays))) == 0
    return trace


@pytest.mark.factor("name", list(SHAPES))
def test_each_stage_of_paris_is_the_naive_one(name: str, path: str) -> None:
    shape = SHAPES[name]
    query, valid = shape.query(), shape.mask()
    search = paris_search(shape, valid)
    budget = max(1, search.candidates // 3)
    trace = trace_paris(query, search, valid, budget)

    grouped = query.view(shape.batch, shape.heads, -1, shape.queries, shape.dim).float()
    if shape.mean_query:
        grouped = grouped.mean(dim=2, keepdim=True)
    of_heads = zip(grouped.transpose(2, 3).flatten(0, 1), search.signs.flatten(0, 1), strict=True)
    rotated = torch.stack([naive.rotate(one, signs) for one, signs in of_heads])
    rotated = rotated.view_as(trace.rotated)
    torch.testing.assert_close(trace.rotated, rotated, rtol=1e-5, atol=1e-5)

    # From here on each stage is given what the stage before it left, to be compared bit by bit.
    shares, products = tuple(search.shares.tolist()), trace.drops * 0.0
    if search.means is not None:
        products = naive.mean_products(grouped.transpose(2, 3), search.means)
    logs = naive.least_logs(
        SearchCall(
            *(grouped.transpose(2, 3), search.signs, search.codes, search.counts, search.levels),
            *(budget, search.candidates, shares, valid, 0.1, None),
            *(search.means, search.block_len, search.samples),
        )
    )
    lost = naive.lost_points(products, trace.rotated, points_of_product(shares), logs)
    # Products are sums in another order.
    assert ((trace.drops.int() - lost.int()).abs() <= 1).all()
    assert lost.any() or search.means is None or lost.shape[-1] == 1
    bonus = naive.similarity_points(trace.rotated)
    if shares:
        bonus = naive.bonus_table(trace.rotated, search.counts, shares)
    drops = naive.Blocks(trace.drops, search.block_len)
    scores = naive.collide(search.codes.sign, bonus, valid, drops)
    assert torch.equal(trace.points, bonus)
    assert torch.equal(trace.scores, torch.where(scores == 255, 0, scores + 1))
    candidates = naive.candidates(scores, search.candidates)
    assert torch.equal(trace.candidates, candidates)
    offsets = naive.Blocks(products, search.block_len)
    estimates = naive.rerank(
        trace.rotated, search.codes, candidates, search.levels, 0.1, None, offsets
    )
    torch.testing.assert_close(trace.estimates, estimates, rtol=1e-5, atol=FP32_ERROR)
    assert torch.equal(trace.ids, naive_relevance.best_ids(trace.estimates, candidates, budget))


def test_a_soft_cap_bends_the_mean_key_too(path: str) -> None:
    shape = Shape(300, group=2, block_len=64)
    query, valid = shape.query(), shape.mask()
    search = paris_search(shape, valid)
    assert search.means is not None
    trace = trace_paris(query, search, valid, 9, softcap=1.5)
    products = naive.mean_products(query.view(1, 2, 2, 1, 128).transpose(2, 3), search.means)
    expected = naive.rerank(
        *(trace.rotated, search.codes, trace.candidates, search.levels, 0.1, 1.5),
        naive.Blocks(products, 64),
    )
    torch.testing.assert_close(trace.estimates, expected, rtol=1e-5, atol=FP32_ERROR)


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.factor(("sets", "heads"), [(1, 2), (2, 2), (6, 2), (2, 6)])
@pytest.mark.factor("rank", [1, 20, 64])
@pytest.mark.factor("softcap", [None, 2.0])
def test_proxies_choose_the_tokens_of_their_highest_scores(
    dtype: torch.dtype, sets: int, heads: int, rank: int, softcap: float | None, path: str
) -> None:
    """Two KV heads of three query heads; all share a set, or a group, or none; heads may choose."""
    shape = Shape(1100, dim=64, group=3, batch=2, queries=2)
    proxies = 2 * draw(2, sets, 1100, rank, seed=7)
    proxies = (proxies * 20 if dtype == torch.int8 else proxies).to(dtype)
    query = draw(2, 6, 2, 1, seed=8) * (0.02 if sets == 6 else 0.1)
    mean = draw(2, sets, 1, seed=9) * 10 if softcap else None
    projection = proxy.Projection(draw(2, sets, 1, rank, seed=10), mean=mean)
    own_query, offset = projection.of(query)
    ids = _found(shape, ProxySearch(own_query, proxies, offset, heads=heads), softcap, scale=1.0)
    options: dict[str, Any] = {"projection": projection, "softcap": softcap, "backend": "naive"}
    check_best(ids, proxy.relevance(query, proxies, heads, valid=shape.mask(), **options))


def test_of_equal_tokens_the_first_are_chosen(path: str) -> None:
    shape = Shape(200, dim=16, group=1, heads=1, valid=1.1)
    level = torch.arange(200).remainder(3).float()
    keys = torch.zeros(1, 1, 200, 16)
    keys[..., 0] = level
    query, window, cold = flat_step(shape, 80)
    query = torch.ones_like(query)
    _, ids = run_step(query, window, replace(cold, search=FlatSearch(keys)), scale=1.0)
    assert torch.equal(ids, best_places(level.view(1, 1, 1, 200), 80))


@pytest.mark.factor("flush", [False, True])
@pytest.mark.factor("search", ["flat", "paris"])
def test_the_budget_holds_for_scores_that_are_zero(search: str, flush: bool, path: str) -> None:
    # Products with a negative scale are -0, which equals 0; and where subnormal numbers count as
    # 0, the number after 0 does not exceed it.
    shape = Shape(200, group=1, candidates=200)
    rows, keys, _ = cold_rows(shape)
    valid = shape.mask()
    result = FlatSearch(keys) if search == "flat" else paris_search(shape, valid)
    query = torch.zeros_like(shape.query())
    torch.set_flush_denormal(flush)
    try:
        for scale in (1.0, -1.0):
            cold = HostCold(rows, result, valid, 5)
            _, ids = run_step(query, near_window(shape, 5), cold, scale=scale)
            assert torch.equal(ids, valid[0].nonzero()[:5, 0].int().expand_as(ids))
    finally:
        torch.set_flush_denormal(False)


def test_a_query_of_nan_has_no_say_in_what_its_group_chooses(path: str) -> None:
    query, window, cold = flat_step(Shape(403, heads=1, dim=64), 20)
    query[:, 1] = math.nan
    _, ids = run_step(query, window, cold, scale=0.1)
    _, alone = run_step(query[:, :1], window, cold, scale=0.1)
    assert torch.equal(ids, alone)
