"""What ``hf-kvret bench all`` measures, stage by stage: cells, and what measures one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvret.generate.attach import attach
from hf_kvret.lab.bench.checks import Checker
from hf_kvret.lab.bench.filling import BenchModel, make_stand_ins, measure_rows
from hf_kvret.lab.bench.model_measurement import ModelMeasurement
from hf_kvret.lab.bench.passes import Decode, Prefill
from hf_kvret.lab.bench.shapes import Shape, load_shape, random_model, weight_bytes
from hf_kvret.lab.bench.timing import Bandwidth, measure_bandwidth
from hf_kvret.lab.evaluate.measurement import Progress, Row
from hf_kvret.lab.program.arguments import DTYPES, length
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.selftest.check import Check, Verdict, run_check
from hf_kvret.lab.selftest.decoding import Bundled, quietly, replayed, step_checks
from hf_kvret_model_patches.decoders import decoder_of

# Of a dry run, whose windows are small enough to overflow.
_DRY_CONTEXT = 128
_SMALL = "dense_below=0:recent=32:flush=32:sink=4"
_RETRIEVING = ("paris", "lrqk", "ctkvr", "a2ats", "aqua", "flat")
# They need CUDA; these stand for them in a dry run.
_ON_CPU = {"dense-graph": "dense", "offloaded": "full"}
_SMALL_BUDGETS = {"top_k=100": "top_k=8", "top_k=1024": "top_k=16", "top_k=2048": "top_k=16"}
_DRY_LAYERS, _DRY_TOKENS = 3, 256


@dataclass(frozen=True)
class Stage:
    """Some cells that answer one question.

    Attributes:
        name: of the stage.
        question: that it answers: a heading of the page.
        seconds: no cell is begun after so long.
        cells: all of them, in the order in which they are measured; of a dry run where it is True.
        row: the numbers of a cell.
        cell_seconds: a cell that takes longer is given up.
    """

    name: str
    question: str
    seconds: float
    cells: Callable[[bool], list[Cell]]
    row: Callable[[Bench, Cell], Row]
    cell_seconds: float = 60.0


class Bench:
    """One model and what is measured once, for all stages.

    Args:
        dry: a tiny model on a CPU in the place of the real one, to see that everything runs.
        seed: of weights, tokens and rows.
    """

    def __init__(self, dry: bool, seed: int = 0) -> None:
        self.dry, self.seed = dry, seed
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
        return self._subject(
            random_model(self.shape.config, DTYPES[self.dtype], self.device, self.seed)
        )

    @cached_property
    def bandwidth(self) -> Bandwidth:
        """Of the device's memory and of the bus."""
        return measure_bandwidth(self.device)

    @cached_property
    def checker(self) -> Checker:
        """Of caches on the whole model; each is checked once at a size."""
        return Checker(self.subject.model, self.subject.rows, self.seed)

    def first_layers(self, count: int) -> BenchModel:
        """The model with its first layers alone; they share the weights."""
        whole = self.subject.model
        shared = {id(one): one for one in (*whole.parameters(), *whole.buffers())}
        # Attention looks its implementation up in the config that its module holds.
        config = self.shape.with_layers(count)
        part = copy.deepcopy(whole, {**shared, id(whole.config): config})
        decoder = decoder_of(part)
        decoder.layers = decoder.layers[:count]
        return self._subject(part)

    def measurement(
        self, cls: type[ModelMeasurement], cell: Cell, **options: Any
    ) -> ModelMeasurement:
        """A measurement of one cell, on the model that is there."""
        if self.dry:
            options |= {name: min(options.get(name, 3), 3) for name in ("warmup", "steps")}
        own = cls(
            shape=self.shape.name,
            caches=cell["cache"],
            dtype=self.dtype,
            device=self.device.type,
            seed=self.seed,
            context=(cell["context"],),
            batch=(cell["batch"],),
            fill="random",
            rounds=1,
            **options,
        )
        vars(own).update(whole=self.shape.part(own.part), bandwidth=self.bandwidth)
        if own.part == "whole":
            vars(own).update(subjects=(self.subject,), checker=self.checker)
        return own

    def _subject(self, model: PreTrainedModel) -> BenchModel:
        weights = weight_bytes(model.config, model.dtype)
        return BenchModel(model, weights, measure_rows(model, self.seed), self.seed)


def cells_of(stage: Stage, dry: bool) -> list[Cell]:
    """The cells of a stage; of a dry run small ones, each kind once."""
    cells = stage.cells(dry)
    if not dry:
        return cells
    return list({str(small): small for small in map(_shrunk, cells)}.values())


def _shrunk(cell: Cell) -> Cell:
    small = dict(cell)
    if "cache" in cell:
        small |= {"context": _DRY_CONTEXT, "batch": 2 if cell["batch"] > 8 else 1}
        name, *options = cell["cache"].split(":")
        kept = ["device_budget=1MB" if "device_budget" in one else one for one in options]
        kept = [_SMALL_BUDGETS.get(one, one) for one in kept]
        small["cache"] = ":".join(
            [_ON_CPU.get(name, name), *kept, *([_SMALL] if name in _RETRIEVING else [])]
        )
    return small


def sized(caches: str, *sizes: str) -> list[Cell]:
    """A cell for each cache at each size, as ``64K`` or ``64K x 8``: length and batch."""
    parsed = [(*size.split(" x "), "1")[:2] for size in sizes]
    return [
        {"cache": cache, "context": length(context), "batch": int(batch)}
        for context, batch in parsed
        for cache in caches.split()
    ]


# Gate: what runs here, and whether it is right.


_PART_CHECKS = ("two layers, paris, graph", "two layers, flat, graph")


def _gate_cells(dry: bool) -> list[Cell]:
    names = ("bandwidth", *_PART_CHECKS, *_bundled_checks(dry))
    return [{"check": name} for name in names]


def _bundled_checks(dry: bool) -> dict[str, Check]:
    """The self-test's checks of replayed steps; those of two layers do the same in a dry run."""
    checks = () if dry else step_checks(Bundled(torch.device("cuda")))
    return {check.name: check for check in checks if check.name.endswith("graph")}


class _Part(Bundled):
    """Two layers of the true shape in the place of the bundled model."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.device, DTYPES[bench.dtype])
        self._model = bench.first_layers(2).model
        attach(self._model)

    @property
    def model(self) -> PreTrainedModel:
        return self._model


def _gate_row(bench: Bench, cell: Cell) -> Row:
    name = cell["check"]
    if name == "bandwidth":
        measured = bench.bandwidth
        return {"status": "measured", "device": measured.device, "host": measured.host}
    if name in _PART_CHECKS:
        run = partial(replayed, _Part(bench), name.split(", ")[1], "device")
        return _verdict(Check("steps", name, run, "graph=False"))
    return _verdict(_bundled_checks(bench.dry)[name])


def _verdict(check: Check) -> Row:
    with quietly():
        verdict: Verdict = run_check(check)
    return {"status": verdict.status, "detail": verdict.detail}


# Times of steps and prompts.


def _timed(bench: Bench, cell: Cell, cls: type[ModelMeasurement] = Decode, **options: Any) -> Row:
    """The row of a measurement; artifacts that a cache lacks are made of random tokens."""
    measurement = bench.measurement(cls, cell, **options)
    with TemporaryDirectory() as folder:
        model, choices = bench.subject.model, measurement.choices.values()
        few = {"tokens": _DRY_TOKENS} if bench.dry else {}
        make_stand_ins([model], choices, Path(folder), bench.seed, **few)
        return measurement.rows([cell], _SILENT)[0]


class _NoBar:
    def set_postfix_str(self, text: str) -> None: ...

    def update(self, count: float) -> None: ...


_SILENT = Progress(_NoBar())


def _steps(warmup: int, count: int, limit: float = 5.0, **more: Any) -> Callable[..., Row]:
    options = {"warmup": warmup, "steps": count, "limit": limit, **more}
    return lambda bench, cell: _timed(bench, cell, **options)


_ON_HOST = "paris:top_k=1024:store=host lrqk:top_k=2048:store=host ctkvr:top_k=1024:store=host"
_RESIDENT = "lrqk:top_k=2048:store=resident:slots=2.0"
_SPLIT = "paris:top_k=1024:store=split:device_budget=4GB"
_PARIS = "paris:top_k=100 paris:top_k=1024"

STAGES = (
    Stage("gate", "Is what runs here right?", 60, _gate_cells, _gate_row),
    Stage(
        "stores",
        "How long does a step take with rows on the host, beside transformers' offloading?",
        110,
        lambda dry: [
            *sized(f"{_ON_HOST} offloaded {_RESIDENT}", "64K"),
            *sized(_SPLIT, "64K"),
            *sized(f"{_ON_HOST} offloaded {_RESIDENT}", "128K"),
            *sized(_SPLIT, "128K"),
        ],
        _steps(6, 24, limit=4.0),
    ),
    Stage(
        "attention",
        "How long does attention alone take?",
        45,
        lambda dry: sized(
            f"{_PARIS} flat:top_k=1024 lrqk:top_k=1024", "32K", "128K", "32K x 8", "128K x 8"
        ),
        _steps(6, 24, limit=2.0, part="attention"),
    ),
    Stage(
        "headline",
        "How long does a step take, beside full attention in a graph?",
        80,
        lambda dry: [
            *sized(f"{_PARIS} dense-graph", "128K", "32K", "64K"),
            *sized("paris:top_k=100 dense-graph", "64K x 8"),
            *sized("paris:top_k=100:store=higgs", "64K x 32"),
        ],
        _steps(8, 48),
    ),
    Stage(
        "systems",
        "How long does a step of each of the five systems take?",
        50,
        lambda dry: sized(
            "paris:top_k=1024 lrqk:top_k=1024 ctkvr:top_k=1024 a2ats:top_k=1024 aqua", "64K"
        ),
        _steps(4, 8),
    ),
    Stage(
        "prompts",
        "How soon does the first token come?",
        40,
        lambda dry: sized("dense paris:top_k=1024 paris:top_k=1024:prompt=retrieve", "64K"),
        lambda bench, cell: _timed(bench, cell, cls=Prefill, warmup=0, steps=1),
    ),
)
"""All of it, the most important first; together some eight minutes."""
