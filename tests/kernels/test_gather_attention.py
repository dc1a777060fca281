"""Attention to chosen rows and their scores against float64, in every place they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret_kernels import host_attention as host
from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.paged import PagedRows

from .draws import HALF_ULP, Place
from .paged_rows import (
    NEVER,
    NO_PAGE,
    TWO_ROWS,
    Results,
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


def results(
    where: Place, query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, **options: Any
) -> Results:
    """``(out, lse, scores)``; scores are of rows whose values are NaN: they read keys alone."""
    blind = PagedRows([chunk.clone() for chunk in rows.chunks], rows.table, rows.key_dim)
    for chunk in blind.chunks:
        chunk[..., rows.key_dim :] = float("nan")
    if rows.chunks[0].is_pinned():
        pinned = [chunk.pin_memory() for chunk in blind.chunks]
        blind = PagedRows(pinned, rows.table, rows.key_dim)
    scores = gather_scores(query, blind, ids, backend=where[0], **options)
    return *gather_attention(query, rows, ids, backend=where[0], **options), scores


def check(
    where: Place,
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    softcap: float | None = None,
    scale: float = 0.3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run in ``where``, compare with the reference, return ``(out, lse)``."""
    expected = reference(query, rows, ids, scale, softcap)
    largest = max(chunk.abs().nan_to_num(0).max().item() for chunk in rows.chunks)
    rounding = HALF_ULP[rows.dtype] * largest if where[0] == "triton" else 0.0
    result = results(where, query, rows, ids, scale=scale, softcap=softcap)
    for one, want in zip(result, expected, strict=True):
        assert one.shape == want.shape and one.dtype == torch.float32
        assert one.device == query.device and not one.isnan().any()
        assert torch.equal((one == NEVER).cpu(), want == NEVER)
    out, lse, scores = (one.cpu().double() for one in result)
    assert (out[lse == NEVER] == 0).all()
    torch.testing.assert_close(out, expected[0], rtol=0, atol=FP32_ERROR + rounding)
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=FP32_ERROR)
    torch.testing.assert_close(scores, expected[2], rtol=1e-6, atol=FP32_ERROR)
    return result[:2]


@pytest.mark.factor("own_selection", [False, True], ids=["per kv head", "per query head"])
@pytest.mark.factor("heads", [2, 6, 8, 34, 136])
@pytest.mark.factor(("queries", "count"), [(0, 5), (1, 0), (1, 1), (1, 64), (3, 33), (4, 7)])
@pytest.mark.factor("holes", [0.0, 0.3, 1.0])
@pytest.mark.factor("dtype", DTYPES)
@pytest.mark.factor(
    "dims", [(8, 8), (40, 24), (96, 128), (128, 128), (256, 256), (9, 5), (33, 47)], ids=str
)
@pytest.mark.factor(("page_len", "chunks"), [(1, (7,)), (7, (3, 1, 3)), (64, (7,))])
def test_attention_and_scores_are_those_of_float64(
    where: Place,
    page_len: int,
    chunks: tuple[int, ...],
    dims: tuple[int, int],
    dtype: torch.dtype,
    holes: float,
    queries: int,
    count: int,
    heads: int,
    own_selection: bool,
) -> None:
    """Sequences share pages, and one has a page twice."""
    table = [[0, 4, 2, 6], [3, 4, 6, 6]]
    rows = paged(where[1], table, chunks, page_len=page_len, dims=dims, dtype=dtype)
    ids = random_ids(rows, heads if own_selection else 2, queries, count, holes)
    check(where, random_query(rows, heads, queries), rows, ids, scale=dims[0] ** -0.5)


@pytest.mark.parametrize("heads", [23, 24, 25, 41, 49, 66])
def test_any_number_of_heads_may_share_rows(where: Place, heads: int) -> None:
    """The library multiplies many heads in panels of one to three vectors."""
    rows = paged(where[1], chunks=(20,), kv_heads=1, dims=(72, 40), page_len=8)
    ids = random_ids(rows, 1, 1, 150)
    check(where, random_query(rows, heads), rows, ids, softcap=4.0)


@pytest.mark.parametrize("count", [40, 300])
def test_a_token_named_twice_counts_twice(where: Place, count: int) -> None:
    rows = paged(where[1], chunks=(20,), page_len=64)
    ids = random_ids(rows, 2, 2, count)
    check(where, random_query(rows, 4, 2), rows, torch.where(ids < 40, ids, ids % 11))


def test_rows_that_no_id_names_may_hold_anything(where: Place) -> None:
    table = [[0, 1, NO_PAGE], [2, 0, NO_PAGE], [NO_PAGE] * 3]
    rows = paged(where[1], table, (3,), page_len=4)
    ids = random_ids(rows, 2, 1, 5)
    ids = torch.where(ids < 8, ids, -1)
    ids[2] = -1
    used = torch.zeros(3, 2, 4, 1, dtype=torch.bool)
    for b, h in ((b, h) for b in range(2) for h in range(2)):
        for token in ids[b, h, 0].tolist():
            if token >= 0:
                used[int(rows.table[b, token // 4]), h, token % 4] = True
    assert not used.all()
    rows.chunks[0].masked_fill_(~used.to(where[1]), float("nan"))
    check(where, random_query(rows, 4), rows, ids)
    keys, values = rows.gather(ids, backend="triton" if where[0] == "triton" else "naive")
    assert not keys.isnan().any()
    assert (values[ids < 0] == 0).all()


# In numpy, which interprets the kernel, a saturated sigmoid warns on its way to 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.factor("softcap", [0.5, 30.0])
def test_softcap(where: Place, softcap: float) -> None:
    rows = paged(where[1], chunks=(20,))
    ids = random_ids(rows, 2, 1, 100)
    check(where, 8.0 * random_query(rows, 4), rows, ids, softcap=softcap)


def test_strided_queries_ids_and_tables(where: Place) -> None:
    rows = paged(where[1], TWO_ROWS)
    query = random_query(rows, 4, 3).transpose(1, 2).contiguous().transpose(1, 2)
    wide = random_ids(rows, 2, 3, 24)
    check(where, query, rows, wide[..., ::2])
    check(where, query, rows, wide.transpose(1, 2).contiguous().transpose(1, 2))
    rows.table = rows.table.t().contiguous().t()
    check(where, query, rows, wide)


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
@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.factor("bad", [float("nan"), float("inf"), NEVER])
@pytest.mark.factor("half", ["key", "value"])
def test_what_is_not_finite_stays_in_the_queries_that_read_it(
    where: Place, half: str, bad: float, dtype: torch.dtype
) -> None:
    rows = paged(where[1], chunks=(20,), batch=1, dims=(32, 32), dtype=dtype)
    ids = random_ids(rows, 2, 2, 100, holes=0.0)
    ids[ids == 11] = -1
    ids[0, 1, 0, 37] = 11
    page = int(rows.table[0, 11 // 8])
    columns = slice(0, 1) if half == "key" else slice(32, 33)
    query = random_query(rows, 4, 2).abs()
    before, _, _ = results(where, query, rows, ids, scale=0.3)
    rows.chunks[0][page, 1, 11 % 8, columns] = bad
    others = torch.ones(1, 4, 2, dtype=torch.bool)
    others[0, 2:, 0] = False
    without = ids.clone()
    without[0, 1, 0, 37] = -1
    want, _, _ = reference(query, rows, without, 0.3)
    error = FP32_ERROR + (5 * HALF_ULP[dtype] if where[0] == "triton" else 0.0)
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


def test_splitting_the_ids_changes_nothing(place: Place) -> None:
    if place[0] != "triton":
        pytest.skip("only the Triton kernel splits ids")
    from hf_kvret_kernels.gather_attention import triton

    rows = paged(place[1], [[0, 1, 2, 3, 4, 5, 6, 7]], (8,), page_len=16, kv_heads=1)
    query, ids = random_query(rows, 2), random_ids(rows, 1, 1, 128)
    ids[..., 32:64] = -1
    whole = triton.gather_partials(query, rows, ids, 0.3, None, splits=1)("triton")
    for splits in (2, 3, 4, 64):
        parts = triton.gather_partials(query, rows, ids, 0.3, None, splits=splits)("triton")
        torch.testing.assert_close(parts, whole, rtol=0, atol=FP32_ERROR)


@pytest.mark.factor("heads", [2, 6])
@pytest.mark.factor("chunks", [(9,), (2, 3, 4)], ids=str)
@pytest.mark.factor("dtype", [torch.bfloat16, torch.uint8])
def test_gather_returns_the_rows_in_order(
    place: Place, chunks: tuple[int, ...], heads: int, dtype: torch.dtype
) -> None:
    rows = paged(place[1], TWO_ROWS, chunks, dims=(12, 20), dtype=torch.bfloat16)
    if dtype == torch.uint8:
        bytes_of = [(chunk.float().abs() * 50).to(dtype) for chunk in rows.chunks]
        rows = PagedRows(bytes_of, rows.table, rows.key_dim)
    ids = random_ids(rows, heads, 2, 7)
    keys, values = rows.gather(ids, backend=place[0])
    assert keys.shape == (2, heads, 2, 7, 12)
    assert values.shape == (2, heads, 2, 7, 20)
    assert keys.dtype == values.dtype == dtype
    expected = chosen_rows(dense_rows(rows), ids, heads).masked_fill_((ids < 0).cpu()[..., None], 0)
    assert torch.equal(torch.cat([keys, values], -1).cpu(), expected)
    keys, values = rows.gather(ids[..., :0], backend=place[0])
    assert keys.shape == (2, heads, 2, 0, 12) and values.shape == (2, heads, 2, 0, 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_host_rows_are_read_from_the_gpu() -> None:
    near = paged("cuda", TWO_ROWS, (4, 5), dtype=torch.float16)
    pinned = [chunk.cpu().pin_memory() for chunk in near.chunks]
    far = PagedRows(pinned, near.table, near.key_dim)
    query, ids = random_query(near, 4), random_ids(near, 2, 1, 20)
    found = []
    for rows in (near, far):
        result = results(("triton", "cuda"), query, rows, ids, scale=0.3)
        found.append((*result, *rows.gather(ids)))
    assert all(map(torch.equal, *found))
    with pytest.raises(ValueError, match="pin_memory"):
        PagedRows([chunk.cpu() for chunk in near.chunks], near.table, near.key_dim).addresses()


@pytest.mark.skipif(bool(host.why_not()), reason="the CPU kernels are not compiled")
def test_auto_takes_the_library_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    run = library.run

    def spy(function: Any, *args: Any, **options: Any) -> None:
        called.append(function)
        run(function, *args, **options)

    monkeypatch.setattr(library, "run", spy)
    rows = paged("cpu", TWO_ROWS)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 20)
    for backend in ("auto", "naive", "cpp"):
        gather_scores(query, rows, ids, scale=0.3, backend=backend)
        gather_attention(query, rows, ids, scale=0.3, backend=backend)
    assert called == ["hfk_scores", "hfk_attend"] * 2


def test_without_the_library_auto_is_torch_and_cpp_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(library.PATH_VARIABLE, "/nowhere/lib.so")
    rows = paged("cpu", TWO_ROWS)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 20)
    for operation in (gather_scores, gather_attention):
        auto, naive = (operation(query, rows, ids, scale=0.3, backend=x) for x in ("auto", "naive"))
        torch.testing.assert_close(auto, naive, rtol=0, atol=0)
        with pytest.raises(ImportError, match="/nowhere"):
            operation(query, rows, ids, scale=0.3, backend="cpp")


def test_the_library_is_refused_for_tensors_elsewhere() -> None:
    rows = PagedRows(
        [torch.zeros(9, 2, 8, 32, device="meta")],
        torch.zeros(2, 4, dtype=torch.int32, device="meta"),
        16,
    )
    query = torch.zeros(2, 4, 1, 16, device="meta")
    ids = torch.zeros(2, 2, 1, 3, dtype=torch.int32, device="meta")
    for operation in (gather_scores, gather_attention):
        with pytest.raises(ValueError, match=r"backend='cpp' with a query on meta.*triton"):
            operation(query, rows, ids, scale=1.0, backend="cpp")


def test_addresses_are_those_of_the_pages_and_are_kept() -> None:
    rows = paged("cpu", TWO_ROWS, (4, 5))
    addresses = rows.addresses()
    pages = [page for chunk in rows.chunks for page in chunk]
    assert addresses.tolist() == [page.data_ptr() for page in pages]
    assert rows.addresses() is addresses
    again = PagedRows(rows.chunks, rows.table, rows.key_dim, page_address=addresses)
    assert again.addresses() is addresses


@pytest.mark.parametrize(
    ("dims", "dtype", "expected"),
    [((64, 64), torch.float16, 16), ((40, 20), torch.float16, 8), ((9, 5), torch.bfloat16, 2)],
    ids=str,
)
def test_alignment_is_what_every_key_and_value_has(
    dims: tuple[int, int], dtype: torch.dtype, expected: int
) -> None:
    rows = paged("cpu", TWO_ROWS, dims=dims, dtype=dtype)
    flat = rows.chunks[0].view(-1, rows.width)
    alignment = rows.alignment_bytes()
    assert alignment == expected
    for row in flat[:20]:
        assert row.data_ptr() % alignment == 0
        assert row[rows.key_dim :].data_ptr() % alignment == 0


CHUNK = torch.zeros(9, 2, 8, 32)
TABLE = torch.tensor(TWO_ROWS, dtype=torch.int32)


@pytest.mark.parametrize(
    ("chunks", "table", "key_dim", "message"),
    [
        ([], TABLE, 16, "chunks is empty"),
        ([CHUNK, CHUNK.half()], TABLE, 16, r"chunks\[1\] is torch.float16"),
        ([CHUNK.transpose(1, 2)], TABLE, 16, "contiguous"),
        ([CHUNK[0]], TABLE, 16, "must be contiguous"),
        ([CHUNK], TABLE.long(), 16, "pass int32"),
        ([CHUNK], TABLE[:, :0], 16, "at least one column"),
        ([CHUNK], TABLE, 32, "1 .. 31"),
    ],
)
def test_mistakes_in_paged_rows_are_refused(
    chunks: list[torch.Tensor], table: torch.Tensor, key_dim: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PagedRows(chunks, table, key_dim)


@pytest.mark.parametrize(
    ("query", "ids", "options", "message"),
    [
        (torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 1, 3).long(), {}, "pass int32"),
        (torch.zeros(2, 4, 2, 16), torch.zeros(2, 2, 1, 3).int(), {}, r"pass \[2, 2 or 4, 2, K\]"),
        (torch.zeros(2, 5, 1, 16), torch.zeros(2, 2, 1, 3).int(), {}, "no multiple"),
        (torch.zeros(2, 4, 1, 12), torch.zeros(2, 2, 1, 3).int(), {}, "must agree"),
        (torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 1, 3).int(), {"softcap": -1.0}, "softcap"),
        (torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 1, 3).int(), {"backend": "x"}, "choose one"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(
    query: torch.Tensor, ids: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    rows = PagedRows([CHUNK], TABLE, 16)
    for operation in (gather_attention, gather_scores):
        with pytest.raises(ValueError, match=message):
            operation(query, rows, ids, **{"scale": 1.0, **options})
