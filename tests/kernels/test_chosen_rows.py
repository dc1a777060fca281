"""Attention to chosen rows and their scores against float64, in every place and kind of row."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.higgs import CodedRows
from hf_kvret_kernels.paged import PagedRows, join_sides, lay_apart

from .draws import HALF_ULP, TRITON, Place, needs_triton
from .paged_rows import (
    KINDS,
    NEVER,
    NO_PAGE,
    TWO_ROWS,
    Kind,
    chosen_rows,
    dense_rows,
    paged,
    random_ids,
    random_query,
    reference,
)

# Sums of up to some thousand fp32 products of size 1: some hundred roundings of 6e-8 each.
FP32_ERROR = 1e-5
DTYPES = list(HALF_ULP)
Rows = PagedRows | CodedRows


def results(
    where: Place, query: torch.Tensor, rows: Rows, ids: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``(out, lse, scores)``; Triton has no scores of coded rows, values may be NaN."""
    attention = gather_attention(query, rows, ids, backend=where[0], **options)
    if isinstance(rows, CodedRows):
        if where[0] == "triton":
            return *attention, None
        return *attention, gather_scores(query, rows, ids, backend=where[0], **options)
    blind = replace(rows, chunks=[chunk.clone() for chunk in rows.chunks], page_address=None)
    for chunk in blind.chunks:
        chunk[..., rows.key_dim :] = float("nan")
    scores = gather_scores(query, blind, ids, backend=where[0], **options)
    return *attention, scores


def check(
    where: Place,
    query: torch.Tensor,
    rows: Rows,
    ids: torch.Tensor,
    plain: PagedRows | None = None,
    *,
    softcap: float | None = None,
    scale: float = 0.3,
) -> None:
    """Run in ``where`` and compare with float64 over ``plain``, or the same rows."""
    want_out, want_lse, want_scores = reference(query, plain or rows, ids, scale, softcap)
    out, lse, scores = results(where, query, rows, ids, scale=scale, softcap=softcap)
    coded = isinstance(rows, CodedRows)
    # Triton rounds weights to the rows' dtype, and to the query's all that it makes of codes.
    largest = 24.0 if coded else max(chunk.abs().nan_to_num(0).max() for chunk in rows.chunks)
    rounding = HALF_ULP[query.dtype] * float(largest) if where[0] == "triton" else 0.0
    error = 2 * FP32_ERROR if coded else FP32_ERROR
    pairs = [(out, want_out, error + rounding), (lse, want_lse, error + coded * rounding)]
    for one, want, allowed in pairs if scores is None else [*pairs, (scores, want_scores, error)]:
        assert one.dtype == torch.float32 and one.device == query.device
        torch.testing.assert_close(one.cpu().double(), want, rtol=1e-6, atol=allowed)
    assert (out[lse == NEVER] == 0).all()


@pytest.mark.factor("kind", list(KINDS))
@pytest.mark.factor("own_selection", [False, True], ids=["per kv head", "per query head"])
@pytest.mark.factor("heads", [2, 6])
@pytest.mark.factor(("queries", "count"), [(0, 5), (1, 0), (3, 33)])
@pytest.mark.factor("holes", [0.0, 0.3, 1.0])
@pytest.mark.factor("dtype", DTYPES)
@pytest.mark.factor(("page_len", "chunks"), [(7, (3, 1, 4)), (64, (8,))])
@pytest.mark.factor("softcap", [None, 2.0])
def test_attention_and_scores_are_those_of_float64(
    where: Place,
    softcap: float | None,
    page_len: int,
    chunks: tuple[int, ...],
    dtype: torch.dtype,
    holes: float,
    queries: int,
    count: int,
    heads: int,
    own_selection: bool,
    kind: str,
) -> None:
    """A sequence has a page twice; sequences share pages unless keys have means of their own."""
    own = KINDS[kind]
    table = [[0, 4, 2, 0], [3, 5, 6, 1 if own.offset else 4]]
    stored = torch.float32 if own.bits < 16 else dtype
    rows, plain = own.rows(where[1], table, chunks, page_len=page_len, dtype=stored)
    ids = random_ids(plain, heads if own_selection else 2, queries, count, holes)
    query = random_query(plain, heads, queries).to(dtype)
    check(where, query, rows, ids, plain, scale=own.dims[0] ** -0.5, softcap=softcap)


@pytest.mark.parametrize("heads", [24, 25, 66])
def test_any_number_of_heads_may_share_rows(where: Place, heads: int) -> None:
    """The library multiplies many heads in panels of one to three vectors."""
    rows = paged(where[1], chunks=(20,), kv_heads=1, dims=(72, 40), page_len=8)
    ids = random_ids(rows, 1, 1, 150)
    check(where, random_query(rows, heads), rows, ids, softcap=4.0)


@pytest.mark.parametrize("bits", [16, 3])
def test_many_heads_attend_to_wide_rows(where: Place, bits: int) -> None:
    """Keys in two parts, more query heads than a program takes, the last of them alone."""
    rows, plain = Kind((520, 512), bits, in_key=True).rows(where[1], kv_heads=1)
    query = random_query(plain, 17).float() / 8
    check(where, query, rows, random_ids(plain, 1, 1, 11), plain)


@pytest.mark.parametrize("count", [40, 300])
def test_a_token_named_twice_counts_twice(where: Place, count: int) -> None:
    rows = paged(where[1], chunks=(20,), page_len=64)
    ids = random_ids(rows, 2, 2, count)
    check(where, random_query(rows, 4, 2), rows, torch.where(ids < 40, ids, ids % 11))


@pytest.mark.parametrize("bits", [16, 3])
def test_rows_that_no_id_names_may_hold_anything(where: Place, bits: int) -> None:
    """NaN, or scales of NaN, in every row that is not named, and pages that do not exist."""
    table = [[0, 1, NO_PAGE], [NO_PAGE] * 3]
    rows, plain = Kind((64, 64), bits, 64).rows(where[1], table, (3,), page_len=4)
    ids = torch.tensor([6, -1, 3, 5, -1], dtype=torch.int32).expand(2, 2, 1, 5).clone()
    ids[1] = -1
    unused = torch.ones(3, 2, 4, 1, dtype=torch.bool)
    for token in (6, 3, 5):
        unused[token // 4, :, token % 4] = False
    pages = rows.pages if isinstance(rows, CodedRows) else rows
    chunk, unused = pages.chunks[0], unused.to(where[1])
    if bits == 16:
        chunk.masked_fill_(unused, float("nan"))
    else:
        named = join_sides(chunk, pages.key_dim).masked_fill_(unused, 255)
        chunk.copy_(lay_apart(named, pages.key_dim))
    check(where, random_query(plain, 4).float(), rows, ids.to(where[1]), plain)


@pytest.mark.parametrize("kind", ["(8, 8)", "4 bits"])
def test_strided_queries_ids_and_tables(where: Place, kind: str) -> None:
    rows, plain = KINDS[kind].rows(where[1])
    query = random_query(plain, 4, 3).float().transpose(1, 2).contiguous().transpose(1, 2)
    wide = random_ids(plain, 2, 3, 24)
    check(where, query, rows, wide[..., ::2], plain)
    check(where, query, rows, wide.transpose(1, 2).contiguous().transpose(1, 2), plain)
    rows.table = rows.table.t().contiguous().t()
    check(where, query, rows, wide, plain)


def test_chunks_may_be_views_that_are_not_aligned(where: Place) -> None:
    rows = paged(where[1], dims=(16, 15), dtype=torch.float16)
    flat = torch.empty(rows.chunks[0].numel() + 1, dtype=torch.float16, device=where[1])
    rows.chunks[0] = flat[1:].view(rows.chunks[0].shape).copy_(rows.chunks[0])
    check(where, random_query(rows, 4), rows, random_ids(rows, 2, 1, 40))


def test_large_scores_do_not_overflow(where: Place) -> None:
    rows = paged(where[1])
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 60)
    want_out, want_lse, _ = reference(query, rows, ids, 200.0)
    out, lse, _ = results(where, query, rows, ids, scale=200.0)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-6, atol=1e-3)
    # Scores of some hundred have rounding errors of 1e-4, and so have their weights.
    torch.testing.assert_close(out.cpu().double(), want_out, rtol=0, atol=1e-2)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.factor("bad", [float("nan"), float("inf"), NEVER])
@pytest.mark.factor("half", ["key", "value"])
def test_what_is_not_finite_stays_where_it_is_read(where: Place, half: str, bad: float) -> None:
    rows = paged(where[1], chunks=(20,), batch=1, dims=(32, 32), dtype=torch.bfloat16)
    ids = random_ids(rows, 2, 2, 100, holes=0.0)
    ids[ids == 11] = -1
    ids[0, 1, 0, 37] = 11
    page = int(rows.table[0, 11 // 8])
    query = random_query(rows, 4, 2).abs()
    before, _, _ = results(where, query, rows, ids, scale=0.3)
    rows.chunks[0][page, 1, 11 % 8, 0 if half == "key" else 32] = bad
    others = torch.ones(1, 4, 2, dtype=torch.bool)
    others[0, 2:, 0] = False
    without = ids.clone()
    without[0, 1, 0, 37] = -1
    want, _, _ = reference(query, rows, without, 0.3)
    error = FP32_ERROR + (5 * HALF_ULP[rows.dtype] if where[0] == "triton" else 0.0)
    out, lse, _ = results(where, query, rows, ids, scale=0.3)
    assert torch.equal(out[others], before[others])
    assert lse[others].isfinite().all()
    # A key of -inf has weight 0: a query that reads it is as good as one without that row.
    if (half, bad) == ("key", NEVER):
        torch.testing.assert_close(out.cpu().double(), want, rtol=0, atol=error)
    else:
        assert not out[~others].isfinite().all(-1).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_query_whose_scores_are_all_minus_infinity_is_empty(where: Place) -> None:
    rows = paged(where[1], batch=1)
    rows.chunks[0][..., 0] = NEVER
    query, ids = random_query(rows, 2).abs(), random_ids(rows, 2, 1, 40)
    out, lse, _ = results(where, query, rows, ids, scale=1.0)
    assert (out == 0).all() and (lse == NEVER).all()


def test_numbers_near_zero_and_near_the_largest(where: Place) -> None:
    rows = paged(where[1], dims=(64, 64), dtype=torch.bfloat16)
    rows.chunks[0][..., :64:2] *= 1e-39
    rows.chunks[0][..., 1:64:2] *= 2.0**60
    rows.chunks[0][..., 64::2] *= 1e-39
    check(where, random_query(rows, 4) * 2.0**-60, rows, random_ids(rows, 2, 1, 40))


@pytest.mark.factor("dtype", DTYPES, ids=str)
@pytest.mark.factor("size", [1e-3, 3e4])
def test_scales_have_the_range_of_fp16(where: Place, dtype: torch.dtype, size: float) -> None:
    """Scaled, some of the larger numbers are no numbers of fp16."""
    rows, plain = KINDS["4 bits"].rows(where[1])
    pages = rows.pages
    coded = join_sides(pages.chunks[0], pages.key_dim)
    # A row ends with the scale of its value.
    scale = coded[..., -2:].contiguous().view(torch.float16) * size
    coded[..., -2:] = scale.view(torch.uint8)
    pages.chunks[0].copy_(lay_apart(coded, pages.key_dim))
    query, ids = random_query(plain, 4).to(dtype), random_ids(plain, 2, 1, 13)
    out, _ = gather_attention(query, rows, ids, scale=0.125, backend=where[0])
    expected, _ = gather_attention(query.float(), rows, ids, scale=0.125, backend="naive")
    rounding = 24 * HALF_ULP[dtype] if where[0] == "triton" else 0.0
    error = 2 * FP32_ERROR + rounding
    torch.testing.assert_close(out / size, expected / size, rtol=0, atol=error)


@needs_triton
@pytest.mark.parametrize("bits", [16, 2])
def test_splitting_the_ids_changes_nothing(bits: int) -> None:
    from hf_kvret_kernels.gather_attention.triton import gather_partials
    from hf_kvret_kernels.higgs import triton_attend

    table = [[0, 1, 2, 3, 4, 5, 6, 7]]
    rows, plain = Kind((64, 64), bits, 64).rows(TRITON[1], table, (8,), kv_heads=1, page_len=16)
    query, ids = random_query(plain, 2).float(), random_ids(plain, 1, 1, 128)
    ids[..., 32:64] = -1
    partials = gather_partials if bits == 16 else triton_attend.gather_partials
    whole, *others = (
        partials(query, rows, ids, 0.3, None, splits=splits)("triton") for splits in (1, 3, 64)
    )
    for parts in others:
        torch.testing.assert_close(parts, whole, rtol=0, atol=2 * FP32_ERROR)


@pytest.mark.factor("heads", [2, 6])
@pytest.mark.factor("kind", ["(40, 24)", "keys alone"])
def test_gather_returns_the_rows_in_order(place: Place, heads: int, kind: str) -> None:
    dtype = torch.bfloat16
    rows, plain = KINDS[kind].rows(place[1], TWO_ROWS, (2, 3, 4), dtype=dtype)
    ids = random_ids(plain, heads, 2, 7)
    keys, values = rows.gather(ids, backend=place[0])
    assert keys.dtype == values.dtype == dtype
    expected = chosen_rows(dense_rows(plain), ids, heads)
    expected.masked_fill_((ids < 0).cpu()[..., None], 0)
    assert torch.equal(torch.cat([keys, values], -1).cpu().double(), expected)
    keys, values = rows.gather(ids[..., :0], backend=place[0])
    assert keys.shape[:4] == values.shape[:4] == (2, heads, 2, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("bits", [16, 2])
def test_pinned_host_rows_are_read_from_the_gpu(bits: int) -> None:
    kind = Kind((64, 64), bits, 64)
    near, plain = kind.rows("cuda", TWO_ROWS, (4, 5), dtype=torch.float16)
    pages = near if bits == 16 else near.pages
    pinned = [chunk.cpu().pin_memory() for chunk in pages.chunks]
    far = replace(pages, chunks=pinned, page_address=None)
    far = far if bits == 16 else replace(near, pages=far)
    query, ids = random_query(plain, 4).half(), random_ids(plain, 2, 1, 20)
    both = [results(("triton", "cuda"), query, rows, ids, scale=0.3)[:2] for rows in (near, far)]
    assert all(map(torch.equal, *both))


@pytest.mark.skipif(bool(library.why_not()), reason="the CPU kernels are not compiled")
def test_auto_takes_the_library_for_cpu_tensors(watch: Any) -> None:
    called = watch(library, "run", lambda function, *_, **__: function)
    rows = paged("cpu", TWO_ROWS)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 20)
    for backend in ("auto", "naive", "cpp"):
        gather_scores(query, rows, ids, scale=0.3, backend=backend)
        gather_attention(query, rows, ids, scale=0.3, backend=backend)
    assert called == ["hfk_scores", "hfk_attend"] * 2
