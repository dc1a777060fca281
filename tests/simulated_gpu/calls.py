"""Calls of torch that name a device, or ask a tensor for its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hf_kvret.replay.compiled_layers import attend_now

from .operations import request
from .simulation import CPU, active, tensors_in
from .streams import Stream, begin_work, current_stream, device_named

_T = torch.Tensor
# Without a device they make tensors on the CPU, whatever the call around them asks for.
_FACTORIES = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.rand, torch.randn,
    torch.randint, torch.tensor, torch.as_tensor, torch.linspace, torch.eye, torch.empty_strided,
    torch.frombuffer, torch.from_numpy, torch.scalar_tensor,
}  # fmt: skip


class Calls(TorchFunctionMode):
    """Answers for the device while it is entered, and takes ``device=`` out of calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.hf_kvret.attend.default:
            # Operations within it are followed, too.
            with self:
                return attend_now(*args)
        answer = _ATTRIBUTES.get(func)
        if answer is not None:
            return answer(*args)
        cls = _kind_with_calls_of_its_own(func, args)
        if cls is not None:
            request.call = func, args[0]
            with self:
                return cls.__torch_function__(func, types, args, kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return handler(*args, **kwargs)
        pinned = kwargs.pop("pin_memory", False)
        location = _asked_for(func, args, kwargs)
        if (
            func in (torch.tensor, torch.as_tensor)
            and location is not None
            and location.type == "cuda"
        ):
            return _numbers_to(location, func, args, kwargs)
        before, request.device = request.device, location
        try:
            out = func(*args, **kwargs)
        finally:
            request.device = before
        if pinned:
            for tensor in tensors_in(out):
                active().pin(tensor)
        return out


def _kind_with_calls_of_its_own(func: Any, args: tuple[Any, ...]) -> Any:
    """The class of a call's first argument, if it takes calls, and has not taken this one yet."""
    cls = type(args[0]) if args and isinstance(args[0], torch.Tensor) else torch.Tensor
    taken, of = request.call
    if taken is func and of is args[0]:
        request.call = None, None
        return None
    plain = (_T.__torch_function__, torch._C._disabled_torch_function_impl)
    return None if cls.__torch_function__ in plain else cls


def _asked_for(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Where new tensors go; a GPU is taken out of ``kwargs``."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "meta":
        kwargs["device"] = CPU
        return device_named(device)
    if func in _FACTORIES:
        return None
    if getattr(func, "__name__", "") == "__setitem__" and isinstance(args[0], torch.Tensor):
        own, value = active().device_of(args[0]), args[2]
        elsewhere = isinstance(value, torch.Tensor) and active().device_of(value) != own
        return None if elsewhere and value.dim() else own
    return request.device or _device_among(args)


def _device_among(args: tuple[Any, ...]) -> torch.device | None:
    """The first GPU that a tensor of a call lies on: what torch makes meanwhile lies there."""
    locations = (active().device_of(tensor) for tensor in tensors_in(args))
    return next((location for location in locations if location.type == "cuda"), None)


def _numbers_to(
    location: torch.device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """``torch.tensor`` with a GPU for its device: the host makes numbers and waits for a copy."""
    before, request.device = request.device, None
    try:
        values: torch.Tensor = func(*args, **kwargs)
        if isinstance(args[0], torch.Tensor) and active().device_of(args[0]) == location:
            return values
        request.device = location
        out = torch.empty_like(values)
    finally:
        request.device = before
    active().wait_for(begin_work(current_stream(location)).seen, "torch.tensor with device=")
    with _disable_current_modes():
        out.copy_(values)
    return out


def _moved(
    tensor: torch.Tensor,
    device: torch.device | None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    options: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
    if device is not None and device.type == "meta":
        with torch._C.DisableTorchFunction():
            return tensor.to("meta")
    new_dtype = dtype or tensor.dtype
    if device is None or device == active().device_of(tensor):
        with torch._C.DisableTorchFunction():
            return tensor.to(dtype=new_dtype, copy=copy, **options)
    source = tensor if new_dtype == tensor.dtype else _moved(tensor, None, new_dtype)
    before, request.device = request.device, device
    try:
        out = torch.empty_like(source, **options)
    finally:
        request.device = before
    out.copy_(source, non_blocking=non_blocking)
    return out


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    device = None if device is None else device_named(device)
    flags = []
    for value in (*args, kwargs.pop("other", None)):
        if isinstance(value, torch.Tensor):
            device, dtype = active().device_of(value), value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif value is not None:
            device = device_named(value)
    named: dict[str, Any] = dict(zip(("non_blocking", "copy"), flags, strict=False))
    return _moved(tensor, device, dtype, **named, **kwargs)


def _cpu(tensor: torch.Tensor, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    return _moved(tensor, CPU, memory_format=memory_format)


def _cuda(
    tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> torch.Tensor:
    return _moved(tensor, device_named(device), non_blocking=non_blocking, **kwargs)


def _read(tensor: torch.Tensor, what: str) -> None:
    """The host reads all of ``tensor``."""
    simulation = active()
    location = simulation.device_of(tensor)
    if location.type == "cuda":
        simulation.wait_for(begin_work(current_stream(location)).seen, what)
    else:
        simulation.access(simulation.host(), [tensor], False, what)


def _tolist(tensor: torch.Tensor) -> Any:
    _read(tensor, "tolist")
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.tolist()


def _numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    location = active().device_of(tensor)
    if location.type == "cuda":
        raise TypeError(
            f"can't convert {location} device type tensor to numpy: use Tensor.cpu() first"
        )
    _read(tensor, "numpy")
    with torch._C.DisableTorchFunction():
        return tensor.numpy(*args, **kwargs)


def _array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _numpy(tensor).__array__(*args, **kwargs)


def _repr(tensor: torch.Tensor, **kwargs: Any) -> str:
    """The host waits for the numbers, as ``print`` has them."""
    location = active().device_of(tensor)
    if location.type != "cuda":
        return _T.__repr__(tensor, **kwargs)
    if tensor.numel():
        _read(tensor, "repr")
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        text = _T.__repr__(tensor, **kwargs)
    return f"{text.removesuffix(')')}, device='{location}')"


def _format(tensor: torch.Tensor, form: str) -> str:
    if tensor.dim() == 0:
        # It is formatted as a number.
        return _T.__format__(tensor, form)
    with Calls():
        text = str(tensor)
    return object.__format__(text, form)


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        copy = _moved(tensor.detach(), None, copy=True)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
    twin: torch.Tensor = memo[id(tensor)]
    return twin


def _pin_memory(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    out = tensor.clone()
    active().pin(out)
    return out


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """In place of ``torch.Tensor.record_stream``, whose arguments are looked at before any mode."""
    active().log_of(tensor).used_by.add(stream.agent.name)


def _getter(name: str) -> Any:
    return getattr(_T, name).__get__


def _place(tensor: torch.Tensor) -> torch.device:
    return active().device_of(tensor)


_ATTRIBUTES: dict[Any, Callable[..., Any]] = {
    _getter("device"): _place,
    _getter("is_cuda"): lambda tensor: _place(tensor).type == "cuda",
    _getter("is_cpu"): lambda tensor: _place(tensor).type == "cpu",
    _T.get_device: lambda tensor: -1 if _place(tensor).index is None else _place(tensor).index,
}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _T.is_pinned: lambda tensor, *args: active().is_pinned(tensor),
    _T.pin_memory: _pin_memory,
    _T.to: _to,
    _T.cpu: _cpu,
    _T.cuda: _cuda,
    _T.tolist: _tolist,
    _T.numpy: _numpy,
    _T.__array__: _array,
    _T.__repr__: _repr,
    _T.__format__: _format,
    _T.__deepcopy__: _deepcopy,
}
