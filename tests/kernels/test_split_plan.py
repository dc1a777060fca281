"""How many programs share a walk: the rule of all kernels that merge chunks."""

import pytest
import torch

pytest.importorskip("triton", reason="the rule stands beside Triton kernels")

from hf_kvret_kernels import _triton_shared
from hf_kvret_kernels._triton_shared import split_plan

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton_shared, "device_limits", lambda device: (8, 0))


@pytest.mark.parametrize("length", [0, 16, 17, 1000])
@pytest.mark.parametrize("splits", [None, 1, 50])
@pytest.mark.parametrize("programs", [1, 5])
def test_whole_blocks_cover_the_length(length: int, splits: int | None, programs: int) -> None:
    count, split_len = split_plan(length, 16, programs, CPU, waves=2, most=6, splits=splits)
    assert count >= 1 and split_len >= 16 and split_len % 16 == 0
    assert (count - 1) * split_len < max(1, length) <= count * split_len
    assert count <= (6 if splits is None else splits)


@pytest.mark.parametrize(
    ("programs", "least_len", "most", "count"),
    [
        *((1, None, 64, 16), (4, None, 64, 4), (16, None, 64, 1), (100, None, 64, 1)),
        *((1, None, 5, 5), (1, 640, 64, 10), (1, 10_000, 64, 1)),
    ],
)
def test_there_are_as_many_as_fill_the_device_and_are_worth_it(
    programs: int, least_len: int | None, most: int, count: int
) -> None:
    plan = split_plan(6400, 16, programs, CPU, waves=2, most=most, least_len=least_len)
    assert plan == (count, 6400 // count)
