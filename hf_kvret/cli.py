"""The command line of hf-kvret: its commands, and how a run that broke off goes on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import transformers

import hf_kvret
from hf_kvret.commands.documents import add_document_parsers
from hf_kvret.commands.models import add_models_parser
from hf_kvret.commands.serve import add_serve_parser
from hf_kvret.lab.bench.parser import add_bench_parser
from hf_kvret.lab.calibrate.command import add_calibrate_parser
from hf_kvret.lab.evaluate.demo import Demo
from hf_kvret.lab.evaluate.measurement import add_measurement
from hf_kvret.lab.evaluate.tasks import add_eval_parser
from hf_kvret.lab.plan.command import add_fits_parser
from hf_kvret.lab.program.program import Parser, kept_results, run_program
from hf_kvret.lab.selftest.command import add_selftest_parser
from hf_kvret.lab.tune.command import Tune
from hf_kvret_kernels.host_library import paths, why_not


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. See ``run_program`` about mistakes and Ctrl-C."""
    return run_program(make_parser, arguments, _resume_hint)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the program with all its commands."""
    # Instruction sets of the compiled library on this processor, or why it can't be used.
    kernels = why_not() or ", ".join(paths())
    parser: argparse.ArgumentParser = Parser(
        prog="hf-kvret",
        description="Caches for Hugging Face transformers that look up the tokens a query attends "
        "to: a demo, a choice for your text, tasks and benchmarks, and calibration.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"hf-kvret {hf_kvret.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, CPU kernels: {kernels}",
        help="show the versions of hf-kvret, torch and transformers, and the CPU kernels",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    add_measurement(commands, Demo)
    add_selftest_parser(commands)
    add_document_parsers(commands)
    add_serve_parser(commands)
    add_measurement(commands, Tune)
    add_eval_parser(commands)
    add_bench_parser(commands)
    add_calibrate_parser(commands)
    add_models_parser(commands)
    add_fits_parser(commands)
    return parser


def _resume_hint(options: argparse.Namespace) -> str:
    """How to resume an interrupted command, as the end of a sentence; empty if it can't be."""
    return kept_results(options) if options.command in ("demo", "tune", "eval", "bench") else ""


if __name__ == "__main__":
    sys.exit(main())
