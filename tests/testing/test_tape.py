"""The tape must behave as a CUDA graph: frozen numbers, the same memory, and no host in it."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hf_kvret.testing.tape import CaptureError, TapeRecorder
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.paged import PagedRows


def _record(step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    return TapeRecorder(torch.device("cpu")).record(step)


def test_a_replay_works_in_the_same_memory_with_frozen_numbers() -> None:
    """Recording leaves memory as it was."""
    x, weight, counter = torch.arange(6.0).view(2, 3), torch.ones(3, 2), [0]
    total, column = torch.zeros(3), torch.tensor([1])

    def step() -> torch.Tensor:
        counter[0] += 1
        total.index_copy_(0, column, torch.ones(1))
        total.add_(1.0)
        return (x @ weight).relu().sum(-1) + counter[0]

    out, replay = _record(step)
    assert total.tolist() == [0.0, 0.0, 0.0]
    x.fill_(2.0)
    column.fill_(2)
    replay()
    assert total.tolist() == [1.0, 1.0, 2.0]
    replay()
    assert total.tolist() == [2.0, 2.0, 2.0]
    assert counter == [1] and out.tolist() == [13.0, 13.0]


def test_a_step_that_breaks_off_leaves_memory_as_it_was() -> None:
    total = torch.zeros(3)

    def step() -> None:
        total.add_(1.0)
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        _record(step)
    assert total.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.clone().masked_fill_(x > 0, 0.0)[x > 0],
        lambda x: torch.tensor([1.0, 2.0]),
        lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(torch.tensor([1, 2])),
        lambda x: torch.nn.functional.one_hot(x.long().abs()),
        lambda x: torch.histc(x),
        lambda x: torch.linalg.solve(x.diag(), x),
        lambda x: torch.multinomial(x.abs(), 1),
    ],
    ids=[
        *("item", "nonzero", "mask", "tensor", "equal", "repeats", "one_hot", "histc", "solve"),
        "multinomial",
    ],
)
def test_what_needs_the_host_is_refused(step: Callable[[torch.Tensor], Any]) -> None:
    x = torch.tensor([1.0, -1.0])
    for mode in (nullcontext, torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(CaptureError):
            _record(lambda: step(x))


def test_what_is_made_of_other_operations_is_replayed() -> None:
    x, weight = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    # In this mode they come whole.
    with torch.inference_mode():
        out, replay = _record(lambda: torch.nn.functional.linear(x, weight).reshape(-1)[1:3])
        limits = _record(lambda: torch.histc(x, 2, 0, 5))[0]
    x.fill_(2.0)
    replay()
    assert out.tolist() == [6.0, 6.0]
    assert limits.tolist() == [3.0, 3.0]


def test_kernels_of_the_interpreter_are_replayed_too() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 1, 16, generator=generator)
    rows = PagedRows(
        [torch.randn(2, 2, 8, 32, generator=generator)],
        torch.tensor([[1, 0]], dtype=torch.int32),
        16,
    )
    ids = torch.tensor([[[[0, 3, 9]], [[1, 15, -1]]]], dtype=torch.int32)
    rows.addresses()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return gather_attention(query, rows, ids, scale=0.3, backend="triton")

    (out, _), replay = _record(step)
    query.mul_(-2.0)
    ids[0, 0, 0, 1] = 12
    replay()
    assert torch.equal(out, step()[0])
    assert not torch.equal(out, torch.zeros_like(out))


def test_without_triton_operations_of_torch_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, module)
    # As where it is not installed: finding and importing it fail.
    monkeypatch.setitem(sys.modules, "triton", None)
    x = torch.arange(3.0)
    out, replay = _record(lambda: x + 1)
    x.fill_(4.0)
    replay()
    assert out.tolist() == [5.0, 5.0, 5.0]
