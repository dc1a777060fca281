"""Compiles kernels of a decode step for sm_90 without a GPU, and reads their machine code.

As a program it prints what it found as JSON, a list of ``Launch``: ``python compile_step.py merge
--context 131072 --batch 1``. Others call ``compile_parts``, which runs it in a process of its own:
a driver that only names its target stays there, and so does TRITON_INTERPRET out of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kernel_launch import Launch, block_of, launch_of
from machine_code import MachineCode, main_width, parse_sass
from machine_model import H200

CAPABILITY = 90


def check_tools() -> None:
    """ModuleNotFoundError or FileNotFoundError where kernels can't be compiled or read here."""
    if find_spec("triton") is None:
        raise ModuleNotFoundError(
            "compiling kernels takes triton: pip install triton (Linux only), no GPU is needed"
        )
    if not _tool("cuobjdump").is_file():
        raise FileNotFoundError(
            f"no {_tool('cuobjdump')}, which comes with triton's wheels: install triton with pip"
        )


def tool_versions() -> dict[str, str]:
    """Of ``triton``, and of the ``ptxas`` that it runs for sm_90."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    return {"triton": triton.__version__, "ptxas": str(get_ptxas(CAPABILITY).version)}


def compile_parts(names: Sequence[str], context: int, batch: int) -> list[Launch]:
    """The launches of parts of a step, compiled in a process of their own.

    Raises:
        ModuleNotFoundError, FileNotFoundError: see ``check_tools``.
        RuntimeError: a kernel does not compile; has the end of what the process said.
    """
    check_tools()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, *names, "--context", str(context), "--batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return [launch_of(fields) for fields in json.loads(done.stdout)]


def read_cubin(cubin: bytes) -> dict[str, Any]:
    """Of the one kernel in ``cubin``: the fields of ``Launch`` that machine code alone decides."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage, sass = (_dump(option, file) for option in ("-res-usage", "-sass"))
    code = MachineCode(parse_sass(sass))
    loops = sorted(code.loops, key=min)
    straight = code.reachable.difference(*loops)
    last = straight & code.of_last
    return {
        "registers": _usage(usage, "REG"),
        # A stack that nothing is kept on is none.
        "spill_bytes": _usage(usage, "STACK") if code.uses_stack else 0,
        "load_bytes": main_width(code.load_widths()),
        "straight": block_of(code, straight - last),
        "loops": [block_of(code, loop, loop <= code.of_last) for loop in loops],
        "last": block_of(code, last, True) if last else None,
    }


def _tool(name: str) -> Path:
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name


def _dump(option: str, file: Path) -> str:
    command = [_tool("cuobjdump"), option, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _usage(text: str, name: str) -> int:
    return int(text.split(f" {name}:")[1].split()[0])


def label_of(module: str, name: str) -> str:
    """``hf_kvret_kernels.paris.triton_collide`` and ``_collide_kernel`` to ``paris.collide``."""
    operation = module.split(".")[1].removeprefix("_triton_")
    return f"{operation}.{name.removeprefix('_').removesuffix('_kernel')}"


_Compiled = tuple[str, tuple[int, int, int], Any]
"""Label, grid and Triton's own object of a kernel."""


def _compile_instead_of_launching() -> list[_Compiled]:
    """Make Triton compile for sm_90 in this process; the list gets what it would launch."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    import hf_kvret_kernels._triton_shared as shared
    from hf_kvret_kernels.prompt_attention import triton as prompt

    class NamedTarget:
        """A driver without a device."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", CAPABILITY, 32)

    def device_limits(device: Any) -> tuple[int, int]:
        return H200.multiprocessors, H200.shared_bytes_of_cta

    driver.set_active(NamedTarget())
    shared.device_limits = prompt.device_limits = device_limits
    compiled: list[_Compiled] = []
    run = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(function, *args, grid=grid, warmup=True, **options)
        label = label_of(function.fn.__module__, function.fn.__name__)
        compiled.append((label, (*grid, 1, 1)[:3], kernel))
        return kernel

    JITFunction.run = compile_only
    return compiled


def _launches(compiled: Sequence[_Compiled], part: str, context: int, batch: int) -> list[Launch]:
    """The same machine code once, in the order of first launches."""
    counts = Counter(kernel.hash for _, _, kernel in compiled)
    names: Counter[str] = Counter()
    launches = []
    for label, grid, kernel in compiled:
        if kernel.hash in counts:
            names[label] += 1
            launch = Launch(
                part,
                context,
                batch,
                label if names[label] == 1 else f"{label} {names[label]}",
                counts.pop(kernel.hash),
                grid,
                kernel.metadata.num_warps,
                shared_bytes=kernel.metadata.shared,
                **read_cubin(kernel.asm["cubin"]),
            )
            launches.append(launch)
    return launches


def main() -> None:
    """Print the launches of the parts named on the command line."""
    from step_kernels import PARTS, WIDE_PARTS, StepShape

    parts = PARTS | WIDE_PARTS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=tuple(parts), metavar="PART")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    compiled, launches = _compile_instead_of_launching(), []
    for part in options.parts:
        compiled.clear()
        parts[part](StepShape(options.context, options.batch))
        launches += _launches(compiled, part, options.context, options.batch)
    print(json.dumps([asdict(launch) for launch in launches]))


if __name__ == "__main__":
    main()
