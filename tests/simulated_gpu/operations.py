"""torch's operations on a simulated GPU: where results lie, who reads and writes, who waits."""

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvret.testing.tape import decomposed, why_it_waits, written_by

from .clocks import Agent
from .simulation import CPU, active, tensors_in
from .streams import begin_work, current_stream

_aten = torch.ops.aten
_VIEWS = {_aten.detach, _aten.alias, _aten.lift_fresh}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_COPYING = {_aten.copy_, _aten._copy_from}
_EMPTY = {
    _aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided,
}  # fmt: skip
# Take a number that lies on the CPU beside tensors of a GPU.
_TAKE_NUMBERS = {
    _aten.where, _aten.fill_, _aten.masked_fill, _aten.masked_fill_, _aten.lerp,
}  # fmt: skip


class _Asked(threading.local):
    """The request of this thread's caller.

    Attributes:
        device: where new tensors go; None: where the others lie.
        call: a function and its first argument, whose class is taking the call.
    """

    device: torch.device | None = None
    call: tuple[Any, Any] = (None, None)


request = _Asked()


class Operations(TorchDispatchMode):
    """Follows every operation while it is entered."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = decomposed(self, func, args, kwargs)
        if out is not NotImplemented:
            return out
        packet, tensors = func.overloadpacket, tensors_in((args, kwargs))
        location = _place_of(func, args, tensors)
        written = written_by(func, args, kwargs)
        if packet in _COPYING:
            agent = _copying(args[0], args[1], bool(kwargs.get("non_blocking", _third(args))))
        else:
            reason = why_it_waits(func, args, kwargs)
            if reason is not None and location is not None and location.type == "cuda":
                active().wait_for(begin_work(current_stream(location)).seen, f"{func} {reason}")
            agent = _agent_on(location or request.device or CPU)
        simulation = active()
        if not (func.is_view or packet in _VIEWS):
            reads = [x for x in tensors if not any(x is y for y in written)]
            simulation.access(agent, reads, False, str(func))
            simulation.access(agent, written, True, str(func))
        out = _run(func, args, kwargs)
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        target = request.device or location or CPU
        for tensor in tensors_in(out):
            if tensor.untyped_storage()._cdata not in storages:
                home = current_stream(target).agent if target.type == "cuda" else None
                simulation.put(tensor, target, home)
                if packet not in _EMPTY:
                    simulation.access(agent, [tensor], True, str(func))
        return out


def _third(args: tuple[Any, ...]) -> Any:
    return args[2] if len(args) > 2 else False


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket is _aten.histc and not args[0].dtype.is_floating_point:
        # A GPU takes integers.
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _place_of(func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> torch.device | None:
    """Where an operation runs; None without tensors.

    SimulationError for tensors of several devices, as torch has it.
    """
    simulation, packet = active(), func.overloadpacket
    locations = {simulation.device_of(tensor) for tensor in tensors}
    if len(locations) <= 1:
        return next(iter(locations), None)
    devices = [location for location in locations if location.type == "cuda"]
    if packet in _COPYING:
        return devices[0]
    own = simulation.device_of(tensors[0])
    others = [
        x for x in tensors if simulation.device_of(x) != (own if own in devices else devices[0])
    ]
    if len(devices) == 1 and all(simulation.device_of(x) == CPU for x in others):
        if packet in _INDEXING and own.type == "cuda" and all(_is_index(x, args) for x in others):
            simulation.wait_for(
                current_stream(own).agent.seen, f"{func}: an index is copied to the device"
            )
            return own
        scalars = all(tensor.dim() == 0 for tensor in others)
        if scalars and (torch.Tag.pointwise in func.tags or packet in _TAKE_NUMBERS):
            return devices[0]
    forms = [(str(simulation.device_of(x)), tuple(x.shape), x.dtype) for x in tensors]
    raise simulation.fault(
        "device", f"Expected all tensors to be on the same device: {func} of {forms}"
    )


def _is_index(tensor: torch.Tensor, args: tuple[Any, ...]) -> bool:
    return any(tensor is index for index in args[1])


def _agent_on(location: torch.device) -> Agent:
    """Who does this thread's next work on a device."""
    if location.type == "cuda":
        return begin_work(current_stream(location))
    host = active().host()
    host.tick()
    return host


def _copying(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> Agent:
    """Who copies; the host may wait for it."""
    simulation = active()
    to, from_ = simulation.device_of(target), simulation.device_of(source)
    if to == from_:
        return _agent_on(to)
    stream = current_stream(to if to.type == "cuda" else from_)
    agent = begin_work(stream)
    if to.type == from_.type:
        # Between two GPUs both wait for each other.
        other = current_stream(from_)
        agent.join(begin_work(other).seen)
        other.agent.join(agent.seen)
        return agent
    direction = "to the device" if to.type == "cuda" else "to the host"
    on_host = target if to == CPU else source
    form = f"{tuple(source.shape)} {source.dtype}"
    if not non_blocking:
        simulation.wait_for(agent.seen, f"a copy {direction} of {form}")
    elif not simulation.is_pinned(on_host):
        simulation.report(
            "copy", f"non_blocking copy {direction} with memory that is not pinned: {form}"
        )
        if simulation.capture is not None:
            simulation.report("capture", f"a copy {direction} reads that address at every replay")
    elif not _is_plain(target, source):
        simulation.report(
            "copy",
            f"non_blocking copy {direction} goes through a temporary: {form} {source.stride()} to "
            f"{tuple(target.shape)} {target.dtype} {target.stride()}",
        )
    return agent


def _is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    contiguous = target.is_contiguous() and source.is_contiguous()
    return contiguous and target.dtype == source.dtype and target.shape == source.shape
