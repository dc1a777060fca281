"""What a thread's waits for the device are, beside other threads; torch's side is played."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from hf_kvret.replay import recorders
from hf_kvret.replay.recorders import waits

MESSAGE = "called a synchronizing CUDA operation (Triggered internally at somewhere)"


class Mode:
    """torch's debug mode, which warns whoever waits while it is on."""

    value = 0

    def set(self, value: int | str) -> None:
        names = {"default": 0, "warn": 1, "error": 2}
        self.value = names[value] if isinstance(value, str) else value

    def wait(self) -> None:
        """The host waits for the device."""
        if self.value:
            warnings.warn(MESSAGE, stacklevel=2)


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mode]:
    """Instead of a GPU."""
    mode = Mode()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode.value)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.set)
    yield mode
    assert mode.value == 0


def in_thread(call: Callable[[], None]) -> None:
    """Run it in another thread, to its end."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_own_waits_are_found_with_their_places(mode: Mode) -> None:
    with waits() as found:
        mode.wait()
        mode.wait()
    assert len(found) == 2
    assert all("test_waits.py:" in place for place in found)
    mode.wait()
    assert len(found) == 2


def test_waits_of_another_thread_are_not_counted_and_not_told(mode: Mode) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with waits() as found:
            in_thread(mode.wait)
    assert found == []
    assert told == []


def test_two_threads_that_collect_at_once_have_their_own_waits(mode: Mode) -> None:
    before = warnings.showwarning, list(warnings.filters)
    others: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with waits() as found:
            entered.set()
            mode.wait()
            leave.wait(10)
            mode.wait()
            others.extend(found)

    thread = threading.Thread(target=other)
    # The one that began last ends last, too.
    with waits() as found:
        thread.start()
        entered.wait(10)
        mode.wait()
    assert mode.value == 1, "the other thread still collects"
    leave.set()
    thread.join()
    assert len(found) == 1
    assert len(others) == 2
    assert (warnings.showwarning, list(warnings.filters)) == before


def test_a_body_within_another_counts_for_both(mode: Mode) -> None:
    with waits() as outer:
        mode.wait()
        with waits() as inner:
            mode.wait()
        mode.wait()
    assert len(inner) == 1
    assert len(outer) == 3


def test_other_warnings_go_their_way_and_modes_come_back(mode: Mode) -> None:
    with pytest.warns(UserWarning, match="something else"), waits() as found:
        warnings.warn("something else", stacklevel=1)
    assert found == []
    with pytest.raises(KeyError), waits():
        raise KeyError
    assert mode.value == 0


def test_a_mode_that_was_on_stays_on(mode: Mode) -> None:
    mode.set("error")
    with waits():
        assert mode.value == 1
    assert mode.value == 2
    mode.set("default")


def test_filters_of_another_thread_that_outlast_it_do_no_harm(mode: Mode) -> None:
    caught = warnings.catch_warnings()
    with waits():
        caught.__enter__()
    # Puts back what stood there in the body.
    caught.__exit__(None, None, None)
    with pytest.warns(UserWarning, match="something else"), waits() as found:
        warnings.warn("something else", stacklevel=1)
        mode.wait()
    assert len(found) == 1
    mode.set("warn")
    with pytest.warns(UserWarning, match="synchronizing"):
        mode.wait()
    mode.set("default")


def test_a_mode_that_can_not_be_set_leaves_all_as_it_was(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = warnings.showwarning
    with monkeypatch.context() as patch:
        patch.delattr(torch.cuda, "set_sync_debug_mode")
        with pytest.raises(AttributeError), waits():
            pass
    assert warnings.showwarning == before
    with waits() as found:
        mode.wait()
    assert len(found) == 1


def test_captures_are_checked_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorders._capture_options() == {}
    monkeypatch.setenv(recorders.CHECK_VARIABLE, "1")
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "capture_begin", lambda self, check_input_liveness=False: None
    )
    assert recorders._capture_options() == {"check_input_liveness": True}
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda self, pool=None: None)
    with pytest.raises(RuntimeError, match=r"HF_KVRET_CHECK_CAPTURES=1: torch .* unset it"):
        recorders._capture_options()
