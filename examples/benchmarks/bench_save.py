"""Seconds to save and load a cache that is full of random rows, in turns: copied and compared with
checksums (checked), with rows that stay in their files (mapped), by the same code as the first with
checksums that are not computed (unchecked), and its tensors by safetensors alone, synced and read
into memory. What is loaded comes from the system's page cache, as far as that holds it.

    python examples/benchmarks/bench_save.py --json save.json
    python examples/benchmarks/bench_save.py --shape tiny --context 4K --repeats 3
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import PreTrainedConfig

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.filling import LayerRows, fill_randomly
from hf_kvret.lab.bench.shapes import SHAPES, Shape, load_shape
from hf_kvret.lab.bench.tables import Column, spread, table_of
from hf_kvret.lab.bench.timing import calls_row, describe
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.measurement import Measurement, Progress, Row
from hf_kvret.lab.plan.prediction import skipped_layers
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.arguments import DTYPES, names
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_groups
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.models.compatibility import layer_shape
from hf_kvret.saved import persistence, shards

_WORKS = ("save", "load")
_WAYS = ("checked", "mapped", "unchecked", "safetensors")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Save(Measurement):
    """Seconds to save and load a filled cache, with checksums, without, and a plain file."""

    command = "bench"
    name = "save"
    smallest = "--shape tiny --context 3K --repeats 2 --caches flat,paris:top_k=64"

    shape: str = option("qwen3-0.6b", f"of {', '.join(SHAPES)}, or a folder with config.json")
    caches: str = option("flat,paris", "retrieval caches, comma-separated, options after colons")
    context: tuple[int, ...] = common.context_option((32_768,), "tokens that the cache holds")
    repeats: int = common.count_option(5, "timed saves and loads of each way")
    folder: Path | None = option(
        None, "where to save; default: the system's temporary files", kind=Path, metavar="DIR"
    )
    dtype: str = common.dtype_option("bfloat16")
    seed: int = common.seed_option()

    def check(self) -> None:
        check_saving(self.caches, self.folder)

    def setup(self) -> dict[str, Any]:
        here = describe(
            self, ("shape", "repeats", "dtype", "seed"), ("processor", "threads", "versions")
        )
        return here | {"disk": "temporary files" if self.folder is None else "--folder"}

    def cells(self) -> list[Cell]:
        return [
            {"cache": name, "context": context, "work": work, "way": way}
            for context in self.context
            for name in names(self.caches)
            for work in _WORKS
            for way in _WAYS
        ]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """All ways of a cache, which take turns, where one of them waits."""
        waiting = [(cell["cache"], cell["context"]) for cell in self.waiting(results)]
        for size in dict.fromkeys(waiting):
            yield [cell for cell in self.cells() if (cell["cache"], cell["context"]) == size]

    def count(self, results: Results) -> int:
        """All cells of caches of which one waits."""
        return sum(map(len, self.plan(results)))

    @torch.inference_mode()
    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """The times of one cache."""
        cache = fill_cache(
            self._shape, group[0]["cache"], group[0]["context"], self.seed, self.dtype
        )
        # It says at each load what no model and no prompt is compared with.
        silent = mock.patch.object(logging.getLogger(persistence.__name__), "disabled", True)
        with silent, tempfile.TemporaryDirectory(dir=self.folder) as place:
            turn = _Turn(cache, self._shape.config, Path(place))
            rounds = tqdm(range(self.repeats), desc=group[0]["cache"], unit="round", leave=False)
            # The first, which is not timed, makes files and memory warm.
            seconds = [turn.take(), *(turn.take() for _ in rounds)][1:]
            size = turn.nbytes
        return [
            calls_row([one[cell["work"], cell["way"]] for one in seconds]) | {"bytes": size}
            for cell in group
        ]

    @cached_property
    def _shape(self) -> Shape:
        return load_shape(self.shape)

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each cache and work, with seconds of each way and their ratios."""
        found: dict[tuple[str, int, str], dict[str, Row]] = {}
        for cell, row in results:
            key = cell["cache"], cell["context"], cell["work"]
            found.setdefault(key, {})[cell["way"]] = row
        # Older results lack one.
        measured = [way for way in _WAYS if any(way in ways for ways in found.values())]
        columns: tuple[Column, ...] = (
            ("cache", lambda cell, row: cell["cache"]),
            ("context", lambda cell, row: f"{cell['context']:,}"),
            ("GB", lambda cell, row: f"{row['checked']['bytes'] / 1e9:.2f}"),
            ("", lambda cell, row: cell["work"]),
            *((f"{way}, s", _seconds(way)) for way in measured),
            *((f"checked / {way}", _ratio(way)) for way in measured[1:]),
        )
        rows = [
            (dict(zip(("cache", "context", "work"), key, strict=True)), ways)
            for key, ways in found.items()
            if len(ways) == len(measured)
        ]
        setup = results.setup
        said = (
            f"{setup['shape']} in {setup['dtype']}; medians of {setup['repeats']} turns with "
            f"quartiles; files among {setup['disk']}."
        )
        return f"{said}\n\n{table_of(columns, rows, 2)}"

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Bars of each way's seconds, by cache and work."""
        groups: dict[str, dict[str, float]] = {}
        for cell, row in results:
            name = f"{cell['cache']}, {cell['context']:,}: {cell['work']}"
            groups.setdefault(name, {})[cell["way"]] = row["seconds"]
        measured = [way for way in _WAYS if any(way in result for result in groups.values())]
        bars = {way: [result.get(way) for result in groups.values()] for way in measured}
        plot_groups(path, list(groups), bars, title="a filled cache", y="seconds")


def check_saving(caches: str, folder: Path | None) -> None:
    """ValueError where one of the ``caches`` can't be saved, or the ``folder`` is missing."""
    for name in names(caches):
        if choose_cache(name, {"store": "device"}).options is None:
            raise ValueError(f"--caches {name}: only retrieval caches can be saved")
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--folder {folder}: there is no such folder; make it")


def layer_rows(config: PreTrainedConfig) -> list[LayerRows]:
    """Shapes of random rows for every layer."""
    layers = []
    for number in range(config.num_hidden_layers):
        shape = layer_shape(config, number)
        rank, dim = shape.rank, shape.head_dim
        dims = (rank, dim - rank) if rank else (dim, dim)
        layers.append(LayerRows(shape.kv_heads, *dims, 1.0, 1.0))
    return layers


def fill_cache(shape: Shape, name: str, context: int, seed: int, dtype: str) -> RetrievalCache:
    """A cache of ``context`` random rows.

    Raises:
        ValueError: the model has layers that hold something else.
    """
    choice: CacheChoice = choose_cache(name, {"store": "device"})
    cache = choice.make(shape.config, context)
    assert isinstance(cache, RetrievalCache)
    if strange := skipped_layers(cache):
        raise ValueError(
            f"--shape {shape.name}: layer {strange[0]} holds no keys and values that random "
            "rows could stand for; choose a model whose layers all do"
        )
    place: dict[str, Any] = {"device": torch.device("cpu"), "dtype": DTYPES[dtype]}
    fill_randomly(shape.config, cache, layer_rows(shape.config), 1, context, seed, **place)
    return cache


class _Turn:
    """Saves and loads of one cache in each way, one after the other."""

    def __init__(self, cache: RetrievalCache, config: PreTrainedConfig, place: Path) -> None:
        self._cache, self._config = cache, config
        self._ours, self._plain = place / "ours", place / "plain.safetensors"
        self._ways = deque(_WAYS)
        cache.save_pretrained(self._ours)
        files = self._ours.glob("*.safetensors")
        self._tensors = {name: x for path in files for name, x in load_file(path).items()}
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def take(self) -> dict[tuple[str, str], float]:
        """Seconds by work and way; each turn begins with another way."""
        seconds = {}
        self._ways.rotate()
        for way in tuple(self._ways):
            plain = way == "safetensors"
            # Neither the removal of the old file nor that of the loaded cache is timed.
            shutil.rmtree(self._ours)
            self._plain.unlink(missing_ok=True)
            with _without_checksums() if way == "unchecked" else nullcontext():
                _, seconds["save", way] = _timed(self._save_plain if plain else self._save)
                load = self._load_plain if plain else partial(self._load, way == "mapped")
                loaded, seconds["load", way] = _timed(load)
                del loaded
            if plain:
                self._save()
        return seconds

    def _save(self) -> None:
        self._cache.save_pretrained(self._ours)

    def _load(self, mapped: bool) -> RetrievalCache:
        return type(self._cache).from_pretrained(self._ours, self._config, mapped=mapped)

    def _save_plain(self) -> None:
        save_file(self._tensors, self._plain)
        with self._plain.open("rb") as file:
            os.fsync(file.fileno())

    def _load_plain(self) -> list[torch.Tensor]:
        # The file is mapped; a copy reads it.
        return [tensor.clone() for tensor in load_file(self._plain).values()]


def _without_checksums() -> AbstractContextManager[Any]:
    """Inside, every checksum is 0 and takes no time."""
    return mock.patch.object(shards, "crc32", lambda *_: 0)


def _timed(work: Callable[[], _Result]) -> tuple[_Result, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def _seconds(way: str) -> Callable[[Cell, Row], str]:
    return lambda _, ways: f"{ways[way]['seconds']:.2f} ({spread(ways[way], '{:.2f}'.format)})"


def _ratio(way: str) -> Callable[[Cell, Row], str]:
    return lambda _, ways: f"{ways['checked']['seconds'] / ways[way]['seconds']:.2f}"


MEASUREMENT = Save

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
