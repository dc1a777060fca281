"""The table of operations: each kernel, with each instruction set, does what plain torch does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_kvret_kernels.catalog import OPERATIONS, Draw, KernelShape

from .draws import Place

BY_NAME = {operation.name: operation for operation in OPERATIONS}
SHAPES = {
    "groups": KernelShape(200, 2, 2, 3, 40, torch.float32, 20, 50, 20, 61, 12, 50),
    "holes": KernelShape(
        197, 2, 2, 3, 40, torch.float32, 30, 50, 7, 130, 9, 30, holes=0.3, softcap=5.0
    ),
    "heads alone": KernelShape(150, 2, 2, 1, 16, torch.float32, 150, 9, 1, 150, 9, 150),
    "latents": KernelShape(140, 1, 1, 9, 192, torch.float32, 5, 130, 130, 70, 8, 13),
    "one token": KernelShape(1, 1, 2, 2, 8, torch.float32, 1, 3, 2),
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
