"""``hf-kvret bench decode | prefill | turns | all``: the command's measurements."""

from __future__ import annotations

import argparse

from hf_kvret.lab.bench.gpu_run import BenchAll
from hf_kvret.lab.bench.passes import Decode, Prefill, Turns
from hf_kvret.lab.evaluate.measurement import Measurement, add_group

MEASUREMENTS: dict[str, type[Measurement]] = {
    cls.title(): cls for cls in (Decode, Prefill, Turns, BenchAll)
}
"""The measurements by the name in their result files."""


def add_bench_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` with one sub-command a measurement to the program's commands."""
    add_group(
        commands,
        "bench",
        MEASUREMENTS.values(),
        "MEASURE",
        help="measure the time of caches on models of true shape with random weights",
        description="Measure the time of caches on a model of true shape with random weights. Give "
        "--json to keep finished rows: the same command goes on where it was interrupted.",
    )
