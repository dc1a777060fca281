"""A CUDA device that is not there: what a GPU would refuse, wait for or get wrong, found on a CPU.

All tensors are CPU tensors with real numbers; the device that a tensor lies on is noted at its
storage. torch's calls and operations are followed: they answer for that device, refuse to mix
devices, and tell where the host would wait. Streams and events carry vector clocks, so that a wait
or a ``record_stream`` that is missing is found whenever the code runs, not when it happens to go
wrong. Triton kernels run in the interpreter, after their arguments were checked; CUDA graphs record
onto ``hf_kvret.testing.tape``.

    with simulated() as gpu:
        model = to_device(model)
        gpu.phase = "prompt"
        ...
    assert not gpu.findings and not gpu.waits_in("decode")

Needs Triton and ``TRITON_INTERPRET=1`` in the environment before Triton is imported. It knows
nothing of time, of memory that runs out, of numbers that differ from a CPU's, nor of code in C++
and CUDA that is not torch's.
"""

import concurrent.futures
import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from . import streams
from .calls import Calls, record_stream
from .clocks import MemoryLog
from .operations import Operations
from .simulation import Simulation, activate, active, is_active

_GIB = 1 << 30
_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    total_memory=141 * _GIB,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    regs_per_multiprocessor=64 << 10,
    L2_cache_size=50 << 20,
)
_ALLOCATOR = ("_cuda_endAllocateToPool", "_cuda_releasePool", "_host_emptyCache")
_MODES = {"default": 0, "warn": 1}
M = TypeVar("M", bound=nn.Module)


@contextmanager
def simulated(device_count: int = 1) -> Iterator[Simulation]:
    """Context in which this process has ``device_count`` GPUs; yields what is found.

    Threads of a ``ThreadPoolExecutor`` that work is submitted to meanwhile are followed, too; other
    threads are not. RuntimeError: one is entered already, or kernels are not interpreted.
    """
    from hf_kvret_kernels._dispatch import interpreted

    if not interpreted():
        raise RuntimeError(
            "a simulated GPU runs Triton kernels in the interpreter: set TRITON_INTERPRET=1 before "
            "Python starts, and install triton"
        )
    simulation = Simulation(device_count)
    with activate(simulation), _replaced(simulation), _followed():
        try:
            yield simulation
        finally:
            if simulation.capture is not None:
                simulation.capture.leave()


def to_device(module: M, device: torch.device | str = "cuda") -> M:
    """Say that the weights and buffers of ``module`` lie on a device of the simulation."""
    for tensor in (*module.parameters(), *module.buffers()):
        active().put(tensor, streams.device_named(device), None)
    return module


class Runtime:
    """In place of ``torch.cuda.cudart()``."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """Pin host memory; 0 for success."""
        del flags
        simulation = active()
        simulation.check_capture("cudaHostRegister")
        simulation.registered[address] = address + size, MemoryLog(owner=simulation)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin it; 0 for success."""
        active().check_capture("cudaHostUnregister")
        active().unregister(address)
        return 0


@contextmanager
def _followed() -> Iterator[None]:
    """This thread's calls and operations are followed."""
    with Calls(), Operations():
        yield


@contextmanager
def _replaced(simulation: Simulation) -> Iterator[None]:
    """torch, Triton's interpreter and thread pools ask the simulation in the body."""
    importlib.import_module("hf_kvret_kernels.paged")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    executor, function = interpreter.GridExecutor, interpreter.InterpretedFunction
    launches = importlib.import_module(".launches", __package__)
    pool = concurrent.futures.ThreadPoolExecutor
    memory = importlib.import_module("hf_kvret.stores.memory")
    replaced = [
        *((torch.cuda, name, answer) for name, answer in _answers(simulation).items()),
        *((torch._C, name, _nothing()) for name in _ALLOCATOR),
        (torch.cuda.graph, "default_capture_stream", None),
        (torch.Tensor, "record_stream", record_stream),
        (executor, "__call__", launches.checked(executor.__call__)),
        (function, "warmup", launches.warm_up),
        (importlib.import_module("hf_kvret_kernels.paged"), "interpreted", lambda: False),
        (memory, "_unpin", _while_it_lasts(simulation, memory._unpin)),
        (pool, "submit", _followed_submit(simulation, pool.submit)),
    ]
    recorders = importlib.import_module("hf_kvret.replay.recorders")
    with ExitStack() as undo:
        undo.callback(streams.forget_choices)
        # Later recorders draw streams of torch's own again.
        undo.callback(recorders._idle.clear)
        undo.callback(recorders._drawn.clear)
        for owner, name, new in replaced:
            _replace(undo, owner, name, new)
        yield


def _replace(undo: ExitStack, owner: Any, name: str, new: Any) -> None:
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, new)


def _nothing(result: Any = None) -> Callable[..., Any]:
    """A function for calls that change nothing here: torch's compiler wants one for each."""
    return lambda *args, **kwargs: result


def _while_it_lasts(simulation: Simulation, finalizer: Callable[..., None]) -> Callable[..., None]:
    """The finalizer while the simulation lasts; later there is nothing to undo."""

    def finalize(*args: Any) -> None:
        if is_active(simulation):
            finalizer(*args)

    return finalize


def _answers(simulation: Simulation) -> dict[str, Any]:
    """Replacements of functions of ``torch.cuda``, by name."""

    def set_sync_debug_mode(mode: int | str) -> None:
        simulation.sync_debug = _MODES[mode] if isinstance(mode, str) else mode

    def synchronize(device: Any = None) -> None:
        seen = streams.begin_work(streams.current_stream(device)).seen
        simulation.wait_for(seen, "torch.cuda.synchronize")

    def is_current_stream_capturing() -> bool:
        capture = simulation.capture
        return capture is not None and streams.current_stream() is capture.stream

    return {
        "Stream": streams.Stream,
        "Event": streams.Event,
        "CUDAGraph": streams.Graph,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "stream": streams.on_stream,
        "device": streams.on_device,
        "set_device": streams.choose_device,
        "current_device": lambda: streams.current_device().index,
        "device_count": lambda: simulation.device_count,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": _nothing(),
        "synchronize": synchronize,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
        "mem_get_info": lambda device=None: (100 * _GIB, _PROPERTIES.total_memory),
        "memory_reserved": _nothing(0),
        "memory_allocated": _nothing(0),
        "empty_cache": _nothing(),
        "MemPool": lambda: types.SimpleNamespace(id=object()),
        "cudart": Runtime,
        "is_current_stream_capturing": is_current_stream_capturing,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: simulation.sync_debug,
        "manual_seed": _nothing(),
        "manual_seed_all": _nothing(),
    }


class _Result(concurrent.futures.Future[Any]):
    """The result of a pool's ``submit``: who asks for it goes on after the work.

    Attributes:
        end: what the thread has seen in the end, by name.
    """

    end: dict[str, int]

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            active().host().join(self.end)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            active().host().join(self.end)


def _followed_submit(simulation: Simulation, submit: Callable[..., Any]) -> Callable[..., Any]:
    """Work of a pool comes after what submitted it, and before what asked for its result."""

    def followed_submit(pool: Any, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start, end = dict(simulation.host().seen), {}

        def run() -> Any:
            simulation.host().join(start)
            with _followed():
                try:
                    return work(*args, **kwargs)
                finally:
                    end.update(simulation.host().seen)

        future = submit(pool, run)
        future.__class__, future.end = _Result, end
        return future

    return followed_submit
