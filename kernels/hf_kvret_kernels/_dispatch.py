"""Which implementation of an operation runs, the checks that all wrappers share, and warm-up.

A kernel is compiled again where an argument that it is compiled for changes, which takes seconds.
Some of these arguments follow the number of tokens. Within ``growing`` an operation that launches
such a kernel also compiles what it would launch for more tokens: with the arguments at hand, so
that these count as they will, but for those that change.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, Self, cast

import torch

Backend = Literal["naive", "triton"]
BACKENDS = ("auto", "naive", "triton")
"""Some operations have ``"cpp"`` and ``"host"``, see ``host_library.is_asked``."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SHORT_NAMES = dict(zip(FLOATS, ("fp32", "fp16", "bf16"), strict=True))
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


def run(
    package: str,
    name: str,
    backend: str,
    *arguments: Any,
    on: torch.Tensor | None = None,
    triton: str = "triton",
) -> Any:
    """What the function ``name`` of ``package.naive``, or of its module ``triton``, returns.

    Which module it is says ``choose_backend``, whose errors there are. Triton is imported when it
    is needed, and launches on the device of ``on``, the first argument where it is not given.
    """
    on = arguments[0] if on is None else on
    module_name = triton if choose_backend(backend, on) == "triton" else "naive"
    module = importlib.import_module(f"{package}.{module_name}")
    with launching_on(on):
        return getattr(module, name)(*arguments)


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


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Refuse a tensor of another shape, dtype or device; None allows any size, or any device.

    Raises:
        ValueError: what the tensor is, and what it should be.
    """
    fits = tensor.shape == shape or (
        tensor.ndim == len(shape)
        and all(size in (None, own) for size, own in zip(shape, tensor.shape, strict=True))
    )
    device = tensor.device if device is None else device
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        names = " or ".join(_SHORT_NAMES.get(each, str(each)[6:]) for each in dtypes)
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: pass {names} "
            f"[{sizes}] on {device}"
        )


def check_valid(
    valid: torch.Tensor | None, shape: tuple[int, int | None], device: torch.device
) -> None:
    """Refuse a mask of tokens that is not bool ``[B, n]`` on the device; None is for no mask."""
    if valid is not None:
        check_tensor("valid", valid, shape, (torch.bool,), device)


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
        if tensor.dtype not in FLOATS:
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


class DenseCall(NamedTuple):
    """Arguments of attention to dense keys, as of ``prompt_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    causal_offset: int | None
    valid: torch.Tensor | None
    softcap: float | None

    def check(self) -> Self:
        """The same call.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit, gradients, a cap that is no cap.
        """
        query, key, value = self.query, self.key, self.value
        check_attention_inputs(query=query, key=key, value=value)
        batch, heads, _, width = query.shape
        if (
            key.shape[0] != batch
            or key.shape[3] != width
            or value.shape[:3] != key.shape[:3]
            or not key.shape[1]
            or heads % key.shape[1]
        ):
            raise ValueError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)} do not fit: pass [B, Hq, Q, Dk], [B, Hkv, T, Dk] and "
                "[B, Hkv, T, Dv], Hq a multiple of Hkv"
            )
        check_valid(self.valid, (batch, key.shape[2]), query.device)
        check_softcap(self.softcap)
        return self


class Window(NamedTuple):
    """A window to attend to.

    Attributes:
        tokens: in it.
        masked: whether there is a mask of valid ones, whose rows then begin at multiples of 16.
        appends: whether the newest token is written on the way.
    """

    tokens: int
    masked: bool
    appends: bool = False


class Growth(NamedTuple):
    """What steps to come may have to do with.

    Attributes:
        more: candidates of a choice, at most, beside those that there are now.
        counts: numbers of tokens to choose, the present one among them, ascending.
        windows: in any order.
    """

    more: int
    counts: tuple[int, ...]
    windows: tuple[Window, ...]

    def choices(self, length: int, count: int) -> list[tuple[int, int]]:
        """``(length, count)`` of choices to come, which now are of ``count`` from ``length``.

        Lengths go by doubles: what is launched depends on their size, not on their value.
        """
        lengths = [length]
        while lengths[-1] < length + self.more:
            lengths.append(min(2 * max(1, lengths[-1]), length + self.more))
        counts = {count, *(each for each in self.counts if each > count)}
        return [(one, each) for one in lengths for each in sorted(counts) if each <= one]


_growth: ContextVar[Growth | None] = ContextVar("growth", default=None)


@contextmanager
def growing(growth: Growth) -> Iterator[None]:
    """Context in which operations compile what ``growth`` will ask for; not within a capture."""
    token = _growth.set(growth)
    try:
        yield
    finally:
        _growth.reset(token)


def growth() -> Growth | None:
    """What kernels are warmed up for; None: nothing."""
    return _growth.get()


def warm_up(kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Compile what ``kernel[grid](*arguments, **constants)`` would launch, and load it.

    Once a process: Triton keeps what it has compiled. A dtype among ``arguments`` is for a pointer
    to numbers of it that begin at a multiple of 16 bytes. Raises what the launch would raise.
    """
    compiled = kernel.warmup(*arguments, grid=(1, 1, 1), **constants)
    if compiled is not None:
        # Asking for a launcher loads it, so that no later capture has to. The interpreter has none.
        compiled[1, 1, 1]
