"""``hf-kvret bench memory``: peaks, and how many sequences fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from hf_kvret.benchmark.limits import byte_count, largest_batch
from hf_kvret.benchmark.model_measurement import ModelMeasurement
from hf_kvret.benchmark.peaks import PeakDeviceMemory, PeakHostMemory
from hf_kvret.benchmark.rows import scale
from hf_kvret.benchmark.stepping import Steps
from hf_kvret.benchmark.tables import (
    SIZE,
    Column,
    described,
    mb,
    of,
    plot_contexts,
    table_of,
    why_missing,
)
from hf_kvret.benchmark.turns import Turn
from hf_kvret.evaluation.measurement import Progress, Row, attempt
from hf_kvret.evaluation.options import option, with_default
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


@dataclass(frozen=True, kw_only=True)
class Memory(ModelMeasurement):
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

    batch: tuple[int, ...] = with_default(ModelMeasurement, "batch", (1, 2))
    caches: str = with_default(
        ModelMeasurement, "caches", "full,static,flat,paris,lrqk,ctkvr,a2ats,aqua"
    )
    steps: int = with_default(ModelMeasurement, "steps", 4)
    warmup: int = with_default(ModelMeasurement, "warmup", 0)
    rounds: int = with_default(ModelMeasurement, "rounds", 1)
    device_memory: int | None = option(
        None,
        "say how many sequences fit into this much device memory, as 80GB or 75GiB",
        kind=byte_count,
        metavar="SIZE",
    )

    def check(self) -> None:
        super().check()
        if self.device_memory and len(self.batch) < 2:
            raise ValueError(
                f"--device-memory with --batch {self.batch[0]}: two batch sizes make the line that "
                "says what fits, as --batch 1,2"
            )

    def cells(self) -> list[Cell]:
        """A cell for each run, then one for each largest batch; ``fits``: device memory in bytes,
        ``batches``: those measured."""
        fits = [
            {"context": context, "batches": list(self.batch), "fits": self.device_memory}
            for context in self.context
            if self.device_memory
        ]
        return super().cells() + [{"cache": name} | fit for fit in fits for name in self.choices]

    @cached_property
    def _measured(self) -> list[Results]:
        """What ``plan`` was given: in it are the rows that largest batches are computed from."""
        return []

    def groups(self, results: Results) -> Iterator[Sequence[Cell]]:
        self._measured[:] = [results]
        yield from super().groups(results)

    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        if "fits" in group[0]:
            return [self._fit(cell) for cell in group]
        return super().rows(group, progress)

    @torch.inference_mode()
    def once(self, turn: Turn) -> MemorySample:
        """Fill and take --warmup + --steps steps, watching the peaks."""
        count = self.warmup + self.steps
        host, device = PeakHostMemory(), PeakDeviceMemory(self.place)
        with turn.filled(count + 1) as (cache, token):
            fill_peak = device.growth()
            device.restart()
            Steps(turn.subject.model, cache, turn.context).run(token, count)
            decode_peak = device.growth()
        usage = turn.usage(cache, turn.context + count)
        return MemorySample(fill_peak, decode_peak, host.growth(), usage)

    def row(self, cell: Cell, samples: Mapping[int, Sequence[MemorySample]]) -> Row:
        """Bytes of weights and cache, and the peaks, the largest of all rounds."""
        taken = samples[self.built]
        usage = taken[-1].usage
        row: Row = {
            "weight_bytes": self.subjects[0].weights.held,
            "device_bytes": usage.device_bytes,
            "host_bytes": usage.host_bytes,
            "full_bytes": usage.full_bytes,
            "device_peak_bytes": max(sample.device_peak for sample in taken),
            "device_peak_is": "cache bytes" if taken[0].fill_peak is None else "peak",
            "fill_peak_bytes": _largest(sample.fill_peak for sample in taken),
            "decode_peak_bytes": _largest(sample.decode_peak for sample in taken),
            "host_growth_bytes": _largest(sample.host_growth for sample in taken),
        }
        if not self.scaled:
            return row
        layers = self.whole.layers

        def whole(value: Callable[[MemorySample], int]) -> float:
            return scale({n: max(map(value, samples[n])) for n in samples}, layers).value

        row["scaled"] = {
            "layers": layers,
            "from_layers": sorted(samples),
            "weight_bytes": self.weights.held,
            "device_bytes": whole(lambda one: one.usage.device_bytes),
            "host_bytes": whole(lambda one: one.usage.host_bytes),
            "device_peak_bytes": whole(lambda one: one.device_peak),
        }
        return row

    def _fit(self, cell: Cell) -> Row:
        """The largest batch that fits, from the rows of the smallest and the largest ``--batch``.

        ``batch`` is None where it can't be computed and ``why`` then says the reason. ``how`` is
        ``computed``, ``scaled, computed`` or ``confirmed``; where a run with that batch did not fit
        after all it is ``refuted``.
        """
        size = {"cache": cell["cache"], "context": cell["context"]}
        points = []
        for batch in (min(self.batch), max(self.batch)):
            row = self._measured[0].find(size | {"batch": batch})
            assert row is not None
            missing = why_missing(row)
            if missing is not None:
                return {"batch": None, "why": f"batch {batch}: {missing}"}
            part = row["scaled"] if self.scaled else row
            points.append((batch, float(part["device_peak_bytes"])))
        result = largest_batch(*points, self.weights.held, cell["fits"])
        if result is None:
            return {"batch": None, "why": "more sequences took no more memory"}
        fitted: Row = {
            "batch": result.batch,
            "per_sequence_bytes": result.per_sequence_bytes,
            "fixed_bytes": result.fixed_bytes,
            "from_batches": [batch for batch, _ in points],
            "how": "scaled, computed" if self.scaled else "computed",
        }
        if self.scaled or not result.batch or not _large_enough(self.place, cell["fits"]):
            return fitted
        return fitted | self._confirmed(size | {"batch": result.batch}, cell["fits"])

    def _confirmed(self, cell: Cell, limit: int) -> Row:
        """``how``, and what a run of the cell took together with the weights."""
        short = self.shortage(cell)
        if short is not None:
            return {"how": "computed", "why": f"not tried: {short}"}
        sample, why = attempt(lambda: self.once(self.turn(cell, self.subjects[0])))
        if why:
            return {"how": "refuted", "why": why_missing(why)}
        total = sample.device_peak + self.weights.held
        return {"how": "confirmed" if total <= limit else "refuted", "run_bytes": total}

    @classmethod
    def table(cls, results: Results) -> str:
        """Two tables: peaks by batch, and the largest batch that fits."""
        peaks = [(cell, row) for cell, row in results if "batch" in cell]
        fits = [(cell, row) for cell, row in results if "fits" in cell]
        scaled = any("scaled" in row for _, row in peaks)
        text = table_of([*_PEAKS, *(_SCALED if scaled else ())], peaks)
        return described(results, f"{text}\n\n{table_of(_FITS, fits)}" if fits else text)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        plot_contexts(path, results, "cache on the device", "MB", "device_bytes")


def _peak(row: Row) -> str:
    peak = mb(row["device_peak_bytes"])
    return peak if row["device_peak_is"] == "peak" else f"{peak} (cache bytes)"


_PEAKS: tuple[Column, ...] = (
    *SIZE,
    ("weights MB", of(mb, "weight_bytes")),
    ("cache device MB", of(mb, "device_bytes")),
    ("cache host MB", of(mb, "host_bytes")),
    ("of full K,V", of(lambda row: f"{row['device_bytes'] / row['full_bytes']:.1%}")),
    ("peak beyond weights MB", of(_peak)),
    ("process growth MB", of(mb, "host_growth_bytes")),
)
_SCALED: tuple[Column, ...] = (
    ("scaled weights MB", of(mb, "scaled", "weight_bytes")),
    ("scaled cache device MB", of(mb, "scaled", "device_bytes")),
    ("scaled peak MB", of(mb, "scaled", "device_peak_bytes")),
)
_FITS: tuple[Column, ...] = (
    *SIZE[:2],
    ("device memory", lambda cell, row: f"{cell['fits'] / 1e9:g} GB"),
    ("largest batch", of(str, "batch")),
    ("MB a sequence", of(lambda row: mb(row["per_sequence_bytes"]) if "how" in row else "-")),
    ("how", of(lambda row: row.get("how", row.get("why", "-")))),
)


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _large_enough(device: torch.device, limit: int) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).total_memory >= limit
