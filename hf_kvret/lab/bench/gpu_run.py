"""``hf-kvret bench all``: the minutes of a GPU, spent on what was prepared.

The model is built once, and the cells of its stages are measured one by one. A finished cell is a
line of ``rows.jsonl``, synced at once. A cell that hangs ends the process; the same call goes on
behind it.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_kvret.lab.bench.checks import Checker
from hf_kvret.lab.bench.filling import BenchModel, make_stand_ins, measure_rows
from hf_kvret.lab.bench.model_measurement import ModelMeasurement
from hf_kvret.lab.bench.passes import Decode, Prefill
from hf_kvret.lab.bench.shapes import Shape, load_shape, random_model, weight_bytes
from hf_kvret.lab.bench.tables import SIZE, TIMES, ms, of, step_counts
from hf_kvret.lab.bench.timing import Bandwidth, measure_bandwidth
from hf_kvret.lab.evaluate.failures import attempt
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.program.arguments import DTYPES, check_device, file_path, length, number
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.program import add_command
from hf_kvret.lab.report.outputs import check_folder, replace_page
from hf_kvret.lab.report.results import Cell, why_missing
from hf_kvret.lab.report.tables import Columns, table_of
from hf_kvret.lab.selftest.command import describe
from hf_kvret.saved.folder import replace_file

_SEED = 0
# A dry run has this context; its windows are small enough to overflow.
_DRY_CONTEXT = 128
_SMALL = "dense_below=0:recent=32:flush=32:sink=4"
_RETRIEVING = ("paris", "lrqk", "ctkvr", "a2ats", "aqua", "flat")
# They need CUDA; these stand for them in a dry run.
_ON_CPU = {"dense-graph": "dense", "offloaded": "full"}
_SMALL_BUDGETS = {"top_k=100": "top_k=8", "top_k=1024": "top_k=16", "top_k=2048": "top_k=16"}
_DRY_LAYERS, _DRY_TOKENS, _DRY_STEPS = 3, 256, 3


@dataclass(frozen=True, eq=False)
class Stage:
    """Some cells that answer one question.

    Attributes:
        name: of the stage, in its rows.
        question: that it answers: a heading of the page.
        seconds: no cell is begun after so long.
        cells: all of them, in the order in which they are measured.
        measurement: that measures each cell.
        options: of the measurement.
    """

    name: str
    question: str
    seconds: float
    cells: Sequence[Cell]
    measurement: type[ModelMeasurement] = Decode
    options: Mapping[str, Any] = field(default_factory=dict)


class Bench:
    """One model and what is measured once, for all stages.

    Args:
        dry: a tiny model on a CPU in the place of the real one, to see that everything runs.
    """

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.dtype = "float32" if dry else "bfloat16"

    @cached_property
    def shape(self) -> Shape:
        """Llama-3.1-8B; dry: a tiny one."""
        if not self.dry:
            return load_shape("llama-3.1-8b")
        config = copy.deepcopy(load_shape("tiny").config)
        config.num_hidden_layers = _DRY_LAYERS
        return Shape("tiny", config)

    @cached_property
    def subject(self) -> BenchModel:
        """The whole model."""
        config, dtype = self.shape.config, DTYPES[self.dtype]
        model = random_model(config, dtype, self.device, _SEED)
        return BenchModel(model, weight_bytes(config, dtype), measure_rows(model, _SEED), _SEED)

    @cached_property
    def bandwidth(self) -> Bandwidth:
        """The bytes a second that the device's memory and the bus reach."""
        return measure_bandwidth(self.device)

    @cached_property
    def checker(self) -> Checker:
        """It checks caches on the whole model, each of them once at a size."""
        return Checker(self.subject.model, self.subject.rows, _SEED)

    def row(self, stage: Stage, cell: Cell) -> Row:
        """The numbers of a cell; artifacts that its cache lacks are made of random tokens."""
        options = dict(stage.options)
        if self.dry:
            options |= {name: min(options[name], _DRY_STEPS) for name in ("warmup", "steps")}
        measurement = stage.measurement(
            shape=self.shape.name,
            caches=cell["cache"],
            dtype=self.dtype,
            device=self.device.type,
            seed=_SEED,
            context=(cell["context"],),
            batch=(cell["batch"],),
            fill="random",
            rounds=1,
            **options,
        )
        vars(measurement).update(whole=self.shape.part(measurement.part), bandwidth=self.bandwidth)
        if measurement.part == "whole":
            vars(measurement).update(subject=self.subject, checker=self.checker)
        few = {"tokens": _DRY_TOKENS} if self.dry else {}
        with TemporaryDirectory() as folder:
            choices = measurement.choices.values()
            make_stand_ins(self.subject.model, choices, Path(folder), _SEED, **few)
            return measurement.rows([cell])[0]


def cells_of(stage: Stage, dry: bool) -> list[Cell]:
    """The cells of a stage; of a dry run small ones, each kind once."""
    if not dry:
        return list(stage.cells)
    return list({str(small): small for small in map(_shrunk, stage.cells)}.values())


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


ROWS, NOW, PAGE = "rows.jsonl", "now.json", "gpu.md"
"""Files of a run: finished cells, the cell that is being measured, the page."""
# A cell takes more than the first, and is given up after the second.
_LEAST_SECONDS, _MOST_SECONDS = 3.0, 60.0


@dataclass(frozen=True, kw_only=True)
class BenchAll:
    """The options of ``hf-kvret bench all``."""

    out: Path = option(Path("gpu"), "folder for rows.jsonl and gpu.md", kind=file_path)
    minutes: float = option(8.0, "time for all of it", kind=number(0))
    dry: bool = option(False, "a tiny model on a CPU: all of it runs, and no number means a thing")
    pages: Path | None = option(
        None,
        "measure nothing: write gpu.md in a folder, of all gpu*.jsonl there",
        kind=file_path,
    )


def add_all_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``all`` to the measurements of ``bench``."""
    names = ", ".join(stage.name for stage in STAGES)
    parser = add_command(
        commands,
        "all",
        BenchAll,
        run_all,
        help="measure what matters on a GPU in some minutes",
        description="Measure on a GPU, in the shape of Llama-3.1-8B, the most important first: "
        f"{names}. A finished cell is kept whatever happens, and the same call goes on.",
        examples=("hf-kvret bench all --out gpu", "hf-kvret bench all --dry"),
    )
    # Its rows are always kept.
    parser.set_defaults(json=True)


def run_all(options: BenchAll) -> int:
    """Measure what is not there yet and write the page; returns 1 where cells are missing.

    Raises:
        ValueError: no GPU, or a folder that can't be written to.
    """
    if options.pages is not None:
        print(f"wrote {write_page(options.pages / PAGE, sorted(options.pages.glob('gpu*.jsonl')))}")
        return 0
    if not options.dry:
        check_device("cuda")
    check_folder("--out", options.out)
    measure(options.out, options.dry, 60 * options.minutes)
    page = write_page(options.out / PAGE, [options.out / ROWS])
    missing = len(list(waiting(read_rows(options.out / ROWS), options.dry)))
    print(f"{missing} cells are not measured: the same call goes on" if missing else f"see {page}")
    return int(missing > 0)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file: finished cells, and environments; none where there is no file.

    What a kill or a full disk left of a line is no row.
    """
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row; it is on the disk when this returns."""
    is_torn = path.is_file() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * is_torn + json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def waiting(rows: Sequence[dict[str, Any]], dry: bool) -> Iterator[tuple[Stage, Cell]]:
    """Stage and cell of all that has no row of this card yet, in their order."""
    card = _card(dry)
    done = [(row["stage"], row["cell"]) for row in rows if "cell" in row and row["card"] == card]
    for stage in STAGES:
        for cell in cells_of(stage, dry):
            if (stage.name, cell) not in done:
                yield stage, cell


def _card(dry: bool) -> str:
    """The name of the GPU, by which rows differ."""
    return "CPU (dry)" if dry else torch.cuda.get_device_name()


def measure(out: Path, dry: bool, seconds: float) -> None:
    """Measure what is waiting until the time is over, or the device does not go on."""
    started, rows, now = time.monotonic(), out / ROWS, out / NOW
    if now.is_file():
        # The last call ended in this cell.
        why = "it took too long, or ended the process"
        add_row(rows, json.loads(now.read_text(encoding="utf-8")) | {"row": {"failed": why}})
        now.unlink()
    bench, card = Bench(dry), _card(dry)
    environment = {"card": card, "environment": describe(bench.device)}
    if environment not in read_rows(rows):
        add_row(rows, environment)
    _ = bench.subject
    spent = dict.fromkeys(STAGES, 0.0)
    for stage, cell in list(waiting(read_rows(rows), dry)):
        left = seconds - (time.monotonic() - started)
        if left < _LEAST_SECONDS or spent[stage] > stage.seconds:
            continue
        begun = {"stage": stage.name, "card": card, "cell": cell}
        replace_file(now, json.dumps(begun).encode())
        # A kernel that hangs can't be interrupted.
        faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True)
        start = time.monotonic()
        row, goes_on = _measured(stage, bench, cell)
        took = time.monotonic() - start
        faulthandler.cancel_dump_traceback_later()
        spent[stage] += took
        add_row(rows, begun | {"row": row, "took": round(took, 2)})
        now.unlink()
        short = why_missing(row) or f"{ms(row['seconds'])} ms"
        print(f"{stage.name} {label(cell)}: {short} ({took:.1f} s)", flush=True)
        if not goes_on:
            return


def _measured(stage: Stage, bench: Bench, cell: Cell) -> tuple[dict[str, Any], bool]:
    """A cell's row, and whether the device goes on."""
    try:
        row, why = attempt(lambda: bench.row(stage, cell))
        row = why if row is None else row
    # Whatever a kernel, a driver or a compiler raises, the other cells are measured.
    except Exception as error:
        row = {"failed": f"{type(error).__name__}: {error}"}
    try:
        if bench.device.type == "cuda":
            torch.cuda.synchronize(bench.device)
    except RuntimeError as error:
        return {"failed": str(error)}, False
    return row, True


def label(cell: Cell) -> str:
    """A cell in words, as ``paris at 65,536 x 1``."""
    return f"{cell['cache']} at {cell['context']:,} x {cell['batch']}"


def _share_over_bus(cell: Cell, row: dict[str, Any]) -> str:
    """How many of the selected rows came over the bus."""
    rows = row.get("selected_rows")
    return f"{row['bus_rows'] / rows:.0%}" if rows else "-"


_TIMED: Columns = {
    **SIZE,
    "check": of(str, "check"),
    "ms": of(ms, "seconds"),
    **{name: text for name, text in TIMES.items() if not name.endswith("moved")},
    "steps": step_counts,
}
_STORED: Columns = {**_TIMED, "rows over the bus": _share_over_bus}


def write_page(page: Path, files: Sequence[Path]) -> Path:
    """Write the page of these row files; the text of ``gpu.notes.txt`` beside it comes first.

    Raises:
        ValueError: there are no rows, or another text stands at ``page``.
    """
    rows = [row for file in files for row in read_rows(file)]
    cards = list(dict.fromkeys(row["card"] for row in rows))
    if not cards:
        raise ValueError(f"no rows for {page}: measure some with hf-kvret bench all --out DIR")
    notes = page.with_suffix(".notes.txt")
    texts = [
        "# How fast is it on a GPU?",
        *([notes.read_text(encoding="utf-8").strip()] if notes.is_file() else []),
        "The shape is llama-3.1-8b in bfloat16, with random weights and random rows. Opponents ran "
        "in the same call, and cards have tables of their own. Random weights select at random, so "
        '`store="resident"` finds few rows in its buffer.',
    ]
    for stage in STAGES:
        texts.append(f"## {stage.question}")
        for card in cards:
            texts += _section(stage, card, [row for row in rows if row["card"] == card])
    texts += ["## How was it measured?", *(_environment(row) for row in rows if "cell" not in row)]
    replace_page(page, texts, "hf-kvret bench all")
    return page


def _section(stage: Stage, card: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of a stage on a card, and a sentence about what is missing."""
    finished = {
        label(row["cell"]): (row["cell"], row["row"])
        for row in rows
        if row.get("stage") == stage.name
    }
    cells = cells_of(stage, "(dry)" in card)
    missing = [label(cell) for cell in cells if label(cell) not in finished]
    if not finished:
        return [f"**{card}**: not measured."]
    columns = _STORED if stage.name == "stores" else _TIMED
    table = table_of(finished.values(), columns, len(SIZE))
    return [f"**{card}**", table, *([f"Not measured: {'; '.join(missing)}."] if missing else [])]


def _environment(row: dict[str, Any]) -> str:
    here = row["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    return f"    {here['command']}\n\n{row['card']}; Python {here['python']}, {versions}."
