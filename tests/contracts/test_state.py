"""State: what a class declares is reordered, cropped, forked, counted, saved, loaded and reset."""

import math
from typing import Any

import pytest
import torch

from hf_kvret import Index
from hf_kvret.contracts.index import CapturableIndex, capture_obstacle_of
from hf_kvret.contracts.state import State, number, part, tensor, transient
from hf_kvret.contracts.token_buffer import TokenBuffer, passed, tokens


class Inner(State):
    sums: torch.Tensor | None = tensor(shared=True)
    count: int = number(0)


class Outer(State):
    keys: TokenBuffer = tokens()
    recent: TokenBuffer = passed(may_be_empty=True)
    mean: torch.Tensor | None = tensor(optional=True)
    table: torch.Tensor | None = tensor(saved=False, batched=False, shared=True)
    inner: Inner = part(Inner)
    maybe: Inner | None = part(Inner, key="", optional=True)
    flag: bool = number(False, key="counts")
    ratio: float = number(math.inf, key="counts")
    uses: int = number(0, saved=False, reset_on_fork=True)

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options


def rows(*values: float) -> torch.Tensor:
    """``[2, 1, n, 1]``: the values, and in the second row of the batch their negatives."""
    one = torch.tensor(values).view(1, 1, -1, 1)
    return torch.cat([one, -one])


def filled() -> Outer:
    state = Outer({"top_k": 3})
    state.keys.append(rows(1, 2, 3))
    state.recent.append(rows(3, 4))
    state.mean = torch.tensor([5.0, 6.0])
    state.table = torch.arange(4.0)
    state.inner.sums, state.inner.count = torch.tensor([7.0, 8.0]), 2
    state.flag, state.ratio, state.uses = True, 0.5, 9
    return state


def contents(state: Outer) -> dict[str, Any]:
    return {name: x.tolist() for name, x in state.state_dict().items()}


def test_a_new_state_and_a_reset_one_hold_nothing() -> None:
    new, state = Outer({}), filled()
    new.ratio = 2.0
    assert new.state_dict() == {} and new.nbytes() == 0, "numbers of nothing are not saved"
    buffers = state.keys.nbytes() + state.recent.nbytes()
    assert state.nbytes() == buffers + (2 + 4 + 2) * 4
    state.crop(1)
    assert len(state.keys) == 1 and len(state.recent) == 2, "a crop cuts cold tokens alone"
    state.reset()
    assert contents(state) == {} and state.nbytes() == 0
    assert (state.flag, state.ratio, state.inner.count) == (False, math.inf, 0)
    assert state.options == {"top_k": 3}, "what was not declared stays"


def test_rows_of_the_batch_are_reordered_but_for_what_has_none() -> None:
    state = filled()
    state.reorder(torch.tensor([1, 1, 0]))
    assert state.keys.rows[:, 0, :, 0].tolist() == [[-1, -2, -3], [-1, -2, -3], [1, 2, 3]]
    assert state.mean is not None and state.mean.tolist() == [6, 6, 5]
    assert state.inner.sums is not None and state.inner.sums.tolist() == [8, 8, 7]
    assert state.table is not None and state.table.tolist() == [0, 1, 2, 3]


def test_a_fork_is_independent_and_shares_options() -> None:
    state = filled()
    before, twin = contents(state), state.fork()
    assert contents(twin) == before
    assert (twin.uses, twin.options) == (0, state.options) and twin.options is state.options
    assert twin.keys.rows.data_ptr() == state.keys.rows.data_ptr()
    twin.keys.append(rows(9))
    assert twin.mean is not None and twin.inner is not state.inner
    twin.mean.zero_()
    twin.inner.count, twin.inner.sums = 0, None
    assert contents(state) == before


def test_a_saved_state_comes_back() -> None:
    state = filled()
    saved = state.state_dict()
    assert set(saved) == {"keys", "recent", "mean", "inner.sums", "inner.count", "counts"}
    assert saved["counts"].tolist() == [1.0, 0.5]
    other = Outer({})
    other.mean = torch.zeros(7)
    other.load_state_dict(saved)
    assert contents(other) == contents(state)
    assert (other.flag, other.ratio, other.uses, other.table) == (True, 0.5, 0, None)
    assert other.mean is not None
    other.mean.zero_()
    assert state.mean is not None and state.mean.tolist() == [5, 6], "not the same memory"
    with pytest.raises(KeyError, match="keys"):
        other.load_state_dict({})


def test_parts_are_made_or_assigned() -> None:
    state, other = filled(), Outer({})
    state.maybe = Inner()
    state.maybe.sums, state.maybe.count = torch.ones(2), 4
    other.load_state_dict(state.state_dict())
    assert other.maybe is not None and other.maybe.count == 4
    other.reset()
    assert other.maybe is None
    with pytest.raises(ValueError, match=r"part\(optional=True\).* pass make, .*or saved=False"):
        part(optional=True)

    class Forgetful(State):
        inner: Inner = part()

    with pytest.raises(RuntimeError, match=r"the part inner was not made: assign it in __init__"):
        Forgetful().load_state_dict({})


def test_fields_of_all_bases_count() -> None:
    class Other(State):
        more: torch.Tensor | None = tensor(optional=True)

    class Both(Outer, Other):
        """Two bases."""

    assert set(Both.fields) == {*Outer.fields, "more"} and "more" not in Outer.fields
    saved = filled().state_dict()
    for name in ("mean", "recent"):
        del saved[name]
    both = Both({})
    both.load_state_dict(saved)
    assert both.more is both.mean is None and len(both.keys) == 3, "these may be missing"


@pytest.mark.parametrize(
    "change", [State.fork, State.reset, lambda state: state.reorder(torch.tensor([0]))]
)
def test_what_a_hook_leaves_to_the_next_ends_with_its_pass(change: Any) -> None:
    class Passing(Inner):
        left: list[int] | None = transient()

    state = Passing()
    assert state.left is None
    state.sums, state.left = torch.ones(1), [3]
    assert "left" not in state.state_dict()
    changed = change(state) or state
    assert changed.left is None
    if changed is not state:
        assert state.left == [3]


def test_an_index_says_why_its_steps_are_not_captured() -> None:
    class Plain(Index):
        def add(self, block: Any) -> None: ...

        def search(self, query: torch.Tensor, cold: Any) -> torch.Tensor:
            return query

    class Random(Plain):
        capture_obstacle = "it draws random numbers"

    class Captured(CapturableIndex, Plain):
        """Its steps launch the same work each time."""

    assert capture_obstacle_of(Plain()) == (
        "the index Plain does not say that its steps can be captured"
    )
    assert capture_obstacle_of(Random()) == "it draws random numbers"
    assert capture_obstacle_of(Captured()) is None
