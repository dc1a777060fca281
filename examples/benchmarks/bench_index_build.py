"""``hf-kvret bench index-build``: the time that an index of one layer's keys takes to make."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from index_build_keys import (
    RECENT,
    LayerKeys,
    LayerShape,
    Source,
    check_memory,
    model_source,
    random_source,
)
from index_build_ways import (
    FAISS_WAYS,
    NOT_INSTALLED,
    MethodWay,
    Prompt,
    Way,
    find_faiss,
)

from hf_kvret.benchmark import timed
from hf_kvret.benchmark.timing import synchronize
from hf_kvret.core.recall import measure_recall
from hf_kvret.evaluation import common_options as common
from hf_kvret.evaluation.arguments import (
    DTYPES,
    check_device,
    known_names,
    number,
    several,
    whole_number,
)
from hf_kvret.evaluation.bundled import default_model
from hf_kvret.evaluation.measurement import Measurement, Progress, Row
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.plots import plot_lines
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.scripts import run_script
from hf_kvret.evaluation.subject import load_subject
from hf_kvret.registry import registered_methods

_WARMUP_TOKENS = 512
# Scores of held-out queries that are there at a time.
_MOST_SCORES = 1 << 24
# What calibration taught is not built here; `bench kernels` times such a method's codes.
_METHODS = {name: cls for name, cls in registered_methods().items() if not cls.needs_artifact}
_RANDOM_SHAPE = {"heads": 8, "group": 4, "dim": 128}
_ONLY = {"random": tuple(_RANDOM_SHAPE), "model": ("model", "text", "layer")}


def _size_option(name: str, of: str) -> Any:
    return option(
        None, f"{of} of random keys; default: {_RANDOM_SHAPE[name]}", kind=whole_number(1)
    )


@dataclass(frozen=True, kw_only=True)
class IndexBuild(Measurement):
    """The time to make an index of one layer's keys: our methods beside IVF, HNSW and k-means."""

    command: ClassVar[str] = "bench"
    name: ClassVar[str] = "index-build"
    summary: ClassVar[str] = "time to make an index of a layer's keys, beside those of faiss"
    description: ClassVar[str] = (
        "The time to make an index of one layer's keys: our methods beside IVF, HNSW and "
        "k-means. All get the same keys and run on the same number of threads; what each finds "
        "for queries that come after the prompt stands beside its time. A row is the median "
        "over --repeats builds, or over fewer where more would take longer than --limit. faiss "
        "comes with the package faiss-cpu; without it only our methods are measured."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench index-build --context 4K,16K,64K --json build.json --plot build.png",
        "hf-kvret bench index-build --keys model --text book.txt --context 2K,4K",
    )

    context: tuple[int, ...] = common.context_option((4096, 16_384, 65_536, 131_072), "keys")
    methods: tuple[str, ...] = option(
        ("flat", "paris", "lrqk", "ctkvr"),
        "retrieval methods that make their index of the keys alone",
        kind=known_names(_METHODS, none=True),
    )
    faiss: tuple[str, ...] = option(
        tuple(FAISS_WAYS),
        f"of {', '.join(FAISS_WAYS)}; '' for none",
        kind=known_names(FAISS_WAYS, none=True),
    )
    candidates: tuple[float, ...] = option(
        (),
        "shares of all keys that paris compares by their codes, an index for each beside that of "
        "its schedule",
        kind=several(number(0, 1)),
    )
    top_k: int = common.count_option(256, "keys that a query selects")
    keys: str = option("random", "synthetic, or a model's", choices=_ONLY)
    heads: int | None = _size_option("heads", "KV heads")
    group: int | None = _size_option("group", "query heads of a KV head")
    dim: int | None = _size_option("dim", "D")
    model: str | None = option(None, f"of --keys model; default: {default_model()}")
    text: Path | None = common.text_option(
        "that the model reads; needle reads documents of its own", required=False
    )
    layer: int | None = option(None, "of the model; default: the middle one", kind=whole_number(0))
    queries: int = common.count_option(32, "after the prompt, for the recall")
    repeats: int = common.repeats_option(3, "timed builds of each index")
    limit: float = common.limit_option(
        300.0, "leave out an index that is expected to take longer, by its time for shorter prompts"
    )
    dtype: str = common.dtype_option()
    device: str = common.device_option()
    seed: int = common.seed_option()

    def check(self) -> None:
        if self.top_k >= min(self.context):
            raise ValueError(
                f"--top-k {self.top_k} with --context {min(self.context)}: select fewer keys than "
                "there are"
            )
        other = "model" if self.keys == "random" else "random"
        for name in _ONLY[other]:
            if getattr(self, name) is not None:
                raise ValueError(f"--{name} belongs to --keys {other}: leave one of them out")
        needle = self._model == "needle"
        if self.keys == "model" and needle == (self.text is not None):
            raise ValueError(
                "--model needle reads documents of its own language: leave --text out"
                if needle
                else "--keys model reads a text: give --text FILE"
            )
        check_device(self.device)
        if not self.cells():
            raise ValueError("--methods, --candidates and --faiss are empty: name an index to make")

    def setup(self) -> dict[str, Any]:
        keys = ("top_k", "queries", "repeats", "seed", "dtype", "device")
        machine = ("processor", "threads", "accelerator", "versions")
        return self.source.description | timed.describe(self, *keys, machine=machine)

    def cells(self) -> list[Cell]:
        # Called a cache as in all results, so that the overview of pages finds it.
        return [{"cache": name, "length": n} for n in sorted(self.context) for name in self.ways]

    def waiting(self, results: Results) -> list[Cell]:
        """Those without a time."""
        return [cell for cell in self.cells() if "seconds" not in (results.find(cell) or {})]

    @property
    def _model(self) -> str:
        return self.model or default_model()

    @cached_property
    def ways(self) -> dict[str, Way | None]:
        """By name; None for what is not installed."""
        faiss = find_faiss()
        kinds = [FAISS_WAYS[name] for name in self.faiss]
        ways: list[Way] = [MethodWay(_METHODS[name], self.top_k) for name in self.methods]
        ways += [MethodWay(_METHODS["paris"], self.top_k, beta) for beta in self.candidates]
        ours: dict[str, Way | None] = {way.name: way for way in ways}
        return ours | {kind.name: None if faiss is None else kind(faiss) for kind in kinds}

    @cached_property
    def source(self) -> Source:
        """Where keys come from; a model is loaded."""
        dtype = DTYPES[self.dtype]
        if self.keys == "model":
            subject = load_subject(self._model, dtype, self.device)
            needed = max(self.context) + RECENT + self.queries
            return model_source(subject, self.text, self.layer, needed, self.seed)
        given = {name: getattr(self, name) or usual for name, usual in _RANDOM_SHAPE.items()}
        return random_source(LayerShape(**given), dtype, self.device, self.seed)

    @cached_property
    def _layer(self) -> LayerKeys:
        """Keys for the longest length; ValueError where they do not fit into memory."""
        tokens = max(self.context) + RECENT + self.queries
        check_memory(self.source.shape, tokens, DTYPES[self.dtype], self.device)
        return self.source.read(tokens)

    @cached_property
    def _held(self) -> dict[str, Any]:
        """Ways that are warm, the prompt of the last length, seconds expected of the next way."""
        return {"warm": set()}

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """One by one, with the time that is expected after shorter lengths."""
        for way in self.ways.values():
            if isinstance(way, MethodWay):
                way.check(self.source.shape.dim)
        waiting = [cell for cell in self.waiting(results) if self.ways[cell["cache"]] is not None]
        if waiting:
            # The keys are read, or do not fit, before there is a bar.
            _ = self._layer
        for cell in self.waiting(results):
            known = [
                (other["length"], row["seconds"])
                for other, row in results
                if other["cache"] == cell["cache"]
                and other["length"] < cell["length"]
                and "seconds" in row
            ]
            self._held["expected"] = expected_seconds(known, cell["length"])
            yield [cell]

    @torch.no_grad()
    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """The time of one index, and what it finds; or why it was left out."""
        (cell,) = group
        way, expected = self.ways[cell["cache"]], self._held["expected"]
        if way is None:
            return [{"skipped": NOT_INSTALLED}]
        if expected is not None and expected > self.limit:
            why = f"skipped: over --limit {self.limit:g} s, expected {expected:,.0f} s"
            return [{"skipped": why, "expected_seconds": expected}]
        prompt = self._prompt(cell["length"])
        if way.name not in self._held["warm"]:
            short = min(cell["length"], _WARMUP_TOKENS)
            way.prepare(Prompt.of(self._layer, short, 1, self.top_k))()
            self._held["warm"].add(way.name)
        index, seconds = time_builds(way.prepare(prompt), self.repeats, self.limit, prompt)
        settings = {"settings": way.settings(prompt)}
        return [timed.calls_row(seconds) | settings | judge(way, index, prompt)]

    def lacking(self, cell: Cell, why: Row) -> Row:
        """Skipped, and tried again the next time."""
        return {"skipped": next(iter(why.values()))}

    def _prompt(self, length: int) -> Prompt:
        if "prompt" not in self._held or len(self._held["prompt"]) != length:
            self._held.pop("prompt", None)
            self._held["prompt"] = Prompt.of(self._layer, length, self.queries, self.top_k)
        return self._held["prompt"]

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each length and way, with times of ctkvr."""
        base = {cell["length"]: row for cell, row in results if cell["cache"] == "ctkvr"}

        def times(cell: Cell, row: Row) -> str:
            found = base.get(cell["length"], {})
            return f"{row['seconds'] / found['seconds']:.3g}" if "seconds" in found else "-"

        columns: tuple[timed.Column, ...] = (
            ("tokens", lambda cell, row: f"{cell['length']:,}"),
            ("index", lambda cell, row: cell["cache"]),
            ("build ms", lambda cell, row: timed.milliseconds(row["seconds"])),
            ("quartiles", lambda cell, row: timed.spread(row)),
            ("times ctkvr", times),
            ("recall@k", lambda cell, row: f"{row['recall']:.3f}"),
            ("mass", lambda cell, row: f"{row['mass']:.3f}"),
            ("best mass", lambda cell, row: f"{row['best_mass']:.3f}"),
            ("keys compared", lambda cell, row: f"{row['compared']:,.0f}"),
            ("settings", lambda cell, row: row["settings"]),
        )
        setup = results.setup
        keys = "Synthetic keys" if setup["keys"] == "random" else f"Keys of layer {setup['layer']}"
        said = (
            f"{keys} of {setup['heads']} KV heads of {setup['dim']} with {setup['group']} query "
            f"heads each, {setup['top_k']} keys selected for {setup['queries']} queries after the "
            f"prompt; {_where(setup)}."
        )
        return timed.rows_table(columns, _by_length(results), 2, said)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Seconds against length, both on a log scale, a line for each way that was measured."""
        rows = [(cell, row) for cell, row in _by_length(results) if "seconds" in row]
        points = ((cell["cache"], float(cell["length"]), row["seconds"]) for cell, row in rows)
        title = f"making an index of one layer, {_where(results.setup)}"
        plot_lines(
            path, timed.series(points), title=title, x="tokens", y="seconds", log_x=True, log_y=True
        )


def time_builds(
    build: Callable[[], Any], repeats: int, limit: float, prompt: Prompt
) -> tuple[Any, list[float]]:
    """The last index made, and seconds of each of ``repeats`` builds.

    There are fewer where one more would take the sum beyond ``limit``, but always one.
    """
    device, seconds = prompt.keys.device, list[float]()
    while True:
        index = None
        synchronize(device)
        start = time.perf_counter()
        index = build()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        if len(seconds) == repeats or sum(seconds) + seconds[-1] > limit:
            return index, seconds


def judge(way: Way, index: Any, prompt: Prompt) -> dict[str, float]:
    """``recall``, ``mass``, ``best_mass`` and ``compared`` for the held-out queries, means.

    Recall is that of the exact top-k of a KV head (of a query head, where these select for
    themselves), see ``measure_recall``.
    """
    cold = prompt.cold
    step = max(1, _MOST_SCORES // (prompt.asked.shape[1] * len(prompt)))
    sums = dict.fromkeys(("recall", "mass", "best_mass", "compared"), 0.0)
    for query in prompt.asked.split(step, dim=2):
        answer = way.ask(index, prompt, query)
        found = measure_recall(query, answer.ids, cold)
        parts = (found.overlap, found.mass, found.best_mass, answer.compared)
        for name, value in zip(sums, parts, strict=True):
            sums[name] += value * query.shape[2]
    return {name: value / prompt.asked.shape[2] for name, value in sums.items()}


def expected_seconds(known: Sequence[tuple[int, float]], length: int) -> float | None:
    """Of a build for ``length`` tokens, by ``known`` shorter lengths and their seconds.

    Time grows with the power that the two longest of them show, held between 1 and 2; with 1 where
    there is one. None where there is none.
    """
    if not known:
        return None
    *before, (near, seconds) = sorted(known)
    power = 1.0
    if before:
        far, least = before[-1]
        power = min(2.0, max(1.0, math.log(seconds / least) / math.log(near / far)))
    return seconds * (length / near) ** power


def _by_length(results: Results) -> list[tuple[Cell, Row]]:
    return sorted(results, key=lambda entry: entry[0]["length"])


def _where(setup: dict[str, Any]) -> str:
    threads = timed.thread_count(setup["threads"])
    return threads if setup["device"] == "cpu" else f"ours on {setup['device']}, faiss on {threads}"


MEASUREMENT = IndexBuild

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
