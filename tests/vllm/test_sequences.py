"""Indexes are found again by blocks and by how often these were used, not by requests."""

from typing import Any

import pytest
import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.methods.flat import FlatKVCache
from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret.vllm.decode import Sequence, Sequences

SIZE = 4
LAYER = "layer"


@pytest.fixture
def sequences() -> Sequences:
    return Sequences(SIZE, most=3)


def write(sequences: Sequences, blocks: list[int], start: int, end: int) -> None:
    """Tokens ``start .. end`` of a request come, into its blocks."""
    tokens = torch.arange(start, end)
    sequences.note_writes(torch.tensor(blocks)[tokens // SIZE] * SIZE + tokens % SIZE)


def ask(
    sequences: Sequences, *requests: tuple[list[int], int], ends: list[int] | None = None
) -> list[Sequence]:
    """Sequences of requests, each with its blocks and length; tables are padded with zeros."""
    most = max(len(blocks) for blocks, _ in requests)
    table = torch.tensor([blocks + [0] * (most - len(blocks)) for blocks, _ in requests])
    lengths = [length for _, length in requests]
    return sequences.of_requests(table.int(), lengths, ends or lengths)


def fill(sequence: Sequence, end: int, value: float = 0.0) -> Any:
    """Add tokens up to ``end``, whose keys are ``value``."""
    index, known = sequence.index(LAYER, lambda: FlatKVCache.make_index(None, 0))
    rows = torch.full((1, 1, end - known, 2), value)
    index.add(TokenBlock(rows, rows, known))
    sequence.added[LAYER] = end
    return index


def keys(sequence: Sequence) -> list[float]:
    index = sequence.indexes[LAYER]
    assert isinstance(index, FlatIndex)
    return index._keys.rows[0, 0, :, 0].tolist()


def test_a_request_finds_its_sequence_while_it_grows(sequences: Sequences) -> None:
    write(sequences, [5, 2], 0, 8)
    (first,) = ask(sequences, ([5, 2], 8))
    assert first.length == 0
    fill(first, 6)
    # Padding of a batch is no write.
    sequences.note_writes(torch.tensor([-1, -SIZE]))
    write(sequences, [5, 2, 7], 8, 9)
    (again,) = ask(sequences, ([5, 2, 7], 9))
    assert again is first and again.length == 6 and len(sequences) == 1


def test_blocks_that_are_used_anew_hold_other_tokens(sequences: Sequences) -> None:
    write(sequences, [5, 2], 0, 8)
    (first,) = ask(sequences, ([5, 2], 8))
    fill(first, 8)
    # The second block was given back, and holds other tokens now.
    write(sequences, [2], 0, 4)
    (other,) = ask(sequences, ([5, 2], 8))
    assert other is not first and other.length == 0 and len(sequences) == 1


def test_two_requests_never_share_a_sequence(sequences: Sequences) -> None:
    """Whose blocks are the same as far as the index goes."""
    write(sequences, [1, 2], 0, 8)
    (first,) = ask(sequences, ([1, 2], 8))
    fill(first, 8)
    write(sequences, [3], 0, 4)
    write(sequences, [4], 0, 4)
    mine, theirs = ask(sequences, ([1, 2, 3], 9), ([1, 2, 4], 9))
    assert mine is first and theirs is not first and theirs.length == 0
    fill(mine, 9, 3.0)
    fill(theirs, 9, 4.0)
    write(sequences, [3, 4], 1, 2)
    assert ask(sequences, ([1, 2, 4], 10), ([1, 2, 3], 10)) == [theirs, mine]


def test_an_index_with_tokens_of_the_window_is_not_taken(sequences: Sequences) -> None:
    write(sequences, [1, 2, 3], 0, 12)
    (first,) = ask(sequences, ([1, 2, 3], 12))
    fill(first, 11)
    (short,) = ask(sequences, ([1, 2, 3], 12), ends=[6])
    assert short is not first and short.length == 0


def test_sequences_that_nobody_used_for_long_leave(sequences: Sequences) -> None:
    for block in range(1, 6):
        write(sequences, [block], 0, 4)
        fill(ask(sequences, ([block], 4))[0], 4, float(block))
    assert len(sequences) == 3
    (kept,), (gone,) = ask(sequences, ([4], 4)), ask(sequences, ([1], 4))
    assert kept.length == 4 and keys(kept) == [4.0] * 4 and gone.length == 0


def test_more_requests_than_are_kept_are_served(sequences: Sequences) -> None:
    for block in range(5):
        write(sequences, [block], 0, 4)
    found = ask(sequences, *(([block], 4) for block in range(5)))
    for one in found:
        fill(one, 4)
    assert ask(sequences, *(([block], 4) for block in range(5))) == found
