"""Decode steps in one call of the compiled library, against attention worked out in double."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_kvret_kernels import host_library as library, host_step
from hf_kvret_kernels.host_step import (
    FlatSearch,
    GivenIds,
    HostCold,
    HostWindow,
    PackedStep,
    run_step,
)
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.mean_tokens import MeanToken

from .draws import best_share, draw, generator, library_threads
from .host_steps import (
    FP32_ERROR,
    Shape,
    check_attention,
    check_best,
    cold_rows,
    flat_step,
    near_window,
    paris_search,
)
from .paged_rows import KINDS, Kind, dense_rows

NEVER = float("-inf")

# The path goes to the tests that take it.
pytestmark = [
    pytest.mark.skipif(bool(host_step.why_not()), reason="the library is not compiled"),
    pytest.mark.factor("path", list(library.PATHS), indirect=True),
]

STEPS = {
    "plain": (Shape(500, dim=64), None),
    "drafts": (Shape(300, queries=4, batch=2, dim=80, group=3), None),
    "soft cap": (Shape(300, dim=32, group=1), 3.0),
    "half": (Shape(400, dim=128, dtype=torch.float16), None),
    "brain": (Shape(400, dim=128, group=4, dtype=torch.bfloat16), 2.0),
    "many heads": (Shape(300, dim=72, group=35, queries=2, dtype=torch.bfloat16), None),
    "one KV head": (Shape(2000, heads=1, group=4, dim=48), None),
    "nothing valid": (Shape(100, valid=-1.0), None),
}


@pytest.mark.factor("threads", [1, 3, 16], indirect=True)
@pytest.mark.factor("method", ["flat", "paris"])
@pytest.mark.factor("name", list(STEPS))
def test_a_step_attends_to_window_and_ids(name: str, method: str, threads: int, path: str) -> None:
    shape, softcap = STEPS[name]
    query, window, cold = flat_step(shape, max(1, shape.n // 10), length=37)
    _, keys, values = cold_rows(shape)
    valid, scale = cold.valid, shape.dim**-0.5
    if method == "paris":
        cold = replace(cold, search=paris_search(shape, valid))
    sinks = draw(query.shape[1], seed=9) if shape.group == 3 else None
    options = {"scale": scale, "softcap": softcap, "sink_logits": sinks}
    selected = torch.tensor(5)
    out, ids = run_step(query, window, cold, selected=selected, **options)
    assert ids.shape == (shape.batch, shape.heads, shape.queries, cold.budget)
    assert int(selected) == 5 + int((ids >= 0).sum())
    for own, mask in zip(ids, valid, strict=True):
        assert mask[own[own >= 0].long()].all()
    # Queries in bf16 are exact products too: only sums are rounded, and weights of many heads.
    error = 2.0**-8 if (name, path) == ("many heads", "avx512_bf16") else FP32_ERROR
    check_attention(out, query, keys, values, ids, window, error=error, **options)
    if method == "flat":
        scores = query.double() @ keys.double().repeat_interleave(shape.group, 1).mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~valid[:, None, None], NEVER)
        check_best(ids, best_share(scores, shape.heads))


@pytest.mark.factor("shape", [Shape(1, queries=3, batch=2, dim=40), Shape(1, group=5)])
def test_a_window_alone_is_attended_to(shape: Shape, path: str) -> None:
    query, window = shape.query(), near_window(shape, 90)
    out, ids = run_step(query, window, scale=0.1)
    assert ids.shape == (shape.batch, shape.heads, shape.queries, 0)
    nothing = torch.zeros(shape.batch, shape.heads, 1, shape.dim)
    check_attention(out, query, nothing, nothing[..., :24], ids, window, scale=0.1)


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.factor("threads", [1, 16], indirect=True)
def test_a_result_is_rounded_as_torch_rounds(dtype: torch.dtype, threads: int, path: str) -> None:
    shape = Shape(1, group=3, queries=2, batch=2, dim=40, dtype=dtype)
    query, window = shape.query(), near_window(shape, 90)
    # Rows from subnormal halves to numbers beyond the largest half, and some that are none.
    factors = torch.logspace(-9, 6, window.values.shape[3], base=10.0)
    window.values.copy_((window.values.float() * factors).to(dtype))
    window.values[0, 0, :, 5] = float("inf")
    window.values[1, 0, :, 5] = float("nan")
    sinks = draw(query.shape[1], seed=9)

    def step(form: torch.dtype) -> torch.Tensor:
        return run_step(query, window, scale=0.1, sink_logits=sinks, dtype=form)[0]

    exact, rounded = step(torch.float32), step(dtype)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.nan_to_num(7.0), exact.to(dtype).nan_to_num(7.0))
    assert torch.equal(rounded.isnan(), exact.isnan())
    assert rounded.isnan().any()


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.factor("in_key", [False, True])
def test_a_packed_step_writes_its_token_first(dtype: torch.dtype, in_key: bool, path: str) -> None:
    shape = Shape(300, batch=2, dim=40, group=3, dtype=dtype)
    query, window, cold = flat_step(shape, 20)
    keys = window.keys.nan_to_num(0.0)
    values = keys[..., :24] if in_key else window.values.nan_to_num(0.0)
    counts = [torch.tensor(0) for _ in range(2)]
    packed_keys = keys.clone()
    packed_values = packed_keys[..., :24] if in_key else values.clone()
    near = HostWindow(packed_keys, packed_values, 20)
    scores = 0.2, None, None
    packed = PackedStep(library.load(), query, near, cold, scores, counts[0])
    for length in (21, 22):
        key, value = (draw(2, shape.heads, 1, dim, seed=length, dtype=dtype) for dim in (40, 24))
        keys[:, :, length - 1 : length] = key
        if not in_key:
            values[:, :, length - 1 : length] = value
        # These rows don't lie side by side.
        query, key = -query, key.mT.contiguous().mT
        out = packed.run(query, key, value, length)
        own = HostWindow(keys, values, length)
        options: dict[str, Any] = {"scale": 0.2, "selected": counts[1], "dtype": dtype}
        expected, _ = run_step(query, own, cold, **options)
        assert out is not None and torch.equal(out, expected.transpose(1, 2))
    assert torch.equal(packed_keys, keys) and torch.equal(packed_values, values)
    assert counts[0] == counts[1] > 0
    assert packed.run(query, key, value, len(keys[0, 0]) + 1) is None


def test_a_result_is_of_float32_or_the_querys_dtype() -> None:
    shape = Shape(1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"float16: a step writes float32 or its query's torch.bf"):
        run_step(shape.query(), near_window(shape, 5), scale=1.0, dtype=torch.float16)


@pytest.mark.factor("kind", list(KINDS))
@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.factor(("heads", "queries"), [(2, 1), (6, 2)])
@pytest.mark.factor("length", [2, 21])
@pytest.mark.factor("softcap", [None, 2.0])
@pytest.mark.factor("threads", [1, 7], indirect=True)
def test_ids_that_are_given_are_attended_to(
    kind: str,
    dtype: torch.dtype,
    heads: int,
    queries: int,
    length: int,
    softcap: float | None,
    threads: int,
    path: str,
) -> None:
    """In rows of any kind: of a KV head for all its query heads, or of each query head."""
    own = KINDS[kind]
    stored = dtype if own.bits == 16 else torch.float32
    table = [[0, 4, 2, 7, 8, 9], [3, 5, 6, 1, 10, 11]]
    rows, plain = own.rows("cpu", table, (12,), page_len=16, dtype=stored)
    keys, values = dense_rows(plain).split(own.dims, -1)
    query = draw(2, 6, queries, own.dims[0], seed=7, dtype=dtype)
    near = [draw(2, 2, length, dim, seed=8, dtype=dtype) for dim in own.dims]
    window = HostWindow(near[0], near[0][..., : own.dims[1]] if own.in_key else near[1], length)
    ids = torch.randint(-1, 96, (2, heads, queries, 70), generator=generator(6)).int()
    cold = HostCold(rows, GivenIds(ids), torch.ones(2, 96, dtype=torch.bool), 70)
    options = {"scale": own.dims[0] ** -0.5, "softcap": softcap, "sink_logits": draw(6, seed=3)}
    out, same = run_step(query, window, cold, **options)
    assert torch.equal(same, ids)
    # Sums of codes are longer, and butterflies go before and after them.
    error = FP32_ERROR if own.bits == 16 else 2 * FP32_ERROR
    check_attention(out, query, keys, values, ids, window, error=error, **options)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_search_reads_a_window_and_rows_of_keys_alone(queries: int, path: str) -> None:
    shape = Shape(32, dim=24, group=3, queries=queries, batch=2)
    rows, plain = Kind((24, 10), in_key=True).rows()
    keys = dense_rows(plain)[..., :24].float().contiguous()
    near = near_window(shape, 37)
    window = replace(near, values=near.keys[..., :10])
    cold = HostCold(rows, FlatSearch(keys), shape.mask(), 9)
    out, ids = run_step(shape.query(), window, cold, scale=0.2)
    check_attention(out, shape.query(), keys, keys[..., :10], ids, window, scale=0.2)


@pytest.mark.parametrize("kind", ["(8, 8)", "2 bits"])
def test_ids_of_no_token_are_refused(kind: str, path: str) -> None:
    rows, plain = KINDS[kind].rows()
    dim = plain.key_dim
    ids = torch.full((2, 2, 1, 3), 32, dtype=torch.int32)
    cold = HostCold(rows, GivenIds(ids), torch.ones(2, 32, dtype=torch.bool), 3)
    near = HostWindow(draw(2, 2, 5, dim), draw(2, 2, 5, dim), 5)
    with pytest.raises(WrongIdError, match="id 32 of 32 tokens"):
        run_step(draw(2, 4, 1, dim), near, cold, scale=0.2)


@pytest.mark.factor("poison", [math.nan, math.inf])
def test_a_query_that_is_not_finite_spoils_its_own_answer_only(poison: float, path: str) -> None:
    shape = Shape(400, heads=2, group=2, dim=64)
    query, window, flat = flat_step(shape, 40)
    bad_query = query.clone()
    bad_query[0, 0] = poison
    for cold in (flat, replace(flat, search=paris_search(shape, flat.valid))):
        good, _ = run_step(query, window, cold, scale=0.1)
        bad, _ = run_step(bad_query, window, cold, scale=0.1)
        assert torch.equal(bad[0, 2:], good[0, 2:])


def test_callers_on_several_threads_do_not_meet() -> None:
    shape = Shape(3000)
    _, window, cold = flat_step(shape, 64)
    cold = replace(cold, search=paris_search(shape, cold.valid))
    queries = [shape.query(seed) for seed in range(6)]

    def answer(query: torch.Tensor) -> torch.Tensor:
        return run_step(query, window, cold, scale=0.1)[0]

    with library_threads(3):
        expected = [answer(query) for query in queries]
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(answer, queries * 10))
    assert all(map(torch.equal, results, expected * 10))


def test_memory_of_any_layout_is_read_right() -> None:
    query, window, cold = flat_step(Shape(200, batch=2), 30)
    expected = run_step(query, window, cold, scale=0.1)[1]
    room = torch.full((2, 2, 300, 128), math.nan)
    room[:, :, :200] = cold.search.keys
    strided = cold.valid.new_zeros(2, 400)
    strided[:, ::2] = cold.valid
    views = replace(cold, search=FlatSearch(room[:, :, :200]), valid=strided[:, ::2])
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(run_step(turned, window, views, scale=0.1)[1], expected)


def test_a_variable_of_no_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "mmx")
    with pytest.raises(ValueError, match="HF_KVRET_CPU_PATH=mmx: choose one of avx512_bf16"):
        run_step(*flat_step(Shape(100), 9), scale=0.1)


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
        (query.double(), rows, rows, 40, "convert the query"),
        (query.expand(2, -1, -1, -1), rows, rows, 40, "query's batch"),
        (query[:, :3], rows, rows, 40, "divide its heads"),
        (query, rows, rows, 41, "length=41"),
        (query, rows, rows, 1, "length=1"),
        (query, rows, roomy, 40, "one capacity"),
        (query, turned, turned, 40, "one capacity"),
        (query, rows, torch.zeros(1, 2, 40, 24)[..., :16], 40, "the first numbers of keys"),
    ]
    for own, keys, values, length, message in cases:
        with pytest.raises(ValueError, match=message):
            run_step(own, HostWindow(keys, values, length), scale=0.25)


def test_cold_rows_that_do_not_fit_are_refused() -> None:
    query, window, cold = flat_step(Shape(100, valid=1.1), 3)
    rows, valid = cold.rows, cold.valid
    halves = replace(rows, chunks=[chunk.half() for chunk in rows.chunks], page_address=None)
    short = replace(rows, table=rows.table[:, :2], page_address=None)
    one_head = GivenIds(torch.zeros(1, 1, 1, 3, dtype=torch.int32))
    moments, counts = torch.zeros(1, 2, 153, 128), torch.ones(1, 1).long()
    rest = MeanToken(moments, torch.zeros(1, 2, 1, 24), counts)
    turned = moments.mT.contiguous().mT
    changes: list[tuple[dict[str, Any], str]] = [
        ({"rows": halves}, "rows of one form"),
        ({"rows": short, "budget": 90}, "of 32 tokens: allowed are 0 to 31"),
        ({"valid": valid.float()}, "bool mask"),
        ({"valid": valid.expand(2, -1)}, "batch of 1"),
        ({"search": one_head}, r"pass int32 \[1, 2 or a multiple"),
        ({"rest": replace(rest, moments=turned)}, "pass contiguous"),
        ({"rest": replace(rest, values=rest.values[:, :1])}, "pass contiguous"),
        ({"rest": replace(rest, counts=counts.int())}, "pass contiguous"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            run_step(query, window, replace(cold, **change), scale=1.0)
