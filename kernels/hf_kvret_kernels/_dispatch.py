"""Which implementation of an operation runs, and checks that all wrappers share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Literal, cast

import torch

Backend = Literal["naive", "triton"]
BACKENDS = ("auto", "naive", "triton")
PREFERRED: ContextVar[Backend | None] = ContextVar("preferred", default=None)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def prefer(backend: str) -> Iterator[None]:
    """Context in which ``"auto"`` means ``backend``, on every device.

    With ``"triton"`` and Triton's interpreter, whole models run on a CPU through the kernels that
    a GPU would run. For tests and counts; nothing gets faster by it.

    Raises:
        ValueError: an unknown backend, or ``"auto"``.
    """
    if backend not in BACKENDS or backend == "auto":
        raise ValueError(f"backend={backend!r}: prefer one of {', '.join(BACKENDS[1:])}")
    token = PREFERRED.set(cast(Backend, backend))
    try:
        yield
    finally:
        PREFERRED.reset(token)


def preferred() -> Backend | None:
    """The backend that ``"auto"`` means here, where ``prefer`` says so."""
    return PREFERRED.get()


def choose_backend(backend: str, tensor: torch.Tensor) -> Backend:
    """The backend for ``tensor``: ``"naive"`` (torch) or ``"triton"``.

    Args:
        backend: ``"auto"`` (Triton for CUDA tensors, else torch; inside ``prefer`` what that
            says), ``"naive"`` or ``"triton"``.
        tensor: any tensor of the operation; only its device is looked at.

    Raises:
        ValueError: an unknown backend, or Triton for a tensor that is not on a CUDA device while
            the interpreter is off.
        ImportError: Triton was chosen and is not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = preferred() or ("triton" if tensor.is_cuda else "naive")
    if backend == "triton":
        if not tensor.is_cuda and not interpreted():
            raise ValueError(
                f"backend='triton' with a tensor on {tensor.device}: move the tensors to a CUDA "
                "device, use backend='naive', or set TRITON_INTERPRET=1 before triton is imported"
            )
        if importlib.util.find_spec("triton") is None:
            raise ImportError(
                "the Triton kernels need triton>=3.6, which is not installed: pip install triton, "
                "or pass backend='naive'"
            )
    return cast(Backend, backend)


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Context in which Triton launches kernels on the device of ``tensor``, not the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_no_grad(**tensors: torch.Tensor) -> None:
    """Refuse tensors that a backward pass would have to go through.

    Raises:
        ValueError: gradients are enabled and a tensor requires them.
    """
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                raise ValueError(
                    f"{name} requires gradients, which this kernel cannot give: run under "
                    "torch.no_grad(), or detach it"
                )


def check_softcap(softcap: float | None) -> None:
    """Refuse a soft cap that caps nothing; None is for no cap.

    Raises:
        ValueError: 0 or below.
    """
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: pass a positive number, or None for no cap")


def check_attention_inputs(**tensors: torch.Tensor) -> None:
    """Check that query, key, value and the like agree and have a dtype that kernels know.

    Raises:
        ValueError: dtypes or devices differ, a dtype is not float32, float16 or bfloat16, a
            tensor is not 4D, its last dimension is not contiguous, or it requires gradients.
    """
    check_no_grad(**tensors)
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: pass [B, H, T, D]")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{name} is {tensor.dtype}: cast it to float32, float16 or bfloat16")
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, {first_name} is {first.dtype} on "
                f"{first.device}: cast and move them to the same"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
            raise ValueError(
                f"{name} has strides {tensor.stride()}: its last dimension must be contiguous, "
                f"pass {name}.contiguous()"
            )
