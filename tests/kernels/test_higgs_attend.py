"""Attention over coded rows against float64 attention over what they decode to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_kvret_kernels.higgs import CodedRows, HiggsCodec, attend
from hf_kvret_kernels.paged import PagedRows, join_sides, lay_apart

from .draws import Place
from .paged_rows import NO_PAGE, TWO_ROWS, code_rows, random_ids, reference

# Sums of a few hundred fp32 products of size 1, and butterflies before and after.
FP32_ERROR = 2e-5
# Units that Triton rounds queries, grid points and weights to where the query has 16 bits; the
# interpreter cuts bf16 off instead of rounding it.
ULP = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def coded_rows(
    place: Place,
    codec: HiggsCodec,
    table: list[list[int]],
    chunks: tuple[int, ...] = (9,),
    *,
    kv_heads: int = 2,
    page_len: int = 8,
    dims: tuple[int, int] = (64, 64),
    offset: float = 0.0,
) -> tuple[CodedRows, PagedRows]:
    """Rows coded in torch, and the fp64 rows that they decode to.

    ``offset``: keys are coded around a mean of this size, another one for each batch row and head;
    then no page may be of two batch rows.
    """
    generator = torch.Generator().manual_seed(sum(chunks))
    lead = (sum(chunks), kv_heads, page_len)
    sides = [torch.randn(*lead, dim, generator=generator) for dim in dims]
    parts = [codec.decode(*codec.encode(side, "naive"), backend="naive") for side in sides]
    plain, mean = torch.cat(parts, -1).double().to(place[1]), None
    if offset:
        mean = torch.randn(len(table), kv_heads, dims[0], generator=generator) * offset
        mean = mean.to(place[1])
        for row, numbers in enumerate(table):
            plain[numbers, ..., : dims[0]] += mean[row][:, None].double()
    page_table = torch.tensor(table, dtype=torch.int32, device=place[1])
    coded = code_rows(codec, sides, page_table, chunks=chunks, mean=mean)
    return coded, PagedRows([*plain.split(chunks)], page_table, dims[0])


def check(
    place: Place,
    coded: tuple[CodedRows, PagedRows],
    ids: torch.Tensor,
    *,
    heads: int = 4,
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    size: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run in ``place``, compare with the reference, return the result."""
    rows, plain = coded
    shape = (ids.shape[0], heads, ids.shape[2], dims[0])
    query = torch.randn(shape, generator=torch.Generator().manual_seed(heads)) * size
    query = query.to(place[1], dtype)
    scale = dims[0] ** -0.5
    out, lse = attend(query, rows, ids, scale=scale, softcap=softcap, backend=place[0])
    want_out, want_lse, _ = reference(query, plain, ids, scale, softcap)
    assert out.dtype == lse.dtype == torch.float32
    assert out.shape == want_out.shape and lse.shape == want_lse.shape
    assert not out.isnan().any()
    empty = want_lse == float("-inf")
    assert torch.equal((lse == float("-inf")).cpu(), empty)
    assert (out[empty.to(out.device)] == 0).all()
    # Scores and values have a size of about 3 at most; a weight is wrong as a score is.
    rounding = 6 * ULP[dtype] if place[0] == "triton" else 0.0
    torch.testing.assert_close(out.double().cpu(), want_out, rtol=0, atol=FP32_ERROR + rounding)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=1e-6, atol=FP32_ERROR + rounding)
    return out, lse


@pytest.mark.factor("bits", [2, 3, 4])
@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.factor(
    ("group", "dims"),
    [(64, (64, 64)), (8, (8, 8)), (8, (24, 16)), (16, (16, 80)), (128, (128, 128)), (8, (8, 16))],
    ids=str,
)
@pytest.mark.factor("own_selection", [False, True], ids=["per kv head", "per query head"])
@pytest.mark.factor("heads", [2, 6])
@pytest.mark.factor(("queries", "count"), [(1, 1), (1, 63), (3, 33), (4, 7), (1, 0), (0, 5)])
@pytest.mark.factor("offset", [0.0, 3.0])
@pytest.mark.factor("softcap", [None, 2.0])
def test_it_is_attention_to_what_codes_stand_for(
    where: Place,
    softcap: float | None,
    offset: float,
    queries: int,
    count: int,
    heads: int,
    own_selection: bool,
    group: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    bits: int,
) -> None:
    """Groups of a head and whole rows; with 3 bits and dims 8 and 16 a row has an odd number of
    bytes; with an offset, keys are coded around a mean.
    """
    table = [[0, 4, 2, 6, 1, 8, 7, 3], [5, 9, 10, 11, 12, 13, 14, 15]]
    coded = coded_rows(where, HiggsCodec(bits, group), table, (16,), dims=dims, offset=offset)
    ids = random_ids(coded[0].pages, heads if own_selection else 2, queries, count, holes=0.3)
    ids[..., : count // 4] = -1
    check(where, coded, ids, heads=heads, dims=dims, dtype=dtype, softcap=softcap)


def test_several_chunks_shared_pages_and_strided_ids(where: Place) -> None:
    codec = HiggsCodec(4, 64)
    coded = coded_rows(where, codec, [[0, 4, 2, 6], [0, 4, 5, 1], [3, 4, 6, 6]], (3, 1, 3))
    wide = random_ids(coded[0].pages, 2, 2, 25)
    check(where, coded, wide[..., ::2])
    check(where, coded, wide.transpose(1, 2).contiguous().transpose(1, 2))


# In numpy, which interprets the kernel, a saturated sigmoid warns on its way to 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.factor("softcap", [0.5, 30.0])
def test_softcap(where: Place, softcap: float) -> None:
    codec = HiggsCodec(4, 64)
    coded = coded_rows(where, codec, TWO_ROWS)
    check(where, coded, random_ids(coded[0].pages, 2, 1, 20), softcap=softcap, size=8.0)


def test_rows_that_no_id_names_may_hold_anything(where: Place) -> None:
    """Scales of NaN in every row that is not named, and pages that do not exist."""
    coded = coded_rows(where, HiggsCodec(3, 64), [[0, 1, NO_PAGE], [NO_PAGE] * 3], (3,), page_len=4)
    rows = coded[0].pages
    ids = torch.tensor([6, -1, 3, 5, -1], dtype=torch.int32).expand(2, 2, 1, 5).clone()
    ids[1] = -1
    used = torch.zeros(3, 2, 4, 1, dtype=torch.bool)
    for token in (6, 3, 5):
        used[token // 4, :, token % 4] = True
    named = join_sides(rows.chunks[0], rows.key_dim).masked_fill_(~used.to(where[1]), 255)
    rows.chunks[0].copy_(lay_apart(named, rows.key_dim))
    check(where, coded, ids.to(where[1]))


def test_without_rows_the_result_is_empty(where: Place) -> None:
    coded = coded_rows(where, HiggsCodec(2, 64), TWO_ROWS)
    out, lse = check(where, coded, torch.full((2, 2, 3, 40), -1, device=where[1]).int())
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_splitting_the_ids_changes_nothing(place: Place) -> None:
    if place[0] != "triton":
        pytest.skip("only the Triton kernel splits ids")
    from hf_kvret_kernels.higgs import triton_attend

    codec = HiggsCodec(2, 64)
    rows, _ = coded_rows(place, codec, [[0, 1, 2, 3, 4, 5, 6, 7]], (8,), kv_heads=1, page_len=16)
    query, ids = torch.randn(1, 2, 1, 64).to(place[1]), random_ids(rows.pages, 1, 1, 128)
    ids[..., 32:64] = -1
    options = (query, rows, ids, 0.3, None)
    whole = triton_attend.attend_partials(*options, splits=1)("triton")
    for splits in (2, 3, 64):
        parts = triton_attend.attend_partials(*options, splits=splits)("triton")
        torch.testing.assert_close(parts, whole, rtol=0, atol=FP32_ERROR)


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.factor("size", [1e-3, 3e4])
def test_scales_of_whole_rows_have_the_range_of_fp16(
    where: Place, dtype: torch.dtype, size: float
) -> None:
    """Scaled, some of the larger numbers are no numbers of fp16."""
    codec, generator = HiggsCodec(4, 64), torch.Generator().manual_seed(5)
    keys, values = (torch.randn(2, 1, 8, 64, generator=generator) * part for part in (1.0, size))
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=where[1])
    rows = code_rows(codec, (keys, values), table)
    query = torch.randn(1, 2, 1, 64, generator=generator).to(where[1], dtype)
    ids = random_ids(rows.pages, 1, 1, 13)
    out, _ = attend(query, rows, ids, scale=0.125, backend=where[0])
    expected, _ = attend(query.float(), rows, ids, scale=0.125, backend="naive")
    rounding = 6 * ULP[dtype] if where[0] == "triton" else 0.0
    torch.testing.assert_close(out / size, expected / size, rtol=0, atol=FP32_ERROR + rounding)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_host_rows_are_read_from_the_gpu() -> None:
    codec, place = HiggsCodec(2, 64), ("triton", "cuda")
    near, _ = coded_rows(place, codec, TWO_ROWS, (4, 5))
    pages = near.pages
    pinned = [chunk.cpu().pin_memory() for chunk in pages.chunks]
    far = replace(near, pages=PagedRows(pinned, pages.table, pages.key_dim, apart=True))
    query, ids = torch.randn(2, 4, 1, 64).cuda().half(), random_ids(pages, 2, 1, 20)
    results = [attend(query, rows, ids, scale=0.3) for rows in (near, far)]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_dim": 128}, "rows have 32 bytes of codes and 4 of scales; .* has 48 and 6"),
        ({"value_dim": 32}, "rows have 32 numbers, group is 64"),
        ({"codec": HiggsCodec(3, 64)}, "has 48 and 4 for key_dim=64"),
        ({"key_mean": torch.zeros(2, 2, 32)}, r"key_mean is .*: pass fp32 \[2, 2, 64\]"),
        ({"key_mean": torch.zeros(2, 2, 64).half()}, "key_mean is torch.float16"),
        ({"key_mean": torch.zeros(2, 64, 2).transpose(1, 2)}, "contiguous"),
    ],
)
def test_rows_of_another_form_are_refused(change: dict[str, Any], message: str) -> None:
    rows, _ = coded_rows(("naive", "cpu"), HiggsCodec(2, 64), TWO_ROWS)
    with pytest.raises(ValueError, match=message):
        replace(rows, **change)
    floats = PagedRows([torch.zeros(9, 2, 8, 36)], rows.pages.table, 32)
    with pytest.raises(ValueError, match=r"rows are torch\.float32: pass coded rows"):
        replace(rows, pages=floats)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"query": torch.zeros(2, 4, 1, 32)},
            "query is torch.float32 on cpu with Dk=32, .* Dk=64: they must agree",
        ),
        ({"ids": torch.zeros(2, 2, 1, 3)}, "pass int32"),
        ({"backend": "torch"}, "choose one of"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(change: dict[str, Any], message: str) -> None:
    rows, _ = coded_rows(("naive", "cpu"), HiggsCodec(2, 64), TWO_ROWS)
    options = {
        "query": torch.zeros(2, 4, 1, 64),
        "rows": rows,
        "ids": torch.zeros(2, 2, 1, 3).int(),
        "scale": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        attend(**(options | change))
    pages = rows.pages
    together = replace(rows, pages=PagedRows(pages.chunks, pages.table, pages.key_dim))
    with pytest.raises(ValueError, match=r"rows have apart=False: .* must lie apart, as codes and"):
        attend(**(options | {"rows": together}))
