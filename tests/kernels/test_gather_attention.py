"""gather_attention and PagedRows against float64, in every place they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.paged import PagedRows

# Sums of a few hundred fp32 products of size 1: some hundred roundings of 6e-8 each.
FP32_ERROR = 1e-5
# Half a unit in the last place, to which Triton rounds the softmax weights of 16-bit rows.
HALF_ULP = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9}
# What stands in table entries that no id leads to; as a page number it would crash.
NO_PAGE = 10**9

Place = tuple[str, str]


def paged(
    place: Place,
    table: list[list[int]],
    chunks: tuple[int, ...] = (9,),
    *,
    kv_heads: int = 2,
    page_len: int = 8,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
) -> PagedRows:
    """Random rows in chunks of ``chunks`` pages, found through ``table``."""
    torch.manual_seed(sum(chunks))
    shape = (kv_heads, page_len, sum(dims))
    pages = [torch.randn(count, *shape).to(place[1], dtype) for count in chunks]
    return PagedRows(pages, torch.tensor(table, dtype=torch.int32, device=place[1]), dims[0])


def random_ids(
    rows: PagedRows, heads: int, queries: int, count: int, holes: float = 0.2
) -> torch.Tensor:
    """Distinct tokens ``[B, heads, queries, count]`` in random order, some of them -1."""
    batch, columns = rows.table.shape
    tokens = columns * rows.page_len
    order = torch.rand(batch, heads, queries, tokens).argsort(-1)[..., :count].int()
    order[torch.rand(order.shape) < holes] = -1
    return order.to(rows.table.device)


def lookup(rows: PagedRows, b: int, kv_head: int, token: int) -> torch.Tensor:
    """One row, found the slow way: chunk by chunk."""
    page = int(rows.table[b, token // rows.page_len])
    for chunk in rows.chunks:
        if page < len(chunk):
            return chunk[page, kv_head, token % rows.page_len].double()
        page -= len(chunk)
    raise AssertionError("page beyond the chunks")


def reference(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` in float64, query by query."""
    batch, heads, queries, _ = query.shape
    out = torch.zeros(batch, heads, queries, rows.value_dim, dtype=torch.float64)
    lse = torch.full((batch, heads, queries), float("-inf"), dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, queries))).tolist():
        chosen = [t for t in ids[b, h * ids.shape[1] // heads, i].tolist() if t >= 0]
        if not chosen:
            continue
        kv_head = h * rows.heads // heads
        found = torch.stack([lookup(rows, b, kv_head, token) for token in chosen])
        scores = found[:, : rows.key_dim] @ query[b, h, i].double() * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        lse[b, h, i] = scores.logsumexp(0)
        out[b, h, i] = scores.softmax(0) @ found[:, rows.key_dim :]
    return out, lse


def check(
    place: Place,
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    softcap: float | None = None,
    scale: float = 0.3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run in ``place``, compare with the reference, return the result."""
    out, lse = gather_attention(query, rows, ids, scale=scale, softcap=softcap, backend=place[0])
    want_out, want_lse = reference(query, rows, ids, scale, softcap)
    assert out.dtype == lse.dtype == torch.float32
    assert out.shape == want_out.shape
    assert lse.shape == want_lse.shape
    assert not out.isnan().any()
    empty = want_lse == float("-inf")
    assert torch.equal((lse == float("-inf")).cpu(), empty)
    assert (out[empty.to(out.device)] == 0).all()
    largest = max(chunk.abs().nan_to_num(0).max().item() for chunk in rows.chunks)
    rounding = HALF_ULP[rows.dtype] * largest if place[0] == "triton" else 0.0
    error = FP32_ERROR + rounding
    torch.testing.assert_close(out.double().cpu(), want_out, rtol=0, atol=error)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=1e-6, atol=FP32_ERROR)
    return out, lse


def random_query(
    place: Place, rows: PagedRows, heads: int, queries: int = 1, batch: int = 2
) -> torch.Tensor:
    return torch.randn(batch, heads, queries, rows.key_dim).to(place[1], rows.dtype)


TWO_ROWS = [[0, 1, 2, 3], [7, 5, 8, 4]]


@pytest.mark.factor("own_selection", [False, True], ids=["per kv head", "per query head"])
@pytest.mark.factor("heads", [2, 4, 6, 8])
def test_groups_of_query_heads(place: Place, heads: int, own_selection: bool) -> None:
    rows = paged(place, TWO_ROWS)
    ids = random_ids(rows, heads if own_selection else 2, 1, 20)
    check(place, random_query(place, rows, heads), rows, ids)


@pytest.mark.factor(("queries", "count"), [(1, 1), (1, 63), (3, 33), (16, 7)])
def test_queries_with_selections_of_their_own(place: Place, queries: int, count: int) -> None:
    rows = paged(place, [[3, 1, 4, 0, 5, 2, 6, 8]], kv_heads=1)
    ids = random_ids(rows, 1, queries, count, holes=0.3)
    check(place, random_query(place, rows, 2, queries, batch=1), rows, ids)


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.factor("dims", [(8, 8), (40, 24), (64, 64), (96, 128), (9, 5)], ids=str)
def test_head_dims_and_dtypes(place: Place, dims: tuple[int, int], dtype: torch.dtype) -> None:
    rows = paged(place, [[2, 0, 1]], (3,), kv_heads=1, dims=dims, dtype=dtype)
    ids = random_ids(rows, 1, 1, 17)
    check(place, random_query(place, rows, 3, batch=1), rows, ids, scale=dims[0] ** -0.5)


def test_several_chunks_and_shared_pages(place: Place) -> None:
    rows = paged(place, [[0, 4, 2, 6], [0, 4, 5, 1], [3, 4, 6, 6]], (3, 1, 3))
    ids = random_ids(rows, 2, 2, 25)
    check(place, random_query(place, rows, 4, 2, batch=3), rows, ids)


def test_rows_that_no_id_names_may_hold_anything(place: Place) -> None:
    rows = paged(place, [[0, 1, NO_PAGE], [2, 0, NO_PAGE], [NO_PAGE] * 3], (3,), page_len=4)
    ids = random_ids(rows, 2, 1, 5)
    ids = torch.where(ids < 8, ids, -1)
    ids[2] = -1
    used = torch.zeros(3, 2, 4, 1, dtype=torch.bool)
    for b, h in ((b, h) for b in range(2) for h in range(2)):
        for token in ids[b, h, 0].tolist():
            if token >= 0:
                used[int(rows.table[b, token // 4]), h, token % 4] = True
    assert not used.all()
    rows.chunks[0].masked_fill_(~used.to(place[1]), float("nan"))
    check(place, random_query(place, rows, 4, batch=3), rows, ids)
    keys, values = rows.gather(ids, backend=place[0])
    assert not keys.isnan().any()
    assert (values[ids < 0] == 0).all()


def test_row_zero_may_hold_nan_where_ids_have_holes(place: Place) -> None:
    rows = paged(place, TWO_ROWS)
    rows.chunks[0][0] = float("nan")
    ids = random_ids(rows, 2, 1, 12, holes=0.5)
    ids[(ids >= 0) & (ids < 8)] = -1
    check(place, random_query(place, rows, 4), rows, ids)


@pytest.mark.factor("count", [0, 1, 40])
def test_no_rows_at_all(place: Place, count: int) -> None:
    rows = paged(place, TWO_ROWS)
    ids = torch.full((2, 2, 3, count), -1, dtype=torch.int32, device=place[1])
    out, lse = check(place, random_query(place, rows, 4, 3), rows, ids)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_no_queries(place: Place) -> None:
    rows = paged(place, TWO_ROWS)
    ids = torch.empty(2, 2, 0, 5, dtype=torch.int32, device=place[1])
    out, lse = gather_attention(
        random_query(place, rows, 4, 0), rows, ids, scale=1.0, backend=place[0]
    )
    assert out.shape == (2, 4, 0, 16)
    assert lse.shape == (2, 4, 0)


# In numpy, which interprets the kernel, a saturated sigmoid warns on its way to 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.factor("softcap", [0.5, 30.0])
def test_softcap(place: Place, softcap: float) -> None:
    rows = paged(place, TWO_ROWS)
    query = 8.0 * random_query(place, rows, 4)
    check(place, query, rows, random_ids(rows, 2, 1, 20), softcap=softcap)


def test_strided_queries_and_ids(place: Place) -> None:
    rows = paged(place, TWO_ROWS)
    query = random_query(place, rows, 4, 3).transpose(1, 2).contiguous().transpose(1, 2)
    wide = random_ids(rows, 2, 3, 24)
    check(place, query, rows, wide[..., ::2])
    check(place, query, rows, wide.transpose(1, 2).contiguous().transpose(1, 2))
    rows.table = rows.table.t().contiguous().t()
    check(place, query, rows, wide)


def test_two_halves_merge_to_the_whole(place: Place) -> None:
    rows = paged(place, TWO_ROWS)
    query, ids = random_query(place, rows, 4), random_ids(rows, 2, 1, 30)
    whole = check(place, query, rows, ids)
    parts = [check(place, query, rows, part) for part in (ids[..., :11], ids[..., 11:])]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum((part[1] - total).exp().unsqueeze(-1) * part[0] for part in parts)
    torch.testing.assert_close(total, whole[1], rtol=0, atol=FP32_ERROR)
    torch.testing.assert_close(out, whole[0], rtol=0, atol=FP32_ERROR)


def test_splitting_the_ids_changes_nothing(place: Place) -> None:
    if place[0] != "triton":
        pytest.skip("only the Triton kernel splits ids")
    from hf_kvret_kernels.gather_attention import triton

    rows = paged(place, [[0, 1, 2, 3, 4, 5, 6, 7]], (8,), page_len=16, kv_heads=1)
    query, ids = random_query(place, rows, 2, batch=1), random_ids(rows, 1, 1, 128)
    ids[..., 32:64] = -1
    whole = triton.gather_pieces(query, rows, ids, 0.3, None, splits=1)("triton")
    for splits in (2, 3, 4, 64):
        parts = triton.gather_pieces(query, rows, ids, 0.3, None, splits=splits)("triton")
        torch.testing.assert_close(parts, whole, rtol=0, atol=FP32_ERROR)


@pytest.mark.factor("heads", [2, 6])
@pytest.mark.factor("chunks", [(9,), (2, 3, 4)], ids=str)
@pytest.mark.factor("dtype", [torch.bfloat16, torch.uint8])
def test_gather_returns_the_rows_in_order(
    place: Place, chunks: tuple[int, ...], heads: int, dtype: torch.dtype
) -> None:
    rows = paged(place, TWO_ROWS, chunks, dims=(12, 20), dtype=torch.bfloat16)
    if dtype == torch.uint8:
        bytes_of = [(chunk.float().abs() * 50).to(dtype) for chunk in rows.chunks]
        rows = PagedRows(bytes_of, rows.table, rows.key_dim)
    ids = random_ids(rows, heads, 2, 7)
    keys, values = rows.gather(ids, backend=place[0])
    assert keys.shape == (2, heads, 2, 7, 12)
    assert values.shape == (2, heads, 2, 7, 20)
    assert keys.dtype == values.dtype == dtype
    both = torch.cat([keys, values], -1).double()
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        token = int(ids[b, h, i, j])
        expected = torch.zeros(32).double()
        if token >= 0:
            expected = lookup(rows, b, h * 2 // heads, token).cpu()
        assert torch.equal(both[b, h, i, j].cpu(), expected)


def test_gather_of_nothing(place: Place) -> None:
    rows = paged(place, TWO_ROWS)
    ids = torch.empty(2, 2, 1, 0, dtype=torch.int32, device=place[1])
    keys, values = rows.gather(ids, backend=place[0])
    assert keys.shape == (2, 2, 1, 0, 16)
    assert values.shape == (2, 2, 1, 0, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_host_rows_are_read_from_the_gpu() -> None:
    place = ("triton", "cuda")
    near = paged(place, TWO_ROWS, (4, 5), dtype=torch.float16)
    pinned = [chunk.cpu().pin_memory() for chunk in near.chunks]
    far = PagedRows(pinned, near.table, near.key_dim)
    ids = random_ids(near, 2, 1, 20)
    query = random_query(place, near, 4)
    results = [gather_attention(query, rows, ids, scale=0.3) for rows in (near, far)]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert all(torch.equal(a, b) for a, b in zip(near.gather(ids), far.gather(ids), strict=True))
    with pytest.raises(ValueError, match="pin_memory"):
        PagedRows([chunk.cpu() for chunk in near.chunks], near.table, near.key_dim).addresses()


def test_addresses_are_those_of_the_pages_and_are_kept() -> None:
    rows = paged(("naive", "cpu"), TWO_ROWS, (4, 5))
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
    rows = paged(("naive", "cpu"), TWO_ROWS, dims=dims, dtype=dtype)
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
        (torch.zeros(2, 4, 1, 16), torch.zeros(2, 3, 1, 3).int(), {}, "multiple"),
        (torch.zeros(2, 8, 1, 16), torch.zeros(2, 4, 1, 3).int(), {}, "2 or 8"),
        (torch.zeros(2, 4, 2, 16), torch.zeros(2, 2, 1, 3).int(), {}, r"pass \[2, 2 or 4, 2, K\]"),
        (torch.zeros(2, 5, 1, 16), torch.zeros(2, 2, 1, 3).int(), {}, "no multiple"),
        (torch.zeros(3, 4, 1, 16), torch.zeros(3, 2, 1, 3).int(), {}, "batch must be 2"),
        (torch.zeros(2, 4, 1, 12), torch.zeros(2, 2, 1, 3).int(), {}, "must agree"),
        (torch.zeros(2, 4, 1, 16).half(), torch.zeros(2, 2, 1, 3).int(), {}, "must agree"),
        (torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 1, 3).int(), {"softcap": -1.0}, "softcap"),
        (torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 1, 3).int(), {"backend": "x"}, "choose one"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(
    query: torch.Tensor, ids: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gather_attention(query, PagedRows([CHUNK], TABLE, 16), ids, **{"scale": 1.0, **options})
