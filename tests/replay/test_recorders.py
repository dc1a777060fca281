"""CUDA graphs as recorders make them on a GPU, and the waits that they see of a thread.

Waits are tested without a GPU, with a played debug mode of torch; what graphs do, on the tape.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_kvret.replay.recorders import RECORDERS, CudaRecorder, waits


def gpu(test: Any) -> Any:
    """A test that needs a GPU."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(skip(test))


DEVICE = torch.device("cuda", 0)
MESSAGE = "called a synchronizing CUDA operation (Triggered internally at somewhere)"


def _broken(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("broken")


@gpu
def test_a_replay_reads_what_stands_in_the_same_memory_now() -> None:
    recorder, x = CudaRecorder(DEVICE), torch.ones(64, 64, device=DEVICE)
    # cuBLAS can't be set up while a stream is captured.
    recorder.rehearse(lambda: x @ x)
    for factor in (1.0, 2.0, 3.0):
        out, replay = recorder.record(lambda factor=factor: (x @ x) * factor)
        x.fill_(factor)
        replay()
        assert torch.allclose(out, torch.full_like(out, 64 * factor**3))


@gpu
@pytest.mark.parametrize("step", [lambda x: x.sum().item(), lambda x: x.nonzero(), _broken])
def test_a_failed_capture_leaves_the_device_sound(step: Callable[[torch.Tensor], Any]) -> None:
    recorder, x = CudaRecorder(DEVICE), torch.ones(64, 64, device=DEVICE)
    for _ in range(2):
        with pytest.raises((RuntimeError, KeyError)):
            recorder.record(lambda: step(x))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    out, replay = recorder.record(lambda: x + 1)
    replay()
    assert float(out.sum()) == 2 * x.numel()


@gpu
def test_a_rehearsal_says_which_line_waits_and_is_real() -> None:
    recorder, x = RECORDERS["cuda"](DEVICE), torch.ones(4, device=DEVICE)
    result, why = recorder.rehearse(lambda: x.sum().item())
    assert result == 4.0
    assert "test_recorders.py" in str(why)
    out, why = recorder.rehearse(lambda: x * 2)
    assert why is None
    assert out.tolist() == [2.0] * 4
    assert torch.cuda.get_sync_debug_mode() == 0


def _used() -> int:
    """Bytes that a recorded step takes while its graph is there."""
    recorder, x = CudaRecorder(DEVICE), torch.ones(1024, 1024, device=DEVICE)
    recorder.rehearse(lambda: x @ x)
    assert recorder.record(lambda: torch.cat([x @ x] * 64))[0].nbytes == 64 * x.nbytes
    return torch.cuda.memory_reserved()


@gpu
def test_memory_is_given_back() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    assert _used() - before > 256 << 20
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 64 << 20


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


def test_own_waits_are_collected_with_their_lines(mode: Mode) -> None:
    with waits() as lines:
        mode.wait()
        mode.wait()
    assert len(lines) == 2
    assert all("test_recorders.py:" in line for line in lines)
    mode.wait()
    assert len(lines) == 2


def test_waits_of_another_thread_are_not_counted_and_not_shown(mode: Mode) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with waits() as lines, ThreadPoolExecutor(1) as pool:
            pool.submit(mode.wait).result()
    assert lines == []
    assert warned == []


def test_one_thread_collects_at_a_time(mode: Mode) -> None:
    others: list[str] = []

    def other() -> None:
        with waits() as lines:
            mode.wait()
        others.extend(lines)

    thread = threading.Thread(target=other)
    with waits() as lines:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        mode.wait()
    thread.join()
    assert len(lines) == len(others) == 1


def test_other_warnings_go_their_way_and_modes_come_back(mode: Mode) -> None:
    before = warnings.showwarning
    with pytest.warns(UserWarning, match="something else"), waits() as lines:
        warnings.warn("something else", stacklevel=1)
    assert lines == []
    mode.set("error")
    with pytest.raises(KeyError), waits():
        assert mode.value == 1
        raise KeyError
    assert mode.value == 2
    assert warnings.showwarning == before
    mode.set("default")
