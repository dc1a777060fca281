"""Attention over coded rows against float64 attention over what they decode to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret_kernels.higgs import Codec, HiggsCodec, MinMaxCodec, attend
from hf_kvret_kernels.paged import PagedRows, join_sides, lay_apart

from .draws import Place
from .paged_rows import NO_PAGE, TWO_ROWS, random_ids, reference

# Sums of a few hundred fp32 products of size 1, and butterflies before and after.
FP32_ERROR = 2e-5
# Units that Triton rounds queries, grid points and weights to where the query has 16 bits; the
# interpreter cuts bf16 off instead of rounding it.
ULP = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def coded_rows(
    place: Place,
    codec: Codec,
    table: list[list[int]],
    chunks: tuple[int, ...] = (9,),
    *,
    kv_heads: int = 2,
    page_len: int = 8,
    dims: tuple[int, int] = (64, 64),
) -> tuple[PagedRows, PagedRows]:
    """Rows coded in torch, and the fp64 rows that they decode to."""
    generator = torch.Generator().manual_seed(sum(chunks))
    pages, plain = [], []
    key_bytes = sum(codec.code_bytes(dim) for dim in dims)
    for count in chunks:
        lead = (count, kv_heads, page_len)
        both = [torch.randn(*lead, dim, generator=generator) for dim in dims]
        coded = [codec.encode(part, backend="naive") for part in both]
        tensors = [part.codes for part in coded] + [part.scales for part in coded]
        pages.append(lay_apart(torch.cat(tensors, -1), key_bytes).to(place[1]))
        back = [codec.decode(*part, backend="naive").double() for part in coded]
        plain.append(torch.cat(back, -1).to(place[1]))
    page_table = torch.tensor(table, dtype=torch.int32, device=place[1])
    coded_pages = PagedRows(pages, page_table, key_bytes, apart=True)
    return coded_pages, PagedRows(plain, page_table, dims[0])


def check(
    place: Place,
    codec: Codec,
    coded: tuple[PagedRows, PagedRows],
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
    out, lse = attend(
        query,
        rows,
        ids,
        codec,
        key_dim=dims[0],
        value_dim=dims[1],
        scale=scale,
        softcap=softcap,
        backend=place[0],
    )
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


CODECS = [HiggsCodec(bits, 64) for bits in (2, 3, 4)]
CODECS += [MinMaxCodec(bits, 32) for bits in (2, 3, 4, 8)]


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.factor("codec", CODECS, ids=str)
def test_all_codecs_and_dtypes(place: Place, codec: Codec, dtype: torch.dtype) -> None:
    coded = coded_rows(place, codec, TWO_ROWS)
    check(place, codec, coded, random_ids(coded[0], 2, 1, 21), dtype=dtype)


@pytest.mark.factor("cls", [HiggsCodec, MinMaxCodec])
@pytest.mark.factor(
    ("group", "dims"),
    [(8, (8, 8)), (8, (24, 16)), (16, (16, 80)), (32, (96, 64)), (128, (128, 128)), (8, (8, 16))],
    ids=str,
)
def test_groups_of_a_head_and_odd_row_lengths(
    place: Place, cls: type[Codec], group: int, dims: tuple[int, int]
) -> None:
    """With 3 bits and dims 8 and 16 a row has an odd number of bytes."""
    codec = cls(3, group)
    coded = coded_rows(place, codec, [[2, 0, 1]], (3,), kv_heads=1, dims=dims)
    check(place, codec, coded, random_ids(coded[0], 1, 1, 17), heads=3, dims=dims)
    if dims == (8, 16):
        assert coded[0].width % 2


@pytest.mark.factor("own_selection", [False, True], ids=["per kv head", "per query head"])
@pytest.mark.factor("heads", [2, 6])
def test_groups_of_query_heads(place: Place, heads: int, own_selection: bool) -> None:
    codec = HiggsCodec(4, 64)
    coded = coded_rows(place, codec, TWO_ROWS)
    ids = random_ids(coded[0], heads if own_selection else 2, 1, 20)
    check(place, codec, coded, ids, heads=heads)


@pytest.mark.factor(("queries", "count"), [(1, 1), (1, 63), (3, 33), (7, 7)])
def test_queries_with_ragged_selections(place: Place, queries: int, count: int) -> None:
    codec = HiggsCodec(2, 32)
    coded = coded_rows(place, codec, [[3, 1, 4, 0, 5, 2, 6, 8]], kv_heads=1)
    ids = random_ids(coded[0], 1, queries, count, holes=0.3)
    ids[0, 0, 0, : count // 2] = -1
    check(place, codec, coded, ids, heads=2)


def test_several_chunks_shared_pages_and_strided_ids(place: Place) -> None:
    codec = MinMaxCodec(4, 64)
    coded = coded_rows(place, codec, [[0, 4, 2, 6], [0, 4, 5, 1], [3, 4, 6, 6]], (3, 1, 3))
    wide = random_ids(coded[0], 2, 2, 25)
    check(place, codec, coded, wide[..., ::2])
    check(place, codec, coded, wide.transpose(1, 2).contiguous().transpose(1, 2))


# In numpy, which interprets the kernel, a saturated sigmoid warns on its way to 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.factor("softcap", [0.5, 30.0])
def test_softcap(place: Place, softcap: float) -> None:
    codec = HiggsCodec(4, 64)
    coded = coded_rows(place, codec, TWO_ROWS)
    check(place, codec, coded, random_ids(coded[0], 2, 1, 20), softcap=softcap, size=8.0)


@pytest.mark.factor("codec", [HiggsCodec(3, 64), MinMaxCodec(3, 64)], ids=str)
def test_rows_that_no_id_names_may_hold_anything(place: Place, codec: Codec) -> None:
    """Scales of NaN in every row that is not named, and pages that do not exist."""
    coded = coded_rows(place, codec, [[0, 1, NO_PAGE], [NO_PAGE] * 3], (3,), page_len=4)
    rows = coded[0]
    ids = torch.tensor([6, -1, 3, 5, -1], dtype=torch.int32).expand(2, 2, 1, 5).clone()
    ids[1] = -1
    used = torch.zeros(3, 2, 4, 1, dtype=torch.bool)
    for token in (6, 3, 5):
        used[token // 4, :, token % 4] = True
    named = join_sides(rows.chunks[0], rows.key_dim).masked_fill_(~used.to(place[1]), 255)
    rows.chunks[0].copy_(lay_apart(named, rows.key_dim))
    check(place, codec, coded, ids.to(place[1]))


@pytest.mark.factor("count", [0, 1, 40])
def test_no_rows_at_all(place: Place, count: int) -> None:
    codec = HiggsCodec(2, 64)
    coded = coded_rows(place, codec, TWO_ROWS)
    ids = torch.full((2, 2, 3, count), -1, dtype=torch.int32, device=place[1])
    out, lse = check(place, codec, coded, ids)
    assert (out == 0).all() and (lse == float("-inf")).all()
    assert check(place, codec, coded, ids[:, :, :0])[0].shape == (2, 4, 0, 64)


def test_splitting_the_ids_changes_nothing(place: Place) -> None:
    if place[0] != "triton":
        pytest.skip("only the Triton kernel splits ids")
    from hf_kvret_kernels.higgs import triton_attend

    codec = HiggsCodec(2, 64)
    rows, _ = coded_rows(place, codec, [[0, 1, 2, 3, 4, 5, 6, 7]], (8,), kv_heads=1, page_len=16)
    query, ids = torch.randn(1, 2, 1, 64).to(place[1]), random_ids(rows, 1, 1, 128)
    ids[..., 32:64] = -1
    options = (query, rows, ids, codec, 64, 64, 0.3, None)
    whole = triton_attend.attend_partials(*options, splits=1)("triton")
    for splits in (2, 3, 64):
        parts = triton_attend.attend_partials(*options, splits=splits)("triton")
        torch.testing.assert_close(parts, whole, rtol=0, atol=FP32_ERROR)


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.factor("size", [1e-3, 3e4])
def test_scales_of_whole_rows_have_the_range_of_fp16(
    place: Place, dtype: torch.dtype, size: float
) -> None:
    """Scaled, some of the larger numbers are no numbers of fp16."""
    codec, generator = HiggsCodec(4, 64), torch.Generator().manual_seed(5)
    keys, values = (torch.randn(2, 1, 8, 64, generator=generator) * part for part in (1.0, size))
    coded = [codec.encode(part, backend="naive") for part in (keys, values)]
    both = torch.cat([part.codes for part in coded] + [part.scales for part in coded], -1)
    pages, table = lay_apart(both, 64).to(place[1]), torch.tensor([[1, 0]], dtype=torch.int32)
    rows = PagedRows([pages], table.to(place[1]), 64, apart=True)
    query = torch.randn(1, 2, 1, 64, generator=generator).to(place[1], dtype)
    options: dict[str, Any] = {"key_dim": 64, "value_dim": 64, "scale": 0.125}
    ids = random_ids(rows, 1, 1, 13)
    out, _ = attend(query, rows, ids, codec, **options, backend=place[0])
    expected, _ = attend(query.float(), rows, ids, codec, **options, backend="naive")
    rounding = 6 * ULP[dtype] if place[0] == "triton" else 0.0
    torch.testing.assert_close(out / size, expected / size, rtol=0, atol=FP32_ERROR + rounding)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_host_rows_are_read_from_the_gpu() -> None:
    codec, place = HiggsCodec(2, 64), ("triton", "cuda")
    near, _ = coded_rows(place, codec, TWO_ROWS, (4, 5))
    pinned = [chunk.cpu().pin_memory() for chunk in near.chunks]
    far = PagedRows(pinned, near.table, near.key_dim, apart=True)
    query, ids = torch.randn(2, 4, 1, 64).cuda().half(), random_ids(near, 2, 1, 20)
    options: dict[str, Any] = {"key_dim": 64, "value_dim": 64, "scale": 0.3}
    results = [attend(query, rows, ids, codec, **options) for rows in (near, far)]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_dim": 128}, "rows have 32 bytes of codes and 4 of scales; .* has 48 and 6"),
        ({"value_dim": 32}, "rows have 32 numbers, group is 64"),
        ({"codec": HiggsCodec(3, 64)}, "has 48 and 4 for key_dim=64"),
        (
            {"query": torch.zeros(2, 4, 1, 32)},
            "query is torch.float32 on cpu with Dk=32, .* Dk=64: they must agree",
        ),
        ({"query": torch.zeros(2, 3, 1, 64)}, "query has 3 heads, no multiple of the rows' 2"),
        ({"query": torch.zeros(2, 4, 1, 64).long()}, "query is torch.int64"),
        ({"ids": torch.zeros(2, 2, 1, 3)}, "pass int32"),
        ({"ids": torch.zeros(2, 2, 2, 3).int()}, r"pass \[2, 2 or 4, 1, K\]"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"backend": "cpp"}, "choose one of"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(change: dict[str, Any], message: str) -> None:
    rows, _ = coded_rows(("naive", "cpu"), HiggsCodec(2, 64), TWO_ROWS)
    options = {
        "query": torch.zeros(2, 4, 1, 64),
        "rows": rows,
        "ids": torch.zeros(2, 2, 1, 3).int(),
        "codec": HiggsCodec(2, 64),
        "key_dim": 64,
        "value_dim": 64,
        "scale": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        attend(**(options | change))
    together = PagedRows(rows.chunks, rows.table, rows.key_dim)
    with pytest.raises(ValueError, match=r"rows have apart=False: .* must lie apart, as codes and"):
        attend(**(options | {"rows": together}))
    floats = PagedRows([torch.zeros(9, 2, 8, 36)], rows.table, 32)
    with pytest.raises(ValueError, match=r"rows are torch\.float32: pass coded rows"):
        attend(**(options | {"rows": floats}))
