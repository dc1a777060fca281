"""Rows read where they lie, or copied first: the same numbers, whatever the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.paged import PagedRows

# Sums of a few dozen fp32 products of size 1, and softmax weights rounded to the rows' dtype
# (half a unit in the last place) times the largest value, which is below 5.
ERRORS = {torch.float32: 1e-5, torch.float16: 5 * 2.0**-11, torch.bfloat16: 5 * 2.0**-9}
Place = tuple[str, str]


@pytest.fixture
def device(place: Place) -> str:
    """Where Triton runs."""
    if place[0] != "triton":
        pytest.skip("variants are Triton's")
    return place[1]


def store(
    device: str, dims: tuple[int, int], dtype: torch.dtype, chunks: tuple[int, ...] = (9,)
) -> PagedRows:
    """Two batch rows of 32 tokens, 2 KV heads; what no id may lead to is NaN."""
    torch.manual_seed(0)
    pages = [torch.randn(count, 2, 8, sum(dims)).to(device, dtype) for count in chunks]
    table = torch.tensor([[0, 1, 2, 3], [7, 5, 8, 4]], dtype=torch.int32, device=device)
    rows = PagedRows(pages, table, dims[0])
    if chunks == (9,):
        pages[0][6] = float("nan")
    return rows


def some_ids(heads: int, queries: int, count: int, device: str, holes: float = 0.3) -> torch.Tensor:
    order = torch.rand(2, heads, queries, 32).argsort(-1)[..., :count].int()
    order[torch.rand(order.shape) < holes] = -1
    return order.to(device)


def check_alike(direct: Sequence[torch.Tensor], copied: Sequence[torch.Tensor]) -> None:
    """The same sums in the same order: bit for bit, but for what a compiler fuses on a GPU."""
    error = 1e-6 if direct[0].is_cuda else 0.0
    for one, other in zip(direct, copied, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=error)


def both(
    query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out, lse`` of "gather", checked against "direct" and against torch."""
    results = {
        variant: gather_attention(
            query, rows, ids, scale=0.3, backend="triton", variant=variant, **options
        )
        for variant in ("direct", "gather")
    }
    check_alike(results["direct"], results["gather"])
    naive = gather_attention(query, rows, ids, scale=0.3, backend="naive", **options)
    for found, want in zip(results["gather"], naive, strict=True):
        assert found.shape == want.shape and found.dtype == want.dtype == torch.float32
        torch.testing.assert_close(found, want, rtol=0, atol=ERRORS[rows.dtype])
    return results["gather"]


@pytest.mark.factor("dtype", ERRORS)
@pytest.mark.factor("heads", [2, 6], ids=["per kv head", "per query head"])
@pytest.mark.factor(
    ("dims", "queries", "count"), [((16, 16), 1, 20), ((40, 24), 3, 31), ((9, 5), 2, 1)], ids=str
)
def test_copied_rows_give_the_same_numbers(
    device: str,
    dims: tuple[int, int],
    queries: int,
    count: int,
    heads: int,
    dtype: torch.dtype,
) -> None:
    rows = store(device, dims, dtype)
    query = torch.randn(2, 6, queries, dims[0]).to(device, dtype)
    both(query, rows, some_ids(heads, queries, count, device))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_with_a_cap_several_chunks_and_strides(device: str) -> None:
    rows = store(device, (16, 16), torch.float16, chunks=(2, 3, 4))
    query = 8 * torch.randn(2, 3, 4, 16).to(device, torch.float16)
    ids = some_ids(2, 3, 32, device)[..., ::2]
    ids = ids.transpose(1, 2).contiguous().transpose(1, 2)
    both(query.transpose(1, 2), rows, ids, softcap=2.0)


@pytest.mark.factor("count", [0, 1, 20])
def test_without_rows(device: str, count: int) -> None:
    rows = store(device, (16, 16), torch.float32)
    ids = torch.full((2, 2, 3, count), -1, dtype=torch.int32, device=device)
    out, lse = both(torch.randn(2, 4, 3, 16, device=device), rows, ids)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.factor("variant", ["direct", "gather"])
@pytest.mark.factor("field", ["copy_rows", "block_k", "warps", "stages", "waves", "most_splits"])
def test_no_choice_changes_the_result(device: str, field: str, variant: str) -> None:
    from hf_kvret_kernels.gather_attention import triton

    rows = store(device, (16, 16), torch.float32)
    query = torch.randn(2, 4, 1, 16, device=device)
    ids = some_ids(2, 1, 29, device)
    want = gather_attention(query, rows, ids, scale=0.3, backend="naive")
    first = replace(triton.rule(triton.size_of(query, rows, ids)), variant=variant)
    for value in triton.CHOICES.space[field]:
        choice = replace(first, **{field: value})
        found = triton.gather_pieces(query, rows, ids, 0.3, None, choice=choice)("triton")
        torch.testing.assert_close(found, want, rtol=0, atol=ERRORS[torch.float32])


def test_the_copy_has_every_row_in_its_place(device: str) -> None:
    from hf_kvret_kernels.gather_attention.triton import CHOICES, copy_rows

    rows = store(device, (12, 20), torch.bfloat16, chunks=(2, 3, 4))
    ids = some_ids(4, 2, 19, device)
    keys, values = rows.gather(ids, backend="naive")
    for block in CHOICES.space["copy_rows"]:
        copied = copy_rows(rows, ids, int(block), 4)
        assert torch.equal(copied, torch.cat([keys, values], dim=-1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_rows_by_both_variants_are_those_of_the_device() -> None:
    near = store("cuda", (64, 64), torch.float16, chunks=(4, 5))
    far = PagedRows([chunk.cpu().pin_memory() for chunk in near.chunks], near.table, near.key_dim)
    query = torch.randn(2, 4, 1, 64).to("cuda", torch.float16)
    ids = some_ids(2, 1, 29, "cuda")
    from hf_kvret_kernels.gather_attention.triton import size_of

    assert size_of(query, near, ids).rows == "device"
    assert size_of(query, far, ids).rows == "host"
    check_alike(both(query, near, ids), both_pinned(query, far, ids))


def both_pinned(
    query: torch.Tensor, rows: PagedRows, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``both``, without torch, which can't read rows on the host from a GPU."""
    direct, copied = (
        gather_attention(query, rows, ids, scale=0.3, variant=variant)
        for variant in ("direct", "gather")
    )
    check_alike(direct, copied)
    return copied


def test_unknown_variants_and_those_of_other_backends_are_refused() -> None:
    rows = store("cpu", (16, 16), torch.float32)
    query, ids = torch.zeros(2, 4, 1, 16), some_ids(2, 1, 3, "cpu")
    with pytest.raises(ValueError, match="variant='copy': choose one of auto, direct, gather"):
        gather_attention(query, rows, ids, scale=1.0, variant="copy")
    with pytest.raises(ValueError, match=r"variant='gather' with backend 'naive'.*'auto'"):
        gather_attention(query, rows, ids, scale=1.0, backend="naive", variant="gather")
