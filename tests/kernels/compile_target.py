"""A GPU that is not at hand, for which ``compile_target.py sm90 merge`` compiles an operation.

A driver only names its target, and a launch stops after the compilation. Prints the names of the
kernels, ``fused`` where one multiplies and adds at once, and ``spills`` where one does not keep to
its registers.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

TARGETS = {"sm80": 80, "sm90": 90}


class NamedTarget:
    """A driver without a device, which only names the capability of one."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def _compile_instead_of_launching(capability: int) -> None:
    """Make Triton compile for ``capability`` and return before it would launch."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NamedTarget(capability))
    run = JITFunction.run

    @functools.wraps(run)
    def compile_only(self: JITFunction, *args: object, warmup: bool, **kwargs: object) -> object:
        # Triton's own choice for it is about to change.
        assert kwargs.get("enable_fp_fusion") is True, self.fn.__name__
        kernel = run(self, *args, warmup=True, **kwargs)
        assert kernel.asm["cubin"]
        print(self.fn.__name__, "fused" if "fma.rn" in kernel.asm["ptx"] else "")
        if _stack_bytes(kernel.asm["cubin"]):
            print("spills")
        # What it did not write may be anything, and torch may look places up in it.
        for argument in args:
            if isinstance(argument, torch.Tensor):
                argument.zero_()
        return kernel

    JITFunction.run = compile_only


def _stack_bytes(cubin: bytes) -> int:
    """Bytes of a thread's stack, which holds the registers that were spilled."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(usage.split(" STACK:")[1].split()[0])


if __name__ == "__main__":
    # Imported here, because others take the target alone, under a name of the tests' package.
    from kernel_calls import calls

    _compile_instead_of_launching(TARGETS[sys.argv[1]])
    for call in calls(sys.argv[2]):
        call()
