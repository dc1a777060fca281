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
    "groups": KernelShape(130, 2, 2, 2, 40, torch.float32, 20, 50, 20, 61, 5, 50),
    "drafts, holes and a soft cap": KernelShape(
        *(97, 1, 2, 2, 24, torch.float32, 30, 70, 7, 60, 3, 30),
        queries=2, value_dim=16, holes=0.3, softcap=5.0,
    ),
    "heads alone": KernelShape(70, 1, 2, 1, 16, torch.float32, 70, 9, 1, 70, 3, 70),
    "latents": KernelShape(66, 1, 1, 5, 160, torch.float32, 5, 40, 130, 33, 2, 13),
    "many heads": KernelShape(
        50, 1, 1, 9, 24, torch.float32, 33, 20, 64, 40, 2, 9, value_dim=8, holes=1.0
    ),
    "one token": KernelShape(1, 1, 2, 2, 8, torch.float32, 1, 1, 1, 1, 1, 1),
    "more than a block": KernelShape(1100, 1, 1, 1, 8, torch.float32, 60, 17, 33, 300, 3, 70),
}  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def has_kernel(case: dict[str, Any]) -> bool:
    """Torch is not compared with itself, and the library has some of the operations."""
    backend = case.get("where", ("triton",))[0]
    by_library = backend == "cpp" and "name" in case
    return backend != "naive" and not (by_library and not BY_NAME[case["name"]].compiled)


@pytest.mark.allowed(when=has_kernel)
@pytest.mark.factor("name", list(BY_NAME))
@pytest.mark.factor("shape", list(SHAPES))
@pytest.mark.factor("dtype", DTYPES)
@pytest.mark.factor("room", [0, 5])
def test_a_kernel_does_what_plain_torch_does(
    where: Place, name: str, shape: str, dtype: torch.dtype, room: int
) -> None:
    """Also out of buffers with room behind the tokens, where floats are NaN."""
    sizes = replace(SHAPES[shape], dtype=dtype)
    call = BY_NAME[name].prepare(sizes, Draw(torch.device(where[1]), 0, room))
    results, expected = call.run(where[0]), call.run("naive")
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype and one.device == other.device
    assert call.error(results, expected) <= call.tolerance
