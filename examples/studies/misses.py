"""What the hit/miss buffer of store="resident" saves along a long generation. Each context is read
in one pass; then --new-tokens follow, one at a time, once with rows in host memory alone and once
for each of --slots with a buffer on the device in front of them. Both must give the same tokens. A
miss is a selected row that had to be fetched.

    python examples/studies/misses.py --text novel.txt --context 4K --top-ks 128,256 \\
        --caches lrqk,paris
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from tqdm import tqdm

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.measurement import CheckFailed
from hf_kvret.lab.evaluate.reader import Reader, check_positions
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.task import Choices, Task, lengths_of
from hf_kvret.lab.evaluate.teacher_forcing import (
    Source,
    greedy_source,
    sampling_source,
    text_source,
)
from hf_kvret.lab.evaluate.texts import describe_file, text_windows
from hf_kvret.lab.program.arguments import budget, number, several
from hf_kvret.lab.program.common_options import context_option, count_option, text_option
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import Columns, table_of
from hf_kvret.observe.reports import MemoryReport
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.registry import registered_methods

FOLLOW = ("sample", "greedy", "text")
_OWN = {"top_k": "--top-ks", "slots": "--slots", "store": None}


@dataclass(frozen=True)
class Generation:
    """One run over a context and the tokens after it.

    Attributes:
        tokens: ``[count]`` int64 on the CPU, fed after the context.
        choices: ``[count + 1]`` int64 on the CPU, the best token at the place of each of them and
            at the next one.
        layers: at the end of each stretch its end in tokens, and ``stats()["layers"]``, which
            count from the start.
        memory: at the end.
        seconds: median of the steps.
    """

    tokens: torch.Tensor
    choices: torch.Tensor
    layers: list[tuple[int, list[dict[str, Any]]]]
    memory: MemoryReport
    seconds: float

    @property
    def last(self) -> list[dict[str, Any]]:
        """What each layer counted over the whole run."""
        return self.layers[-1][1]

    def first_difference(self, other: Generation) -> int | None:
        """The first new token, from 0, that is another or was not the best there; else None."""
        unequal = self.choices != other.choices
        unequal[:-1] |= self.tokens != other.tokens
        return int(unequal.nonzero()[0]) if unequal.any() else None


@dataclass(frozen=True, kw_only=True)
class Misses(Task):
    """What the hit/miss buffer of store="resident" saves along a long generation."""

    name = "misses"
    smallest = (
        "--model reference --text examples/notebooks/text.txt --context 256 --new-tokens 24 "
        "--every 8 --top-ks 16 --slots 1 --caches lrqk:dense_below=0:recent=16:flush=16"
    )

    # Budgets and stores are what this compares.
    caches: str | None = option("lrqk,paris", "comma-separated, options after colons")
    top_k: int | float = field(default=1.0, init=False)
    store: str = field(default="resident", init=False)
    text: Path = text_option()
    context: tuple[int, ...] = context_option((4096,), "tokens of a context")
    new_tokens: int = count_option(2000, "after each context")
    every: int = count_option(100, "tokens a point of the picture")
    top_ks: tuple[int | float, ...] = option(
        (128, 256, 512),
        "budgets, counts or shares",
        kind=several(budget),
        metavar="K,K",
        aliases=("--top-k",),
    )
    slots: tuple[float, ...] = option(
        (1.0, 2.0),
        "rows of the buffer, as multiples of the budget",
        kind=several(number(0)),
        metavar="N,N",
    )
    follow: str = option(
        "sample",
        "where the new tokens come from: drawn with --seed, the best ones (small models soon "
        "repeat themselves, and a loop hardly misses), or the text",
        choices=FOLLOW,
    )
    # The last run without a buffer, which those with one are compared to.
    _plain: dict[Any, Generation] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # Readers keep the last context of the last cache, by store and slots, with its last logits.
    _read: dict[Any, tuple[Reader, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, values in (("--top-ks", self.top_ks), ("--slots", self.slots)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: the same number twice in {values}")
        for top_k in self.top_ks:
            for slots in self.slots:
                RetrievalConfig(top_k=top_k, slots=slots)

    def details(self) -> dict[str, Any]:
        return {
            "text": describe_file("--text", self.text),
            "new_tokens": self.new_tokens,
            "every": self.every,
            "follow": self.follow,
            "top_k": "of each row",
            "store": "resident beside host",
        }

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        for cache in caches:
            _check_cache(cache)
        # Slots come last, so that the run without a buffer is made once for all of them.
        return [
            {"cache": cache, "length": length, "top_k": top_k, "slots": slots}
            for length in self.context
            for cache in caches
            for top_k in self.top_ks
            for slots in self.slots
        ]

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        following = self.new_tokens if self.follow == "text" else 0
        for length in lengths_of(cells):
            text_windows(subject, self.name, self.text, length, following, 1, None)
            check_positions(subject.model, length + self.new_tokens)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        """The numbers of one cell.

        Raises:
            ValueError: nothing was cold.
            CheckFailed: other tokens with the buffer than without.
        """
        plain = self._without_buffer(cell, subject, choice)
        changes = {"store": "resident", "slots": cell["slots"]}
        result = self._generate(cell, subject, choice, changes)
        place = result.first_difference(plain)
        if place is not None:
            raise CheckFailed(
                f"{_label(cell)}: with the buffer another token than without it, first at new "
                f"token {place + 1} (position {cell['length'] + place}): a store must not change "
                "a result, so this is a bug"
            )
        fetched = sum(layer["bytes_missed"] for layer in result.last) / self.new_tokens
        selected = sum(layer["bytes_fetched"] for layer in plain.last) / self.new_tokens
        layers = [{"layer": one["layer"], "miss_ratio": one["miss_ratio"]} for one in result.last]
        return {
            "miss_ratio": fmean(layer["miss_ratio"] for layer in layers),
            "layers": layers,
            "stretches": _stretches(result.layers),
            "equal_tokens": self.new_tokens,
            "bus_bytes": fetched,
            "plain_bus_bytes": selected,
            "saved_ratio": 1 - fetched / selected,
            "seconds": result.seconds,
            "plain_seconds": plain.seconds,
            "buffer_bytes": result.memory.store_device - plain.memory.store_device,
            "full_bytes": result.memory.full_attention,
        }

    def _without_buffer(self, cell: Cell, subject: Subject, choice: CacheChoice) -> Generation:
        key = (subject.model, *(cell[name] for name in ("cache", "length", "top_k")))
        if key not in self._plain:
            self._plain.clear()
            self._plain[key] = self._generate(cell, subject, choice, {"store": "host"})
        return self._plain[key]

    def _generate(
        self, cell: Cell, subject: Subject, choice: CacheChoice, changes: dict[str, Any]
    ) -> Generation:
        """Read the context and go on, with those options of the cache changed."""
        length, following = cell["length"], self.new_tokens if self.follow == "text" else 0
        (window,) = text_windows(subject, self.name, self.text, length, following, 1, None)
        key = (subject.model, cell["cache"], length), *changes.values()
        if key not in self._read:
            if any(other[0] != key[0] for other in self._read):
                self._read.clear()
            changed = _changed(choice, subject, top_k=cell["top_k"], **changes)
            reader = Reader(subject.model, changed, length + self.new_tokens)
            self._read[key] = reader, reader.prefill(window[:length])[-1]
        reader, logits = self._read[key]
        reader, source = reader.fork(top_k=cell["top_k"]), self._source(window[length:])
        tokens, choices, seconds, layers = [], [logits.argmax()], [], []
        for index in tqdm(range(self.new_tokens), leave=False, desc=_label(cell), mininterval=1):
            tokens.append(source(logits, index))
            before = reader.seconds
            logits = reader.feed(tokens[-1])[-1]
            seconds.append(reader.seconds - before)
            choices.append(logits.argmax())
            end = index + 1
            if index == 0:
                _check_selects(reader, cell)
            # Counts lie on the device: to read them is to wait for it.
            if end % self.every == 0 or end == self.new_tokens:
                layers.append((end, _cache(reader).stats()["layers"]))
        memory = _cache(reader).memory()
        return Generation(
            torch.cat(tokens), torch.stack(choices).cpu(), layers, memory, median(seconds)
        )

    def _source(self, rest: torch.Tensor) -> Source:
        if self.follow == "text":
            return text_source(rest, 1)
        return greedy_source if self.follow == "greedy" else sampling_source(self.seed)

    @classmethod
    def table(cls, results: Results) -> str:
        columns: Columns = {
            "cache": lambda cell, row: cell["cache"],
            "context": lambda cell, row: str(cell["length"]),
            "k": lambda cell, row: f"{cell['top_k']:g}",
            "slots / k": lambda cell, row: f"{cell['slots']:g}",
            "miss ratio": lambda cell, row: f"{row['miss_ratio']:.1%}",
            "by layer": lambda cell, row: _range(row["layers"]),
            "kB a step": lambda cell, row: f"{row['bus_bytes'] / 1e3:.1f}",
            "without": lambda cell, row: f"{row['plain_bus_bytes'] / 1e3:.1f}",
            "saved": lambda cell, row: f"{row['saved_ratio']:.1%}",
            "ms a step": lambda cell, row: f"{1e3 * row['seconds']:.2f}",
            "without ": lambda cell, row: f"{1e3 * row['plain_seconds']:.2f}",
            "time / without": lambda cell, row: f"{row['seconds'] / row['plain_seconds']:.2f}",
            "buffer MB": lambda cell, row: f"{row['buffer_bytes'] / 1e6:.2f}",
            "of full K,V": lambda cell, row: f"{row['buffer_bytes'] / row['full_bytes']:.1%}",
        }
        ratios = [row["miss_ratio"] for _, row in results]
        spread = f", standard deviation {stdev(ratios):.1%}" if len(ratios) > 1 else ""
        return f"{table_of(results, columns)}\n\nmean miss ratio {fmean(ratios):.1%}{spread}"

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for cell, result in results:
            stretches = result["stretches"]
            ends, ratios = ([one[name] for one in stretches] for name in ("end", "miss_ratio"))
            lines[_label(cell)] = ends, ratios
        plot_lines(
            path,
            lines,
            title=f"rows fetched of rows selected, following {results.setup['follow']}",
            x="generated tokens",
            y="miss ratio, mean over layers",
            low=0.0,
        )


def _stretches(layers: Sequence[tuple[int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """For each stretch its ``end``, and its own ``miss_ratio``, mean over layers."""
    before = [(0, 0)] * len(layers[0][1])
    results = []
    for end, stats in layers:
        now = [(one["misses"], one["hits"] + one["misses"]) for one in stats]
        ratios = [
            (misses - old_misses) / (requests - old_requests)
            for (misses, requests), (old_misses, old_requests) in zip(now, before, strict=True)
        ]
        results.append({"end": end, "miss_ratio": fmean(ratios)})
        before = now
    return results


def _check_cache(cache: str) -> None:
    """ValueError for a cache that doesn't retrieve, or names what this task chooses itself."""
    name, *options = (part.strip() for part in cache.split(":"))
    if name not in registered_methods():
        raise ValueError(
            f"--caches {cache}: misses is about selected rows, so name caches that retrieve: "
            f"{', '.join(registered_methods())}"
        )
    for key in (part.partition("=")[0] for part in options):
        if key in _OWN:
            use = f"use {_OWN[key]}" if _OWN[key] else "both host and resident are run"
            raise ValueError(
                f"--caches {cache}: {key} is chosen by misses itself: leave it out, {use}"
            )


def _check_selects(reader: Reader, cell: Cell) -> None:
    """ValueError where the first new token retrieved nothing."""
    if not all(layer["selected"] for layer in _cache(reader).stats()["layers"]):
        raise ValueError(
            f"--context {cell['length']}: {cell['cache']} selects nothing after it; take a longer "
            "one, or a smaller window as paris:dense_below=0:recent=64:flush=64"
        )


def _changed(choice: CacheChoice, subject: Subject, **changes: Any) -> CacheChoice:
    """The cache of ``choice`` with other options."""
    given = choice.make(subject.model.config, 1)
    assert isinstance(given, RetrievalCache)
    made, options = type(given), given.options.replace(**changes)
    return CacheChoice(choice.name, lambda config, capacity: made(config=config, options=options))


def _cache(reader: Reader) -> RetrievalCache:
    assert isinstance(reader.cache, RetrievalCache)
    return reader.cache


def _label(cell: Cell) -> str:
    return f"{cell['cache']}, {cell['length']}, k={cell['top_k']:g}, {cell['slots']:g} x k slots"


def _range(layers: list[dict[str, Any]]) -> str:
    ratios = [layer["miss_ratio"] for layer in layers]
    return f"{min(ratios):.1%} to {max(ratios):.1%}"


MEASUREMENT = Misses

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
