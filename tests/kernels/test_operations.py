"""The table of operations: each kernel, with each instruction set, does what plain torch does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_kvret.lab.bench.kernel_ops import OPERATIONS
from hf_kvret.lab.bench.kernel_work import Draw, KernelShape

from .draws import Place

BY_NAME = {operation.name: operation for operation in OPERATIONS}
SHAPES = {
    "groups": KernelShape(200, 2, 2, 3, 40, torch.float32, 20, codewords=50, rank=20),
    "heads alone": KernelShape(150, 2, 2, 1, 16, torch.float32, 150, codewords=9, rank=1),
    "latents": KernelShape(140, 1, 1, 9, 192, torch.float32, 5, codewords=130, rank=130),
}


def has_kernel(case: dict[str, Any]) -> bool:
    """The library has some of the operations."""
    by_library = case.get("where", ("",))[0] == "cpp"
    return not by_library or "name" not in case or BY_NAME[case["name"]].compiled


@pytest.mark.allowed(when=has_kernel)
@pytest.mark.factor("name", list(BY_NAME))
@pytest.mark.factor("shape", list(SHAPES))
@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_does_what_plain_torch_does(
    where: Place, name: str, shape: str, dtype: torch.dtype
) -> None:
    sizes = replace(SHAPES[shape], dtype=dtype)
    call = BY_NAME[name].prepare(sizes, Draw(torch.device(where[1]), 0))
    assert call.error(call.run(where[0]), call.run("naive")) <= call.tolerance
