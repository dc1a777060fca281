"""Every Triton kernel compiles to machine code for GPUs that are not at hand.

The interpreter accepts much that the compiler refuses. Here ``compile_target.py`` calls the
operations as on a GPU, in a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .test_machine_code import all_kernels

SCRIPT = Path(__file__).with_name("compile_target.py")
# Codebooks spill nowhere, latent attention not where shared memory is large.
KEEP_TO_REGISTERS = {"sm80": r"\w+ codebook\.", "sm90": r"\w+ codebook\.|latents "}


@pytest.mark.slow
@pytest.mark.parametrize("target", KEEP_TO_REGISTERS)
def test_kernels_compile(target: str) -> None:
    lines = compiled(target)
    assert {line.split()[1] for line in lines} == all_kernels()
    # Products and sums are one instruction.
    assert all("fused" in line for line in lines if " merge." in line)
    spilling = [line for line in lines if "spills" in line]
    assert not [line for line in spilling if re.match(KEEP_TO_REGISTERS[target], line)]


def compiled(target: str) -> list[str]:
    """What ``compile_target.py`` prints."""
    pytest.importorskip("triton", reason="Triton compiles on Linux only")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_ALWAYS_COMPILE"] = "1"
    command = [sys.executable, str(SCRIPT), target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()
