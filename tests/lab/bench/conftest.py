"""The bench command on the CPU, and the models it measures in tests."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.cli import main
from hf_kvret.lab.bench import timing
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.report.results import Results
from hf_kvret.methods.flat import FlatIndex

Change = Callable[[torch.Tensor], torch.Tensor]


def newer_half(ids: torch.Tensor) -> torch.Tensor:
    """Ids ``[..., k]`` without those of the older half."""
    return ids.masked_fill(ids < ids.shape[-1] // 2, -1)


def nothing(ids: torch.Tensor) -> torch.Tensor:
    """As many ids of no token."""
    return torch.full_like(ids, -1)


def find_only(keep: Change, patch: pytest.MonkeyPatch) -> None:
    """From now on ``flat`` finds only what ``keep`` leaves of its ids."""

    class Lossy(FlatIndex):
        def search(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return keep(super().search(*args, **kwargs))

    patch.setattr(FlatKVCache, "make_index", classmethod(lambda cls, options, layer: Lossy()))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth over 4 MiB: quick, and nothing here looks at how true it is."""
    monkeypatch.setattr(timing, "_CPU_BYTES", 1 << 22)


@pytest.fixture
def bench() -> Callable[..., int]:
    """``bench("decode", "--context", "1K")`` runs the command and returns its exit status."""

    return lambda *arguments: main(["bench", *arguments, "--device", "cpu"])


@pytest.fixture
def measure(bench: Callable[..., int], tmp_path: Path) -> Callable[..., Results]:
    """As ``bench`` for arguments that succeed; returns the results."""
    numbers = itertools.count()

    def run(*arguments: str) -> Results:
        file = tmp_path / f"results-{next(numbers)}.json"
        assert bench(*arguments, "--json", str(file)) == 0
        return Results.load(file)

    return run


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """A model of the tiny shape: two layers, two KV heads of 64, fp32."""
    return random_model(load_shape("tiny").config, torch.float32, "cpu", seed=0)
