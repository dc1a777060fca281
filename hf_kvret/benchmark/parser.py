"""``hf-kvret bench decode | prefill | memory | ...``: what can be measured, and its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_kvret.benchmark.batches import Batch
from hf_kvret.benchmark.command import run_alone, run_batch, run_bench
from hf_kvret.benchmark.decode import Decode
from hf_kvret.benchmark.filling import FILLS
from hf_kvret.benchmark.host_attention import HostAttention, add_host_options, measure_host
from hf_kvret.benchmark.index_build import (
    IndexBuild,
    add_index_build_options,
    measure_index_build,
)
from hf_kvret.benchmark.kernels import Kernels, add_kernels_options, measure_kernels
from hf_kvret.benchmark.limits import byte_count
from hf_kvret.benchmark.measure import Measure
from hf_kvret.benchmark.memory import Memory
from hf_kvret.benchmark.opponents import bench_caches
from hf_kvret.benchmark.prefill import Prefill, chunk_length
from hf_kvret.benchmark.shapes import SHAPES
from hf_kvret.benchmark.step import Step
from hf_kvret.benchmark.tune import Tune, add_tune_options, measure_tune
from hf_kvret.evaluation.arguments import batches, lengths, seconds_at_most, whole_number
from hf_kvret.evaluation.command import add_budget_options, add_run_options
from hf_kvret.evaluation.help_text import HelpFormatter, example_lines
from hf_kvret.evaluation.report import Measurement
from hf_kvret.evaluation.results import Results

_Alone = tuple[Any, Callable[[argparse.ArgumentParser], None], Callable[..., Results]]


@dataclass(frozen=True)
class _Defaults:
    """How much is measured when nothing is said."""

    caches: str
    batch: str
    steps: int
    warmup: int
    rounds: int


_MEASURES: tuple[tuple[type[Measure], _Defaults], ...] = (
    (Decode, _Defaults("full,dense,static,flat,paris,lrqk,ctkvr,a2ats,aqua", "1", 32, 8, 3)),
    (Batch, _Defaults("dense,flat,paris,lrqk", "1", 16, 4, 1)),
    (Step, _Defaults("dense,flat,paris", "1", 4, 4, 1)),
    (Prefill, _Defaults("full,dense,flat,paris,lrqk,ctkvr,a2ats,aqua", "1", 1, 1, 3)),
    (Memory, _Defaults("full,static,flat,paris,lrqk,ctkvr,a2ats,aqua", "1,2", 4, 0, 1)),
)

# What is measured without a model: the measurement, its options, and the function that measures.
_ALONE: tuple[_Alone, ...] = (
    (HostAttention(), add_host_options, measure_host),
    (IndexBuild(), add_index_build_options, measure_index_build),
    (Kernels(), add_kernels_options, measure_kernels),
    (Tune(), add_tune_options, measure_tune),
)

MEASUREMENTS: dict[str, Measurement] = {
    **{f"bench {measure.name}": measure() for measure, _ in _MEASURES},
    **{f"bench {alone.name}": alone for alone, _, _ in _ALONE},
}
"""The measures by the name in their result files."""


def add_bench_parser(commands: argparse._SubParsersAction) -> None:
    """Add ``bench`` with one sub-command a measure to the program's commands."""
    parser = commands.add_parser(
        "bench",
        help="measure time and memory of caches on models of true shape with random weights",
        description="Measure time and memory of caches on a model of true shape with random "
        "weights. Give --json to keep finished rows: the same command goes on where it was "
        "interrupted.",
        formatter_class=HelpFormatter,
    )
    measures = parser.add_subparsers(required=True, metavar="MEASURE")
    for measure, defaults in _MEASURES:
        one = measures.add_parser(
            measure.name,
            help=measure.summary,
            description=measure.description,
            epilog=example_lines(measure.examples),
            formatter_class=HelpFormatter,
        )
        _add_options(one, measure, defaults)
        if measure is Memory:
            one.add_argument(
                "--device-memory",
                type=byte_count,
                metavar="SIZE",
                help="say how many sequences fit into this much device memory, as 80GB or 75GiB",
            )
        if measure is Prefill:
            one.add_argument(
                "--chunk",
                type=chunk_length,
                default="own",
                help="tokens of a pass, as 8K; none: one pass; own: as each cache's prefill_chunk",
            )
        if measure is Batch:
            one.add_argument(
                "--device-memory",
                type=byte_count,
                metavar="SIZE",
                help="fill no more device memory than this, as 80GB; default: all of a GPU's",
            )
            one.add_argument("--most", type=whole_number(1), default=256, help="no batch is larger")
        one.set_defaults(run=run_batch if measure is Batch else run_bench, measure=measure)
    for alone, add_options, measuring in _ALONE:
        one = measures.add_parser(
            alone.name,
            help=alone.summary,
            description=alone.description,
            epilog=example_lines(alone.examples),
            formatter_class=HelpFormatter,
        )
        add_options(one)
        one.set_defaults(run=run_alone, measurement=alone, measuring=measuring)


def _add_options(
    parser: argparse.ArgumentParser, measure: type[Measure], defaults: _Defaults
) -> None:
    parser.add_argument(
        "--shape",
        default="tiny",
        help=f"{', '.join(SHAPES)}, or a folder or hub id with config.json",
    )
    parser.add_argument(
        "--layers",
        type=whole_number(1),
        help="build this many of the model's layers, and scale to all of them",
    )
    parser.add_argument("--context", type=lengths, default=[4096], help="as 4096 or 32K,128K")
    if measure is Batch:
        parser.set_defaults(batch=[1])
    else:
        batch = lengths(defaults.batch)
        parser.add_argument("--batch", type=batches, default=batch, help="as 1,8")
    parser.add_argument(
        "--caches",
        default=defaults.caches,
        help="comma-separated, options after colons as paris:top_k=100:store=host; known: "
        f"{', '.join(bench_caches())}",
    )
    add_budget_options(parser)
    parser.add_argument(
        "--fill",
        choices=FILLS,
        default="auto",
        help="prefill: read the context through the model; random: write random rows of the "
        "model's scale; auto: random beyond 16K tokens on a GPU",
    )
    parser.add_argument(
        "--steps",
        "--new-tokens",
        type=whole_number(1),
        default=defaults.steps,
        help="timed steps (prompts, for prefill) of a round",
    )
    parser.add_argument(
        "--warmup", type=whole_number(0), default=defaults.warmup, help="as --steps, untimed"
    )
    parser.add_argument(
        "--rounds",
        type=whole_number(1),
        default=defaults.rounds,
        help="how often all caches take turns",
    )
    parser.add_argument(
        "--limit",
        type=seconds_at_most,
        default=60.0,
        metavar="SECONDS",
        help="take fewer decode steps in a turn where --steps of them would take longer",
    )
    add_run_options(parser)
