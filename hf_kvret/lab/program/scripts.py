"""Measurements that are scripts in the ``examples`` of a checkout, not part of the package.

Studies of what the papers assume, and benches for those who work on the kernels.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_kvret.lab.evaluate.measurement import Measurement, fill_parser
from hf_kvret.lab.program.program import Parser, example_lines, kept_results, run_program

FOLDER = Path(__file__).parents[3] / "examples"
"""The examples of the checkout that the package is run from; code of others is never loaded."""

SCRIPTS = {
    "eval assumptions": "studies/assumptions.py",
    "eval exact-answers": "studies/exact_answers.py",
    "eval literal": "studies/literal.py",
    "bench host-attention": "benchmarks/bench_host_attention.py",
    "bench kernels": "benchmarks/bench_kernels.py",
}
"""Each script by the name in its result files."""


def command_line(title: str) -> str:
    """The command that runs the script in a checkout."""
    return f"python examples/{SCRIPTS[title]}"


def load_measurement(title: str) -> type[Measurement]:
    """The measurement of a script, in a checkout."""
    script = FOLDER / SCRIPTS[title]
    sys.path.insert(0, str(script.parent))
    try:
        return importlib.import_module(script.stem).MEASUREMENT
    finally:
        sys.path.remove(str(script.parent))


def script_parser(cls: type[Measurement]) -> argparse.ArgumentParser:
    """The parser of a script's measurement."""
    parser = Parser(
        prog=Path(SCRIPTS[cls.title()]).name,
        description=sys.modules[cls.__module__].__doc__,
        epilog=example_lines(cls.examples) if hasattr(cls, "examples") else None,
    )
    fill_parser(parser, cls)
    parser.add_argument("--smallest", action="store_true", help=f"as {cls.smallest}")
    return parser


def run_script(cls: type[Measurement], arguments: Sequence[str] | None = None) -> int:
    """Run a script; returns the exit status, see ``run_program``.

    ``--smallest`` stands for ``cls.smallest``, the options of a run of seconds; others go on top.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if "--smallest" in words:
        arguments = [*cls.smallest.split(), *words]
    return run_program(script_parser(cls), arguments, kept_results)
