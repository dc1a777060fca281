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

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from .driver import driver, followed
from .simulation import (
    Finding,
    Simulation,
    SimulationError,
    Wait,
    activate,
    active,
)

__all__ = ["Finding", "Simulation", "SimulationError", "Wait", "simulated", "to_device"]

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
    with activate(simulation), driver(simulation), followed():
        try:
            yield simulation
        finally:
            if simulation.capture is not None:
                simulation.capture.leave()


def to_device(module: M, device: torch.device | str = "cuda") -> M:
    """Say that the weights and buffers of ``module`` lie on a device of the simulation."""
    from .streams import device_named

    for tensor in (*module.parameters(), *module.buffers()):
        active().put(tensor, device_named(device), None)
    return module
