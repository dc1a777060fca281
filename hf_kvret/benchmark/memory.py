"""``hf-kvret bench memory``: peaks, and how many sequences fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.benchmark.filling import feed, serving
from hf_kvret.benchmark.limits import PeakHostMemory
from hf_kvret.benchmark.measure import Bench, Measure, Turn
from hf_kvret.benchmark.peaks import device_peak, restart_peak
from hf_kvret.benchmark.scaling import scale
from hf_kvret.benchmark.tables import memory_table, plot_memory
from hf_kvret.evaluation.reader import Usage
from hf_kvret.evaluation.results import Cell, Results


@dataclass(frozen=True)
class MemorySample:
    """Bytes of one filled cache and some steps.

    Attributes:
        fill_peak, decode_peak: the most device memory beyond the weights while the context came
            in, and in the steps after it; None on a CPU.
        host_growth: growth of this process, see ``PeakHostMemory``; None where it isn't known.
        usage: of the cache after the last step.
    """

    fill_peak: int | None
    decode_peak: int | None
    host_growth: int | None
    usage: Usage

    @property
    def device_peak(self) -> int:
        """The most device memory beyond the weights; on a CPU the bytes of the cache."""
        if self.fill_peak is None or self.decode_peak is None:
            return self.usage.device_bytes
        return max(self.fill_peak, self.decode_peak)


class Memory(Measure):
    """Peak memory, and the largest batch that fits --device-memory."""

    name: ClassVar[str] = "memory"
    summary: ClassVar[str] = "peak memory, and the largest batch that fits"
    description: ClassVar[str] = (
        "Peak memory, and the largest batch that fits --device-memory. Two batch sizes are "
        "measured; a straight line through their bytes says how many sequences fit. On a CUDA "
        "device a run with that batch confirms it where the device is large enough."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench memory --shape llama-3.1-8b --context 32K --batch 1,2 --dtype "
        "bfloat16 --caches full,paris,paris:store=host --device-memory 80GB",
    )

    @torch.inference_mode()
    def once(self, turn: Turn) -> MemorySample:
        """Fill and take --warmup + --steps steps, watching the peaks."""
        bench, model, device = turn.bench, turn.subject.model, turn.bench.device
        count = bench.warmup + bench.steps
        host = PeakHostMemory()
        base = restart_peak(device)
        cache = turn.choice.make(model.config, turn.context + count + 1)
        peaks: list[int | None] = []
        with serving(model, cache):
            token = turn.filled(cache)
            peaks.append(device_peak(device, base))
            restart_peak(device)
            for length in range(turn.context, turn.context + count):
                token = feed(model, cache, token, length).argmax(-1)
            peaks.append(device_peak(device, base))
        usage = turn.usage(cache, turn.context + count)
        return MemorySample(peaks[0], peaks[1], host.growth(), usage)

    def row(
        self, bench: Bench, cell: Cell, samples: Mapping[int, Sequence[MemorySample]]
    ) -> dict[str, Any]:
        """Bytes of weights and cache, and the peaks, the largest of all rounds."""
        subject = bench.subjects[0]
        taken = samples[subject.layers]
        usage = taken[-1].usage
        row: dict[str, Any] = {
            "weight_bytes": subject.weights.held,
            "device_bytes": usage.device_bytes,
            "host_bytes": usage.host_bytes,
            "full_bytes": usage.full_bytes,
            "device_peak_bytes": max(sample.device_peak for sample in taken),
            "device_peak_is": "cache bytes" if taken[0].fill_peak is None else "peak",
            "fill_peak_bytes": _largest([sample.fill_peak for sample in taken]),
            "decode_peak_bytes": _largest([sample.decode_peak for sample in taken]),
            "host_growth_bytes": _largest([sample.host_growth for sample in taken]),
        }
        if bench.scaled:
            row["scaled"] = {
                "layers": bench.shape.layers,
                "from_layers": sorted(samples),
                "weight_bytes": bench.whole.held,
                "device_bytes": _whole(bench, samples, lambda s: s.usage.device_bytes),
                "host_bytes": _whole(bench, samples, lambda s: s.usage.host_bytes),
                "device_peak_bytes": _whole(bench, samples, lambda s: s.device_peak),
            }
        return row

    def table(self, results: Results) -> str:
        return memory_table(results)

    def plot(self, path: Path, results: Results) -> None:
        plot_memory(path, results)


def _whole(bench: Bench, samples: Mapping[int, Sequence[MemorySample]], value: Any) -> float:
    few, many = (max((n, float(value(s))) for s in samples[n]) for n in sorted(samples))
    return scale(few, many, bench.shape.layers).value


def _largest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
