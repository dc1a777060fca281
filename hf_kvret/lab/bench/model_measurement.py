"""Measurements of caches on a model: a model, caches, rounds, and rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench import filling, shapes
from hf_kvret.lab.bench.checks import Checker
from hf_kvret.lab.bench.opponents import bench_caches, check_choices, choose_bench_cache
from hf_kvret.lab.bench.tables import plot_contexts, timing_table
from hf_kvret.lab.bench.timing import Bandwidth, Floor, describe, measure_bandwidth, quartiles
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.failures import attempt
from hf_kvret.lab.evaluate.measurement import CacheMeasurement, Row
from hf_kvret.lab.evaluate.usage import Usage
from hf_kvret.lab.program import options as common
from hf_kvret.lab.program.arguments import DTYPES, lengths, whole_number
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.results import Cell, Results, why_missing
from hf_kvret.models.compatibility import is_latent, layer_shapes
from hf_kvret.stores.placement import free_host_bytes

_LEAST_CONTEXT = 64
# A median of fewer steps says nothing.
_LEAST_STEPS = 3
# Results depend on these besides the cells, the model's size and the limit.
_OPTIONS = ("dtype", "device", "seed", "top_k", "store", "fill", "steps", "warmup", "rounds")
_MACHINE = ("processor", "threads", "accelerator", "versions")


@dataclass(frozen=True)
class TimedSample:
    """The result of one turn.

    Attributes:
        seconds: of each timed step or prompt.
        floor: of one of them, with the cache as it is after the last.
        usage: of the cache after the last.
        more: further entries of a row, which by default are those of the last turn.
    """

    seconds: list[float]
    floor: Floor
    usage: Usage
    more: Row


@dataclass(frozen=True, kw_only=True)
class ModelMeasurement(CacheMeasurement):
    """Caches on a model of true shape with random weights.

    Every cache in turn, several times, each checked before it is measured. The model is built when
    the first group of cells is asked for.
    """

    command: ClassVar[str] = "bench"
    unit: ClassVar[str]
    """What the milliseconds of the table are of."""

    shape: str = option(
        "tiny", f"{', '.join(shapes.SHAPES)}, or a folder or hub id with config.json"
    )
    layers: int | None = option(None, "build this many of the model's layers", kind=whole_number(1))
    part: str = option(
        "whole",
        "attention: with MLPs and a vocabulary that take next to no time and memory",
        choices=shapes.PARTS,
    )
    context: tuple[int, ...] = option((4096,), "as 4096 or 32K,128K", kind=lengths)
    batch: tuple[int, ...] = option((1,), "as 1,8", kind=lengths)
    caches: str = option(
        "full,dense,static,flat,paris,lrqk,ctkvr,a2ats,aqua",
        "comma-separated, options after colons as paris:top_k=100:store=host; your own as "
        "mine=module:factory; known: "
        f"{', '.join(bench_caches())}",
    )
    fill: str = option(
        "auto",
        "prefill: read the context through the model; random: write random rows of the model's "
        "scale; auto: random beyond 16K tokens on a GPU",
        choices=filling.FILLS,
    )
    steps: int = option(32, "timed steps (prompts, for prefill) of a round", kind=whole_number(1))
    warmup: int = option(8, "as --steps, untimed", kind=whole_number(0))
    rounds: int = common.count_option(3, "how often all caches take turns")
    limit: float = common.limit_option(
        60.0, "take fewer decode steps in a turn where --steps of them would take longer"
    )

    def choose(self, text: str) -> CacheChoice:
        return choose_bench_cache(text, self.retrieval, self.device)

    @cached_property
    def whole(self) -> shapes.Shape:
        """The shape of the whole model."""
        return shapes.load_shape(self.shape).part(self.part)

    @property
    def place(self) -> torch.device:
        """Where the model is."""
        return torch.device(self.device)

    @property
    def built(self) -> int:
        """Layers of the model that is measured."""
        return self.whole.layers if self.layers is None else self.layers

    @cached_property
    def subject(self) -> filling.BenchModel:
        """The model to measure.

        Raises:
            ValueError: its weights do not fit into what memory is free.
        """
        dtype, config = DTYPES[self.dtype], self.whole.with_layers(self.built)
        weights = shapes.weight_bytes(config, dtype)
        check_weights(weights.held, self.place, self.shape)
        model = shapes.random_model(config, dtype, self.place, self.seed)
        rows = filling.measure_rows(model, self.seed) if "random" in self._fills() else None
        return filling.BenchModel(model, weights, rows, self.seed)

    @cached_property
    def bandwidth(self) -> Bandwidth:
        """Measured by this command."""
        return measure_bandwidth(self.place)

    @cached_property
    def checker(self) -> Checker:
        """Checks each cache once at each size."""
        return Checker(self.subject.model, self.subject.rows, self.seed)

    def check(self) -> None:
        super().check()
        if min(self.context) < _LEAST_CONTEXT:
            raise ValueError(f"--context {min(self.context)}: at least {_LEAST_CONTEXT} tokens")
        self.whole.with_layers(self.built)
        check_choices(self.choices, self.whole.config, self.context)
        self._fills()

    def setup(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            **({} if self.part == "whole" else {"part": self.part}),
            **self._layers,
            "limit": self.limit,
            **describe(self, _OPTIONS, _MACHINE),
        }

    def cells(self) -> list[Cell]:
        return [
            {"cache": name, "context": context, "batch": batch}
            for context in self.context
            for batch in self.batch
            for name in self.choices
        ]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """Groups of one context and batch, so that all cells see the same moods of the machine.

        With one round each cell is a group: its row is kept as soon as it is measured. Methods that
        need an artifact have one meanwhile.
        """
        cells = self.waiting(results)
        if not cells:
            return
        with TemporaryDirectory() as folder:
            filling.make_stand_ins(
                self.subject.model, self.choices.values(), Path(folder), self.seed
            )
            for choice in self.choices.values():
                choice.check(self.subject.model)
            # It is measured before caches take the memory.
            _ = self.bandwidth
            for _, of_size in groupby(cells, lambda cell: (cell["context"], cell["batch"])):
                group = list(of_size)
                yield from ([cell] for cell in group) if self.rounds == 1 else (group,)

    def rows(self, group: Sequence[Cell]) -> list[Row]:
        """A cell that runs out of memory, or whose cache is wrong, has a row that says so."""
        rows = [self.check_row(cell) for cell in group]
        samples: list[list[TimedSample]] = [[] for _ in group]
        for _ in tqdm(range(self.rounds), leave=False, unit="round"):
            for cell, row, taken in zip(group, rows, samples, strict=True):
                if why_missing(row) is None:
                    sample, why = attempt(partial(self._sample, self.turn(cell)))
                    taken.append(sample)
                    row.update(why)
        return [
            row if why_missing(row) else row | self.row(cell, taken)
            for cell, row, taken in zip(group, rows, samples, strict=True)
        ]

    def _sample(self, turn: filling.Turn) -> TimedSample:
        with turn.choice.guard(turn.subject.model):
            return self.once(turn)

    @abstractmethod
    def once(self, turn: filling.Turn) -> TimedSample:
        """A sample, measured now; the cache is gone afterwards."""

    @abstractmethod
    def tokens(self, cell: Cell) -> int:
        """New tokens of one timed step or prompt."""

    def row(self, cell: Cell, samples: Sequence[TimedSample]) -> Row:
        """The entries of a row besides ``fill`` and ``check``, from a sample of each round.

        It has seconds as median and quartiles, tokens a second, the bytes of the cache, and the
        floor.
        """
        last, bandwidth = samples[-1], self.bandwidth
        seconds = [value for one in samples for value in one.seconds]
        low, middle, high = quartiles(seconds)
        least = last.floor.seconds(bandwidth)
        return {
            "seconds": middle,
            "seconds_quartiles": [low, high],
            "seconds_mean": fmean(seconds),
            "seconds_by_round": [median(one.seconds) for one in samples],
            "timed": len(seconds),
            "floor_device_bytes": last.floor.device_bytes,
            "floor_host_bytes": last.floor.host_bytes,
            "floor_seconds": least,
            "time_over_floor": middle / least,
            "device_bandwidth": bandwidth.device,
            "host_bandwidth": bandwidth.host,
            "tokens_per_second": self.tokens(cell) / middle,
            "device_bytes": last.usage.device_bytes,
            "host_bytes": last.usage.host_bytes,
            "full_bytes": last.usage.full_bytes,
            **last.more,
        }

    @classmethod
    def table(cls, results: Results) -> str:
        return timing_table(results, cls.unit)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        plot_contexts(path, results, cls.summary)

    def turn(self, cell: Cell) -> filling.Turn:
        """A turn of a cell."""
        choice = self.choices[cell["cache"]]
        return filling.Turn(
            self.subject, choice, cell["context"], cell["batch"], self.fill_of(cell)
        )

    def fill_of(self, cell: Cell) -> str:
        """``"prefill"`` or ``"random"``."""
        latent = is_latent(self.whole.config)
        choice = self.choices[cell["cache"]]
        return filling.choose_fill(self.fill, cell["context"], self.place, choice, latent)

    def steps_within(self, pace: float) -> int:
        """``steps``, or as many of ``pace`` seconds as the limit allows, at least 3."""
        if pace * self.steps <= self.limit:
            return self.steps
        return min(self.steps, max(_LEAST_STEPS, int(self.limit / pace)))

    @property
    def _layers(self) -> Row:
        return {"layers": self.built, "of_layers": self.whole.layers}

    def _fills(self) -> set[str]:
        """How caches will be filled; ValueError where one can't be."""
        return {
            self.fill_of({"cache": name, "context": context})
            for context in self.context
            for name in self.choices
        }

    def check_row(self, cell: Cell) -> Row:
        """How a cell's cache is filled, and the result of its check or why it can't be measured."""
        fill = self.fill_of(cell)
        row: Row = {"fill": fill, **self._layers}
        choice, size = self.choices[cell["cache"]], (cell["context"], cell["batch"])
        short = shortage(self.subject.model, choice, cell["batch"], cell["context"])
        if short is not None:
            return row | {"out_of_memory": short}
        result, why = attempt(lambda: self.checker.check(choice, *size, fill))
        return row | {"check": result} | why


def row_bits(choice: CacheChoice, config: PreTrainedConfig) -> int:
    """Bits of an element in the store of a cache for this model; 16: as the model has it."""
    if choice.options is None:
        return 16
    # A cache is made because its artifact may set them; an empty one takes no memory.
    cache = choice.make(config, 0)
    assert isinstance(cache, RetrievalCache)
    return cache.options.row_bits


def shortage(model: PreTrainedModel, choice: CacheChoice, batch: int, context: int) -> str | None:
    """Why a cell can't be measured on a CPU with so little memory, or None: a guess.

    A host that runs out of memory has its processes killed, while a GPU says so by itself. The
    guess is twice the bytes of all keys and values: the cache, its index, and a prompt on its way.
    """
    if model.device.type != "cpu":
        return None
    config = model.config
    # Layers hold keys and values, or latents alone.
    tensors = 1 if is_latent(config) else 2
    width = tensors * sum(shape.width for shape in layer_shapes(config)) * model.dtype.itemsize
    need = 2 * batch * context * width * row_bits(choice, config) // 16
    available = available_host_memory()
    if need <= available:
        return None
    return (
        f"out of memory (predicted: {need / 1e9:.1f} GB of host memory, {available / 1e9:.1f} GB "
        "available)"
    )


def available_host_memory() -> int:
    """``free_host_bytes``; where it is unknown, more than there ever is."""
    free = free_host_bytes()
    # Where nothing can be read, nothing is refused; an allocation that fails is still recorded.
    return 2**63 if free is None else free


def check_weights(held: int, device: torch.device, name: str) -> None:
    """ValueError when a model of ``held`` bytes does not fit into the memory that is free now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = available_host_memory()
    if held > free:
        raise ValueError(
            f"--shape {name}: its weights take {held / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            "free: give --layers, a smaller shape, or another --dtype"
        )
