"""Shared by all tests: Triton's interpreter where there is no GPU, and places to run a kernel."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

# Triton reads this when a kernel is defined, so it is set before any test imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Launch numbers that somebody tuned on this machine are not those under test.
os.environ["HF_KVRET_TUNING"] = tempfile.mkdtemp(prefix="hf_kvret_tuning_")


@pytest.fixture(
    params=[
        pytest.param(("naive", "cpu"), id="naive-cpu"),
        pytest.param(("triton", "cpu"), id="triton-cpu"),
        pytest.param(("triton", "cuda"), id="triton-cuda", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """``(backend, device)`` of a kernel: torch, Triton's interpreter, Triton on a GPU."""
    backend, device = request.param
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if device == "cuda" and interpreting:
        pytest.skip("TRITON_INTERPRET=1 is set: no kernel is compiled")
    if backend == "triton" and device == "cpu" and not interpreting:
        pytest.skip(
            "Triton runs on the CPU with TRITON_INTERPRET=1 only; the GPU is tested instead"
        )
    return backend, device


@pytest.fixture
def temporaries() -> Callable[[Callable[[], object]], int]:
    """``work -> bytes``: the most that ``work`` allocated on the CPU above what it left.

    Of torch's allocator, so also within an operation; the same every time.
    """

    def measure(work: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
        results = profiler.profiler.kineto_results
        events = [event for event in results.events() if event.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        return most - max(0, held)

    return measure


@pytest.fixture(scope="session")
def artifact_options(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], dict[str, str]]:
    """``(method, model of the zoo)`` -> the options that name its artifact, if it needs one."""
    # Imported here, because the lines above must come before any module with a kernel.
    from hf_kvret import registered_methods
    from hf_kvret.testing import MODELS, tiny_artifact

    made: dict[tuple[str, str], str] = {}

    def find(method: str, model: str) -> dict[str, str]:
        if not registered_methods()[method].needs_artifact:
            return {}
        if (method, model) not in made:
            folder = tmp_path_factory.mktemp(f"{method}-{model}")
            made[method, model] = tiny_artifact(MODELS[model].build(), method, folder)
        return {"artifact": made[method, model]}

    return find
