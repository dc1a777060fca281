"""``hf-kvret bench batch``: the most tokens a second, at the batch that gives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.lab.bench.limits import byte_count
from hf_kvret.lab.bench.model_measurement import Line
from hf_kvret.lab.bench.opponents import DENSE
from hf_kvret.lab.bench.passes import Decode
from hf_kvret.lab.bench.tables import (
    SIZE,
    mb,
    of,
    per_second,
    step_counts,
    table_of,
    tenths,
    why_missing,
)
from hf_kvret.lab.bench.timed import Column, ms, series
from hf_kvret.lab.evaluate.measurement import Progress, Row
from hf_kvret.lab.program.common_options import count_option
from hf_kvret.lab.program.options import option, with_default
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import markdown_table

# Full attention to all tokens, with keys and values in device memory.
_DENSE = ("full", "static", *DENSE)


@dataclass(frozen=True, kw_only=True)
class Batch(Decode):
    """The most new tokens a second: batches of 1, 2, 4, ... up to the largest that fits.

    Decode steps are measured as in bench decode. A batch doesn't fit when memory runs out, when its
    peak is beyond --device-memory, or when the line through two smaller ones says so. Between the
    last power of two that fits and the next the largest batch is looked for, and measured too.
    """

    name: ClassVar[str] = "batch"
    summary: ClassVar[str] = "most tokens a second, and the batch that gives them"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench batch --shape llama-3.1-8b --context 64K,128K --dtype bfloat16 "
        "--caches dense,dense-graph,paris,paris:store=host --json batch.json",
    )

    batch: tuple[int, ...] = (1,)
    """No option: batches are what is looked for."""
    opponents: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    caches: str = with_default(Decode, "caches", "dense,flat,paris,lrqk")
    steps: int = with_default(Decode, "steps", 16)
    warmup: int = with_default(Decode, "warmup", 4)
    rounds: int = with_default(Decode, "rounds", 1)
    device_memory: int | None = option(
        None,
        "fill no more device memory than this, as 80GB; default: all of a GPU's",
        kind=byte_count,
        metavar="SIZE",
    )
    most: int = count_option(256, "no batch is larger")

    @cached_property
    def room(self) -> int:
        """Bytes of device memory to fill, the weights' included: no more than there is.

        Raises:
            ValueError: no limit on a CPU, whose memory is not the device's.
        """
        limit = self.device_memory
        if self.place.type == "cuda":
            total = torch.cuda.get_device_properties(self.place).total_memory
            return total if limit is None else min(limit, total)
        if limit is None:
            raise ValueError(
                "bench batch on a CPU needs --device-memory SIZE, as 1GB: it is how much memory "
                "the device is taken to have"
            )
        return limit

    def check(self) -> None:
        if self.layers is not None:
            raise ValueError(
                "--layers: which batch fits is a matter of the whole model; leave it out"
            )
        super().check()

    def setup(self) -> dict[str, Any]:
        return super().setup() | {"device_memory": self.room, "most": self.most}

    def cells(self) -> list[Cell]:
        """No cells: the batches to measure follow from the results of others."""
        return []

    def count(self, results: Results) -> None:
        return None

    def groups(self, results: Results) -> Iterator[Sequence[Cell]]:
        """Powers of two of all caches, as far as they fit, then the largest batch of each."""
        for context in self.context:
            fitting, last, batch = list(self.choices), dict.fromkeys(self.choices, 0), 1
            while fitting and batch <= self.most:
                cells = {name: _cell(name, context, batch) for name in fitting}
                yield from self._try(results, list(cells.values()))
                fitting = [name for name in fitting if _measured_row(results, cells[name])]
                last |= dict.fromkeys(fitting, batch)
                batch *= 2
            for name in self.choices:
                yield from self._refine(results, name, context, last[name])

    def _refine(
        self, results: Results, name: str, context: int, low: int
    ) -> Iterator[Sequence[Cell]]:
        """Search the largest batch above ``low``, the largest power of two that fits."""
        # Nothing lies between 1 and 2.
        if low < 2 or low == self.most:
            return
        high = min(2 * low - 1, self.most)
        line = self._line(results, _cell(name, context, low))
        # Beyond the line nothing is tried, here as elsewhere.
        batch = high = high if line is None else min(high, line)
        while low < high:
            cell = _cell(name, context, batch)
            yield from self._try(results, [cell])
            if _measured_row(results, cell):
                low = batch
            else:
                high = batch - 1
            batch = (low + high + 1) // 2

    def _try(self, results: Results, cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
        """The ``cells`` without a row; those that can't fit get a row that says so."""
        pending = []
        for cell in cells:
            row = results.find(cell)
            if row is not None and "check_failed" not in row:
                continue
            line = self._line(results, cell | {"batch": cell["batch"] // 2})
            if line is not None and line < cell["batch"]:
                results.add(cell, self._too_large(cell, f"predicted: {line} fit"))
            else:
                pending.append(cell)
        yield from self.together(pending)

    def _line(self, results: Results, cell: Cell) -> int | None:
        """The largest batch by the peaks at this cell's batch and at half of it; None: unknown.

        It is unknown where a store moves rows to the host by a budget, or by the memory free.
        """
        options, low = self.choices[cell["cache"]].options, cell["batch"]
        if low < 2 or (options is not None and (options.splits_rows or options.store == "auto")):
            return None
        peaks: dict[int, float] = {}
        for batch in (low // 2, low):
            row = _measured_row(results, cell | {"batch": batch})
            if row is None:
                return None
            peaks[batch] = self.whole_bytes.held + float(row["device_peak_bytes"])
        return Line.through(peaks).most(self.room)

    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """Rows as of ``Decode``; a batch beyond the limit has one that says so."""
        rows = []
        for cell, row in zip(group, super().rows(group, progress), strict=True):
            peak = self.whole_bytes.held + row.get("device_peak_bytes", 0)
            why = f"{peak / 1e9:.2f} GB of {self.room / 1e9:.2f} GB"
            rows.append(row if peak <= self.room else self._too_large(cell, why))
        return rows

    def _too_large(self, cell: Cell, why: str) -> Row:
        return {"fill": self.fill_of(cell), "out_of_memory": f"does not fit ({why})"}

    @classmethod
    def table(cls, results: Results) -> str:
        """Two tables: the best batch of each cache beside the best dense one, and all batches."""
        rows, best, lines = _by_cache(results), best_batches(results), []
        for (context, cache), measured in rows.items():
            if (context, cache) not in best:
                lines.append((cache, f"{context:,}", "0", "-", "-", "-"))
                continue
            batch, rate = best[context, cache]
            dense = [
                other
                for (length, name), (_, other) in best.items()
                if length == context and name in _DENSE
            ]
            largest = str(max(cell["batch"] for cell, row in measured if "seconds" in row))
            over = f"{rate / max(dense):.2f}" if dense else "-"
            lines.append((cache, f"{context:,}", largest, str(batch), per_second(rate), over))
        header = ("cache", "context", "largest batch", "best batch", "tokens/s")
        by_batch = [pair for measured in rows.values() for pair in measured]
        return (
            f"{markdown_table((*header, 'over the best dense'), lines)}\n\n"
            f"{table_of(_ALL, by_batch)}"
        )

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Tokens a second against the batch, a line for each cache and context."""
        points = [
            (f"{cache}, {context:,}", float(cell["batch"]), row["tokens_per_second"])
            for (context, cache), rows in _by_cache(results).items()
            for cell, row in rows
            if "seconds" in row
        ]
        lines = series(points)
        title = f"{results.setup['shape']}: new tokens a second"
        plot_lines(path, lines, title=title, x="batch", y="tokens/s", log_x=True, log_y=True)


_ALL: tuple[Column, ...] = (
    *SIZE[:-1],
    ("ms a step", of(ms, "seconds")),
    ("tokens/s", of(per_second, "tokens_per_second")),
    ("floor ms", of(ms, "floor_seconds")),
    ("time / floor", of(tenths, "time_over_floor")),
    ("peak beyond weights MB", of(mb, "device_peak_bytes")),
    ("cache host MB", of(mb, "host_bytes")),
    ("steps", step_counts),
)


def best_batches(results: Results) -> dict[tuple[int, str], tuple[int, float]]:
    """By context and cache: the batch with the most tokens a second, and these."""
    best: dict[tuple[int, str], tuple[int, float]] = {}
    for cell, row in results:
        key = cell["context"], cell["cache"]
        if "seconds" in row and (key not in best or row["tokens_per_second"] > best[key][1]):
            best[key] = cell["batch"], row["tokens_per_second"]
    return best


def _by_cache(results: Results) -> dict[tuple[int, str], list[tuple[Cell, Row]]]:
    """Cells and rows by context and cache, batches ascending."""
    rows: dict[tuple[int, str], list[tuple[Cell, Row]]] = {}
    for cell, row in results:
        rows.setdefault((cell["context"], cell["cache"]), []).append((cell, row))
    return {key: sorted(pairs, key=lambda pair: pair[0]["batch"]) for key, pairs in rows.items()}


def _cell(name: str, context: int, batch: int) -> Cell:
    return {"cache": name, "context": context, "batch": batch}


def _measured_row(results: Results, cell: Cell) -> Row | None:
    """The row of a cell that was measured; None where there is none, or it says why not."""
    row = results.find(cell)
    return None if row is None or why_missing(row) is not None else row
