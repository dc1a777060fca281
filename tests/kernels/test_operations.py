"""The table of operations: each kernel, with each instruction set, does what plain torch does."""

from dataclasses import replace

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


def check(where: Place, name: str, shape: str, dtype: torch.dtype, room: int) -> None:
    """Results are those of torch, also out of buffers whose room behind the tokens is NaN."""
    sizes = replace(SHAPES[shape], dtype=dtype)
    call = BY_NAME[name].prepare(sizes, Draw(torch.device(where[1]), 0, room))
    results, expected = call.run(where[0]), call.run("naive")
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype and one.device == other.device
    assert call.error(results, expected) <= call.tolerance


@pytest.mark.allowed(when=lambda case: case.get("place", ("triton",))[0] == "triton")
@pytest.mark.factor("name", list(BY_NAME))
@pytest.mark.factor("shape", list(SHAPES))
@pytest.mark.factor("dtype", DTYPES)
@pytest.mark.factor("room", [0, 5])
def test_triton_does_what_plain_torch_does(
    place: Place, name: str, shape: str, dtype: torch.dtype, room: int
) -> None:
    check(place, name, shape, dtype, room)


@pytest.mark.allowed(when=lambda case: case.get("where", ("cpp",))[0] == "cpp")
@pytest.mark.factor("name", [name for name, operation in BY_NAME.items() if operation.compiled])
@pytest.mark.factor("shape", list(SHAPES))
@pytest.mark.factor("dtype", DTYPES)
@pytest.mark.factor("room", [0, 5])
def test_the_library_does_what_plain_torch_does(
    where: Place, name: str, shape: str, dtype: torch.dtype, room: int
) -> None:
    check(where, name, shape, dtype, room)
