"""How much of our Python code a decode step runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hf_kvret
from hf_kvret.models.versions import as_argument
from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import prefer

from .replay.steps import small_llama

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(str(ROOT / name) for name in ("hf_kvret", "kernels", "model_patches"))
LAYERS = 4


class Calls:
    """Calls of our functions in a body, but for those within a launch of Triton's interpreter.

    Attributes:
        files: in which they stand.
        count: of the calls.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.count = self._launches = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Of ``sys.setprofile``."""
        code = frame.f_code
        if code.co_qualname == "GridExecutor.__call__":
            self._launches += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not self._launches and code.co_filename.startswith(OURS):
            self.files.add(str(Path(code.co_filename).relative_to(ROOT)))
            self.count += 1


@contextmanager
def recording() -> Iterator[Calls]:
    calls = Calls()
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def calls_of_a_step(backend: str | None, layers: int = LAYERS) -> Calls:
    """Of a step of ``paris`` between two flushes, in a loop of one's own."""
    model = small_llama(layers)
    options = {"top_k": 4, "recent": 4, "flush": 8, "dense_below": 0}
    cache = hf_kvret.ParisKVCache(model.config, **options)
    token, argument = torch.tensor([[5]]), as_argument(cache)
    preference = nullcontext() if backend is None else prefer(backend)
    with torch.inference_mode():
        model(torch.randint(64, (1, 24)), **argument)
        model(token, **argument)
    with torch.inference_mode(), preference:
        model(token, **argument)
        with recording() as calls:
            model(token, **argument)
    assert cache.stats()["layers"][0]["steps"] == 3, "the step retrieves"
    return calls


@pytest.mark.skipif(bool(host_library.why_not()), reason="needs the compiled library")
def test_a_step_on_a_cpu_runs_few_files_and_calls() -> None:
    calls = calls_of_a_step(None)
    assert len(calls.files) <= 11, "\n".join(sorted(calls.files))
    assert calls.count <= 30 * LAYERS


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches of the interpreter")
def test_a_step_of_kernels_runs_few_files() -> None:
    calls = calls_of_a_step("triton", layers=1)
    # Half of them are of kernels: two or three an operation.
    assert len(calls.files) <= 26, "\n".join(sorted(calls.files))
