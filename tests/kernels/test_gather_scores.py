"""gather_scores against float64 in every place it runs, and where CPU tensors are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret_kernels import host_attention as host
from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.paged import PagedRows

NEVER = float("-inf")
# Sums of up to some hundred fp32 products of size 1: some hundred roundings of 6e-8 each.
FP32_ERROR = 1e-5
# What stands in table entries that no id leads to; as a page number it would crash.
NO_PAGE = 10**9
TWO_ROWS = [[0, 1, 2, 3], [7, 5, 8, 4]]

Place = tuple[str, str]


def paged(
    where: Place,
    table: list[list[int]],
    chunks: tuple[int, ...] = (9,),
    *,
    kv_heads: int = 2,
    page_len: int = 8,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
) -> PagedRows:
    """Random keys in chunks of ``chunks`` pages, found through ``table``; all values are NaN."""
    torch.manual_seed(sum(chunks) + sum(dims))
    shape = (kv_heads, page_len, sum(dims))
    pages = [torch.randn(count, *shape).to(where[1], dtype) for count in chunks]
    for chunk in pages:
        chunk[..., dims[0] :] = float("nan")
    return PagedRows(pages, torch.tensor(table, dtype=torch.int32, device=where[1]), dims[0])


def random_ids(
    rows: PagedRows, heads: int, queries: int, count: int, holes: float = 0.2
) -> torch.Tensor:
    """Tokens ``[B, heads, queries, count]``, some named twice, some -1."""
    batch, columns = rows.table.shape
    drawn = torch.randint(0, columns * rows.page_len, (batch, heads, queries, count))
    return drawn.masked_fill(torch.rand(drawn.shape) < holes, -1).int().to(rows.table.device)


def random_query(rows: PagedRows, heads: int, queries: int = 1) -> torch.Tensor:
    query = torch.randn(len(rows.table), heads, queries, rows.key_dim)
    return query.to(rows.table.device, rows.dtype)


def reference(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Scores in float64, one after the other."""
    batch, heads, queries, _ = query.shape
    pages = torch.cat(rows.chunks)
    scores = torch.full((batch, heads, queries, ids.shape[3]), NEVER, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, queries))).tolist():
        for place, token in enumerate(ids[b, h * ids.shape[1] // heads, i].tolist()):
            if token < 0:
                continue
            page = pages[int(rows.table[b, token // rows.page_len]), h * rows.heads // heads]
            key = page[token % rows.page_len, : rows.key_dim].double()
            score = float(query[b, h, i].double() @ key) * scale
            if softcap is not None:
                score = softcap * float(torch.tensor(score / softcap).double().tanh())
            scores[b, h, i, place] = score
    return scores


def check(
    where: Place,
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    softcap: float | None = None,
    scale: float = 0.3,
) -> torch.Tensor:
    """Run in ``where``, compare with the reference, return the scores."""
    got = gather_scores(query, rows, ids, scale=scale, softcap=softcap, backend=where[0])
    want = reference(query, rows, ids, scale, softcap)
    assert got.shape == want.shape and got.dtype == torch.float32
    assert got.device == query.device
    got_there = got.cpu().double()
    assert torch.equal(got_there == NEVER, want == NEVER)
    torch.testing.assert_close(got_there, want, rtol=1e-6, atol=FP32_ERROR)
    return got


@pytest.mark.factor("own_selection", [False, True], ids=["per kv head", "per query head"])
@pytest.mark.factor("heads", [2, 6, 8])
def test_groups_of_query_heads(where: Place, heads: int, own_selection: bool) -> None:
    rows = paged(where, TWO_ROWS)
    ids = random_ids(rows, heads if own_selection else 2, 1, 20)
    check(where, random_query(rows, heads), rows, ids)


@pytest.mark.factor(("queries", "count"), [(1, 1), (1, 64), (3, 65), (7, 130)])
def test_queries_with_selections_of_their_own(where: Place, queries: int, count: int) -> None:
    rows = paged(where, [[3, 1, 4, 0, 5, 2, 6, 8]], kv_heads=1)
    check(where, random_query(rows, 2, queries), rows, random_ids(rows, 1, queries, count))


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.factor("dims", [(8, 8), (40, 24), (96, 128), (9, 5), (256, 16)], ids=str)
def test_head_dims_and_dtypes(where: Place, dims: tuple[int, int], dtype: torch.dtype) -> None:
    rows = paged(where, [[2, 0, 1]], (3,), kv_heads=1, dims=dims, dtype=dtype)
    scale = dims[0] ** -0.5
    check(where, random_query(rows, 3), rows, random_ids(rows, 1, 1, 17), scale=scale)


def test_several_chunks_and_shared_pages(where: Place) -> None:
    rows = paged(where, [[0, 4, 2, 6], [0, 4, 5, 1], [3, 4, 6, 6]], (3, 1, 3))
    check(where, random_query(rows, 4, 2), rows, random_ids(rows, 2, 2, 25))


def test_rows_that_no_id_names_are_not_looked_for(where: Place) -> None:
    rows = paged(where, [[1, NO_PAGE], [NO_PAGE, NO_PAGE]], (2,))
    rows.chunks[0][0] = float("nan")
    ids = random_ids(rows, 2, 1, 12).clamp(max=7)
    ids[1] = -1
    check(where, random_query(rows, 4), rows, ids)


@pytest.mark.factor("count", [0, 1, 40])
def test_no_rows_at_all(where: Place, count: int) -> None:
    rows = paged(where, TWO_ROWS)
    ids = torch.full((2, 2, 3, count), -1, dtype=torch.int32, device=where[1])
    assert (check(where, random_query(rows, 4, 3), rows, ids) == NEVER).all()


def test_no_queries(where: Place) -> None:
    rows = paged(where, TWO_ROWS)
    ids = torch.empty(2, 2, 0, 5, dtype=torch.int32, device=where[1])
    got = gather_scores(random_query(rows, 4, 0), rows, ids, scale=1.0, backend=where[0])
    assert got.shape == (2, 4, 0, 5)


# In numpy, which interprets the kernel, a saturated sigmoid warns on its way to 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.factor("softcap", [0.5, 30.0])
def test_softcap(where: Place, softcap: float) -> None:
    rows = paged(where, TWO_ROWS)
    check(where, 8.0 * random_query(rows, 4), rows, random_ids(rows, 2, 1, 20), softcap=softcap)


def test_strided_queries_ids_and_tables(where: Place) -> None:
    rows = paged(where, TWO_ROWS)
    query = random_query(rows, 4, 3).transpose(1, 2).contiguous().transpose(1, 2)
    wide = random_ids(rows, 2, 3, 24)
    check(where, query, rows, wide[..., ::2])
    check(where, query, rows, wide.transpose(1, 2).contiguous().transpose(1, 2))
    rows.table = rows.table.t().contiguous().t()
    check(where, query, rows, wide)


def test_scores_are_those_of_attention(where: Place) -> None:
    """The log-sum-exp of the scores is the one that gather_attention gives."""
    rows = paged(where, TWO_ROWS)
    for chunk in rows.chunks:
        chunk.nan_to_num_(0.0)
    query, ids = random_query(rows, 4, 2), random_ids(rows, 2, 2, 30)
    scores = gather_scores(query, rows, ids, scale=0.3, backend=where[0])
    lse = gather_attention(query, rows, ids, scale=0.3, backend=where[0])[1]
    torch.testing.assert_close(scores.logsumexp(-1), lse, rtol=1e-6, atol=FP32_ERROR)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_host_keys_are_read_from_the_gpu() -> None:
    near = paged(("triton", "cuda"), TWO_ROWS, (4, 5), dtype=torch.float16)
    pinned = [chunk.cpu().pin_memory() for chunk in near.chunks]
    far = PagedRows(pinned, near.table, near.key_dim)
    query, ids = random_query(near, 4), random_ids(near, 2, 1, 20)
    results = [gather_scores(query, rows, ids, scale=0.3) for rows in (near, far)]
    assert torch.equal(*results)


@pytest.mark.skipif(bool(host.why_not()), reason="the CPU kernels are not compiled")
def test_auto_takes_the_library_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    run = library.run

    def spy(function: Any, *args: Any, **options: Any) -> None:
        called.append(function)
        run(function, *args, **options)

    monkeypatch.setattr(library, "run", spy)
    rows = paged(("cpp", "cpu"), TWO_ROWS)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 20)
    for backend in ("auto", "naive", "cpp"):
        gather_scores(query, rows, ids, scale=0.3, backend=backend)
        gather_attention(query, rows, ids, scale=0.3, backend=backend)
    assert called == ["hfk_scores", "hfk_attend"] * 2


@pytest.mark.parametrize(
    "backend",
    [
        "naive",
        pytest.param("cpp", marks=pytest.mark.skipif(bool(host.why_not()), reason="not compiled")),
    ],
)
def test_arguments_are_checked_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are read so fast that a second look at the arguments would show."""
    checked = []
    check_ids = PagedRows.check_ids

    def count(rows: PagedRows, ids: torch.Tensor) -> None:
        checked.append(ids)
        check_ids(rows, ids)

    monkeypatch.setattr(PagedRows, "check_ids", count)
    rows = paged(("naive", "cpu"), TWO_ROWS)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 20)
    operations = (gather_scores, gather_attention, host.host_scores, host.host_attention)
    for number, operation in enumerate(operations, 1):
        operation(query, rows, ids, scale=0.3, backend=backend)
        assert len(checked) == number


def test_without_the_library_auto_is_torch_and_cpp_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(library.PATH_VARIABLE, "/nowhere/lib.so")
    rows = paged(("naive", "cpu"), TWO_ROWS)
    for chunk in rows.chunks:
        chunk.nan_to_num_(0.0)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 20)
    for operation in (gather_scores, gather_attention):
        auto, naive = (operation(query, rows, ids, scale=0.3, backend=x) for x in ("auto", "naive"))
        torch.testing.assert_close(auto, naive, rtol=0, atol=0)
        with pytest.raises(ImportError, match="/nowhere"):
            operation(query, rows, ids, scale=0.3, backend="cpp")


@pytest.mark.parametrize(
    ("query", "ids", "options", "message"),
    [
        (torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 1, 3).long(), {}, "pass int32"),
        (torch.zeros(2, 8, 1, 16), torch.zeros(2, 4, 1, 3).int(), {}, "2 or 8"),
        (torch.zeros(2, 4, 1, 12), torch.zeros(2, 2, 1, 3).int(), {}, "must agree"),
        (torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 1, 3).int(), {"softcap": -1.0}, "softcap"),
        (torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 1, 3).int(), {"backend": "x"}, "choose one"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(
    query: torch.Tensor, ids: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    rows = PagedRows([torch.zeros(9, 2, 8, 32)], torch.tensor(TWO_ROWS, dtype=torch.int32), 16)
    with pytest.raises(ValueError, match=message):
        gather_scores(query, rows, ids, **{"scale": 1.0, **options})


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
