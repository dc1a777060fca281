"""CUDA graphs as recorders make them: needs a GPU. The rest is tested on the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_kvret.replay.recorders import RECORDERS, CudaRecorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda", 0)


def _broken(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("broken")


def test_a_replay_reads_what_stands_in_the_same_memory_now() -> None:
    recorder, x = CudaRecorder(DEVICE), torch.ones(64, 64, device=DEVICE)
    for factor in (1.0, 2.0, 3.0):
        out, replay = recorder.record(lambda factor=factor: (x @ x) * factor)
        x.fill_(factor)
        replay()
        assert torch.allclose(out, torch.full_like(out, 64 * factor**3))


@pytest.mark.parametrize("step", [lambda x: x.sum().item(), lambda x: x.nonzero(), _broken])
def test_a_capture_that_fails_leaves_device_and_allocator_sound(
    step: Callable[[torch.Tensor], Any],
) -> None:
    recorder, x = CudaRecorder(DEVICE), torch.ones(64, 64, device=DEVICE)
    for _ in range(2):
        with pytest.raises((RuntimeError, KeyError)):
            recorder.record(lambda: step(x))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    out, replay = recorder.record(lambda: x + 1)
    replay()
    assert float(out.sum()) == 2 * x.numel()


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
    held = recorder.record(lambda: torch.cat([x @ x] * 64))
    assert held[0].nbytes == 64 * x.nbytes
    return torch.cuda.memory_reserved()


def test_memory_is_given_back() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    assert _used() - before > 256 << 20
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 64 << 20
