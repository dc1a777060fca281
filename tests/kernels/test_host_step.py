"""Decode steps in one call of the compiled library, against the naive code of each operation."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace

import pytest
import torch

from hf_kvret_kernels import host_library as library
from hf_kvret_kernels import host_step, paris, proxy
from hf_kvret_kernels.host_step import (
    FlatSearch,
    GivenIds,
    HostCold,
    HostWindow,
    ParisSearch,
    ProxySearch,
    run_step,
)
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.paris import naive
from hf_kvret_kernels.relevance.naive import best_ids

NEVER = float("-inf")
# Sums of up to some hundred fp32 products of size 1, in another order: some roundings of 6e-8 each.
FP32_ERROR = 2e-5

pytestmark = pytest.mark.skipif(bool(host_step.why_not()), reason="the library is not compiled")
every_path = pytest.mark.factor("path", list(library.PATHS), indirect=True)


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    """Every instruction set of this processor."""
    name: str = request.param
    if name not in library.paths():
        pytest.skip(f"this processor has no {name}")
    return name


@dataclass(frozen=True)
class Shape:
    """Of a search: H KV heads of G query heads, Q queries, n tokens of D dims."""

    n: int
    dim: int = 128
    group: int = 2
    heads: int = 2
    queries: int = 1
    batch: int = 1
    m: int = 8
    tiers: int = 6
    mean_query: bool = False
    weight_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.float32
    candidates: int | None = None
    valid: float = 0.8

    def query(self, seed: int = 0) -> torch.Tensor:
        shape = (self.batch, self.heads * self.group, self.queries, self.dim)
        return 2 * torch.randn(shape, generator=generator(seed)).to(self.dtype)

    def mask(self, seed: int = 1) -> torch.Tensor:
        return torch.rand(self.batch, self.n, generator=generator(seed)) < self.valid


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def paris_search(shape: Shape, valid: torch.Tensor) -> ParisSearch:
    keys = torch.randn(shape.batch, shape.heads, shape.n, shape.dim, generator=generator(2))
    signs = paris.random_signs(paris.rotated_dim(shape.dim), 0)
    levels = paris.magnitude_levels(shape.m)
    out = paris.ParisCodes.empty(*keys.shape, m=shape.m, weight_dtype=shape.weight_dtype)
    codes = paris.encode(keys, signs, levels, m=shape.m, out=out)
    counts = paris.count_centroids(codes.sign, m=shape.m, valid=valid)
    tiers = tuple((i + 1) / shape.tiers for i in range(shape.tiers))
    count = max(1, shape.n // 4) if shape.candidates is None else shape.candidates
    shares = paris.tier_shares(0.3, tiers)
    return ParisSearch(
        codes, counts, signs, levels, shares, shape.m, count, mean_query=shape.mean_query
    )


SHAPES = {
    "plain": Shape(1000),
    "four heads": Shape(777, group=4, queries=2, batch=2, weight_dtype=torch.float16),
    "one head": Shape(4099, dim=64, group=1, queries=2, dtype=torch.float16),
    "wide": Shape(515, dim=256, group=3, weight_dtype=torch.float32),
    "nibbles": Shape(300, dim=80, m=4),
    "nibbles, few tiers": Shape(640, dim=64, m=4, tiers=3, group=5),
    "many heads": Shape(300, dim=32, group=9),
    "tiny head": Shape(130, dim=5, queries=3),
    "mean, many tiers": Shape(900, group=4, mean_query=True, tiers=10, dtype=torch.bfloat16),
    "one token": Shape(1, valid=1.1),
    "all are candidates": Shape(200, candidates=200),
    "nothing valid": Shape(100, valid=-1.0),
}


@every_path
@pytest.mark.factor("name", list(SHAPES))
def test_each_stage_of_paris_is_the_naive_one(name: str, path: str) -> None:
    shape = SHAPES[name]
    query, valid = shape.query(), shape.mask()
    search = paris_search(shape, valid)
    budget = max(1, search.candidates // 3)
    trace = host_step.trace_paris(query, search, valid, budget, scale=0.1, path=path)

    grouped = query.view(shape.batch, shape.heads, -1, shape.queries, shape.dim).float()
    if shape.mean_query:
        grouped = grouped.mean(dim=2, keepdim=True)
    rotated = naive.rotate(grouped.transpose(2, 3), search.signs)
    torch.testing.assert_close(trace.rotated, rotated, rtol=1e-5, atol=1e-5)

    # From here on each stage is given what the stage before it left, to be compared bit by bit.
    bonus = naive.bonus_table(trace.rotated, search.counts, tuple(search.shares.tolist()), shape.m)
    scores, histogram = naive.collide(search.codes.sign, bonus, shape.m, valid)
    by_byte = bonus
    if shape.m == 4:
        byte, halves = torch.arange(256), bonus.unflatten(-2, (-1, 2))
        by_byte = halves[..., 0, :][..., byte & 15] + halves[..., 1, :][..., byte >> 4]
    assert torch.equal(trace.points, by_byte)
    assert torch.equal(trace.scores, torch.where(scores == 255, 0, scores + 1))
    candidates = naive.candidates(scores, histogram, search.candidates)
    assert torch.equal(trace.candidates, candidates)
    estimates = naive.rerank(
        trace.rotated, search.codes, candidates, search.levels, shape.m, 0.1, None, None
    )
    torch.testing.assert_close(trace.estimates, estimates, rtol=1e-5, atol=FP32_ERROR)
    assert torch.equal(trace.ids, best_ids(trace.estimates, candidates, budget))


@every_path
def test_a_soft_cap_bends_the_mean_key_too(path: str) -> None:
    shape = Shape(300, group=2)
    query, valid = shape.query(), shape.mask()
    search = paris_search(shape, valid)
    search.mean = torch.randn(1, 2, 128, generator=generator(5))
    trace = host_step.trace_paris(query, search, valid, 9, scale=0.1, softcap=1.5, path=path)
    offset = torch.einsum("bhgqd,bhd->bhqg", query.view(1, 2, 2, 1, 128), search.mean)
    expected = naive.rerank(
        trace.rotated, search.codes, trace.candidates, search.levels, 8, 0.1, 1.5, offset
    )
    torch.testing.assert_close(trace.estimates, expected, rtol=1e-5, atol=FP32_ERROR)


def cold_rows(shape: Shape, page_len: int = 16) -> tuple[PagedRows, torch.Tensor, torch.Tensor]:
    """Shuffled pages, and the same keys and values ``[B, Hkv, n, D]`` in order."""
    count = -(-shape.n // page_len)
    pages = torch.randn(
        shape.batch * count, shape.heads, page_len, shape.dim + 24, generator=generator(3)
    ).to(shape.dtype)
    order = torch.randperm(shape.batch * count, generator=generator(4)).int()
    table = order.view(shape.batch, count)
    rows = pages[table.long()].transpose(1, 2).flatten(2, 3)[:, :, : shape.n]
    return PagedRows([pages], table, shape.dim), rows[..., : shape.dim], rows[..., shape.dim :]


def near_window(shape: Shape, length: int, seed: int = 6) -> HostWindow:
    """Room behind the rows holds NaN."""
    lead = (shape.batch, shape.heads, length + 5)
    keys = torch.randn(*lead, shape.dim, generator=generator(seed)).to(shape.dtype)
    values = torch.randn(*lead, 24, generator=generator(seed + 1)).to(shape.dtype)
    keys[:, :, length:] = values[:, :, length:] = math.nan
    valid = torch.rand(shape.batch, length, generator=generator(seed + 2)) < 0.9
    valid[:, -shape.queries :] = True
    return HostWindow(keys, values, length, valid)


def expected_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    window: HostWindow,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """In double, one query after the other."""
    out = torch.zeros(*query.shape[:3], values.shape[-1], dtype=torch.double)
    group = query.shape[1] // keys.shape[1]
    for b, head, q in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        kv = head // group
        seen = window.length - (query.shape[2] - 1 - q)
        near = torch.arange(seen)
        if window.valid is not None:
            near = near[window.valid[b, :seen]]
        chosen = ids[b, kv, q][ids[b, kv, q] >= 0].long()
        k = torch.cat([window.keys[b, kv, near], keys[b, kv, chosen]]).double()
        v = torch.cat([window.values[b, kv, near], values[b, kv, chosen]]).double()
        logits = k @ query[b, head, q].double() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if sinks is not None:
            logits = torch.cat([logits, sinks[head, None].double()])
            v = torch.cat([v, v.new_zeros(1, v.shape[1])])
        out[b, head, q] = logits.softmax(0) @ v
    return out


STEPS = {
    "plain": (Shape(500, dim=64), None),
    "drafts": (Shape(300, queries=4, batch=2, dim=80, group=3), None),
    "soft cap": (Shape(300, dim=32, group=1), 3.0),
    "half": (Shape(400, dim=128, dtype=torch.float16), None),
    "brain": (Shape(400, dim=128, group=4, dtype=torch.bfloat16), 2.0),
    "one KV head": (Shape(2000, heads=1, group=4, dim=48), None),
    "nothing valid": (Shape(100, valid=-1.0), None),
}


@every_path
@pytest.mark.factor("threads", [1, 3, 16])
@pytest.mark.factor("method", ["flat", "paris"])
@pytest.mark.factor("name", list(STEPS))
def test_a_step_attends_to_window_and_choice(
    name: str, method: str, threads: int, path: str
) -> None:
    shape, softcap = STEPS[name]
    rows, keys, values = cold_rows(shape)
    query, valid, window = shape.query(), shape.mask(), near_window(shape, 37)
    sinks = torch.randn(query.shape[1], generator=generator(9)) if shape.group == 3 else None
    search = FlatSearch(keys) if method == "flat" else paris_search(shape, valid)
    budget, scale = max(1, shape.n // 10), shape.dim**-0.5
    selected = torch.tensor(5)
    out, ids = run_step(
        query,
        window,
        HostCold(rows, search, valid, budget),
        scale=scale,
        softcap=softcap,
        sink_logits=sinks,
        selected=selected,
        threads=threads,
        path=path,
    )
    assert ids.shape == (shape.batch, shape.heads, shape.queries, budget)
    assert int(selected) == 5 + int((ids >= 0).sum())
    assert not (ids >= 0).any() or valid.any()
    for b in range(shape.batch):
        chosen = ids[b][ids[b] >= 0].long()
        assert valid[b, chosen].all()
    expected = expected_attention(query, keys, values, ids, window, scale, softcap, sinks)
    # Queries in bf16 are exact products too: only sums are rounded.
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=FP32_ERROR)
    if method == "flat":
        check_best(query, keys, ids, valid, scale, softcap)


@every_path
@pytest.mark.factor("shape", [Shape(1, queries=3, batch=2, dim=40), Shape(1, group=5)])
def test_a_window_alone_is_attended_to(shape: Shape, path: str) -> None:
    query, window = shape.query(), near_window(shape, 90)
    out, ids = run_step(query, window, scale=0.1, path=path)
    assert ids.shape == (shape.batch, shape.heads, shape.queries, 0)
    nothing = torch.zeros(shape.batch, shape.heads, 1, shape.dim)
    expected = expected_attention(query, nothing, nothing[..., :24], ids, window, 0.1, None, None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=FP32_ERROR)


@every_path
@pytest.mark.factor("heads", [1, 2, 6])
@pytest.mark.factor("threads", [1, 16])
def test_ids_that_are_given_are_attended_to(heads: int, threads: int, path: str) -> None:
    shape = Shape(300, heads=2, group=3, queries=2, batch=2, dim=40)
    rows, keys, values = cold_rows(shape)
    if heads % 2:
        with pytest.raises(
            ValueError, match=r"ids is torch.int32 \(2, 1, 2, 5\): pass int32 \[2, 2 or a multiple"
        ):
            run_given(shape, rows, torch.zeros(2, 1, 2, 5, dtype=torch.int32), threads, path)
        return
    ids = torch.randint(-1, 300, (2, heads, 2, 700), generator=generator(3), dtype=torch.int32)
    out = run_given(shape, rows, ids, threads, path)
    each = 6 // heads
    for head in range(6):
        kv = slice(head // 3, head // 3 + 1)
        window = near_window(shape, 21)
        window.keys, window.values = window.keys[:, kv], window.values[:, kv]
        own = ids[:, head // each, None]
        expected = expected_attention(
            shape.query()[:, head, None], keys[:, kv], values[:, kv], own, window, 0.1, None, None
        )
        got = out[:, head, None].double()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=FP32_ERROR)


def run_given(
    shape: Shape, rows: PagedRows, ids: torch.Tensor, threads: int, path: str
) -> torch.Tensor:
    cold = HostCold(rows, GivenIds(ids), shape.mask(), 1)
    window = near_window(shape, 21)
    out, same = run_step(shape.query(), window, cold, scale=0.1, threads=threads, path=path)
    assert torch.equal(same, ids)
    return out


def check_best(
    query: torch.Tensor,
    keys: torch.Tensor,
    ids: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> None:
    """No token left out matters more than one chosen, up to rounding; none is chosen twice."""
    B, H, n, _ = keys.shape
    grouped = query.view(B, H, -1, query.shape[2], query.shape[3]).double()
    logits = torch.einsum("bhgqd,bhnd->bhgqn", grouped, keys.double()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~valid[:, None, None, None], NEVER)
    shares = (logits.log_softmax(-1) if grouped.shape[2] > 1 else logits).nan_to_num(NEVER).amax(2)
    taken = torch.zeros(B, H, ids.shape[2], n + 1)
    taken.scatter_add_(-1, ids.long().masked_fill(ids < 0, n), torch.ones(ids.shape))
    taken = taken[..., :n]
    assert taken.max() <= 1
    count = valid.sum(1).clamp(max=ids.shape[-1])
    assert torch.equal(taken.sum(-1).long(), count[:, None, None].expand(ids.shape[:3]))
    worst = shares.masked_fill(taken == 0, math.inf).amin(-1)
    best_left = shares.masked_fill(taken > 0, NEVER).amax(-1)
    assert (best_left <= worst + 1e-4).all()


@every_path
@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.factor("sets", [1, 2, 6])
@pytest.mark.factor("rank", [1, 20, 64])
@pytest.mark.factor("softcap", [None, 2.0])
def test_proxies_choose_the_tokens_of_their_highest_scores(
    dtype: torch.dtype, sets: int, rank: int, softcap: float | None, path: str
) -> None:
    """Two KV heads of three query heads; a set is shared by all, by a group, or by none."""
    shape = Shape(1100, dim=64, group=3, batch=2, queries=2)
    rows, _, _ = cold_rows(shape)
    proxies = 2 * torch.randn(2, sets, 1100, rank, generator=generator(7))
    proxies = (proxies * 20 if dtype == torch.int8 else proxies).to(dtype)
    query = torch.randn(2, 6, 2, rank, generator=generator(8)) * (0.02 if sets == 6 else 0.1)
    offset = torch.randn(2, 6, 2, generator=generator(9)) if softcap else None
    valid, budget = shape.mask(), 90
    cold = HostCold(rows, ProxySearch(query, proxies, offset), valid, budget)
    window = near_window(shape, 9)
    found = [
        run_step(shape.query(), window, cold, scale=1.0, softcap=softcap, threads=n, path=path)[1]
        for n in (1, 16)
    ]
    assert torch.equal(*found)
    relevance = proxy.relevance(
        query, proxies, 2, valid=valid, offset=offset, softcap=softcap, backend="naive"
    )
    best = relevance.topk(budget, dim=-1).values
    mine = relevance.gather(-1, found[0].long().clamp(min=0)).sort(-1, descending=True).values
    assert (found[0].sort(-1).values.diff(dim=-1) > 0).all()
    torch.testing.assert_close(mine, best, rtol=1e-4, atol=1e-4)


@every_path
def test_threads_choose_and_answer_alike(path: str) -> None:
    shape = Shape(3000, heads=1, group=3)
    rows, _, _ = cold_rows(shape)
    query, valid, window = shape.query(), shape.mask(), near_window(shape, 20)
    search = paris_search(shape, valid)
    results = [
        run_step(query, window, HostCold(rows, search, valid, 100), scale=0.1, threads=n, path=path)
        for n in (1, 2, 7)
    ]
    for out, ids in results[1:]:
        assert torch.equal(ids, results[0][1])
        torch.testing.assert_close(out, results[0][0], rtol=1e-5, atol=FP32_ERROR)


@every_path
def test_of_equal_tokens_the_first_are_chosen(path: str) -> None:
    shape = Shape(200, dim=16, group=1, heads=1, valid=1.1)
    rows, keys, _ = cold_rows(shape)
    level = torch.arange(200).remainder(3).float()
    same = torch.zeros_like(keys)
    same[..., 0] = level
    query = torch.zeros(1, 1, 1, 16)
    query[..., 0] = 1
    window = near_window(shape, 5)
    _, ids = run_step(
        query, window, HostCold(rows, FlatSearch(same), shape.mask(), 80), scale=1.0, path=path
    )
    twos, ones = (torch.arange(200)[level == x] for x in (2, 1))
    assert ids.flatten().sort().values.tolist() == sorted([*twos, *ones[: 80 - len(twos)]])


@every_path
@pytest.mark.factor("poison", [math.nan, math.inf])
def test_a_query_that_is_not_finite_spoils_its_own_answer_only(poison: float, path: str) -> None:
    shape = Shape(400, heads=2, group=2, dim=64)
    rows, keys, _ = cold_rows(shape)
    query, valid, window = shape.query(), shape.mask(), near_window(shape, 20)
    for search in (FlatSearch(keys), paris_search(shape, valid)):
        cold = HostCold(rows, search, valid, 40)
        good, _ = run_step(query, window, cold, scale=0.1, path=path)
        bad_query = query.clone()
        bad_query[0, 0] = poison
        bad, _ = run_step(bad_query, window, cold, scale=0.1, path=path)
        assert torch.equal(bad[0, 2:], good[0, 2:])


def test_callers_on_several_threads_do_not_meet() -> None:
    shape = Shape(3000)
    rows, _, _ = cold_rows(shape)
    valid, window = shape.mask(), near_window(shape, 20)
    queries = [shape.query(seed) for seed in range(6)]
    cold = HostCold(rows, paris_search(shape, valid), valid, 64)

    def answer(query: torch.Tensor) -> torch.Tensor:
        return run_step(query, window, cold, scale=0.1, threads=3)[0]

    expected = [answer(query) for query in queries]
    results: list[list[torch.Tensor]] = [[] for _ in queries]
    workers = [
        threading.Thread(
            target=lambda i=i: results[i].extend(answer(queries[i]) for _ in range(10))
        )
        for i in range(len(queries))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for got, want in zip(results, expected, strict=True):
        assert len(got) == 10
        assert all(torch.equal(x, want) for x in got)


def test_memory_of_any_layout_is_read_right() -> None:
    shape = Shape(200, batch=2)
    rows, keys, _ = cold_rows(shape)
    query, valid, window = shape.query(), shape.mask(), near_window(shape, 20)
    expected = run_step(query, window, HostCold(rows, FlatSearch(keys), valid, 30), scale=0.1)[1]
    room = torch.full((2, 2, 300, 128), math.nan)
    room[:, :, :200] = keys
    strided = valid.new_zeros(2, 400)
    strided[:, ::2] = valid
    views = HostCold(rows, FlatSearch(room[:, :, :200]), strided[:, ::2], 30)
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    got = run_step(turned, window, views, scale=0.1)[1]
    assert torch.equal(got, expected)


def test_a_query_of_another_dtype_is_refused() -> None:
    shape = Shape(100)
    rows, keys, _ = cold_rows(shape)
    cold = HostCold(rows, FlatSearch(keys), shape.mask(), 3)
    with pytest.raises(ValueError, match="convert the query"):
        run_step(shape.query().double(), near_window(shape, 5), cold, scale=1.0)


def test_a_page_table_without_the_rows_is_an_error() -> None:
    shape = Shape(100, valid=1.1)
    rows, keys, _ = cold_rows(shape)
    short = replace(rows, table=rows.table[:, :2], page_address=None)
    cold = HostCold(short, FlatSearch(keys), shape.mask(), 90)
    with pytest.raises(ValueError, match="page table covers"):
        run_step(shape.query(), near_window(shape, 5), cold, scale=1.0)


def test_the_variable_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(100)
    rows, keys, _ = cold_rows(shape)
    cold = HostCold(rows, FlatSearch(keys), shape.mask(), 9)
    arguments = (shape.query(), near_window(shape, 5), cold)
    monkeypatch.setenv(library.ISA_VARIABLE, "portable")
    forced, _ = run_step(*arguments, scale=0.1)
    assert torch.equal(forced, run_step(*arguments, scale=0.1, path="portable")[0])
    monkeypatch.setenv(library.ISA_VARIABLE, "mmx")
    with pytest.raises(ValueError, match="HF_KVRET_CPU_PATH=mmx: choose one of avx512_bf16"):
        run_step(*arguments, scale=0.1)


@every_path
@pytest.mark.factor("flush", [False, True])
@pytest.mark.factor("search", ["flat", "paris"])
def test_no_more_than_the_budget_are_chosen_of_scores_that_are_zero(
    search: str, flush: bool, path: str
) -> None:
    # Products with a negative scale are -0, which equals 0; and where subnormal numbers count as
    # 0, the number after 0 does not exceed it.
    shape = Shape(200, group=1, candidates=200)
    rows, keys, _ = cold_rows(shape)
    valid = shape.mask()
    found = FlatSearch(keys) if search == "flat" else paris_search(shape, valid)
    query = torch.zeros_like(shape.query())
    torch.set_flush_denormal(flush)
    try:
        for scale in (1.0, -1.0):
            cold = HostCold(rows, found, valid, 5)
            _, ids = run_step(query, near_window(shape, 5), cold, scale=scale, path=path, threads=1)
            first = valid[0].nonzero()[:5, 0].int()
            assert torch.equal(ids, first.expand_as(ids))
    finally:
        torch.set_flush_denormal(False)


@every_path
def test_a_query_of_nan_has_no_say_in_what_its_group_chooses(path: str) -> None:
    shape = Shape(403, heads=1, dim=64)
    rows, keys, _ = cold_rows(shape)
    query = shape.query()
    query[:, 1] = math.nan
    cold, window = HostCold(rows, FlatSearch(keys), shape.mask(), 20), near_window(shape, 5)
    _, ids = run_step(query, window, cold, scale=0.1, path=path)
    _, alone = run_step(query[:, :1], window, cold, scale=0.1, path=path)
    assert torch.equal(ids, alone)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_defaults_of_torch_do_not_matter(dtype: torch.dtype) -> None:
    shape = Shape(200)
    rows, keys, _ = cold_rows(shape)
    query, valid, window = shape.query(), shape.mask(), near_window(shape, 20)
    cold = HostCold(rows, FlatSearch(keys), valid, 30)
    expected = run_step(query, window, cold, scale=0.1)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            got = run_step(query, window, cold, scale=0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got[0].dtype == torch.float32
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_a_window_of_one_head_or_row_is_read_right_whatever_its_strides() -> None:
    query = torch.randn(2, 2, 1, 16)
    rows = torch.randn(2, 40, 1, 16).transpose(1, 2)
    expected = run_step(query, HostWindow(rows.clone(), rows.clone(), 40), scale=0.25)[0]
    for window in (rows, rows.contiguous(), torch.cat([rows, rows], dim=2)[:, :, :40]):
        assert torch.equal(run_step(query, HostWindow(window, window, 40), scale=0.25)[0], expected)
        one = HostWindow(window[1:], window[1:], 40)
        assert torch.equal(run_step(query[1:], one, scale=0.25)[0], expected[1:])


def test_windows_that_do_not_fit_are_refused() -> None:
    query, rows = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 40, 16)
    roomy = torch.randn(1, 2, 64, 16)[:, :, :40]
    turned = torch.randn(1, 40, 2, 16).transpose(1, 2)
    cases = [
        (query, rows, rows.bfloat16(), 40, "one dtype"),
        (query, rows, rows[:, :, :30], 30, "one dtype"),
        (query.expand(2, -1, -1, -1), rows, rows, 40, "query's batch"),
        (query[:, :3], rows, rows, 40, "divide its heads"),
        (query, rows, rows, 41, "length=41"),
        (query, rows, rows, 1, "length=1"),
        (query, rows, roomy, 40, "one capacity"),
        (query, turned, turned, 40, "one capacity"),
        (query, rows[:, :1].expand(-1, 2, -1, -1), rows, 40, "one capacity"),
    ]
    for own, keys, values, length, message in cases:
        with pytest.raises(ValueError, match=message):
            run_step(own, HostWindow(keys, values, length), scale=0.25)


def test_cold_rows_that_do_not_fit_are_refused() -> None:
    shape = Shape(100)
    rows, keys, _ = cold_rows(shape)
    query, window, valid = shape.query(), near_window(shape, 5), shape.mask()
    halves = replace(rows, chunks=[chunk.half() for chunk in rows.chunks], page_address=None)
    for own, mask, message in (
        (halves, valid, "rows of one form"),
        (rows, valid.float(), "bool mask"),
        (rows, valid.expand(2, -1), "batch of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            run_step(query, window, HostCold(own, FlatSearch(keys), mask, 3), scale=1.0)
