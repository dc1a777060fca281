"""Launches of Triton kernels on a simulated GPU: run by the interpreter, after a check."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

from .clocks import MemoryLog
from .simulation import Simulation, active, site, tensors_in
from .streams import begin_work, current_stream

# Loads of whole vectors begin at multiples of this; Triton makes another kernel elsewhere.
_ALIGNMENT = 16
_LARGEST_INT32 = 2**31 - 1
# The argument of our kernels that holds addresses of pages.
_ADDRESSES = "page_address"


def checked(launch: Callable[..., None]) -> Callable[..., None]:
    """``launch`` of Triton's interpreter, as the simulated GPU does it."""

    def run(executor: Any, *args: Any, **kwargs: Any) -> None:
        simulation, name = active(), executor.fn.__name__
        named = _by_name(executor.arg_names, args, kwargs)
        with torch._C.DisableTorchFunction():
            location = _check_arguments(simulation, name, named)
            _note_specialisation(simulation, executor.fn, executor.constexprs, named, kwargs)
            pages = _page_addresses(named.get(_ADDRESSES))
            logs = _page_logs(simulation, name, current_stream(location).device, pages)
        simulation.launches[simulation.phase, name] += 1
        agent = begin_work(current_stream(location))
        tensors = [tensor for value in named.values() for tensor in tensors_in(value)]
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            before = [_bits(tensor).clone() for tensor in tensors]
            launch(executor, *args, **kwargs)
            # What a kernel writes shows only afterwards; what it leaves as it was counts as read.
            is_written = [
                not torch.equal(old, _bits(tensor))
                for old, tensor in zip(before, tensors, strict=True)
            ]
        pairs = list(zip(tensors, is_written, strict=True))
        simulation.access(
            agent, [x for x, written in pairs if not written], False, f"kernel {name}"
        )
        simulation.access(agent, [x for x, written in pairs if written], True, f"kernel {name}")
        for log in logs:
            simulation.note(log, agent, False, f"kernel {name}, by address", site())

    return run


def warm_up(kernel: Any, *args: Any, **kwargs: Any) -> None:
    """``warmup`` of Triton's interpreter, which compiles nothing: a compilation is counted."""
    named = _by_name(kernel.arg_names, args, kwargs)
    del kwargs["grid"]
    with torch._C.DisableTorchFunction():
        constants = interpreter.GridExecutor(kernel.fn, kernel.arg_names, None).constexprs
        _note_specialisation(active(), kernel.fn, constants, named, kwargs)


def _by_name(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a kernel; options of the launch are none."""
    own = {name: value for name, value in kwargs.items() if name in names}
    return dict(zip(names, args, strict=False)) | own


def _check_arguments(
    simulation: Simulation, name: str, named: dict[str, Any]
) -> torch.device | None:
    """Where the kernel runs; SimulationError for a pointer that it can't follow."""
    locations: set[torch.device] = set()
    for argument, value in named.items():
        for tensor in tensors_in(value):
            location = simulation.device_of(tensor)
            locations.add(location)
            if location.type != "cuda":
                raise simulation.fault(
                    "device",
                    f"Pointer argument cannot be accessed from Triton (cpu tensor?): {argument} of "
                    f"{name}, {tuple(tensor.shape)} {tensor.dtype}",
                )
            offset = tensor.data_ptr() % _ALIGNMENT
            if offset:
                simulation.report(
                    "alignment", f"kernel {name}: {argument} begins at {offset} mod {_ALIGNMENT}"
                )
    if len(locations) > 1:
        raise simulation.fault(
            "device", f"kernel {name}: tensors of {', '.join(sorted(map(str, locations)))}"
        )
    home = next(iter(locations), None)
    current = current_stream().device
    if home is not None and home != current:
        raise simulation.fault(
            "device", f"kernel {name}: tensors of {home} while the current device is {current}"
        )
    return home


def _note_specialisation(
    simulation: Simulation,
    kernel: Any,
    constants: Sequence[str],
    named: dict[str, Any],
    kwargs: dict[str, Any],
) -> None:
    """A compilation takes seconds; within a capture it is a finding, as it may break it."""
    name, general = kernel.__name__, _general_arguments(kernel)
    own = tuple(
        (argument, str(value) if argument in constants else _form(value, argument not in general))
        for argument, value in named.items()
    )
    options = sorted((key, str(value)) for key, value in kwargs.items() if key not in named)
    form = own, tuple(options)
    forms = simulation.specialisations.setdefault((kernel.__module__, name), set())
    if form in forms:
        return
    forms.add(form)
    simulation.compilations[simulation.phase, name] += 1
    if simulation.capture is not None:
        simulation.report("compile", f"kernel {name} may be compiled anew within a capture")


def _general_arguments(kernel: Any) -> frozenset[str]:
    """Names of the numbers whose values the compiler does not look at."""
    decorated = kernel.__globals__.get(kernel.__name__)
    return frozenset(getattr(decorated, "kwargs", {}).get("do_not_specialize") or ())


def _form(value: Any, special: bool) -> Any:
    """The properties of an argument that the compiler sees; the type alone if not ``special``."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), special and value.data_ptr() % _ALIGNMENT == 0
    if isinstance(value, torch.dtype):
        # It stands for a pointer.
        return str(value), special
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        is_long = abs(value) > _LARGEST_INT32
        return is_long, special and value == 1, special and value % _ALIGNMENT == 0
    if isinstance(value, float):
        return "float"
    if isinstance(value, tuple | list):
        return tuple(_form(each, special) for each in value)
    return str(value)


def _page_addresses(addresses: Any) -> list[int]:
    if not isinstance(addresses, torch.Tensor):
        return []
    with _disable_current_modes():
        pages: list[int] = addresses.flatten().tolist()
    return pages


def _page_logs(
    simulation: Simulation, name: str, location: torch.device, pages: list[int]
) -> list[MemoryLog]:
    """Logs of the memory of pages; SimulationError for memory that the kernel can't read."""
    logs: dict[int, MemoryLog] = {}
    for log in simulation.memories_at(location, [page for page in pages if page]):
        if log is not None:
            logs[id(log)] = log
        else:
            raise simulation.fault(
                "device",
                f"an illegal memory access was encountered: kernel {name} on {location} has the "
                "address of a page that is neither its own memory nor registered on the host",
            )
    return list(logs.values())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, so that NaN equals itself."""
    return tensor.contiguous().view(-1).view(torch.uint8)
