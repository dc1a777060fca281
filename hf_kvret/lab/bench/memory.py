"""``hf-kvret bench memory``: peaks, and how many sequences fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from hf_kvret.lab.bench.filling import Turn
from hf_kvret.lab.bench.limits import PeakDeviceMemory, PeakHostMemory, byte_count
from hf_kvret.lab.bench.model_measurement import Line, ModelMeasurement
from hf_kvret.lab.bench.stepping import Steps
from hf_kvret.lab.bench.tables import (
    SIZE,
    described,
    mb,
    of,
    plot_contexts,
    table_of,
    why_missing,
)
from hf_kvret.lab.bench.timed import Column
from hf_kvret.lab.evaluate.measurement import Progress, Row, attempt
from hf_kvret.lab.program.options import option, with_default
from hf_kvret.lab.report.results import Cell, Results


@dataclass(frozen=True, kw_only=True)
class Memory(ModelMeasurement):
    """Peak memory, and the largest batch that fits --device-memory.

    Two batch sizes are measured; a straight line through their bytes says how many sequences fit.
    On a CUDA device a run with that batch confirms it where the device is large enough.
    """

    name: ClassVar[str] = "memory"
    summary: ClassVar[str] = "peak memory, and the largest batch that fits"
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
        """The results of ``plan``, from whose rows largest batches are computed."""
        return []

    def groups(self, results: Results) -> Iterator[Sequence[Cell]]:
        self._measured[:] = [results]
        yield from super().groups(results)

    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        if "fits" in group[0]:
            return [self._fit(cell) for cell in group]
        return super().rows(group, progress)

    @torch.inference_mode()
    def once(self, turn: Turn) -> Row:
        """Fill and take --warmup + --steps steps, watching the peaks; bytes of each.

        ``device_peak_bytes`` is the most device memory beyond the weights; on a CPU, where the
        peaks are None, the bytes of the cache.
        """
        count = self.warmup + self.steps
        host, device = PeakHostMemory(), PeakDeviceMemory(self.place)
        with turn.filled(count + 1) as (cache, token):
            fill_peak = device.growth()
            device.restart()
            Steps(turn.subject.model, cache, turn.context).run(token, count)
            decode_peak = device.growth()
        usage = turn.usage(cache, turn.context + count)
        peak = usage.device_bytes if fill_peak is None else max(fill_peak, decode_peak or 0)
        return {
            "device_bytes": usage.device_bytes,
            "host_bytes": usage.host_bytes,
            "full_bytes": usage.full_bytes,
            "device_peak_bytes": peak,
            "fill_peak_bytes": fill_peak,
            "decode_peak_bytes": decode_peak,
            "host_growth_bytes": host.growth(),
        }

    def row(self, cell: Cell, samples: Mapping[int, Sequence[Row]]) -> Row:
        """Bytes of weights and cache, and the peaks, the largest of all rounds."""
        most: dict[int, Row] = {
            layers: {key: _largest(row[key] for row in rows) for key in rows[0]}
            for layers, rows in samples.items()
        }
        row: Row = {"weight_bytes": self.subjects_of(cell)[0].weights.held, **most[self.built]}
        row["device_peak_is"] = "cache bytes" if row["fill_peak_bytes"] is None else "peak"
        if self.scaled:
            layers = self.whole.layers
            row["scaled"] = {
                "layers": layers,
                "from_layers": sorted(samples),
                "weight_bytes": self.whole_bytes.held,
            } | {
                key: Line.through({n: most[n][key] for n in most}).at(layers)
                for key in ("device_bytes", "host_bytes", "device_peak_bytes")
            }
        return row

    def _fit(self, cell: Cell) -> Row:
        """The largest batch that fits, from the rows of the smallest and the largest ``--batch``.

        ``batch`` is None where it can't be computed and ``why`` then says the reason. ``how`` is
        ``computed``, ``scaled, computed`` or ``confirmed``; where a run with that batch did not fit
        after all it is ``refuted``.
        """
        size = {"cache": cell["cache"], "context": cell["context"]}
        points: dict[int, float] = {}
        for batch in (min(self.batch), max(self.batch)):
            row = self._measured[0].find(size | {"batch": batch})
            assert row is not None
            missing = why_missing(row)
            if missing is not None:
                return {"batch": None, "why": f"batch {batch}: {missing}"}
            sizes = row["scaled"] if self.scaled else row
            points[batch] = self.whole_bytes.held + float(sizes["device_peak_bytes"])
        line = Line.through(points)
        most = line.most(cell["fits"])
        if most is None:
            return {"batch": None, "why": "more sequences took no more memory"}
        fit: Row = {
            "batch": most,
            "per_sequence_bytes": line.slope,
            "fixed_bytes": line.start,
            "from_batches": list(points),
            "how": "scaled, computed" if self.scaled else "computed",
        }
        if self.scaled or not most or not _large_enough(self.place, cell["fits"]):
            return fit
        return fit | self._confirm(size | {"batch": most}, cell["fits"])

    def _confirm(self, cell: Cell, limit: int) -> Row:
        """``how``, and what a run of the cell took together with the weights."""
        short = self.shortage(cell)
        if short is not None:
            return {"how": "computed", "why": f"not tried: {short}"}
        sample, why = attempt(lambda: self.once(self.turn(cell, self.subjects_of(cell)[0])))
        if why:
            return {"how": "refuted", "why": why_missing(why)}
        total = sample["device_peak_bytes"] + self.whole_bytes.held
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
