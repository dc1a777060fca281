"""Rows copied into their slots, bit by bit against look-ups one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.resident import SlotMap, assign, fetch

from .paged_rows import NO_PAGE, TWO_ROWS, lookup, paged

Place = tuple[str, str]
# Of rows of 24 numbers.
DIMS = (16, 8)


def poisoned(rows: PagedRows, slots: int) -> torch.Tensor:
    lead = (rows.table.shape[0], rows.heads)
    return torch.full(
        (*lead, slots, rows.width), torch.nan, dtype=rows.dtype, device=rows.table.device
    )


def check_fetch(place: Place, rows: PagedRows, ids: torch.Tensor, fetched: torch.Tensor) -> None:
    """Rows lie where ``fetched`` says, all other slots are as they were."""
    slots = 1 + max(0, int(fetched.max()) if fetched.numel() else 0)
    buffer, expected = poisoned(rows, slots), poisoned(rows, slots)
    for b, h, r in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        if fetched[b, h, r] >= 0:
            expected[b, h, int(fetched[b, h, r])] = lookup(rows, b, h, int(ids[b, h, r]))
    fetch(rows, ids, fetched, buffer, backend=place[0])
    torch.testing.assert_close(buffer, expected, rtol=0, atol=0, equal_nan=True)


def random_fetches(
    rows: PagedRows, count: int, tokens: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids, fetched)``: some requests are holes, of others the row is there."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows.table.shape[0], rows.heads, count)
    ids = torch.randint(tokens, shape, generator=generator).int()
    fetched = torch.rand(shape, generator=generator).argsort(-1).int()
    fetched[torch.rand(shape, generator=generator) < 0.4] = -1
    ids[(fetched < 0) & (torch.rand(shape, generator=generator) < 0.5)] = -1
    return ids.to(rows.table.device), fetched.to(rows.table.device)


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.factor(("width", "key_dim"), [(16, 8), (24, 16), (13, 5), (256, 128)])
def test_rows_are_copied_whole(place: Place, width: int, key_dim: int, dtype: torch.dtype) -> None:
    rows = paged(place[1], TWO_ROWS, dims=(key_dim, width - key_dim), dtype=dtype)
    check_fetch(place, rows, *random_fetches(rows, 19, 32))


@pytest.mark.factor("count", [0, 1, 64, 65, 130])
def test_any_number_of_requests(place: Place, count: int) -> None:
    rows = paged(place[1], TWO_ROWS, dims=DIMS)
    check_fetch(place, rows, *random_fetches(rows, count, 32))


def test_wide_rows(place: Place) -> None:
    rows = paged(place[1], [[1, 0]], (2,), dims=(4000, 100))
    check_fetch(place, rows, *random_fetches(rows, 3, 16))


def test_several_chunks_shared_pages_and_pages_of_no_one(place: Place) -> None:
    rows = paged(place[1], [[0, 4, 2, NO_PAGE], [6, 4, 5, NO_PAGE]], (3, 1, 3), dims=DIMS)
    check_fetch(place, rows, *random_fetches(rows, 21, 24))


def test_nothing_to_fetch_reads_nothing(place: Place) -> None:
    rows = paged(place[1], [[NO_PAGE] * 4] * 2, dims=DIMS)
    ids, _ = random_fetches(rows, 21, 32)
    check_fetch(place, rows, ids, torch.full_like(ids, -1))


def test_strided_fetches_and_page_tables(place: Place) -> None:
    rows = paged(place[1], TWO_ROWS, dims=DIMS)
    rows.table = rows.table.t().contiguous().t()
    ids, fetched = random_fetches(rows, 22, 32)
    strided = ids.transpose(0, 1).contiguous().transpose(0, 1)[..., ::2]
    check_fetch(place, rows, strided, fetched[..., ::2])


@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
def test_after_a_fetch_every_request_finds_its_row(place: Place, dtype: torch.dtype) -> None:
    rows, device = paged(place[1], TWO_ROWS, (4, 5), dims=DIMS, dtype=dtype), place[1]
    table = torch.full((2, 2, 32), -1, dtype=torch.int32, device=device)
    token = table[..., :11].contiguous()
    clock = torch.zeros(1, dtype=torch.int32, device=device)
    slots = SlotMap(table, token, token.clone(), clock)
    buffer = poisoned(rows, 11)
    for step in range(6):
        # A third of the tokens comes more often, so that there are hits, misses and repeats.
        ids, _ = random_fetches(rows, 10, 32 if step % 2 else 11, seed=step)
        places, fetched = assign(slots, ids, backend=place[0])
        fetch(rows, ids, fetched, buffer, backend=place[0])
        assert torch.equal(places < 0, ids < 0)
        for b, h, r in (ids >= 0).nonzero().tolist():
            expected = lookup(rows, b, h, int(ids[b, h, r]))
            assert torch.equal(buffer[b, h, int(places[b, h, r])], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_host_rows_are_fetched_from_the_gpu() -> None:
    place = ("triton", "cuda")
    near = paged(place[1], TWO_ROWS, (4, 5), dtype=torch.float16, dims=DIMS)
    far = PagedRows([chunk.cpu().pin_memory() for chunk in near.chunks], near.table, near.key_dim)
    ids, fetched = random_fetches(near, 40, 32)
    buffers = [torch.zeros(2, 2, 40, 24, dtype=torch.float16, device="cuda") for _ in range(2)]
    for rows, buffer in zip((near, far), buffers, strict=True):
        fetch(rows, ids, fetched, buffer)
    assert buffers[0].any()
    assert torch.equal(buffers[0], buffers[1])


INTS = torch.full((1, 2, 6), -1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": INTS.long()}, r"ids is torch.int64 .* pass int32 \[1, 2, any\]"),
        ({"fetched": INTS[:, :1]}, r"fetched is .* pass int32 \[1, 2, 6\]"),
        ({"fetched": INTS[..., :5]}, r"pass int32 \[1, 2, 6\]"),
        ({"fetched": INTS.to("meta")}, "fetched is .* on meta: .* on cpu"),
        ({"buffer": torch.zeros(1, 2, 6, 24, device="meta")}, "buffer is .* on meta"),
        ({"buffer": torch.zeros(1, 2, 6, 24).half()}, "pass fp32"),
        ({"buffer": torch.zeros(1, 2, 6, 23)}, r"\[1, 2, any, 24\]"),
        ({"buffer": torch.zeros(1, 2, 24)}, r"\[1, 2, any, 24\]"),
        ({"buffer": torch.zeros(1, 2, 12, 24)[:, :, ::2]}, "pass a contiguous"),
        ({"backend": "x"}, "choose one"),
    ],
)
def test_mistakes_in_fetches_are_refused(change: dict[str, Any], message: str) -> None:
    rows = paged("cpu", [[0, 1]], (2,), dims=DIMS)
    given = {"ids": INTS, "fetched": INTS, "buffer": torch.zeros(1, 2, 6, 24), **change}
    with pytest.raises(ValueError, match=message):
        fetch(rows, **given)


def test_naive_fetches_refuse_rows_of_another_device() -> None:
    rows = paged("cpu", [[0, 1]], (2,), dims=DIMS)
    far = PagedRows([rows.chunks[0].to("meta")], rows.table, rows.key_dim)
    with pytest.raises(ValueError, match="use backend='triton' with pinned rows"):
        fetch(far, INTS, INTS, torch.zeros(1, 2, 6, 24), backend="naive")
