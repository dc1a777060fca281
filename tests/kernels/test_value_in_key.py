"""Rows whose value is the start of their key: every kernel gives what it gives for both kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_kvret_kernels import host_step
from hf_kvret_kernels.gather_attention import gather_attention, gather_partials, gather_scores
from hf_kvret_kernels.higgs import CodedRows, HiggsCodec, attend
from hf_kvret_kernels.host_step import FlatSearch, GivenIds, HostCold, HostWindow, run_step
from hf_kvret_kernels.page_copy import copy_pages
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.prompt_attention import prompt_attention
from hf_kvret_kernels.step_attention import step_attention

from .draws import Place
from .host_steps import FP32_ERROR, Shape, expected_attention, generator, near_window
from .paged_rows import code_rows

PAGE_LEN, PAGES = 8, 5
TABLE = torch.tensor([[0, 3, 1], [4, 2, 4]], dtype=torch.int32)
DIMS = [(24, 16), (40, 40), (17, 5)]

needs_library = pytest.mark.skipif(bool(host_step.why_not()), reason="the library is not compiled")


def both(
    dims: tuple[int, int], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[PagedRows, PagedRows]:
    """The same rows twice: values within keys, and beside them."""
    key_dim, value_dim = dims
    keys = torch.randn(PAGES, 2, PAGE_LEN, key_dim, generator=generator(key_dim)).to(device, dtype)
    beside = torch.cat([keys, keys[..., :value_dim]], dim=-1)
    table = TABLE.to(device, copy=True)
    within = PagedRows([keys[:2].clone(), keys[2:].clone()], table, key_dim, value_in_key=value_dim)
    return within, PagedRows([beside], table, key_dim)


def random_ids(heads: int = 2, queries: int = 2, count: int = 11) -> torch.Tensor:
    tokens = TABLE.shape[1] * PAGE_LEN
    order = torch.rand(2, heads, queries, tokens, generator=generator(count)).argsort(-1).int()
    ids = order[..., :count].contiguous()
    ids[torch.rand(ids.shape, generator=generator(1)) < 0.2] = -1
    return ids


def random_query(key_dim: int, heads: int = 6) -> torch.Tensor:
    return torch.randn(2, heads, 2, key_dim, generator=generator(2))


@pytest.mark.factor("dims", DIMS)
@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_as_if_values_lay_beside_keys(
    where: Place, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    backend, device = where
    pair = within, beside = both(dims, dtype, device)
    assert (within.width, within.value_dim, within.value_start) == (dims[0], dims[1], 0)
    query, ids = random_query(dims[0]).to(device, dtype), random_ids().to(device)
    options = {"scale": 0.3, "backend": backend}
    assert all(map(torch.equal, *(gather_attention(query, rows, ids, **options) for rows in pair)))
    assert torch.equal(*(gather_scores(query, rows, ids, **options) for rows in pair))
    if backend != "cpp":
        assert all(map(torch.equal, *(rows.gather(ids, backend) for rows in pair)))
        copied = copy_pages(within, 1, 3, backend=backend)
        assert torch.equal(copied, copy_pages(beside, 1, 3, width=dims[0], backend=backend))


@needs_library
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("given", [True, False])
def test_a_step_reads_a_window_and_rows_of_keys_alone(given: bool, queries: int) -> None:
    shape = Shape(40, dim=24, group=3, queries=queries, batch=2)
    query, valid, keys, rows = shape.query(), shape.mask(), *dense_rows(shape, 10)
    near = near_window(shape, 37)
    window = replace(near, values=near.keys[..., :10])
    assert window.value_row == 24
    search = FlatSearch(keys)
    if given:
        order = torch.rand(2, shape.heads, queries, 40, generator=generator(5)).argsort(-1)
        search = GivenIds(order[..., :9].int().contiguous())
    out, ids = run_step(query, window, HostCold(rows, search, valid, 9), scale=0.2)
    expected = expected_attention(query, keys, keys[..., :10], ids, window, 0.2, None, None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=FP32_ERROR)


def dense_rows(shape: Shape, value_dim: int) -> tuple[torch.Tensor, PagedRows]:
    """Keys ``[B, H, n, D]``, and the rows that hold them."""
    keys = torch.randn(shape.batch, shape.heads, shape.n, shape.dim, generator=generator(3))
    pages = keys.unflatten(2, (-1, PAGE_LEN)).transpose(1, 2).flatten(0, 1).contiguous()
    table = torch.arange(len(pages), dtype=torch.int32).view(shape.batch, -1)
    return keys, PagedRows([pages], table, shape.dim, value_in_key=value_dim)


# One group of a head is a path of its own; three bits lie in two planes.
CODED = [(HiggsCodec(4, 8), (24, 16)), (HiggsCodec(3, 16), (48, 16)), (HiggsCodec(2, 32), (32, 32))]


@pytest.mark.factor("backend", ["naive", "triton"])
@pytest.mark.factor("coded", CODED)
def test_coded_rows_hold_keys_alone(
    coded: tuple[HiggsCodec, tuple[int, int]], backend: str
) -> None:
    codec, (key_dim, value_dim) = coded
    keys = torch.randn(PAGES, 2, PAGE_LEN, key_dim, generator=generator(7))
    coded_rows = code_rows(codec, [keys], TABLE, value_dim=value_dim)
    query, ids = random_query(key_dim), random_ids()
    out, lse = attend(query, coded_rows, ids, scale=0.3, backend=backend)
    back = codec.decode(*codec.encode(keys, "naive"), backend="naive")
    plain = PagedRows([back], TABLE, key_dim, value_in_key=value_dim)
    expected = gather_attention(query, plain, ids, scale=0.3, backend="naive")
    # Sums of a few hundred products, and butterflies before and after.
    torch.testing.assert_close(out, expected[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=2e-5)


def test_dims_that_do_not_fit_are_refused() -> None:
    within, _ = both((24, 16))
    for changes in ({"value_in_key": 25}, {"key_dim": 20}, {"apart": True}):
        with pytest.raises(ValueError, match="value_in_key"):
            replace(within, **changes)
    codec = HiggsCodec(4, 8)
    coded = PagedRows([torch.zeros(5, 2, 8, 18, dtype=torch.uint8)], TABLE, 12, apart=True)
    with pytest.raises(ValueError, match="value_dim=12 with value_in_key"):
        CodedRows(coded, codec, 24, 12, value_in_key=True)


def test_windows_of_other_strides_are_refused() -> None:
    shape = Shape(4, dim=8)
    keys = torch.zeros(1, 2, 9, 8)
    other = torch.zeros(1, 2, 9, 12)[..., :8]
    with pytest.raises(ValueError, match="the first numbers of keys"):
        run_step(shape.query(), HostWindow(keys, other, 9), scale=1.0)


# Keys in two parts, more query heads than a program takes, the last of them alone.
WIDE, GROUP = (520, 512), 17


def wide_rows() -> tuple[PagedRows, torch.Tensor, torch.Tensor]:
    """Rows of one KV head, queries of many heads, and ids."""
    keys = torch.randn(PAGES, 1, PAGE_LEN, WIDE[0], generator=generator(11))
    rows = PagedRows([keys], TABLE, WIDE[0], value_in_key=WIDE[1])
    query = torch.randn(2, GROUP, 1, WIDE[0], generator=generator(12)) / 8
    return rows, query, random_ids(heads=1, queries=1)


# Sums of 520 fp32 products of size 1/8: some hundred roundings of 6e-8 each.
WIDE_ERROR = 5e-5


@pytest.mark.factor("backend", ["triton"])
def test_many_heads_attend_to_wide_rows(backend: str) -> None:
    rows, query, ids = wide_rows()
    expected = gather_attention(query, rows, ids, scale=0.3, backend="naive")
    result = gather_attention(query, rows, ids, scale=0.3, backend=backend)
    scores = [gather_scores(query, rows, ids, scale=0.3, backend=way) for way in ("naive", backend)]
    for mine, other in zip((*result, scores[0]), (*expected, scores[1]), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=WIDE_ERROR)


@pytest.mark.factor("backend", ["triton"])
@pytest.mark.factor("bits", [4, 3])
def test_many_heads_attend_to_wide_coded_rows(bits: int, backend: str) -> None:
    rows, query, ids = wide_rows()
    coded = code_rows(HiggsCodec(bits, 8), rows.chunks, TABLE, value_dim=WIDE[1])
    expected = attend(query, coded, ids, scale=0.3, backend="naive")
    result = attend(query, coded, ids, scale=0.3, backend=backend)
    torch.testing.assert_close(result, expected, rtol=0, atol=WIDE_ERROR)


@pytest.mark.factor("backend", ["triton"])
@pytest.mark.factor("masked", [False, True])
@pytest.mark.factor("queries", [1, 2])
def test_many_heads_attend_to_a_wide_window(queries: int, masked: bool, backend: str) -> None:
    keys = torch.randn(1, 1, 70, WIDE[0], generator=generator(13))
    query = torch.randn(1, GROUP, queries, WIDE[0], generator=generator(14)) / 8
    valid = torch.rand(1, 70, generator=generator(15)) < 0.8 if masked else None
    options = {"scale": 0.3, "causal_offset": 70 - queries, "valid": valid}
    values = keys[..., : WIDE[1]]
    expected = prompt_attention(query, keys, values, backend="naive", **options)
    result = prompt_attention(query, keys, values, backend=backend, **options)
    torch.testing.assert_close(result, expected, rtol=0, atol=WIDE_ERROR)
    rows = PagedRows(
        [keys[:, :, :64].unflatten(2, (8, 8))[0].transpose(0, 1).contiguous()],
        torch.arange(8, dtype=torch.int32)[None],
        WIDE[0],
        value_in_key=WIDE[1],
    )
    ids = torch.arange(0, 60, 7, dtype=torch.int32).expand(1, 1, queries, -1).contiguous()
    steps = []
    for way in ("naive", backend):
        others = gather_partials(query, rows, ids, scale=0.3, backend=way)
        steps.append(step_attention(query, keys, values, others, backend=way, **options))
    torch.testing.assert_close(*steps, rtol=0, atol=WIDE_ERROR)
