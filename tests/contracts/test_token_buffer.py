"""TokenBuffer: rows of consecutive tokens, shared between forks until one side writes."""

import random

import pytest
import torch

from hf_kvret.contracts.token_buffer import TokenBuffer


def _rows(batch: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch, 2, count, 3, generator=generator)


@pytest.mark.parametrize("seed", range(3))
def test_no_operation_changes_what_another_fork_reads(seed: int) -> None:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    first = _rows(2, 5, generator)
    start = TokenBuffer(least_step=4)
    # The second one begins with rows that lie elsewhere, as in a file.
    (start.take if seed == 1 else start.append)(first)
    given = first.clone()
    pairs: list[tuple[TokenBuffer, torch.Tensor]] = [(start, first)]
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
            assert len(held) == wanted.shape[2]
            assert torch.equal(held.rows, wanted)
    assert torch.equal(first, given)


def test_a_fork_shares_memory_until_it_appends() -> None:
    rows = TokenBuffer()
    rows.append(torch.zeros(1, 1, 10, 2))
    twin = rows.fork()
    assert twin.rows.data_ptr() == rows.rows.data_ptr()
    twin.append(torch.ones(1, 1, 1, 2))
    assert twin.rows.data_ptr() != rows.rows.data_ptr()
    address = rows.rows.data_ptr()
    rows.append(torch.full((1, 1, 1, 2), 2.0))
    assert rows.rows.data_ptr() == address, "the original goes on in place"


def test_rows_that_are_taken_stay_where_they_lie_until_others_join() -> None:
    file, more = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 1, 3)
    rows = TokenBuffer()
    rows.take(file)
    assert rows.rows.data_ptr() == file.data_ptr() and rows.end == 5
    rows.crop(4)
    rows.append(more)
    assert torch.equal(rows.rows, torch.cat([file[:, :, :4], more], dim=2))
    assert rows.rows.data_ptr() != file.data_ptr()


def test_capacity_grows_in_steps_and_counts_as_bytes() -> None:
    rows = TokenBuffer(least_step=4)
    assert rows.nbytes() == 0
    for count in range(12):
        rows.append(torch.full((1, 1, 1, 2), float(count)))
        assert rows.nbytes() == 16 * 2 * 4, "one asked for, four to spare, rounded for wide loads"
    assert torch.equal(rows.rows[0, 0, :, 0], torch.arange(12.0))


def test_rows_are_addressed_by_slot() -> None:
    buffer = TokenBuffer(least_step=4)

    def rows(*slots: int) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.float32).view(1, 1, -1, 1)

    def held() -> list[float]:
        return buffer.rows.flatten().tolist()

    buffer.put(rows(7, 8, 9, 10), 7)
    assert (buffer.first, buffer.end, len(buffer)) == (7, 11, 4)
    buffer.put(rows(9, 10, 11), 9)
    assert held() == [7, 8, 9, 10, 11]
    buffer.drop(9)
    assert (buffer.first, held()) == (9, [9, 10, 11])
    assert buffer.since(10).flatten().tolist() == [10, 11]
    assert buffer.since(3).flatten().tolist() == [9, 10, 11]
    buffer.crop(10)
    assert held() == [9]
    buffer.crop(4)
    assert len(buffer) == 0 and buffer.end == 9
    for start in (20, 2):
        buffer.put(rows(start), start)
        assert (buffer.first, held()) == (start, [start]), "not next to the rows: these go"


def test_dropped_rows_do_not_stay_in_memory() -> None:
    buffer = TokenBuffer(least_step=4)
    buffer.append(torch.arange(1000.0).view(1, 1, -1, 1))
    twin = buffer.fork()
    buffer.drop(990)
    assert buffer.nbytes() <= 32 * 4
    buffer.append(torch.zeros(1, 1, 5, 1))
    assert buffer.rows.flatten().tolist() == [*range(990, 1000), 0, 0, 0, 0, 0]
    assert twin.rows.shape[2] == 1000 and twin.rows.sum() == 999 * 500


@pytest.mark.parametrize("writer", [0, 1])
def test_what_is_written_in_place_is_no_forks(writer: int) -> None:
    buffer = TokenBuffer()
    buffer.append(torch.zeros(1, 1, 10, 2))
    sides = [buffer, buffer.fork()]
    sides[writer].writable().fill_(3.0)
    assert (sides[writer].rows == 3.0).all() and (sides[1 - writer].rows == 0.0).all()
    address = sides[writer].rows.data_ptr()
    assert sides[writer].writable().data_ptr() == address, "copied once"
