"""``hf-kvret bench batch``: the most tokens a second, at the batch that gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.benchmark.batch_tables import batch_table, plot_batches
from hf_kvret.benchmark.checks import Checker
from hf_kvret.benchmark.decode import Decode
from hf_kvret.benchmark.filling import choose_fill
from hf_kvret.benchmark.limits import largest_batch
from hf_kvret.benchmark.measure import Bench
from hf_kvret.benchmark.runs import run_cells
from hf_kvret.benchmark.tables import why_missing
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.results import Cell, Results


class Batch(Decode):
    """The most new tokens a second: batches of 1, 2, 4, ... up to the largest that fits."""

    name: ClassVar[str] = "batch"
    summary: ClassVar[str] = "most tokens a second, and the batch that gives them"
    description: ClassVar[str] = (
        "The most new tokens a second: batches of 1, 2, 4, ... up to the largest that fits. "
        "Decode steps are measured as in bench decode. A batch doesn't fit when memory runs "
        "out, when its peak is beyond --device-memory, or when the line through two smaller "
        "ones says so. Between the last power of two that fits and the next the largest batch "
        "is looked for, and measured too."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench batch --shape llama-3.1-8b --context 64K,128K --dtype bfloat16 "
        "--caches dense,dense-graph,paris,paris:store=host --json batch.json",
    )

    def table(self, results: Results) -> str:
        return batch_table(results)

    def plot(self, path: Path, results: Results) -> None:
        plot_batches(path, results)


class BatchSearch:
    """Finds and measures the batches of one command; finished cells are not measured again.

    Args:
        limit: bytes of device memory that there are, the weights' included.
        most: no batch is larger.
        results: where rows are looked for and kept.
    """

    def __init__(
        self,
        bench: Bench,
        choices: Mapping[str, CacheChoice],
        fill: str,
        limit: int,
        most: int,
        results: Results,
    ) -> None:
        self._bench, self._choices, self._fill = bench, dict(choices), fill
        self._limit, self._most, self._results = limit, most, results
        self._checker = Checker(bench.subjects[0].model, bench.subjects[0].rows, bench.seed)

    def run(self, context: int) -> None:
        """Measure all caches behind ``context`` tokens; one whose check fails goes no further."""
        fitting, last, batch = list(self._choices), dict.fromkeys(self._choices, 0), 1
        while fitting and batch <= self._most:
            self._measure(fitting, context, batch)
            fitting = [name for name in fitting if self._fits(name, context, batch)]
            last |= dict.fromkeys(fitting, batch)
            batch *= 2
        for name in self._choices:
            self._refine(name, context, last[name])

    def _refine(self, name: str, context: int, low: int) -> None:
        """Measure the largest batch above ``low``, the largest power of two that fits."""
        if low < 2 or low == self._most:
            # Nothing lies between 1 and 2.
            return
        high = min(2 * low - 1, self._most)
        line = self._line(name, context, low)
        # Beyond the line nothing is tried, here as elsewhere.
        high = high if line is None else min(high, line)
        batch = high
        while low < high:
            self._measure([name], context, batch)
            if self._fits(name, context, batch):
                low = batch
            else:
                high = batch - 1
            batch = (low + high + 1) // 2

    def _measure(self, names: Sequence[str], context: int, batch: int) -> None:
        """Rows for these caches, those that are there already left alone."""
        waiting: list[Cell] = []
        for name in names:
            cell = _cell(name, context, batch)
            row = self._results.find(cell)
            if row is not None and "check_failed" not in row:
                continue
            line = self._line(name, context, batch // 2)
            if line is not None and line < batch:
                self._results.add(cell, self._too_large(cell, f"predicted: {line} fit"))
            else:
                waiting.append(cell)
        if not waiting:
            return
        run_cells(
            self._bench,
            Batch(),
            self._choices,
            waiting,
            self._fill,
            self._results,
            self._checker,
        )
        for cell in waiting:
            row = self._results.find(cell)
            assert row is not None
            needed = self._bench.whole.held + row.get("device_peak_bytes", 0)
            if needed > self._limit:
                told = f"{needed / 1e9:.2f} GB of {self._limit / 1e9:.2f} GB"
                self._results.add(cell, self._too_large(cell, told))

    def _fits(self, name: str, context: int, batch: int) -> bool:
        row = self._results.find(_cell(name, context, batch))
        return row is not None and why_missing(row) is None

    def _line(self, name: str, context: int, low: int) -> int | None:
        """The largest batch by the peaks of ``low`` and half of it; None where they don't tell.

        They don't where a store decides by what is free, or by a budget, what goes to the host.
        """
        options = self._choices[name].options
        if low < 2 or (options is not None and (options.splits_rows or options.store == "auto")):
            return None
        peaks: list[tuple[int, float]] = []
        for batch in (low // 2, low):
            row = self._results.find(_cell(name, context, batch))
            if row is None or why_missing(row) is not None:
                return None
            peaks.append((batch, float(row["device_peak_bytes"])))
        found = largest_batch(peaks[0], peaks[1], self._bench.whole.held, self._limit)
        return None if found is None else found.batch

    def _too_large(self, cell: Cell, why: str) -> dict[str, Any]:
        fill = choose_fill(self._fill, cell["context"], self._bench.device, cell["cache"])
        return {"fill": fill, "out_of_memory": f"does not fit ({why})"}


def device_limit(wanted: int | None, device: torch.device) -> int:
    """Bytes of device memory to fill: ``wanted``, and no more than there is.

    Raises:
        ValueError: no limit on a CPU, whose memory is not the device's.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return total if wanted is None else min(wanted, total)
    if wanted is None:
        raise ValueError(
            "bench batch on a CPU needs --device-memory SIZE, as 1GB: it is how much memory the "
            "device is taken to have"
        )
    return wanted


def _cell(name: str, context: int, batch: int) -> Cell:
    return {"cache": name, "context": context, "batch": batch}
