"""Measurements that are scripts in the ``examples`` of a checkout, not part of the package.

Studies of the papers' methods, and benches of kernels and steps for those who work on them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_kvret.evaluation.help_text import HelpFormatter
from hf_kvret.evaluation.measurement import Measurement, fill_parser
from hf_kvret.evaluation.program import kept_results, run_program

FOLDER = Path(__file__).parents[2] / "examples"

SCRIPTS = {
    "eval paris-ablation": "studies/paris_ablation.py",
    "eval lrqk-factors": "studies/lrqk_factors.py",
    "eval ctkvr-ablation": "studies/ctkvr_ablation.py",
    "eval a2ats-ablation": "studies/a2ats_ablation.py",
    "eval aqua-ablation": "studies/aqua_ablation.py",
    "eval misses": "studies/misses.py",
    "bench step": "benchmarks/bench_step.py",
    "bench host-attention": "benchmarks/bench_host_attention.py",
    "bench kernels": "benchmarks/bench_kernels.py",
    "bench tune": "benchmarks/bench_tune.py",
}
"""Each script by the name in its result files, which is that of the command that it once was."""


def is_here(title: str) -> bool:
    """Whether the package is run from a checkout that has the script."""
    return (FOLDER / SCRIPTS[title]).is_file()


def command_line(title: str) -> str:
    """What runs the script in a checkout."""
    return f"python examples/{SCRIPTS[title]}"


def load_measurement(title: str) -> type[Measurement]:
    """The measurement of a script.

    Raises:
        ValueError: this is no checkout; says where the script is.
    """
    script = FOLDER / SCRIPTS[title]
    if not is_here(title):
        raise ValueError(
            f"{title} is a script in a checkout of hf-kvret's repository, examples/"
            f"{SCRIPTS[title]}, and this is none"
        )
    sys.path.insert(0, str(script.parent))
    try:
        return importlib.import_module(script.stem).MEASUREMENT
    finally:
        sys.path.remove(str(script.parent))


def run_script(kind: type[Measurement], arguments: Sequence[str] | None = None) -> int:
    """Run a script; returns the exit status, see ``run_program``."""
    parser = argparse.ArgumentParser(
        prog=Path(SCRIPTS[kind.title()]).name, formatter_class=HelpFormatter
    )
    fill_parser(parser, kind)
    parser.description = parser.description or sys.modules[kind.__module__].__doc__
    return run_program(parser, arguments, kept_results)


def add_script_name(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], title: str
) -> None:
    """Let the command that the script once was say where it is; the help doesn't list it."""
    # Whatever is given: nothing begins with this character.
    parser = commands.add_parser(title.partition(" ")[2], add_help=False, prefix_chars="\0")
    parser.add_argument("given", nargs="*")
    parser.set_defaults(run=lambda parsed: _say_where(title), json=None)


def _say_where(title: str) -> int:
    raise ValueError(
        f"{title} is a script now: {command_line(title)} takes the same options, in a checkout of "
        "hf-kvret's repository"
    )
