"""How many kernels a selection launches: counted in the interpreter, where nothing is timed."""

from __future__ import annotations

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


def test_a_selection_is_five_launches_and_no_operation_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime.interpreter import GridExecutor

    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 100, 16, generator=generator).bfloat16()
    query = torch.randn(1, 4, 1, 16, generator=generator).bfloat16()
    index = ParisIndex(ParisConfig())
    index.add(TokenBlock(keys, keys, 0))
    cold = cold_tokens(torch.ones(1, 100, dtype=torch.bool), 0.125, 20)
    kernels: list[str] = []
    run = GridExecutor.__call__

    def count(self: GridExecutor, *args: object, **kwargs: object) -> object:
        kernels.append(self.fn.__name__)
        # The interpreter's own operations are none of the caller's.
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", count)
    with prefer("triton"), TorchOps() as operations:
        index.search(query, cold)
    stages = ("bonus", "collide", "compact", "rerank", "best")
    assert kernels == [f"_{stage}_kernel" for stage in stages]
    assert operations.names == []
