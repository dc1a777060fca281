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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine_code import MachineCode, main_width, parse_sass
from machine_model import H200, pipe_of, pipe_slots

CAPABILITY = 90
_SHUFFLES, _SHARED_STORES, _BARRIERS = ("SHFL",), ("STS", "STSM"), ("BAR",)


@dataclass(frozen=True)
class Block:
    """Instructions that are executed equally often: all outside of loops, or those of one loop.

    Attributes:
        instructions, shuffles, shared_stores, barriers: how many there are.
        slots: that a warp takes in each pipe, see ``machine_model.pipe_slots``.
        load_widths: loads from global memory by their width in bytes (text, as in JSON).
    """

    instructions: int
    slots: Mapping[str, float]
    shuffles: int
    shared_stores: int
    barriers: int
    load_widths: Mapping[str, int]


@dataclass(frozen=True)
class Launch:
    """A kernel as a part of a step launches it.

    Attributes:
        part, context, batch: of the step.
        kernel: operation and name, as ``"paris.collide"``; other machine code of the same name
            later in the part has a number behind it, as ``"top_k.count_digits 2"``.
        launches: how often the part launches this code.
        grid: of the first launch.
        registers, spill_bytes: of a thread; ``spill_bytes`` is its stack.
        shared_bytes: of a CTA.
        load_bytes: the width in which most bytes are loaded, in all of the code.
        straight: what lies outside of loops.
        loops: the outermost loops in the order of their addresses.
    """

    part: str
    context: int
    batch: int
    kernel: str
    launches: int
    grid: tuple[int, int, int]
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bytes: int
    straight: Block
    loops: Sequence[Block]

    @property
    def ctas(self) -> int:
        """Of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def ctas_at_once(self) -> int:
        """CTAs that fit on a multiprocessor."""
        return H200.ctas_at_once(self.registers, self.warps, self.shared_bytes)

    @property
    def load_widths(self) -> dict[str, int]:
        """As of a block, of all of them."""
        widths: Counter[str] = Counter()
        for block in (self.straight, *self.loops):
            widths.update(block.load_widths)
        return dict(widths)

    def in_loops(self, name: str) -> int:
        """The sum over all loops of a count of ``Block``, as ``"shuffles"``."""
        return sum(getattr(loop, name) for loop in self.loops)

    def issue_seconds(self, trips: Sequence[float]) -> float:
        """Modelled, of all launches; ``trips`` of each loop, the last one for those that follow."""
        blocks = [(1.0, self.straight)]
        for number, loop in enumerate(self.loops):
            blocks.append((trips[min(number, len(trips) - 1)], loop))
        instructions = sum(count * block.instructions for count, block in blocks)
        slots: dict[str, float] = {}
        for count, block in blocks:
            for pipe, taken in block.slots.items():
                slots[pipe] = slots.get(pipe, 0.0) + count * taken
        return self.launches * H200.issue_seconds(instructions, slots, self.warps, self.ctas)


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


def launch_of(fields: Mapping[str, Any]) -> Launch:
    """A launch from plain JSON values, as ``dataclasses.asdict`` makes them."""
    blocks = {
        "straight": Block(**fields["straight"]),
        "loops": [Block(**loop) for loop in fields["loops"]],
    }
    return Launch(**{**fields, "grid": tuple(fields["grid"]), **blocks})


def read_cubin(cubin: bytes) -> dict[str, Any]:
    """Of the one kernel in ``cubin``: the fields of ``Launch`` that machine code alone decides."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage, sass = (_dump(option, file) for option in ("-res-usage", "-sass"))
    code = MachineCode(parse_sass(sass))
    loops = sorted(code.loops, key=min)
    straight = code.reachable.difference(*loops)
    return {
        "registers": _usage(usage, "REG"),
        "spill_bytes": _usage(usage, "STACK"),
        "load_bytes": main_width(code.load_widths()),
        "straight": _block(code, straight),
        "loops": [_block(code, loop) for loop in loops],
    }


def _block(code: MachineCode, places: frozenset[int]) -> Block:
    slots: dict[str, float] = {}
    for one in (code.instructions[place] for place in places):
        pipe = pipe_of(one.name)
        slots[pipe] = slots.get(pipe, 0.0) + pipe_slots(pipe, one.width)
    return Block(
        len(places),
        dict(sorted(slots.items())),
        code.count(_SHUFFLES, places),
        code.count(_SHARED_STORES, places),
        code.count(_BARRIERS, places),
        {str(width): count for width, count in code.load_widths(places).items()},
    )


def _tool(name: str) -> Path:
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name


def _dump(option: str, file: Path) -> str:
    command = [_tool("cuobjdump"), option, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _usage(text: str, name: str) -> int:
    return int(text.split(f" {name}:")[1].split()[0])


def _label(module: str, name: str) -> str:
    """``hf_kvret_kernels.paris.triton_collide`` and ``_collide_kernel`` to ``paris.collide``."""
    operation = module.split(".")[1].removeprefix("_triton_")
    return f"{operation}.{name.removeprefix('_').removesuffix('_kernel')}"


class _Recorder:
    """Makes Triton compile for sm_90 and keep what it would launch, for the whole process."""

    def __init__(self) -> None:
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

        def limits(device: Any) -> tuple[int, int]:
            return H200.multiprocessors, H200.shared_bytes_of_cta

        driver.set_active(NamedTarget())
        shared.device_limits = limits
        prompt.device_limits = limits
        self.kernels: list[tuple[str, tuple[int, int, int], Any]] = []
        run, kernels = JITFunction.run, self.kernels

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **options)
            label = _label(function.fn.__module__, function.fn.__name__)
            kernels.append((label, (*grid, 1, 1)[:3], kernel))
            return kernel

        JITFunction.run = compile_only

    def launches(self, part: str, context: int, batch: int) -> list[Launch]:
        """What was compiled since the last call, the same machine code once."""
        counts = Counter(kernel.hash for _, _, kernel in self.kernels)
        names: Counter[str] = Counter()
        launches = []
        for label, grid, kernel in self.kernels:
            if not counts[kernel.hash]:
                continue
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
        self.kernels.clear()
        return launches


def main() -> None:
    """Print the launches of the parts named on the command line."""
    from step_kernels import PARTS, StepShape, check_parts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    check_parts(options.parts)
    recorder, launches = _Recorder(), []
    for part in options.parts:
        PARTS[part](StepShape(options.context, options.batch))
        launches += recorder.launches(part, options.context, options.batch)
    print(json.dumps([asdict(launch) for launch in launches]))


if __name__ == "__main__":
    main()
