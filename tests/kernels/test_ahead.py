"""What is compiled ahead is what Triton itself looks up when there are more tokens.

The compiler does not run: a kernel that it is asked for is written down, and nothing is launched.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

# Kernels that are asked for when there are three times as many tokens, and then 40 times.
BEST, SPLIT = ["_best_kernel"], ["_border_kernel", "_count_kernel"]
LATER = {
    "places": [*BEST, *SPLIT],
    "ids of groups": [*BEST, *SPLIT],
    "places of groups": [],
    "candidates": ["_rank_kernel", *BEST],
    # Windows of more than one chunk, and one with a mask.
    "windows": ["_finish_kernel"] * 2,
}


@pytest.fixture(scope="module")
def asked_for() -> dict[str, Any]:
    """By operation, and then by whether there is compiling ahead: kernels of each step."""
    pytest.importorskip("triton", reason="Triton compiles on Linux only")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("operation", LATER)
def test_no_kernel_is_asked_for_later(operation: str, asked_for: dict[str, Any]) -> None:
    without, ahead = asked_for[operation]
    first, *later = ahead
    assert later == [[]] * len(later)
    late = [name for step in without[1:] for name in step]
    assert sorted(late) == sorted(LATER[operation])
    # Not one more than is needed.
    assert sorted(first) == sorted(without[0] + late)


def test_a_kernel_that_is_refused_is_an_error(asked_for: dict[str, Any]) -> None:
    assert asked_for["refused"] == "RuntimeError: too much shared memory"


class _Compiled:
    """In the place of a kernel."""

    refuses = False

    def __getitem__(self, grid: object) -> None:
        if self.refuses:
            raise RuntimeError("too much shared memory")


def _list_instead_of_compiling(names: list[str]) -> None:
    sys.path.append(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
    from machine_code import NamedTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NamedTarget(90))
    run = JITFunction.run

    def listed(self: Any, key: Any, signature: Any, device: int, *more: Any) -> _Compiled:
        names.append(self.fn.__name__)
        made = self.device_caches[device][0][key] = _Compiled()
        return made

    @functools.wraps(run)
    def only_look_up(self: Any, *args: object, warmup: bool, **kwargs: object) -> object:
        return run(self, *args, warmup=True, **kwargs)

    JITFunction._do_compile, JITFunction.run = listed, only_look_up


def _operations() -> Iterator[tuple[str, int, Any, list[Callable[[], object]]]]:
    """Name, tokens more, windows, and calls with ever more tokens."""
    from hf_kvret_kernels._dispatch import DenseCall, Window
    from hf_kvret_kernels.merge import Partials
    from hf_kvret_kernels.paris import ParisCodes, SearchCall, triton as paris
    from hf_kvret_kernels.relevance import triton as relevance
    from hf_kvret_kernels.step_attention import triton as step
    from hf_kvret_kernels.top_k import triton as top_k

    scores = [torch.zeros(1, 2, 1, 4, length) for length in (1000, 3000, 40_000)]
    ids = [torch.zeros(1, 2, 1, each.shape[-1]).int() for each in scores]
    choices: dict[str, list[Callable[[], object]]] = {
        "places": [partial(top_k.top_k, each[..., 0, :], 1000) for each in scores],
        "ids of groups": [
            partial(relevance.best_ids, *pair, 1000) for pair in zip(scores, ids, strict=True)
        ],
        "places of groups": [
            partial(relevance.top_indices, each.view(1, 8, 1, -1), 2, 1000) for each in scores
        ],
    }
    room = ParisCodes.empty(1, 2, 40_000, 32)
    codes = [room.tokens(0, each.shape[-1]) for each in scores]
    counts, levels = torch.zeros(1, 2, 4, 256, dtype=torch.int32), torch.zeros(8)
    query, options = torch.zeros(1, 2, 1, 4, 32), ((1,), None, 1.0, None, None, 1, None)
    searches = (
        SearchCall(query, None, each, counts, levels, 200, each.sign.shape[2], *options)
        for each in codes
    )
    choices["candidates"] = [partial(paris.search, call) for call in searches]
    for name, calls in choices.items():
        yield name, 39_000, (), calls
    half = torch.bfloat16
    query, buffer = torch.zeros(2, 8, 1, 128, dtype=half), torch.zeros(2, 2, 800, 128, dtype=half)
    others = Partials(torch.zeros(2, 8, 1, 4, 128), torch.zeros(2, 8, 1, 4))
    mask = torch.ones(2, 800, dtype=torch.bool)
    lengths = (60, *range(130, 800, 67), 800)
    windows = (*((length, False) for length in lengths), (800, True))
    dense = [
        DenseCall(
            *(query, buffer[:, :, :tokens], buffer[:, :, :tokens], 0.1, None),
            *(mask[:, :tokens] if masked else None, None),
        )
        for tokens, masked in windows
    ]
    steps = [partial(step.step_attention, call, others, None, None, None, half) for call in dense]
    yield "windows", 0, tuple(Window(*each) for each in windows), steps


def _main() -> dict[str, Any]:
    from triton.runtime.jit import JITFunction

    from hf_kvret_kernels import _dispatch as dispatch

    names: list[str] = []
    _list_instead_of_compiling(names)
    kernels: set[Any] = set()
    run = JITFunction.run

    def known(self: Any, *args: object, **kwargs: object) -> object:
        kernels.add(self)
        return run(self, *args, **kwargs)

    JITFunction.run = known
    results: dict[str, Any] = {}

    def taken() -> list[str]:
        asked = names.copy()
        names.clear()
        return asked

    for name, more, windows, calls in _operations():
        results[name] = []
        for growth in (None, dispatch.Growth(more, (), windows)):
            for kernel in kernels:
                kernel.device_caches.clear()
            if growth is None:
                calls[0]()
            else:
                with dispatch.growing(growth):
                    calls[0]()
            steps = [taken()]
            for call in calls[1:]:
                call()
                steps.append(taken())
            results[name].append(steps)
    _Compiled.refuses = True
    try:
        with dispatch.growing(growth):
            calls[0]()
    except RuntimeError as error:
        results["refused"] = f"RuntimeError: {error}"
    return results


if __name__ == "__main__":
    print(json.dumps(_main()))
