"""A GPU that is not at hand, for which ``compile_target.py sm90 merge`` compiles an operation.

A driver only names its target, and a launch stops after the compilation. Prints the names of the
kernels, ``fused`` where one multiplies and adds at once, and ``spills`` where one does not keep to
its registers.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "examples" / "benchmarks"))
from machine_code import NamedTarget, usage_of

TARGETS = {"sm80": 80, "sm90": 90}


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
        # The stack of a thread holds the registers that were spilled.
        if usage_of(kernel.asm["cubin"])["STACK"]:
            print("spills")
        # What it did not write may be anything, and torch may look places up in it.
        for argument in args:
            if isinstance(argument, torch.Tensor):
                argument.zero_()
        return kernel

    JITFunction.run = compile_only


if __name__ == "__main__":
    # Imported here, because others take the target alone, under a name of the tests' package.
    from kernel_calls import calls

    _compile_instead_of_launching(TARGETS[sys.argv[1]])
    for call in calls(sys.argv[2]):
        call()
