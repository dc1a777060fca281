"""host_attention and host_scores against float64, on every path of the compiled library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret_kernels import host_attention as host
from hf_kvret_kernels import host_library as library
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.host_attention import host_attention, host_scores
from hf_kvret_kernels.paged import PagedRows

from .host_rows import paged, random_ids, random_query

NEVER = float("-inf")
# Sums of up to some thousand fp32 products of size 1: some hundred roundings of 6e-8 each.
FP32_ERROR = 1e-5
# What stands in table entries that no id leads to; as a page number it would crash.
NO_PAGE = 10**9

pytestmark = pytest.mark.factor("place", ["naive", *library.PATHS], indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keyword arguments that choose torch, or one path of the library."""
    if request.param == "naive":
        return {"backend": "naive"}
    request.getfixturevalue("compiled")
    if request.param not in host.paths():
        pytest.skip(f"this processor has no {request.param}")
    return {"backend": "cpp", "path": request.param}


def reference(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out, lse, scores)`` in float64, from a copy of all rows in the order of tokens."""
    groups = query.shape[1] // ids.shape[1]
    per_head = ids.shape[1] // rows.heads
    pages = torch.cat(rows.chunks)[rows.table.clamp_max(sum(map(len, rows.chunks)) - 1).long()]
    tokens = pages.transpose(1, 2).flatten(2, 3).double()
    tokens = tokens.repeat_interleave(per_head, 1).unsqueeze(2)
    index = ids.clamp_min(0).long().unsqueeze(-1).expand(*ids.shape, rows.width)
    found = tokens.expand(-1, -1, ids.shape[2], -1, -1).gather(3, index)
    found = found.masked_fill((ids < 0).unsqueeze(-1), 0.0).repeat_interleave(groups, 1)
    keys, values = found[..., : rows.key_dim], found[..., rows.key_dim :]
    scores = (keys @ query.double().unsqueeze(-1)).squeeze(-1) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill((ids < 0).repeat_interleave(groups, 1), NEVER)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == NEVER, 0.0).unsqueeze(-1)).exp()
    return (weights.unsqueeze(-2) @ values).squeeze(-2), lse, scores


def check(
    place: dict[str, Any],
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    softcap: float | None = None,
    scale: float = 0.3,
    threads: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare attention and scores with the reference; returns ``(out, lse)``."""
    options = {"scale": scale, "softcap": softcap, "threads": threads, **place}
    out, lse = host_attention(query, rows, ids, **options)
    scores = host_scores(query, rows, ids, **options)
    want_out, want_lse, want_scores = reference(query, rows, ids, scale, softcap)
    assert out.dtype == lse.dtype == scores.dtype == torch.float32
    assert out.shape == want_out.shape
    assert lse.shape == want_lse.shape
    assert scores.shape == want_scores.shape
    assert torch.equal(lse == NEVER, want_lse == NEVER)
    assert (out[lse == NEVER] == 0).all()
    assert torch.equal(scores == NEVER, want_scores == NEVER)
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=FP32_ERROR)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=FP32_ERROR)
    torch.testing.assert_close(scores.double(), want_scores, rtol=1e-6, atol=FP32_ERROR)
    return out, lse


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DIMS = [(16, 16), (64, 64), (80, 80), (96, 128), (128, 128), (256, 256), (9, 5), (33, 47)]


@pytest.mark.factor("dtype", DTYPES)
@pytest.mark.factor("dims", DIMS, ids=str)
def test_head_dims_and_dtypes(
    place: dict[str, Any], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    rows = paged(dims=dims, dtype=dtype)
    query = random_query(rows, 6)
    check(place, query, rows, random_ids(rows, 2, 1, 37), scale=dims[0] ** -0.5)


@pytest.mark.factor("own_selection", [False, True], ids=["per kv head", "per query head"])
@pytest.mark.factor("group", [1, 2, 4, 7, 8])
def test_groups_of_query_heads(place: dict[str, Any], group: int, own_selection: bool) -> None:
    rows = paged(dims=(40, 24), dtype=torch.bfloat16)
    heads = 2 * group
    ids = random_ids(rows, heads if own_selection else 2, 2, 21)
    check(place, random_query(rows, heads, 2), rows, ids)


@pytest.mark.factor("holes", [0.0, 0.5])
@pytest.mark.factor("count", [0, 1, 7, 33, 1000])
def test_counts_of_ids(place: dict[str, Any], count: int, holes: float) -> None:
    rows = paged((20,), page_len=64)
    check(place, random_query(rows, 4, 2), rows, random_ids(rows, 2, 2, count, holes))


@pytest.mark.factor("page_len", [1, 7, 64])
@pytest.mark.factor("chunks", [(9,), (2, 3, 4)], ids=str)
def test_pages_and_chunks(place: dict[str, Any], chunks: tuple[int, ...], page_len: int) -> None:
    rows = paged(chunks, batch=3, page_len=page_len)
    check(place, random_query(rows, 4, 2), rows, random_ids(rows, 2, 2, 8))


@pytest.mark.factor("softcap", [0.5, 30.0])
def test_softcap(place: dict[str, Any], softcap: float) -> None:
    rows = paged((20,))
    check(place, 8.0 * random_query(rows, 4), rows, random_ids(rows, 2, 1, 100), softcap=softcap)


def test_strided_queries_ids_and_tables(place: dict[str, Any]) -> None:
    rows = paged()
    query = random_query(rows, 4, 3).transpose(1, 2).contiguous().transpose(1, 2)
    wide = random_ids(rows, 2, 3, 24)
    check(place, query, rows, wide[..., ::2])
    check(place, query, rows, wide.transpose(1, 2).contiguous().transpose(1, 2))
    rows.table = rows.table.t().contiguous().t()
    check(place, query, rows, wide)


def test_chunks_may_be_views_that_are_not_aligned(place: dict[str, Any]) -> None:
    rows = paged(dims=(16, 15), dtype=torch.float16)
    flat = torch.empty(rows.chunks[0].numel() + 1, dtype=torch.float16)
    rows.chunks[0] = flat[1:].view(rows.chunks[0].shape).copy_(rows.chunks[0])
    check(place, random_query(rows, 4), rows, random_ids(rows, 2, 1, 40))


def test_large_scores_do_not_overflow(place: dict[str, Any]) -> None:
    rows = paged()
    ids = random_ids(rows, 2, 1, 60)
    query = random_query(rows, 4)
    out, lse = host_attention(query, rows, ids, scale=200.0, **place)
    want_out, want_lse, _ = reference(query, rows, ids, 200.0)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-3)
    # Scores of some hundred have rounding errors of 1e-4, and so have their weights.
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=1e-2)


def test_rows_and_pages_that_no_id_names_may_hold_anything(place: dict[str, Any]) -> None:
    rows = paged((3,), page_len=4)
    rows.table = torch.tensor([[0, 1, NO_PAGE], [2, 0, NO_PAGE]], dtype=torch.int32)
    ids = torch.tensor([[0, 5, -1, 6], [3, 4, 7, -1]], dtype=torch.int32)
    ids = ids.view(2, 1, 1, 4).expand(2, 2, 1, 4)
    used = torch.zeros(3, 1, 4, 1, dtype=torch.bool)
    for b in range(2):
        for token in ids[b, 0, 0].tolist():
            if token >= 0:
                used[int(rows.table[b, token // 4]), 0, token % 4] = True
    rows.chunks[0].masked_fill_(~used, float("nan"))
    want = reference(random_query(rows, 4), rows, ids, 0.3)
    assert not want[0].isnan().any()
    check(place, random_query(rows, 4), rows, ids)


@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.factor("bad", [float("nan"), float("inf"), NEVER])
@pytest.mark.factor("half", ["key", "value"])
def test_what_is_not_finite_stays_in_the_queries_that_read_it(
    place: dict[str, Any], half: str, bad: float, dtype: torch.dtype
) -> None:
    rows = paged((20,), batch=1, dims=(32, 32), dtype=dtype)
    ids = random_ids(rows, 2, 2, 100, holes=0.0)
    ids[ids == 11] = -1
    ids[0, 1, 0, 37] = 11
    page = int(rows.table[0, 11 // 8])
    columns = slice(0, 1) if half == "key" else slice(32, 33)
    query = random_query(rows, 4, 2).abs()
    before, _ = host_attention(query, rows, ids, scale=0.3, threads=3, **place)
    rows.chunks[0][page, 1, 11 % 8, columns] = bad
    out, lse = host_attention(query, rows, ids, scale=0.3, threads=3, **place)
    others = torch.ones(1, 4, 2, dtype=torch.bool)
    others[0, 2:, 0] = False
    assert torch.equal(out[others], before[others])
    assert lse[others].isfinite().all()
    # A key of -inf has weight 0, and a query that reads it is as good as one without that row.
    if (half, bad) == ("key", NEVER):
        ids[0, 1, 0, 37] = -1
        want, _, _ = reference(query, rows, ids, 0.3)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=FP32_ERROR)
    else:
        assert not out[~others].isfinite().all(-1).any()


def test_a_query_whose_scores_are_all_minus_infinity_is_empty(place: dict[str, Any]) -> None:
    rows = paged(batch=1)
    rows.chunks[0][..., 0] = NEVER
    query = random_query(rows, 2).abs()
    out, lse = host_attention(query, rows, random_ids(rows, 2, 1, 40), scale=1.0, **place)
    assert (out == 0).all()
    assert (lse == NEVER).all()


def test_two_halves_merge_to_the_whole(place: dict[str, Any]) -> None:
    rows = paged()
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 60)
    whole = check(place, query, rows, ids)
    parts = [check(place, query, rows, part) for part in (ids[..., :23], ids[..., 23:])]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum((part[1] - total).exp().unsqueeze(-1) * part[0] for part in parts)
    torch.testing.assert_close(total, whole[1], rtol=0, atol=FP32_ERROR)
    torch.testing.assert_close(out, whole[0], rtol=0, atol=FP32_ERROR)


def test_numbers_near_zero_and_near_the_largest(place: dict[str, Any]) -> None:
    rows = paged(dims=(64, 64), dtype=torch.bfloat16)
    rows.chunks[0][..., :64:2] *= 1e-39
    rows.chunks[0][..., 1:64:2] *= 2.0**60
    rows.chunks[0][..., 64::2] *= 1e-39
    query = random_query(rows, 4) * 2.0**-60
    check(place, query, rows, random_ids(rows, 2, 1, 40))


def test_torch_defaults_do_not_matter(place: dict[str, Any]) -> None:
    rows = paged(dtype=torch.bfloat16)
    query, ids = random_query(rows, 4), random_ids(rows, 2, 1, 40)
    want = host_attention(query, rows, ids, scale=0.3, **place)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = host_attention(query, rows, ids, scale=0.3, **place)
            scores = host_scores(query, rows, ids, scale=0.3, **place)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert scores.dtype == torch.float32
    assert scores.device.type == "cpu"


def test_it_agrees_with_gather_attention(place: dict[str, Any]) -> None:
    rows = paged(dtype=torch.bfloat16)
    query, ids = random_query(rows, 8, 2), random_ids(rows, 2, 2, 50)
    want = gather_attention(query, rows, ids, scale=0.3, softcap=2.0, backend="naive")
    got = host_attention(query, rows, ids, scale=0.3, softcap=2.0, **place)
    torch.testing.assert_close(got, want, rtol=0, atol=FP32_ERROR)
