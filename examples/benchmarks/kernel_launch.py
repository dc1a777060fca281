"""A kernel as a decode step launches it: its grid, what it takes, what its code consists of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from machine_code import MachineCode
from machine_model import H200, pipe_of, pipe_slots

_SHUFFLES, _SHARED_STORES, _BARRIERS = ("SHFL",), ("STS", "STSM"), ("BAR",)


@dataclass(frozen=True)
class Block:
    """Instructions that are executed equally often: all outside of loops, or those of one loop.

    Attributes:
        instructions, shuffles, shared_stores, barriers: how many there are.
        slots: that a warp takes in each pipe, see ``machine_model.pipe_slots``.
        load_widths: loads from global memory by their width in bytes (text, as in JSON).
        of_last: only the last of several CTAs executes them, see ``MachineCode.of_last``.
    """

    instructions: int
    slots: Mapping[str, float]
    shuffles: int
    shared_stores: int
    barriers: int
    load_widths: Mapping[str, int]
    of_last: bool = False


@dataclass(frozen=True)
class Launch:
    """A kernel as a part of a step launches it.

    Attributes:
        part, context, batch: of the step.
        kernel: operation and name, as ``"paris.collide"``; other machine code of the same name
            later in the part has a number behind it, as ``"top_k.count_digits 2"``.
        launches: how often the part launches this code.
        grid: of the first launch.
        registers, spill_bytes: of a thread; ``spill_bytes`` is its stack, where it is used.
        shared_bytes: of a CTA.
        load_bytes: the width in which most bytes are loaded, in all of the code.
        straight: what lies outside of loops.
        loops: the outermost loops in the order of their addresses.
        last: what lies outside of loops and is left to the last of several CTAs.
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
    last: Block | None = None

    @property
    def ctas(self) -> int:
        """Of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def ctas_at_once(self) -> int:
        """CTAs that fit on a multiprocessor."""
        return H200.ctas_at_once(self.registers, self.warps, self.shared_bytes)

    @property
    def outside_loops(self) -> list[Block]:
        """``straight``, and ``last`` where there is one."""
        return [self.straight] if self.last is None else [self.straight, self.last]

    @property
    def load_widths(self) -> dict[str, int]:
        """As of a block, of all of them."""
        widths: Counter[str] = Counter()
        for block in (*self.outside_loops, *self.loops):
            widths.update(block.load_widths)
        return dict(widths)

    def in_loops(self, name: str) -> int:
        """The sum over all loops of a count of ``Block``, as ``"shuffles"``."""
        return sum(getattr(loop, name) for loop in self.loops)

    def issue_seconds(self, trips: Sequence[float], last_ctas: int = 1) -> float:
        """Modelled, of all launches.

        Args:
            trips: of each loop, the last one for those that follow.
            last_ctas: how many are the last of several, each of others; they begin when all have
                done the rest.
        """
        counted = [(1.0, block) for block in self.outside_loops]
        for number, loop in enumerate(self.loops):
            counted.append((trips[min(number, len(trips) - 1)], loop))
        seconds = 0.0
        for of_last, ctas in ((False, self.ctas), (True, last_ctas)):
            blocks = [(count, block) for count, block in counted if block.of_last == of_last]
            instructions = sum(count * block.instructions for count, block in blocks)
            slots: dict[str, float] = {}
            for count, block in blocks:
                for pipe, taken in block.slots.items():
                    slots[pipe] = slots.get(pipe, 0.0) + count * taken
            seconds += H200.issue_seconds(instructions, slots, self.warps, ctas)
        return self.launches * seconds


def launch_of(fields: Mapping[str, Any]) -> Launch:
    """A launch from plain JSON values, as ``dataclasses.asdict`` makes them."""
    blocks = {
        "straight": Block(**fields["straight"]),
        "loops": [Block(**loop) for loop in fields["loops"]],
        "last": None if fields["last"] is None else Block(**fields["last"]),
    }
    return Launch(**{**fields, "grid": tuple(fields["grid"]), **blocks})


def block_of(code: MachineCode, places: Collection[int], of_last: bool = False) -> Block:
    """Of the instructions at these places."""
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
        of_last,
    )
