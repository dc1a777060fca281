"""The command line: demo, eval, bench, calibrate, inspect, lm-eval and report of hf-kvret."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

import hf_kvret

MEASUREMENTS = {}


def add_bench_parser(c):
    pass  # TEMPORARY


from hf_kvret.calibration.command import add_calibrate_parser
from hf_kvret.calibration.hub import CLIENT_ERROR
from hf_kvret.evaluation.command import add_eval_parser
from hf_kvret.evaluation.demo import Demo
from hf_kvret.evaluation.help_text import HelpFormatter
from hf_kvret.evaluation.lm_eval import add_lm_eval_parser
from hf_kvret.evaluation.measurement import add_measurement
from hf_kvret.evaluation.report import add_report_parser
from hf_kvret.evaluation.tasks import TASKS
from hf_kvret.loading import INTERRUPTED, loading_is_done

# What a user, a file or the machine can be the cause of; anything else is our own bug.
_MISTAKES = (
    ValueError,
    TypeError,
    OSError,
    ModuleNotFoundError,
    RecursionError,
    SafetensorError,
    MemoryError,
    torch.OutOfMemoryError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. A user's mistake prints one line, not a trace.

    So does Ctrl-C on the command line, with status 130. Callers who pass ``arguments`` get the
    KeyboardInterrupt, which may be meant for them.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()
    try:
        loading_is_done()
        return options.run(options)
    except KeyboardInterrupt:
        if arguments is not None:
            raise
        # A progress bar may have left the cursor in the middle of a line.
        print(f"\nhf-kvret: interrupted{_what_is_kept(options)}", file=sys.stderr)
        return INTERRUPTED
    except (*_MISTAKES, CLIENT_ERROR) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"hf-kvret: error: {reason}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The parser of the program with all its commands."""
    parser = argparse.ArgumentParser(
        prog="hf-kvret",
        description="Caches for Hugging Face transformers that look up the tokens a query attends "
        "to: a demo, tasks and benchmarks, calibration, and pages of results.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"hf-kvret {hf_kvret.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        help="show the versions of hf-kvret, torch and transformers",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    add_measurement(commands, Demo)
    add_eval_parser(commands)
    add_bench_parser(commands)
    add_lm_eval_parser(commands)
    add_calibrate_parser(commands)
    tasks = {f"eval {name}": task for name, task in TASKS.items()}
    add_report_parser(commands, {"demo": Demo, **tasks, **MEASUREMENTS})
    return parser


def _what_is_kept(options: argparse.Namespace) -> str:
    """What an interrupted command leaves to go on from, as the end of a sentence."""
    measures = options.command in ("demo", "eval", "bench")
    learns = options.command == "calibrate" and (options.out / ".parts").is_dir()
    if learns or (measures and options.json):
        return ": the same command goes on where it stopped"
    return ", and nothing is kept: with --json FILE the same command goes on" if measures else ""


if __name__ == "__main__":
    sys.exit(main())
