"""The chip that machine code is set against: all its figures, and the time they make of counts.

Nothing here is measured. Sizes and rates are those that NVIDIA publishes for compute capability
9.0 (CUDA C++ Programming Guide, arithmetic instructions; H100 and H200 data sheets); what is
assumed beyond them is said beside the figure. Change a figure only with all pages made anew: it
stands behind both the modelled issue time and the DRAM time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


@dataclass(frozen=True)
class Chip:
    """Figures of a GPU.

    Attributes:
        multiprocessors, schedulers: of the chip, and of a multiprocessor; a scheduler issues one
            instruction of one warp in a cycle.
        clock: cycles a second.
        bandwidth: bytes a second from and to DRAM.
        registers, threads, ctas, shared_bytes: what a multiprocessor has, at most.
        register_step: registers that a warp gets are a multiple of this.
        reserved_bytes: shared memory that the driver takes of each CTA.
        shared_bytes_of_cta: the most that one CTA may have.
        rates: warp instructions a cycle and multiprocessor, by pipe.
    """

    name: str
    multiprocessors: int
    schedulers: int
    clock: float
    bandwidth: float
    registers: int
    register_step: int
    threads: int
    ctas: int
    shared_bytes: int
    reserved_bytes: int
    shared_bytes_of_cta: int
    rates: Mapping[str, float]

    def ctas_at_once(self, registers: int, warps: int, shared_bytes: int) -> int:
        """CTAs that fit on a multiprocessor; ``registers`` of a thread, ``shared_bytes`` of a CTA.

        0 where not even one does.
        """
        of_warp = math.ceil(32 * registers / self.register_step) * self.register_step
        return min(
            self.registers // max(1, of_warp * warps),
            self.shared_bytes // (shared_bytes + self.reserved_bytes),
            self.threads // (32 * warps),
            self.ctas,
        )

    def issue_seconds(
        self, instructions: float, slots: Mapping[str, float], warps: int, ctas: int
    ) -> float:
        """Time in which the multiprocessor with the most CTAs issues all their instructions.

        Pipes work side by side, so the slowest counts: the schedulers, which take whole warps, or
        one of ``rates``. Nothing waits for an operand, a barrier or a launch.

        Args:
            instructions: that a warp executes.
            slots: that they take in each pipe, see ``pipe_slots``.
            warps: of a CTA.
            ctas: of the grid.
        """
        most_warps = math.ceil(ctas / self.multiprocessors) * warps
        cycles = [math.ceil(most_warps / self.schedulers) * instructions]
        cycles += [most_warps * slots.get(pipe, 0.0) / rate for pipe, rate in self.rates.items()]
        return max(cycles) / self.clock

    def dram_seconds(self, moved_bytes: int) -> float:
        """Time of reading and writing so many bytes once."""
        return moved_bytes / self.bandwidth


H200 = Chip(
    name="H200",
    multiprocessors=132,
    schedulers=4,
    # Assumed: the boost clock of the data sheet is 1.98 GHz, under load it is about this.
    clock=1.755e9,
    # Assumed: nine tenths of the 4.8 TB/s of the data sheet.
    bandwidth=4.3e12,
    registers=65_536,
    register_step=256,
    threads=2048,
    ctas=32,
    shared_bytes=228 << 10,
    reserved_bytes=1 << 10,
    shared_bytes_of_cta=227 << 10,
    rates=MappingProxyType(
        {
            # 128 lanes a cycle.
            "fp32": 4.0,
            # 64 lanes: integers, logic, comparisons, selections; products have a pipe of their own.
            "integer": 2.0,
            "product": 2.0,
            # 16 lanes.
            "special": 0.5,
            # 32 lanes of up to four bytes: loads, stores, shuffles, atomics.
            "memory": 1.0,
            # Assumed: mma.sync m16n8k16 in 16 bits at half of the rate that wgmma reaches.
            "tensor": 0.5,
        }
    ),
)


class Assumption(NamedTuple):
    """A figure that no data sheet has, as a range: of the quickest step and of the slowest."""

    quick: float
    slow: float
    source: str


ASSUMPTIONS: Mapping[str, Assumption] = MappingProxyType(
    {
        "gap_seconds": Assumption(
            0.5e-6,
            1.2e-6,
            "assumed: from the end of a kernel to the beginning of the next one in a CUDA graph",
        ),
        "least_seconds": Assumption(
            1.4e-6,
            2.0e-6,
            "assumed: a kernel of nothing but latencies; with the gap, 849 kernels of norms and "
            "rotations take 1.6 to 2.7 ms",
        ),
        "dram_share": Assumption(
            1.0, 0.9, "assumed: of the bandwidth above, which is nine tenths of the data sheet's"
        ),
        "bus_bandwidth": Assumption(
            55e9,
            40e9,
            "assumed: of 64 GB/s of PCIe 5.0 x16, rows of 512 bytes read by a kernel from pinned "
            "memory",
        ),
    }
)
"""Of a whole step, beside the chip's figures."""


@dataclass(frozen=True)
class Pace:
    """One end of what is assumed of a step; see ``ASSUMPTIONS``.

    Attributes:
        gap_seconds: between a kernel and the next one.
        least_seconds: of the shortest kernel.
        dram_share: of ``Chip.bandwidth``.
        bus_bandwidth: bytes a second from pinned host memory.
    """

    gap_seconds: float
    least_seconds: float
    dram_share: float
    bus_bandwidth: float

    def kernel_seconds(
        self, launches: int, dram_seconds: float, issue_seconds: float = 0.0
    ) -> float:
        """Of ``launches`` kernels in a row; ``dram_seconds`` and ``issue_seconds`` of them all."""
        least = launches * self.least_seconds
        work = max(issue_seconds, dram_seconds / self.dram_share, least)
        return work + launches * self.gap_seconds

    def bus_seconds(self, moved_bytes: float) -> float:
        """Of reading so many bytes from host memory."""
        return moved_bytes / self.bus_bandwidth


QUICK = Pace(**{name: one.quick for name, one in ASSUMPTIONS.items()})
SLOW = Pace(**{name: one.slow for name, one in ASSUMPTIONS.items()})

_LANE_BYTES = 4
_PIPES = {
    "fp32": ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2"),
    "product": ("IMAD",),
    "special": ("MUFU", "POPC", "FLO", "BREV", "I2F", "F2I", "F2F", "I2I"),
    "memory": (
        *("LDG", "LDS", "LDSM", "LDGSTS", "LDL", "LD", "STG", "STS", "STSM", "STL", "ST"),
        *("SHFL", "ATOM", "ATOMG", "ATOMS", "RED", "REDUX", "MATCH"),
    ),
    "tensor": ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA"),
    "integer": (
        *("IADD3", "VIADD", "IABS", "IMNMX", "VIMNMX", "VIADDMNMX", "LEA", "SHF", "LOP3", "PLOP3"),
        *("ISETP", "FSETP", "FSET", "FMNMX", "FSEL", "SEL", "PRMT", "SGXT", "BMSK", "MOV", "F2FP"),
        *("VOTE", "P2R", "R2P", "FCHK", "I2FP"),
    ),
}
_PIPE_OF = {name: pipe for pipe, names in _PIPES.items() for name in names}


def pipe_of(name: str) -> str:
    """The pipe of an instruction by the first part of its name, as ``"IMAD"``.

    ``"other"`` takes nothing but an issue slot: branches, barriers, the uniform datapath.
    """
    return _PIPE_OF.get(name, "other")


def pipe_slots(pipe: str, width: int | None) -> float:
    """Slots that an instruction takes in its pipe: more than one for wide loads and stores."""
    return max(1.0, (width or 0) / _LANE_BYTES) if pipe == "memory" else 1.0
