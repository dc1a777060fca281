"""Machine code as ``cuobjdump -sass`` prints it: instructions, loops, what a kernel consists of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_TARGET = re.compile(r"(0x[0-9a-f]+)\)?$")
_GUARD = re.compile(r"^@!?U?P\w+\s+")
_BITS = re.compile(r"\.(?:[US])?(8|16|32|64|128)\b")
# Control never reaches what follows one of these, unless it is guarded.
_LAST = ("EXIT", "RET", "BRA", "KILL", "BRX", "JMP")
# Taken only where the lanes of a warp have gone different ways: into code behind the kernel.
_SLOW_BRANCH = "BRA.DIV"
LOADS = ("LDG", "LDGSTS", "LD")
"""Instructions that load from global memory."""


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
        # Of several the first is the size: an address may have one of its own.
        bits = _BITS.search(self.opcode.replace("LTC128B", "").replace("LTC64B", ""))
        return int(bits[1]) // 8 if bits else 4

    @property
    def target(self) -> int | None:
        """The address that a branch leads to; None for every other instruction."""
        if self.name != "BRA" or self.opcode.startswith(_SLOW_BRANCH):
            return None
        place = _TARGET.search(self.operands)
        return int(place[1], 16) if place else None

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
    """The instructions of a kernel, in the order of their addresses."""

    instructions: Sequence[Instruction]

    @property
    def uses_stack(self) -> bool:
        """Whether anything is loaded from local memory or stored there."""
        return any(one.name in ("LDL", "STL") for one in self.instructions)

    @cached_property
    def reachable(self) -> frozenset[int]:
        """Places of the instructions that control may come to, subroutines left out."""
        return self._reached({})

    @cached_property
    def of_last(self) -> frozenset[int]:
        """Places that only the last CTA of several comes to, which knows by a ticket that it is.

        The ticket is an atomic that gives what was there, and is followed by an invalidation of
        the L1 cache: its CTA reads what the others wrote. The next guarded EXIT is for all others.
        """
        opcodes = [one.opcode for one in self.instructions]
        tickets = [
            place
            for place, opcode in enumerate(opcodes[:-1])
            if opcode.startswith("ATOMG") and opcodes[place + 1] == "CCTL.IVALL"
        ]
        for place in range(tickets[-1] + 1 if tickets else len(opcodes), len(opcodes)):
            if self.instructions[place].name == "EXIT" and self.instructions[place].is_guarded:
                return self.reachable - self._reached({place: []})
        return frozenset()

    @cached_property
    def loops(self) -> list[frozenset[int]]:
        """Places of each outermost loop's instructions, the longest loop first.

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

    def count(self, names: Collection[str], places: Collection[int] | None = None) -> int:
        """How many instructions have one of these names, among ``places`` or in all."""
        return sum(self.instructions[place].name in names for place in self._places(places))

    def load_widths(self, places: Collection[int] | None = None) -> dict[int, int]:
        """How many loads from global memory there are of each width in bytes, widest first."""
        found = [self.instructions[place] for place in self._places(places)]
        widths = Counter(one.width for one in found if one.name in LOADS and one.width)
        return dict(sorted(widths.items(), reverse=True))

    def _places(self, places: Collection[int] | None) -> Collection[int]:
        return self.reachable if places is None else places

    def _reached(self, instead: Mapping[int, Sequence[int]]) -> frozenset[int]:
        """From the first place on; some places have other followers than ``_followers``."""
        known, waiting = {0}, [0]
        while waiting:
            leader = waiting.pop()
            for place in instead.get(leader, self._followers[leader]):
                if place not in known:
                    known.add(place)
                    waiting.append(place)
        return frozenset(known)

    @cached_property
    def _followers(self) -> list[list[int]]:
        """By place: the places that may come next."""
        places = {one.address: place for place, one in enumerate(self.instructions)}
        followers = []
        for place, one in enumerate(self.instructions):
            following = [place + 1] if one.falls_through and place + 1 < len(places) else []
            if one.target is not None and one.target in places:
                following.append(places[one.target])
            followers.append(following)
        return followers

    @cached_property
    def _leaders(self) -> dict[int, list[int]]:
        """By place: the places that may come just before."""
        leaders: dict[int, list[int]] = {}
        for place in self.reachable:
            for following in self._followers[place]:
                leaders.setdefault(following, []).append(place)
        return leaders

    def _body(self, head: int, tail: int) -> frozenset[int]:
        """Whatever leads to ``tail`` without passing ``head``, and both of them."""
        body, waiting = {head, tail}, [tail] if tail != head else []
        while waiting:
            for place in self._leaders.get(waiting.pop(), []):
                if place not in body:
                    body.add(place)
                    waiting.append(place)
        return frozenset(body)


def main_width(widths: dict[int, int]) -> int:
    """The width in which the most bytes are loaded; 0 where nothing is."""
    return max(widths, key=lambda width: (width * widths[width], width), default=0)
