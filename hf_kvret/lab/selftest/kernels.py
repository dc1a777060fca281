"""Checks of the self-test: every operation beside its twin in plain torch, and rows on the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hf_kvret.lab.selftest.check import Check, Skip
from hf_kvret.stores.host_memory import pinned
from hf_kvret_kernels import host_library
from hf_kvret_kernels.catalog import (
    ATTENTION_ERRORS,
    OPERATIONS,
    Draw,
    KernelOp,
    KernelShape,
    distance,
)
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.paged import PagedRows

# The length is no multiple of a page or a tile, and several query heads share a KV head.
_SIZES: dict[str, Any] = {
    "length": 1_491, "batch": 2, "heads": 2, "group": 4, "head_dim": 128, "top_k": 200,
    "codewords": 256, "rank": 32, "candidates": 746, "centroids": 93, "listed": 500,
}  # fmt: skip
# Its rows take more than 4 MiB, from where on memory is pinned in huge pages.
_LONG = 20_000
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REMEDIES = {
    "paris": "another method than paris, as cache_implementation='flat'",
    "codebook": "another method than a2ats, as cache_implementation='paris'",
    "proxy": "another method than lrqk, as cache_implementation='paris'",
    "centroid": "another method than ctkvr, as cache_implementation='paris'",
    "higgs": "a store that codes nothing: store='device' or 'host', and no aqua",
    "resident": "another store than 'resident', as store='host'",
    "block_lse": "prompt='exact'",
}


def kernel_checks(device: torch.device) -> Iterator[Check]:
    """Each operation in each dtype, on a CPU with each instruction set of the library."""
    on_gpu, missing = device.type == "cuda", bool(host_library.why_not())
    paths = [None] if on_gpu or missing else [*host_library.paths()]
    for operation in OPERATIONS:
        group = operation.name.partition(".")[0]
        for name, dtype in _DTYPES.items():
            for path in paths:
                label = f"{operation.name}, {name}" + (f", {path}" if path else "")
                remedy = _REMEDIES.get(group, "cache_implementation='dynamic'")
                if path is not None:
                    remedy = f"{host_library.ISA_VARIABLE}={_other(path, paths)}"
                yield Check(
                    "kernels", label, partial(_compare, operation, dtype, device, path), remedy
                )


def _other(path: str | None, paths: list[Any]) -> str:
    """An instruction set that is not this one, or the way without the library."""
    return next((each for each in reversed(paths) if each != path), "portable")


@torch.inference_mode()
def _compare(
    operation: KernelOp, dtype: torch.dtype, device: torch.device, path: str | None
) -> str:
    check_dtype(dtype, device)
    if operation.backends(device)[0] == "naive":
        reason = host_library.why_not() if operation.compiled else None
        raise Skip(reason or "plain torch does this on a CPU")
    call = operation.prepare(KernelShape(dtype=dtype, **_SIZES), Draw(device, 0))
    with _instructions(path):
        own = call.run(operation.backends(device)[0])
    error = call.error(own, call.run("naive"))
    if not error <= call.tolerance:
        raise AssertionError(f"error {error:.2g}, at most {call.tolerance:.2g} is rounding")
    return f"error {error:.1g}"


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Skip where a GPU has no arithmetic in bf16, as before compute capability 8.0."""
    if dtype == torch.bfloat16 and device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        if major < 8:
            raise Skip("this GPU has no bf16: load models in fp16 or fp32")


@contextmanager
def _instructions(path: str | None) -> Iterator[None]:
    """Have the compiled library take the code of an instruction set."""
    before = os.environ.get(host_library.ISA_VARIABLE)
    if path is not None:
        os.environ[host_library.ISA_VARIABLE] = path
    try:
        yield
    finally:
        if path is not None:
            os.environ.pop(host_library.ISA_VARIABLE)
            if before is not None:
                os.environ[host_library.ISA_VARIABLE] = before


def host_row_checks(device: torch.device) -> Iterator[Check]:
    """Attention to rows in pinned host memory, which the GPU reads by their addresses."""
    for length in (_SIZES["length"], _LONG):
        yield Check(
            "memory",
            f"rows on the host, {length:,} tokens",
            partial(_attend_host_rows, device, length),
            "store='device', or 'cpu'",
        )


@torch.inference_mode()
def _attend_host_rows(device: torch.device, length: int) -> str:
    if device.type != "cuda":
        raise Skip("a GPU reads rows over the bus, and none is tested")
    shape = KernelShape(dtype=torch.bfloat16, **_SIZES | {"length": length})
    query, same, ids = Draw(device, 0).chosen_rows(shape)
    # Two chunks of the memory that stores use, of which neither ends with a huge page.
    chunks = []
    for part in same.chunks[0].tensor_split([same.chunks[0].shape[0] // 3]):
        chunk = pinned(tuple(part.shape), part.dtype, torch.cuda.current_stream(device))
        chunks.append(chunk.copy_(part))
    rows = PagedRows(chunks, same.table, same.key_dim)
    own = gather_attention(query, rows, ids, scale=shape.scale)
    error = distance(own, gather_attention(query, same, ids, scale=shape.scale, backend="naive"))
    if not error <= ATTENTION_ERRORS[shape.dtype]:
        raise AssertionError(f"error {error:.2g}, at most {ATTENTION_ERRORS[shape.dtype]:.2g}")
    return f"error {error:.1g}"
