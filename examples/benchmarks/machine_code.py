"""Machine code of a kernel as ``cuobjdump -sass`` prints it: instructions, loops, loads.

``compile_parts`` compiles the kernels of a decode step for sm_90 without a GPU, in a process of its
own: a driver that only names its target stays there, and so does TRITON_INTERPRET out of it. As a
program it prints a table: ``python machine_code.py merge --context 131072 --batch 1``. With
``--json`` that is a list of ``Launch``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CAPABILITY = 90
# What a multiprocessor of compute capability 9.0 has, by the CUDA C++ Programming Guide.
_REGISTERS, _REGISTER_STEP, _THREADS, _CTAS = 65_536, 256, 2048, 32
_SHARED_BYTES, _RESERVED_BYTES, _SHARED_BYTES_OF_CTA = 228 << 10, 1 << 10, 227 << 10

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_TARGET = re.compile(r"(0x[0-9a-f]+)\)?$")
_GUARD = re.compile(r"^@!?U?P\w+\s+")
_BITS = re.compile(r"\.(?:[US])?(8|16|32|64|128)\b")
# Control never reaches what follows one of these, unless it is guarded.
_LAST = ("EXIT", "RET", "BRA", "KILL", "BRX", "JMP")
# The branch is taken only where the lanes of a warp have gone different ways.
_SLOW_BRANCH = "BRA.DIV"
_LOADS = ("LDG", "LDGSTS", "LD")
COUNTS = {"shuffles": ("SHFL",), "shared_stores": ("STS", "STSM"), "barriers": ("BAR",)}
"""Instructions that are counted by name, beside all of them."""


@dataclass(frozen=True)
class Instruction:
    """One line of SASS.

    Attributes:
        address: in bytes from the start of the kernel.
        opcode: with its modifiers, as ``"LDG.E.128"``.
        operands: the text behind it.
        is_guarded: whether a predicate decides if it is executed.
    """

    address: int
    opcode: str
    operands: str
    is_guarded: bool

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def width(self) -> int | None:
        """Bytes that a lane loads or stores; None for what has no memory operand."""
        if not self.name.startswith(("LD", "ST")) or self.name == "LDC":
            return None
        # The first of several is the size: an address may have one of its own.
        bits = _BITS.search(self.opcode.replace("LTC128B", "").replace("LTC64B", ""))
        return int(bits[1]) // 8 if bits else 4

    @property
    def target(self) -> int | None:
        """The address that a branch leads to; None for every other instruction."""
        if self.name != "BRA" or self.opcode.startswith(_SLOW_BRANCH):
            return None
        address = _TARGET.search(self.operands)
        return int(address[1], 16) if address else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow it."""
        # A branch may have its predicate among the operands.
        guarded = self.is_guarded or "," in self.operands or self.opcode.startswith(_SLOW_BRANCH)
        return guarded or self.name not in _LAST


def parse_sass(text: str) -> list[Instruction]:
    """The instructions of the one kernel in ``text``; ValueError where there is none."""
    instructions = []
    for address, line in _LINE.findall(text):
        guard = _GUARD.match(line)
        opcode, _, operands = line[guard.end() if guard else 0 :].partition(" ")
        instructions.append(Instruction(int(address, 16), opcode, operands.strip(), bool(guard)))
    if not instructions:
        raise ValueError("no SASS: pass what cuobjdump -sass prints of a cubin")
    return instructions


@dataclass(frozen=True)
class MachineCode:
    """The instructions of a kernel, in the order of their addresses; others name them by index."""

    instructions: Sequence[Instruction]

    @property
    def uses_stack(self) -> bool:
        """Whether anything is loaded from local memory or stored there."""
        return any(one.name in ("LDL", "STL") for one in self.instructions)

    @cached_property
    def reachable(self) -> frozenset[int]:
        """Instructions that control may come to, subroutines left out."""
        known, pending = {0}, [0]
        while pending:
            following = set(self._followers[pending.pop()]) - known
            known |= following
            pending += following
        return frozenset(known)

    @cached_property
    def loops(self) -> list[frozenset[int]]:
        """Instructions of each outermost loop, the longest loop first.

        A backward branch closes a loop if control can't come to it but through its target. The
        loop is all that leads from the target to the branch.
        """
        bodies: dict[int, frozenset[int]] = {}
        for tail in sorted(self.reachable):
            for head in self._followers[tail]:
                if head <= tail:
                    body = self._body(head, tail)
                    if head == 0 or 0 not in body:
                        bodies[head] = bodies.get(head, frozenset()) | body
        outermost = [
            body for body in bodies.values() if not any(body < other for other in bodies.values())
        ]
        return sorted(outermost, key=lambda body: (-len(body), min(body)))

    def counts(self, indices: Collection[int]) -> dict[str, int]:
        """``instructions`` and those of ``COUNTS`` among the ones at ``indices``."""
        names = Counter(self.instructions[index].name for index in indices)
        sums = {key: sum(names[name] for name in some) for key, some in COUNTS.items()}
        return {"instructions": len(indices), **sums}

    def load_widths(self) -> dict[int, int]:
        """How many loads from global memory there are of each width in bytes, widest first."""
        loads = [self.instructions[index] for index in self.reachable]
        widths = Counter(one.width for one in loads if one.name in _LOADS and one.width)
        return dict(sorted(widths.items(), reverse=True))

    @cached_property
    def _followers(self) -> list[list[int]]:
        """By index: the instructions that may come next."""
        indices = {one.address: index for index, one in enumerate(self.instructions)}
        followers = []
        for index, one in enumerate(self.instructions):
            following = [index + 1] if one.falls_through and index + 1 < len(indices) else []
            if one.target is not None and one.target in indices:
                following.append(indices[one.target])
            followers.append(following)
        return followers

    @cached_property
    def _leaders(self) -> dict[int, list[int]]:
        """By index: the instructions that may come just before."""
        leaders: dict[int, list[int]] = {}
        for index in self.reachable:
            for following in self._followers[index]:
                leaders.setdefault(following, []).append(index)
        return leaders

    def _body(self, head: int, tail: int) -> frozenset[int]:
        """Whatever leads to ``tail`` without passing ``head``, and both of them."""
        body, pending = {head, tail}, [tail] if tail != head else []
        while pending:
            leading = set(self._leaders.get(pending.pop(), [])) - body
            body |= leading
            pending += leading
        return frozenset(body)


def main_width(widths: dict[int, int]) -> int:
    """The width in which the most bytes are loaded; 0 where nothing is."""
    return max(widths, key=lambda width: (width * widths[width], width), default=0)


@dataclass(frozen=True)
class Launch:
    """A kernel as a part of a step launches it.

    Attributes:
        part, context, batch: of the step.
        kernel: operation and name, as ``"paris.collide"``; other machine code of the same name
            later in the part has a number behind it, as ``"top_k.count_digits 2"``.
        launches: how often the part launches this code.
        grid: of the first launch.
        warps, shared_bytes: of a CTA.
        registers, spill_bytes: of a thread; ``spill_bytes`` is its stack, where it is used.
        load_bytes: the width in which most bytes are loaded.
        load_widths: loads from global memory by their width in bytes (text, as in JSON).
        loops: how many outermost loops there are.
        counts, loop_counts: of ``MachineCode.counts``, in all and in loops.
    """

    part: str
    context: int
    batch: int
    kernel: str
    launches: int
    grid: Sequence[int]
    warps: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    load_bytes: int
    load_widths: dict[str, int]
    loops: int
    counts: dict[str, int]
    loop_counts: dict[str, int]

    @property
    def ctas(self) -> int:
        """Of the grid."""
        return math.prod(self.grid)

    @property
    def ctas_at_once(self) -> int:
        """CTAs that fit on a multiprocessor; 0 where not even one does."""
        of_warp = math.ceil(32 * self.registers / _REGISTER_STEP) * _REGISTER_STEP
        return min(
            _REGISTERS // max(1, of_warp * self.warps),
            _SHARED_BYTES // (self.shared_bytes + _RESERVED_BYTES),
            _THREADS // (32 * self.warps),
            _CTAS,
        )


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
    size = "--context", str(context), "--batch", str(batch)
    command = [sys.executable, __file__, *names, *size, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return [Launch(**fields) for fields in json.loads(done.stdout)]


def read_cubin(cubin: bytes) -> dict[str, Any]:
    """Of the one kernel in ``cubin``: the fields of ``Launch`` that machine code alone decides."""
    code = MachineCode(parse_sass(_dump("-sass", cubin)))
    usage = usage_of(cubin)
    return {
        "registers": usage["REG"],
        # A stack that nothing is kept on is none.
        "spill_bytes": usage["STACK"] if code.uses_stack else 0,
        "load_bytes": main_width(code.load_widths()),
        "load_widths": {str(width): count for width, count in code.load_widths().items()},
        "loops": len(code.loops),
        "counts": code.counts(code.reachable),
        "loop_counts": code.counts(frozenset().union(*code.loops)),
    }


def _tool(name: str) -> Path:
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name


def _dump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [_tool("cuobjdump"), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage_of(cubin: bytes) -> dict[str, int]:
    """What a thread of the one kernel takes: ``REG`` registers, ``STACK`` bytes, and others."""
    return {
        name: int(count) for name, count in re.findall(r" (\w+):(\d+)", _dump("-res-usage", cubin))
    }


class NamedTarget:
    """A driver of Triton without a device, which names the capability of one."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def label_of(module: str, name: str) -> str:
    """``hf_kvret_kernels.paris.triton_collide`` and ``_collide_kernel`` to ``paris.collide``."""
    operation = module.split(".")[1].removeprefix("_triton_")
    return f"{operation}.{name.removeprefix('_').removesuffix('_kernel')}"


_Compiled = tuple[str, tuple[int, int, int], Any]
"""Label, grid and Triton's own object of a kernel."""


def compile_instead_of_launching() -> list[_Compiled]:
    """Make Triton compile for sm_90 in this process; the list gets what it would launch."""
    from step_kernels import MULTIPROCESSORS
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    import hf_kvret_kernels._triton_shared as shared
    from hf_kvret_kernels.prompt_attention import triton as prompt

    def device_limits(device: Any) -> tuple[int, int]:
        return MULTIPROCESSORS, _SHARED_BYTES_OF_CTA

    driver.set_active(NamedTarget(CAPABILITY))
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
            kernel_name = label if names[label] == 1 else f"{label} {names[label]}"
            sizes = kernel.metadata.num_warps, kernel.metadata.shared
            code = read_cubin(kernel.asm["cubin"])
            place = part, context, batch, kernel_name, counts.pop(kernel.hash), grid
            launches.append(Launch(*place, *sizes, **code))
    return launches


def table_of(launches: Sequence[Launch]) -> str:
    """A line of markdown for each kernel; a second number is of instructions in loops."""
    titles = (
        *("part", "kernel", "CTAs", "warps", "registers", "spill bytes", "shared bytes"),
        *("CTAs an SM", "load bytes", "loads", "instructions", *COUNTS),
    )
    rows: list[Sequence[object]] = [titles, ["---"] * len(titles)]
    for one in launches:
        widths = ", ".join(f"{width}: {count}" for width, count in one.load_widths.items())
        counts = (f"{one.counts[name]} / {one.loop_counts[name]}" for name in titles[10:])
        rows.append(
            (
                *(one.part, one.kernel, one.ctas, one.warps, one.registers, one.spill_bytes),
                *(one.shared_bytes, one.ctas_at_once, one.load_bytes, widths, *counts),
            )
        )
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def main() -> None:
    """Print the launches of the parts named on the command line."""
    from step_kernels import LEAST_CONTEXT, PARTS, PROMPT_PARTS, WIDE_PARTS, StepShape

    parts = PARTS | WIDE_PARTS | PROMPT_PARTS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=tuple(parts), metavar="PART")
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.context < LEAST_CONTEXT:
        parser.error(f"--context {options.context}: give at least {LEAST_CONTEXT}")
    check_tools()
    compiled, launches = compile_instead_of_launching(), []
    for part in options.parts:
        compiled.clear()
        parts[part](StepShape(options.context, options.batch))
        launches += _launches(compiled, part, options.context, options.batch)
    if options.json:
        print(json.dumps([asdict(launch) for launch in launches]))
    else:
        print(table_of(launches))


if __name__ == "__main__":
    main()
