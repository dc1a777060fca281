"""What a cache keeps of its model, by length and row."""

from __future__ import annotations

import pytest
import torch

from hf_kvret.models.kept_state import UNKNOWN, ModelState

NAME = "rope_deltas"
CPU = torch.device("cpu")


def shift(*values: int) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def filled() -> ModelState:
    """10 tokens with pictures at 2 to 5 and 3 to 7, text to 12, and 4 with a picture in one row."""
    state = ModelState()
    unknown = UNKNOWN
    cuts = [
        [0, 0, 0, unknown, unknown, unknown, -2, -2, -2, -2, -2],
        [0, 0, 0, 0, unknown, unknown, unknown, unknown, -3, -3, -3],
    ]
    state.note({NAME: shift(-2, -3)}, 0, 10, 2, torch.tensor(cuts, dtype=torch.int32))
    state.note(state.values(), 10, 12, 2, None)
    later = torch.tensor([[-2, -2, unknown, -4, -4], [-3] * 5], dtype=torch.int32)
    state.note({NAME: shift(-4, -3)}, 12, 16, 2, later)
    return state


def test_an_empty_state_has_no_values_and_takes_any_change() -> None:
    state = ModelState()
    state.reorder(torch.tensor([0]))
    state.repeat(2)
    state.crop(0)
    assert state.values() == {} and state.state_dict(0) == {} and state.shift is None
    state.note({NAME: None}, 0, 5, 1, None)
    state.reorder(torch.tensor([0, 0]))
    state.crop(3)
    assert state.shift is None and state.state_dict(3) == {}


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(
    ("length", "values"),
    [
        *((20, (-4, -3)), (16, (-4, -3)), (15, (-4, -3)), (13, (-2, -3)), (12, (-2, -3))),
        *((11, (-2, -3)), (10, (-2, -3)), (9, (-2, -3)), (2, (0, 0)), (1, (0, 0))),
    ],
)
def test_a_crop_goes_back_to_the_shift_of_its_length(
    length: int, values: tuple[int, ...], is_loaded: bool
) -> None:
    state = loaded(filled()) if is_loaded else filled()
    state.crop(length)
    assert torch.equal(state.values()[NAME], shift(*values))
    # Twice is no other than once.
    state.crop(length)
    assert torch.equal(state.values()[NAME], shift(*values))


@pytest.mark.parametrize("length", [3, 5, 7, 14])
def test_a_crop_into_a_picture_of_any_row_is_refused_until_a_deeper_one(length: int) -> None:
    for state in (filled(), loaded(filled()), filled().fork()):
        state.crop(length)
        for _ in range(2):
            with pytest.raises(ValueError, match="crop it to a place before the picture"):
                state.values()
        again = loaded(state, length)
        with pytest.raises(ValueError, match="middle of a picture"):
            again.values()
        state.crop(2)
        assert torch.equal(state.values()[NAME], shift(0, 0))


def test_a_row_without_that_picture_goes_on() -> None:
    state = filled()
    state.crop(14)
    state.reorder(torch.tensor([1]))
    assert torch.equal(state.values()[NAME], shift(-3))


def loaded(state: ModelState, length: int = 20) -> ModelState:
    twin = ModelState()
    twin.load_state_dict(state.state_dict(length), CPU)
    return twin


def test_rows_move_with_the_batch_and_so_do_their_cuts() -> None:
    state = filled()
    fork = state.fork()
    state.reorder(torch.tensor([1, 1, 0]))
    assert torch.equal(state.values()[NAME], shift(-3, -3, -4))
    state.repeat(2)
    assert torch.equal(state.values()[NAME], shift(-3, -3, -3, -3, -4, -4))
    state.crop(13)
    assert torch.equal(state.values()[NAME], shift(-3, -3, -3, -3, -2, -2))
    assert torch.equal(fork.values()[NAME], shift(-4, -3))


def test_a_fork_and_its_original_go_their_own_ways() -> None:
    state = filled()
    fork = state.fork()
    fork.crop(9)
    state.note({NAME: shift(-9, -9)}, 16, 20, 2, None)
    assert torch.equal(fork.values()[NAME], shift(-2, -3))
    assert torch.equal(state.values()[NAME], shift(-9, -9))
    state.reset()
    assert state.values() == {}
    assert torch.equal(fork.values()[NAME], shift(-2, -3))


def test_a_pass_whose_positions_are_unknown_or_contradict_is_not_cut() -> None:
    for cuts in (None, torch.zeros(1, 6, dtype=torch.int32)):
        state = ModelState()
        state.note({NAME: shift(-2)}, 0, 5, 1, cuts)
        restored = ModelState()
        restored.load_state_dict(state.state_dict(8), CPU)
        for one in (state, restored):
            kept = one.fork()
            kept.crop(5)
            assert torch.equal(kept.values()[NAME], shift(-2))
            one.crop(4)
            with pytest.raises(ValueError, match="whose positions it does not know"):
                one.values()


def test_a_shift_of_fewer_rows_is_that_of_their_repetitions() -> None:
    state = ModelState()
    state.note({NAME: shift(-2, -3)}, 0, 5, 6, None)
    assert torch.equal(state.values()[NAME], shift(-2, -2, -2, -3, -3, -3))


def test_frequencies_stay_through_a_crop_and_go_with_the_last_token() -> None:
    state = ModelState()
    values = {
        "rotary_emb.inv_freq": torch.rand(4),
        "rotary_emb.max_seq_len_cached": torch.tensor(9),
    }
    state.note(values, 0, 9, 2, None)
    state.crop(5)
    state.reorder(torch.tensor([1, 0]))
    twin = ModelState()
    twin.load_state_dict(state.state_dict(5), CPU)
    for one in (state, twin):
        assert torch.equal(one.values()["rotary_emb.inv_freq"], values["rotary_emb.inv_freq"])
        assert one.values()["rotary_emb.max_seq_len_cached"] == 9
        one.crop(0)
        assert one.values() == {}


def test_a_shift_of_text_alone_is_saved_without_its_lengths() -> None:
    state = ModelState()
    state.note({NAME: shift(0, 0)}, 0, 9, 2, torch.zeros(2, 10, dtype=torch.int32))
    saved = state.state_dict(50)
    assert list(saved[NAME].shape) == [2, 1]
    twin = ModelState()
    twin.load_state_dict(saved, CPU)
    twin.crop(4)
    assert torch.equal(twin.values()[NAME], shift(0, 0))
