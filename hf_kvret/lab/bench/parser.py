"""``hf-kvret bench decode | prefill | turns | all``: the command's measurements."""

from __future__ import annotations

import argparse

from hf_kvret.lab.bench.gpu_run import add_all_parser
from hf_kvret.lab.bench.passes import Decode, Prefill
from hf_kvret.lab.bench.turns import Turns
from hf_kvret.lab.evaluate.measurement import Measurement, add_measurement

_MEASUREMENTS: tuple[type[Measurement], ...] = (Decode, Prefill, Turns)

MEASUREMENTS: dict[str, type[Measurement]] = {cls.title(): cls for cls in _MEASUREMENTS}
"""The measurements by the name in their result files."""


def add_bench_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` with one sub-command a measurement to the program's commands."""
    parser = commands.add_parser(
        "bench",
        help="measure the time of caches on models of true shape with random weights",
        description="Measure the time of caches on a model of true shape with random weights. Give "
        "--json to keep finished rows: the same command goes on where it was interrupted.",
    )
    measurements = parser.add_subparsers(required=True, metavar="MEASURE")
    for cls in _MEASUREMENTS:
        add_measurement(measurements, cls)
    add_all_parser(measurements)
