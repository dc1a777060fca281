"""H2OIndex over a long use: drafts, forks, beams, crops, saving, and its books."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret.methods.h2o import H2OConfig, H2OIndex

from .h2o_runs import DIM, HEADS, OPTIONS, Run, random_tokens
from .watched_stores import WatchedStore, slot_sets, slot_sets_of


def _read(length: int = 60, **changes: Any) -> Run:
    """A run that has read a prompt."""
    run = Run(**changes)
    run.prompt(random_tokens(0, length))
    return run


def _assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_keys_of_evicted_tokens_are_not_read_again() -> None:
    run = _read()
    run.steps(range(10, 40))
    for seed in range(40, 50):
        run.step(random_tokens(seed, 5))
        run.crop(2)
    run.prompt(random_tokens(50, 20))
    run.steps(range(50, 53))
    assert isinstance(run.kv.store, WatchedStore)
    assert run.cold_len > 100 and run.kv.store.readings == 0


def test_rejected_drafts_leave_no_trace() -> None:
    """Also where the cache is forked before the pass that shows it."""
    # Without a flush: what goes together depends on drafts that overflow the window.
    plain, drafted = _read(120, flush=100), _read(120, flush=100)
    for seed in range(10, 30):
        queries, keys = random_tokens(seed, 5)
        accepted = 1 + seed % 3
        some = queries[:, :, :accepted], keys[:, :, :accepted]
        assert torch.equal(drafted.step((queries, keys))[:, :, :accepted], plain.step(some))
        drafted.crop(5 - accepted)
        if seed % 5 == 0:
            drafted = drafted.fork()
    assert plain.length == drafted.length > 155
    for run in (plain, drafted):
        run.step(random_tokens(5))
    # Sums over other numbers of columns: the last bits may differ.
    torch.testing.assert_close(drafted.scores, plain.scores, rtol=1e-5, atol=1e-6)
    assert (plain.scores[:, :, 120:-1] > 0).all()


def test_asking_twice_in_a_pass_counts_once() -> None:
    """Layers that share their cache ask again."""
    run = _read()
    run.steps(range(10, 15))
    before = run.scores
    run.ask(random_tokens(14)[0])
    assert torch.equal(run.scores, before)


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_forks_and_loaded_indexes_go_on_like_one_that_was_left_alone(steps: int) -> None:
    one, alone = _read(), _read()
    for run in (one, alone):
        run.steps(range(10, 10 + steps))
    twin, other, loaded = one.fork(), one.fork(), one.fork()
    other.steps(range(300, 320))
    loaded.kv.index = H2OIndex(one.options)
    loaded.index.load_state_dict({name: x.clone() for name, x in one.index.state_dict().items()})
    expected = alone.steps(range(40, 60))
    for run in (one, twin, loaded):
        _assert_same(run.steps(range(40, 60)), expected)
        assert torch.equal(run.scores, alone.scores)
    assert not torch.equal(other.scores, alone.scores)


def test_an_index_that_saw_nothing_has_nothing_to_save() -> None:
    index = H2OIndex(H2OConfig())
    assert index.state_dict() == {} and index.nbytes() == index.cost(100, 10).nbytes == 0
    assert index.stats() == {"evicted": 0} and index.fork().state_dict() == {}


def test_reordered_rows_go_on_like_the_old_ones() -> None:
    rows = [1, 0, 0]
    run, moved = _read(), _read()
    for each in (run, moved):
        each.steps(range(10, 17))
    moved.kv.reorder(torch.tensor(rows))
    expected = [ids[rows] for ids in run.steps(range(40, 52))]
    _assert_same(moved.steps(range(40, 52), rows), expected)


@pytest.mark.parametrize("top_k", [OPTIONS["top_k"], 14])
def test_what_is_cropped_is_forgotten_and_what_was_evicted_stays_so(top_k: float) -> None:
    run = _read(top_k=top_k)
    run.steps(range(10, 40))
    before = run.scores
    assert run.length == 90 and run.cold_len == 82
    run.crop(30)
    assert run.cold_len == 54
    ids = run.step(random_tokens(50))
    after = run.scores
    assert after.shape[2] == 61 and int(ids.max()) < 54
    evicted = before[:, :, :60] == float("-inf")
    assert evicted[:, :, 54:].any(), "none of those that came back was evicted: nothing is shown"
    assert (after[:, :, :60][evicted] == float("-inf")).all()
    # Tokens pulled back into the window keep what they had, those in the dropped slots start anew.
    assert torch.equal(after[:, :, 54:60], before[:, :, 54:60])
    assert (after[:, :, 60] == 0).all()
    selections = slot_sets(run.steps(range(60, 80))[-1])
    assert run.cold_len > 70
    for slots, evicted_before in zip(selections, slot_sets_of(evicted), strict=True):
        assert not slots & evicted_before


def test_other_tokens_in_the_slots_of_cropped_ones_are_chosen_from_anew() -> None:
    """Also where as many tokens are cold as before, so that the length tells nothing."""
    run = _read()
    run.steps(range(10, 40))
    cold_len = run.cold_len
    run.crop(30)
    run.prompt(random_tokens(70, cold_len + OPTIONS["recent"] - 60))
    assert run.cold_len == cold_len
    ids = run.step(random_tokens(50))
    left = run.scores[:, :, :cold_len] > float("-inf")
    left[:, :, : OPTIONS["sink"]] = False
    assert slot_sets(ids) == slot_sets_of(left)
    assert int(ids.max()) >= 60


@pytest.mark.parametrize("left", [0, 5])
def test_a_crop_to_nothing_cold_starts_a_new_text(left: int) -> None:
    """What is left of the old text is in the window, and goes cold with the new one."""
    run, fresh, text = _read(), Run(), random_tokens(77, 60)
    run.steps(range(10, 20))
    run.crop(run.length - left)
    assert run.cold_len == 0
    for each in (run, fresh):
        each.prompt(text)
    ids = run.step(random_tokens(50))
    assert int(ids.min()) >= 0 and int(ids.max()) < run.cold_len == left + 54
    if not left:
        assert torch.equal(ids, fresh.step(random_tokens(50)))
        assert torch.equal(run.scores, fresh.scores)


def test_memory_is_bounded_while_text_is_generated() -> None:
    """Once a selection was made only the keys in the window are left."""
    run = _read(length=2000)
    run.steps(range(10, 310))
    state = run.index.state_dict()
    # The newest query waits to be accepted.
    assert state["queries.rows"].shape[2] == 1
    assert state["keys.rows"].shape[2] == run.length - run.cold_len <= 11


def test_numbers_for_reports() -> None:
    run = _read()
    ids = run.step(random_tokens(1))
    assert run.cold_len == 54 and ids.shape == (2, HEADS, 1, 14)
    assert run.index.stats() == {"evicted": 2 * HEADS * (54 - 2 - 14)}
    assert run.index.cost(54, 14).candidates == 14 and run.index.cost(54, 14).keys_read == 16
    assert run.index.cost(100, 10).nbytes == 2 * HEADS * (14 * 4 + 7 * DIM * 4)
