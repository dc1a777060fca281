"""What ``hf-kvret bench all`` measures, stage by stage: cells, and what measures one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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
from hf_kvret.lab.bench.timing import Bandwidth, measure_bandwidth
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.program.arguments import DTYPES, length
from hf_kvret.lab.report.results import Cell

_SEED = 0
# Of a dry run, whose windows are small enough to overflow.
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
        """Of the device's memory and of the bus."""
        return measure_bandwidth(self.device)

    @cached_property
    def checker(self) -> Checker:
        """Of caches on the whole model; each is checked once at a size."""
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
    options = ["device_budget=1MB" if "device_budget" in one else one for one in options]
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
_SPLIT = "paris:top_k=1024:store=split:device_budget=4GB"
_PARIS = "paris:top_k=100 paris:top_k=1024"

STAGES = (
    Stage(
        "stores",
        "How long does a step take with rows on the host, beside transformers' offloading?",
        110,
        sized(f"{_ON_HOST} offloaded {_RESIDENT} {_SPLIT}", "64K", "128K"),
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
