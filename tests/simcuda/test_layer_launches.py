"""How many kernels a layer launches in a captured step, by method and store."""

from itertools import product
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvret.layer.layer import RetrievalLayer

from ..simulated_gpu.simulation import active
from .cases import Case, run

pytest.importorskip("triton")

# Each pair counts kernels of ours and operations of torch.
LAUNCHES = {
    # Three search, one attends to the rows found, and one to the window.
    **dict.fromkeys(product(("paris", "flat", "lrqk"), ("device", "host", "higgs")), (5, 0)),
    # This store maps slots, and fetches rows.
    ("paris", "resident"): (7, 0),
}
QUICK = ("paris", "device")


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


@pytest.mark.parametrize(
    ("method", "store"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in LAUNCHES],
)
def test_a_layer_launches_so_many_kernels(
    method: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the row of the new token, which the model has made, to the attention's output."""
    attend, counts = RetrievalLayer.attend, set()

    def counted(layer: RetrievalLayer, *arguments: Any) -> Any:
        gpu = active()
        if gpu.capture is None:
            return attend(layer, *arguments)
        before = gpu.launches.total()
        with TorchOps() as operations:
            result = attend(layer, *arguments)
        counts.add((gpu.launches.total() - before, len(operations.names)))
        return result

    monkeypatch.setattr(RetrievalLayer, "attend", counted)
    run(Case(method, store, "graph", steps=4, layers=1))
    assert counts == {LAUNCHES[method, store]}
