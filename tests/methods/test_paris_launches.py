"""How many kernels a selection launches: counted in the interpreter, where nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_kvret import TokenBlock
from hf_kvret.methods.paris import ParisConfig, ParisIndex
from hf_kvret.testing.cold import cold_tokens
from hf_kvret_kernels._dispatch import interpreted, prefer

pytestmark = pytest.mark.skipif(
    not interpreted() or find_spec("triton") is None, reason="Triton's interpreter is off"
)
# They make a tensor and leave what is in it to others.
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


class TorchOps(TorchDispatchMode):
    """Names of the operations of torch that run a kernel: views and empty tensors don't."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func._schema.name
        views = name == "aten::_unsafe_view" or any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in func._schema.returns
        )
        if not views and name not in _EMPTY:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches(
    call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """Names of the Triton kernels and of the operations of torch that ``call`` runs."""
    from triton.runtime.interpreter import GridExecutor

    kernels: list[str] = []
    run = GridExecutor.__call__

    def count(self: GridExecutor, *args: object, **kwargs: object) -> object:
        kernels.append(self.fn.__name__)
        # What the interpreter does to run a kernel is none of the caller's operations.
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    with monkeypatch.context() as patch, prefer("triton"), TorchOps() as operations:
        patch.setattr(GridExecutor, "__call__", count)
        call()
    return kernels, operations.names


def selection_launches(
    monkeypatch: pytest.MonkeyPatch,
    options: ParisConfig,
    softcap: float | None = None,
    queries: int = 1,
) -> tuple[list[str], list[str]]:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 300, 16, generator=generator).bfloat16()
    query = torch.randn(1, queries, 4, 16, generator=generator).bfloat16().transpose(1, 2)
    index = ParisIndex(options)
    index.add(TokenBlock(keys, keys, 0))
    valid = torch.ones(1, 300, dtype=torch.bool)
    return launches(
        lambda: index.search(query, cold_tokens(valid, 0.125, 50, softcap)), monkeypatch
    )


def test_a_selection_is_five_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, operations = selection_launches(monkeypatch, ParisConfig())
    assert kernels == [
        "_bonus_kernel",
        "_collide_kernel",
        "_compact_kernel",
        "_rerank_kernel",
        "_best_kernel",
    ]
    assert operations == []


def test_a_large_budget_takes_three_launches_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As more than 4,096 of the best of all blocks do."""
    from hf_kvret_kernels.top_k import triton

    monkeypatch.setattr(triton, "_SIZES", ())
    kernels, operations = selection_launches(monkeypatch, ParisConfig())
    assert kernels[4:] == ["_count_kernel", "_border_kernel", "_compact_kernel"]
    assert operations == ["aten::zeros"]


@pytest.mark.parametrize(
    "options, softcap, queries",
    [(ParisConfig(), 30.0, 1), (ParisConfig.preset("paper"), None, 1), (ParisConfig(), None, 3)],
)
def test_a_cap_a_mean_of_queries_and_drafts_take_two_more(
    monkeypatch: pytest.MonkeyPatch, options: ParisConfig, softcap: float | None, queries: int
) -> None:
    """The mean key's part of a score, a mean over the group, drafted queries laid in order."""
    kernels, operations = selection_launches(monkeypatch, options, softcap, queries)
    assert len(kernels) == 5 and 1 <= len(operations) <= 2, operations


def test_what_is_counted_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 4)
    kernels, operations = launches(lambda: (x.t()[1:].reshape(-1)[:2] + 1).sum(), monkeypatch)
    assert kernels == [] and operations == ["aten::clone", "aten::add", "aten::sum"]
