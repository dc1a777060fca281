"""GrowingRows: rows that grow in steps, shared between forks until one side writes."""

from __future__ import annotations

import random

import pytest
import torch

from hf_kvret.core.token_buffer import GrowingRows


def _rows(batch: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch, 2, count, 3, generator=generator)


@pytest.mark.parametrize("seed", range(3))
def test_no_operation_changes_what_another_fork_reads(seed: int) -> None:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    first = _rows(2, 5, generator)
    start = GrowingRows(least_step=4)
    start.append(first)
    pairs: list[tuple[GrowingRows, torch.Tensor]] = [(start, first)]
    for _ in range(200):
        place = choose.randrange(len(pairs))
        rows, expected = pairs[place]
        kind = choose.choice(["append", "append", "crop", "reorder", "fork"])
        if kind == "append":
            more = _rows(len(expected), choose.randint(0, 6), generator)
            rows.append(more)
            expected = torch.cat([expected, more], dim=2)
        elif kind == "crop":
            length = choose.randint(max(0, expected.shape[2] - 5), expected.shape[2])
            rows.crop(length)
            expected = expected[:, :, :length]
        elif kind == "reorder":
            order = torch.tensor([choose.randrange(len(expected)) for _ in range(2)])
            rows.reorder(order)
            expected = expected[order]
        elif len(pairs) < 5:
            pairs.append((rows.fork(), expected))
        else:
            pairs.pop(choose.randrange(len(pairs)))
            continue
        pairs[place] = rows, expected
        for held, wanted in pairs:
            assert held.length == wanted.shape[2]
            assert torch.equal(held.rows, wanted)


def test_reserved_rows_are_a_view_to_be_filled() -> None:
    rows = GrowingRows(least_step=4)
    view = rows.reserve(3, torch.empty(1, 2, 0, 3))
    view.fill_(7.0)
    assert rows.rows.shape == (1, 2, 3, 3)
    assert (rows.rows == 7.0).all()


def test_a_fork_shares_memory_until_it_appends() -> None:
    rows = GrowingRows()
    rows.append(torch.zeros(1, 1, 10, 2))
    twin = rows.fork()
    assert twin.rows.data_ptr() == rows.rows.data_ptr()
    twin.append(torch.ones(1, 1, 1, 2))
    assert twin.rows.data_ptr() != rows.rows.data_ptr()
    address = rows.rows.data_ptr()
    rows.append(torch.full((1, 1, 1, 2), 2.0))
    assert rows.rows.data_ptr() == address, "the original goes on in place"


def test_capacity_grows_in_steps_and_counts_as_bytes() -> None:
    rows = GrowingRows(least_step=4)
    assert rows.nbytes() == 0
    sizes = []
    for count in range(12):
        rows.append(torch.full((1, 1, 1, 2), float(count)))
        sizes.append(rows.nbytes() // (2 * 4))
    assert sizes == [16] * 12, "one row asked for, four to spare, rounded up for wide loads"
    assert torch.equal(rows.rows[0, 0, :, 0], torch.arange(12.0))


def test_rows_before_the_first_append_raise() -> None:
    with pytest.raises(RuntimeError, match="append first"):
        _ = GrowingRows().rows
