"""PaperLRQKIndex forked, saved, reordered while it generates, beside an undisturbed twin."""

from __future__ import annotations

import pytest
import torch

from hf_kvret.methods.lrqk import PaperLRQKIndex
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing import all_valid

from .lrqk_runs import (
    BATCH,
    BUDGET,
    DIM,
    GROUP,
    HEADS,
    RANK,
    Run,
    paper_options,
    paper_tokens,
)

BF16 = 2.0**-8


def _go_on(run: Run, first: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Selections of eight more passes and the proxies in the end."""
    flushes = (0, 3, 0, 0, 5, 1, 0, 7)
    ids = [run.step(first + i, 1 + i % 3, flush) for i, flush in enumerate(flushes)]
    return ids, run.index._proxies.rows


def _same(one: Run, other: Run, first: int) -> None:
    (ids, rows), (more_ids, more_rows) = _go_on(one, first), _go_on(other, first)
    assert all(torch.equal(a, b) for a, b in zip(ids, more_ids, strict=True))
    # Products of tensors that lie otherwise in memory may round otherwise, by one bf16 step then.
    torch.testing.assert_close(rows.float(), more_rows.float(), rtol=2 * BF16, atol=1e-4)


def _at(moment: str, init: str) -> Run:
    """After a prompt, before the first step, or after some."""
    run = Run(paper_options(init=init))
    if moment == "prompt":
        return run.prompt()
    run.prompt(chunks=2)
    for number in range(4):
        run.step(number, flush=2 * (number == 2))
    return run


@pytest.mark.parametrize("moment", ["prompt", "steps"])
@pytest.mark.parametrize("init", ["randn", "top"])
def test_a_fork_or_a_saved_index_goes_on_like_an_undisturbed_one(init: str, moment: str) -> None:
    original, undisturbed = _at(moment, init), _at(moment, init)
    fork, loaded = original.fork(), original.load()
    _same(fork, undisturbed, 100)
    _same(original, _at(moment, init), 100)
    _same(loaded, _at(moment, init), 100)


@pytest.mark.parametrize("moment", ["prompt", "steps"])
def test_a_fork_that_goes_its_own_way_leaves_the_original_alone(moment: str) -> None:
    original = _at(moment, "randn")
    fork = original.fork()
    _go_on(fork, 200)
    fork.index.crop(20)
    fork.index.reorder(torch.tensor([0, 0]))
    _same(original, _at(moment, "randn"), 100)
    other = _at(moment, "randn")
    quiet = other.fork()
    _go_on(other, 200)
    _same(quiet, _at(moment, "randn"), 100)


@pytest.mark.parametrize("moment", ["prompt", "steps"])
def test_reordered_rows_go_on_where_they_are(moment: str) -> None:
    run, still = _at(moment, "top"), _at(moment, "top")
    rows = torch.tensor([1, 0])
    run.reorder(rows)
    for number in range(6):
        count, flush = 1 + number % 2, 3 * (number % 3 == 2)
        queries, keys = paper_tokens(count, 3000 + 10 * number)
        still.watch(queries, keys)
        run.watch(queries[rows], keys[rows])
        for each in (run, still):
            each.flush(flush)
            each.ready()
        assert torch.equal(run.select(queries[rows]), still.select(queries)[rows])
    run.reorder(torch.tensor([0]))
    assert run.step(50).shape[0] == 1


def test_bytes_are_those_of_the_tensors() -> None:
    run = Run(paper_options()).prompt()
    heads, index = BATCH * HEADS * GROUP, run.index
    # Two Grams, two rows of column sizes and two counts for each query head, and the newest keys.
    sums = 2 * heads * (DIM * DIM + DIM + 1) * 4
    # Room for 64 tokens more, rounded up.
    room = 80
    assert index.nbytes() == sums + BATCH * HEADS * room * DIM * 4
    run.step(0)
    bases, rows = 2 * heads * RANK * DIM * 4, heads * run.cold * RANK * 2
    waiting = 5 * BATCH * HEADS * DIM * 4 + 5 * heads * RANK * 4
    # At least 256 rows to spare, and a capacity that 16 divides.
    spare = -(-(run.cold + 256) // 16) * 16 - run.cold
    window = room * BATCH * HEADS * DIM * 4 + room * heads * RANK * 4
    ids = heads * BUDGET * 4
    assert index.nbytes() == bases + rows + heads * spare * RANK * 2 + window + ids
    selected = heads * BUDGET * DIM * 4
    assert index.cost(100, 10).nbytes == rows + 2 * bases + waiting + selected


def test_building_before_anything_was_watched_is_refused() -> None:
    store = PagedStore(DeviceMemory(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="call on_forward before build"):
        PaperLRQKIndex(paper_options()).build(all_valid(store, 2))
