"""``hf-kvret bench index-build``: the time that an index of one layer's keys takes to make."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_kvret.benchmark.index_build_keys import RECENT, LayerKeys
from hf_kvret.benchmark.index_build_source import (
    DEFAULT_SHAPE,
    Source,
    check_memory,
    choose_source,
)
from hf_kvret.benchmark.index_build_tables import index_build_table, plot_index_build
from hf_kvret.benchmark.index_build_ways import (
    FAISS_WAYS,
    NOT_INSTALLED,
    FaissWay,
    MethodWay,
    Prompt,
    Way,
    find_faiss,
)
from hf_kvret.benchmark.runs import attempt
from hf_kvret.benchmark.timing import quartiles, synchronize
from hf_kvret.evaluation.arguments import (
    check_device,
    file_path,
    lengths,
    names,
    seconds_at_most,
    whole_number,
)
from hf_kvret.evaluation.command import add_run_options
from hf_kvret.evaluation.environment import describe_environment
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.recall import measure_recall
from hf_kvret.registry import registered_methods

_WARMUP_TOKENS = 512
# Scores of held-out queries that are there at a time.
_MOST_SCORES = 1 << 24


class IndexBuild:
    """The time to make an index of one layer's keys: our methods beside IVF, HNSW and k-means."""

    name = "index-build"
    summary = "time to make an index of a layer's keys, beside those of faiss"
    description = (
        "The time to make an index of one layer's keys: our methods beside IVF, HNSW and "
        "k-means. All get the same keys and run on the same number of threads; what each finds "
        "for queries that come after the prompt stands beside its time. A row is the median "
        "over --repeats builds, or over fewer where more would take longer than --limit. faiss "
        "comes with the package faiss-cpu; without it only our methods are measured."
    )
    examples = (
        "hf-kvret bench index-build --context 4K,16K,64K --json build.json --plot build.png",
        "hf-kvret bench index-build --keys model --text book.txt --context 2K,4K",
    )

    def table(self, results: Results) -> str:
        """One line for each length and index."""
        return index_build_table(results)

    def plot(self, path: Path, results: Results) -> None:
        """Seconds against length, a line for each index."""
        plot_index_build(path, results)


def add_index_build_options(parser: argparse.ArgumentParser) -> None:
    """Keys, what to make of them, and where results go."""
    parser.add_argument("--context", type=lengths, default=lengths("4K,16K,64K,128K"), help="keys")
    parser.add_argument(
        "--methods",
        default="flat,paris,lrqk,ctkvr",
        help="retrieval methods that make their index of the keys alone",
    )
    parser.add_argument(
        "--faiss", default=",".join(FAISS_WAYS), help=f"of {', '.join(FAISS_WAYS)}; '' for none"
    )
    parser.add_argument("--top-k", type=int, default=256, help="keys that a query selects")
    parser.add_argument(
        "--keys", choices=("random", "model"), default="random", help="synthetic, or a model's"
    )
    for name, text in (("heads", "KV heads"), ("group", "query heads of a KV head"), ("dim", "D")):
        default = getattr(DEFAULT_SHAPE, name)
        parser.add_argument(
            f"--{name}", type=whole_number(1), help=f"{text} of random keys; default: {default}"
        )
    parser.add_argument("--model", help="of --keys model; default: the bundled model reference")
    parser.add_argument("--text", type=file_path, metavar="FILE", help="that the model reads")
    parser.add_argument(
        "--layer", type=whole_number(0), help="of the model; default: the middle one"
    )
    parser.add_argument("--queries", type=int, default=32, help="after the prompt, for the recall")
    parser.add_argument("--repeats", type=int, default=3, help="timed builds of each index")
    parser.add_argument(
        "--limit",
        type=seconds_at_most,
        default=300.0,
        metavar="SECONDS",
        help="leave out an index that is expected to take longer, by its time for shorter prompts",
    )
    add_run_options(parser)


def measure_index_build(options: argparse.Namespace) -> Results:
    """Measure what ``options`` name and ``--json`` has no time of yet; returns all of it.

    Raises:
        ValueError: options that make no sense or contradict each other, a text that is too short,
            or keys that do not fit into memory.
        FileNotFoundError: no such text or model.
    """
    ways = _understand(options)
    source = choose_source(options)
    for way in ways.values():
        if isinstance(way, MethodWay):
            way.check(source.shape.dim)
    results = Results("bench index-build", _setup(options, source), options.json)
    todo = [
        (length, name)
        for length in sorted(options.context)
        for name in ways
        if "seconds" not in (results.find(_cell(name, length)) or {})
    ]
    missing = [(length, name) for length, name in todo if ways[name] is None]
    todo = [(length, name) for length, name in todo if ways[name] is not None]
    if todo:
        longest = max(length for length, _ in todo)
        tokens = longest + RECENT + options.queries
        check_memory(source.shape, tokens, options)
        layer = source.read(tokens)
        with torch.no_grad(), tqdm(total=len(todo), desc="index-build", unit="index") as bar:
            _measure(options, layer, ways, todo, results, bar)
    for length, name in missing:
        results.add(_cell(name, length), {"skipped": NOT_INSTALLED})
    return results


def _understand(options: argparse.Namespace) -> dict[str, Way | None]:
    """The ways by name, None for what is not installed; ValueError for what makes no sense."""
    for name in ("top_k", "queries", "repeats"):
        if getattr(options, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {getattr(options, name)}: at least 1")
    if options.top_k >= min(options.context):
        raise ValueError(
            f"--top-k {options.top_k} with --context {min(options.context)}: select fewer keys "
            "than there are"
        )
    check_device(options.device)
    # What calibration taught is not built here; `bench kernels` times such a method's codes.
    known = {name: cls for name, cls in registered_methods().items() if not cls.needs_artifact}
    ways: dict[str, Way | None] = {}
    for name in _distinct("methods", options.methods, list(known)):
        ways[name] = MethodWay(known[name], options.top_k)
    faiss = find_faiss()
    for name in _distinct("faiss", options.faiss, list(FAISS_WAYS)):
        kind: type[FaissWay] = FAISS_WAYS[name]
        ways[kind.name] = None if faiss is None else kind(faiss)
    if not ways:
        raise ValueError("--methods and --faiss are empty: name an index to make")
    return ways


def _distinct(option: str, text: str, known: Sequence[str]) -> list[str]:
    found = names(text)
    for name in found:
        if name not in known:
            raise ValueError(f"--{option} {name}: choose of {', '.join(known)}")
    if len(set(found)) < len(found):
        raise ValueError(f"--{option} {text}: the same name twice")
    return found


def _measure(
    options: argparse.Namespace,
    layer: LayerKeys,
    ways: dict[str, Way | None],
    todo: Sequence[tuple[int, str]],
    results: Results,
    bar: Any,
) -> None:
    """Measure ``todo``, ascending lengths and names, and add a row for each to ``results``."""
    prompt: Prompt | None = None
    warm: set[str] = set()
    for length, name in todo:
        way = ways[name]
        assert way is not None
        bar.set_postfix_str(f"{name}, {length:,} tokens")
        expected = expected_seconds(_known(results, name, length), length)
        if expected is not None and expected > options.limit:
            row: dict[str, Any] = {
                "skipped": f"skipped: over --limit {options.limit:g} s, expected {expected:,.0f} s",
                "expected_seconds": expected,
            }
        else:
            if prompt is None or len(prompt) != length:
                prompt = None
                prompt = Prompt.of(layer, length, options.queries, options.top_k)
            if name not in warm:
                short = Prompt.of(layer, min(length, _WARMUP_TOKENS), 1, options.top_k)
                way.prepare(short)()
                warm.add(name)
            row = _row(way, prompt, options.repeats, options.limit)
        results.add(_cell(name, length), row)
        bar.update()


def _row(way: Way, prompt: Prompt, repeats: int, limit: float) -> dict[str, Any]:
    made, lacking = attempt(partial(time_builds, way.prepare(prompt), repeats, limit, prompt))
    if lacking is not None:
        return {"skipped": lacking}
    index, seconds = made
    low, middle, high = quartiles(seconds)
    row = {
        "seconds": middle,
        "seconds_quartiles": [low, high],
        "seconds_least": min(seconds),
        "timed": len(seconds),
        "settings": way.settings(prompt),
    }
    return row | judge(way, index, prompt)


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
        found = measure_recall(query, answer.ids, cold.store, cold.valid, cold.scale, cold.softcap)
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


def _known(results: Results, name: str, length: int) -> list[tuple[int, float]]:
    return [
        (cell["length"], row["seconds"])
        for cell, row in results
        if cell["cache"] == name and cell["length"] < length and "seconds" in row
    ]


def _setup(options: argparse.Namespace, source: Source) -> dict[str, Any]:
    keys = ("top_k", "queries", "repeats", "seed", "dtype", "device")
    here = describe_environment()
    machine = {key: here[key] for key in ("processor", "threads", "accelerator", "versions")}
    return source.describe() | {key: getattr(options, key) for key in keys} | machine


def _cell(name: str, length: int) -> Cell:
    # Called a cache as in all results, so that the overview of pages finds it.
    return {"cache": name, "length": length}
