"""``hf-kvret bench all``: the minutes of a GPU, spent on what was prepared."""

from __future__ import annotations

import copy
import faulthandler
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch

from hf_kvret.lab.bench.filling import make_stand_ins
from hf_kvret.lab.bench.model_measurement import ModelMeasurement
from hf_kvret.lab.bench.passes import Decode, Prefill
from hf_kvret.lab.bench.shapes import Shape, load_shape
from hf_kvret.lab.bench.tables import SIZE, TIMES, ms, of, plot_contexts, step_counts
from hf_kvret.lab.evaluate.failures import attempt
from hf_kvret.lab.evaluate.measurement import Measurement, Row
from hf_kvret.lab.program.arguments import length, number
from hf_kvret.lab.program.options import option
from hf_kvret.lab.report.results import FAILED, Cell, Results
from hf_kvret.lab.report.tables import Columns, table_of
from hf_kvret.lab.selftest.command import device_fault

_SEED = 0
# A dry run has this context; its windows are small enough to overflow.
_DRY_CONTEXT = 128
_SMALL = "dense_below=0:recent=32:flush=32:sink=4"
_RETRIEVING = ("paris", "lrqk", "ctkvr", "a2ats", "aqua", "flat")
# They need CUDA; these stand for them in a dry run.
_ON_CPU = {"dense-graph": "dense", "offloaded": "full"}
_SMALL_BUDGETS = {"top_k=100": "top_k=8", "top_k=1024": "top_k=16", "top_k=2048": "top_k=16"}
_DRY_LAYERS, _DRY_STEPS = 3, 3
_DRY_CARD = "CPU (dry)"
# A cell takes more than the first, and is given up after the second.
_LEAST_SECONDS, _MOST_SECONDS = 3.0, 60.0
_HUNG = {"failed": "it took too long, or ended the process"}


@dataclass(frozen=True, eq=False)
class Stage:
    """Some cells that answer one question.

    Attributes:
        name: of the stage, in its cells.
        question: that it answers: a heading of the page.
        seconds: no cell is begun after so long.
        cells: cache, context and batch of each, in the order in which they are measured.
        measurement: that measures each cell.
        options: of the measurement.
    """

    name: str
    question: str
    seconds: float
    cells: Sequence[Cell]
    measurement: type[ModelMeasurement] = Decode
    options: Mapping[str, Any] = field(default_factory=dict)

    def on(self, card: str) -> list[Cell]:
        """The cells of a card; of a dry run small ones, each kind once."""
        sizes = list(self.cells)
        if card == _DRY_CARD:
            sizes = list({str(small): small for small in map(_shrunk, sizes)}.values())
        return [{"stage": self.name, "card": card, **size} for size in sizes]


def _shrunk(cell: Cell) -> Cell:
    name, *options = cell["cache"].split(":")
    options = [_SMALL_BUDGETS.get(one, one) for one in options]
    if name in _RETRIEVING:
        options.append(_SMALL)
    return {
        "cache": ":".join([_ON_CPU.get(name, name), *options]),
        "context": _DRY_CONTEXT,
        "batch": 2 if cell["batch"] > 8 else 1,
    }


def sized(caches: str, *sizes: str) -> list[Cell]:
    """A cell for each cache at each size, as ``64K`` or ``64K x 8``: length and batch."""
    parsed = [(*size.split(" x "), "1")[:2] for size in sizes]
    return [
        {"cache": cache, "context": length(context), "batch": int(batch)}
        for context, batch in parsed
        for cache in caches.split()
    ]


_ON_HOST = "paris:top_k=1024:store=host lrqk:top_k=2048:store=host ctkvr:top_k=1024:store=host"
_RESIDENT = "lrqk:top_k=2048:store=resident:slots=2.0"
_PARIS = "paris:top_k=100 paris:top_k=1024"

STAGES = (
    Stage(
        "stores",
        "How long does a step take with rows on the host, beside transformers' offloading?",
        110,
        sized(f"{_ON_HOST} offloaded {_RESIDENT}", "64K", "128K"),
        options={"warmup": 6, "steps": 24, "limit": 4.0},
    ),
    Stage(
        "attention",
        "How long does attention alone take?",
        45,
        sized(f"{_PARIS} flat:top_k=1024 lrqk:top_k=1024", "32K", "128K", "32K x 8", "128K x 8"),
        options={"warmup": 6, "steps": 24, "limit": 2.0, "part": "attention"},
    ),
    Stage(
        "headline",
        "How long does a step take, beside full attention in a graph?",
        80,
        [
            *sized(f"{_PARIS} dense-graph", "128K", "32K", "64K"),
            *sized("paris:top_k=100 dense-graph", "64K x 8"),
            *sized("paris:top_k=100:store=higgs", "64K x 32"),
        ],
        options={"warmup": 8, "steps": 48, "limit": 5.0},
    ),
    Stage(
        "systems",
        "How long does a step of each of the five systems take?",
        50,
        sized("paris:top_k=1024 lrqk:top_k=1024 ctkvr:top_k=1024 a2ats:top_k=1024 aqua", "64K"),
        options={"warmup": 4, "steps": 8, "limit": 5.0},
    ),
    Stage(
        "prompts",
        "How soon does the first token come?",
        40,
        sized("dense paris:top_k=1024 paris:top_k=1024:prompt=retrieve", "64K"),
        Prefill,
        {"warmup": 0, "steps": 1},
    ),
)
"""All of it, the most important first; together some six minutes."""


@dataclass(frozen=True, kw_only=True)
class BenchAll(Measurement):
    """Measure what matters on a GPU, in the shape of Llama-3.1-8B, the most important first.

    The model is built once for all stages, and each finished cell is kept at once. A cell that
    hangs ends the process; the same command goes on behind it, and tries what failed again at the
    end. Cards have tables of their own.
    """

    command: ClassVar[str] = "bench"
    name: ClassVar[str] = "all"
    summary: ClassVar[str] = "measure what matters on a GPU in some minutes"
    examples: ClassVar[tuple[str, ...]] = ("hf-kvret bench all --json gpu.json",)

    minutes: float = option(8.0, "time for all of it", kind=number(0))
    dry: bool = option(False, "a tiny model on a CPU: all of it runs, and no number means a thing")

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device("cpu" if self.dry else "cuda")

    @cached_property
    def card(self) -> str:
        """The name of the GPU, by which rows differ."""
        return _DRY_CARD if self.dry else torch.cuda.get_device_name()

    @cached_property
    def shape(self) -> Shape:
        """Llama-3.1-8B; dry: a tiny one."""
        if not self.dry:
            return load_shape("llama-3.1-8b")
        config = copy.deepcopy(load_shape("tiny").config)
        config.num_hidden_layers = _DRY_LAYERS
        return Shape("tiny", config)

    @cached_property
    def shared(self) -> ModelMeasurement:
        """It has the whole model, and what is measured and checked once for all stages."""
        return self.measurement(Decode, caches="dense")

    def measurement(self, cls: type[ModelMeasurement], **options: Any) -> ModelMeasurement:
        """A measurement on the model of all stages, or on its attention."""
        dtype = "float32" if self.dry else "bfloat16"
        place: dict[str, Any] = {"dtype": dtype, "device": self.device.type, "fill": "random"}
        one = cls(shape=self.shape.name, seed=_SEED, rounds=1, **place, **options)
        vars(one)["whole"] = self.shape.part(one.part)
        return one

    def check(self) -> None:
        if not self.dry and not torch.cuda.is_available():
            raise ValueError("no CUDA device here: give --dry to try all of it on a CPU")

    def setup(self) -> dict[str, Any]:
        layers = self.shape.layers
        return {"shape": self.shape.name, "layers": layers, "of_layers": layers}

    def cells(self) -> list[Cell]:
        return [cell for stage in STAGES for cell in stage.on(self.card)]

    def waiting(self, results: Results) -> list[Cell]:
        """The cells that were never begun, and behind them those that failed."""
        cells = self.cells()
        failed = [cell for cell, row in results if cell in cells and ({FAILED, *_HUNG} & {*row})]
        return [cell for cell in cells if results.find(cell) is None] + failed

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """One by one, until the time is over or the device does not go on.

        A cell has a row before it is measured, which stays where it ends the process.
        """
        if results.path is None and not self.dry:
            raise ValueError("give --json FILE: a cell that hangs would take all rows with it")
        started, left = time.monotonic(), {stage.name: stage.seconds for stage in STAGES}
        # It is built before the time of a cell begins.
        _ = self.shared.subject
        for cell in self.waiting(results):
            begun = time.monotonic()
            late = begun - started + _LEAST_SECONDS > 60 * self.minutes
            if late or left[cell["stage"]] < 0:
                continue
            results.add(cell, _HUNG)
            yield [cell]
            left[cell["stage"]] -= time.monotonic() - begun
            if device_fault(self.device):
                return

    def rows(self, group: Sequence[Cell]) -> list[Row]:
        """The row of a cell; whatever a kernel, a driver or a compiler raises, it says so."""
        # A kernel that hangs can't be interrupted.
        faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True)
        try:
            try:
                row, why = attempt(partial(self.row, group[0]))
            except Exception as error:
                row, why = None, {"failed": f"{type(error).__name__}: {error}"}
            # It waits for kernels of a cell that raised, too.
            fault = device_fault(self.device)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return [{"failed": fault} if fault else why or row]

    def row(self, cell: Cell) -> Row:
        """The numbers of a cell; artifacts that its cache lacks are made of random tokens."""
        stage = next(one for one in STAGES if one.name == cell["stage"])
        options = dict(stage.options)
        if self.dry:
            options |= {name: min(options[name], _DRY_STEPS) for name in ("warmup", "steps")}
        size = {name: (cell[name],) for name in ("context", "batch")}
        measurement = self.measurement(stage.measurement, caches=cell["cache"], **size, **options)
        names = ("bandwidth", *(("subject", "checker") if measurement.part == "whole" else ()))
        vars(measurement).update({name: getattr(self.shared, name) for name in names})
        with TemporaryDirectory() as folder:
            choices = measurement.choices.values()
            make_stand_ins(self.shared.subject.model, choices, Path(folder), _SEED)
            return measurement.rows([cell])[0]

    @classmethod
    def table(cls, results: Results) -> str:
        """A heading for each stage, below it a table for each card, and what is missing."""
        texts = []
        for stage in STAGES:
            texts.append(f"## {stage.question}")
            for card in dict.fromkeys(cell["card"] for cell, _ in results):
                place = {"stage": stage.name, "card": card}.items()
                rows = [(cell, row) for cell, row in results if place <= cell.items()]
                missing = [cell for cell in stage.on(card) if results.find(cell) is None]
                if not rows:
                    texts.append(f"**{card}**: not measured.")
                    continue
                texts += [f"**{card}**", table_of(rows, _COLUMNS, len(SIZE))]
                if missing:
                    texts.append(f"Not measured: {'; '.join(map(label, missing))}.")
        return "\n\n".join(texts)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Steps beside full attention in a graph."""
        steps = Results(results.name, results.setup)
        for cell, row in results:
            if cell["stage"] == "headline":
                steps.add({**cell, "cache": f"{cell['cache']}, {cell['card']}"}, row)
        plot_contexts(path, steps, "time of a decode step")


def label(cell: Cell) -> str:
    """A cell in words, as ``paris at 65,536 x 1``."""
    return f"{cell['cache']} at {cell['context']:,} x {cell['batch']}"


def _share_over_bus(cell: Cell, row: dict[str, Any]) -> str:
    """How many of the selected rows came over the bus."""
    rows = row.get("selected_rows")
    return f"{row['bus_rows'] / rows:.0%}" if rows else "-"


_COLUMNS: Columns = {
    **SIZE,
    "check": of(str, "check"),
    "ms": of(ms, "seconds"),
    **{name: text for name, text in TIMES.items() if not name.endswith("moved")},
    "rows over the bus": _share_over_bus,
    "steps": step_counts,
}
