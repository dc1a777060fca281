"""The papers' ablations: scripts in ``examples/studies`` of a checkout, not part of the package."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "studies"

STUDIES = {
    "paris-ablation": "paris_ablation",
    "lrqk-factors": "lrqk_factors",
    "ctkvr-ablation": "ctkvr_ablation",
    "a2ats-ablation": "a2ats_ablation",
    "aqua-ablation": "aqua_ablation",
}
"""The module of each study by its name, which is that of the command that it once was."""


def add_study_names(tasks: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Let ``hf-kvret eval NAME`` say where the study is; the help doesn't list them."""
    for name in STUDIES:
        # Whatever is given: nothing begins with this character.
        parser = tasks.add_parser(name, add_help=False, prefix_chars="\0")
        parser.add_argument("given", nargs="*")
        parser.set_defaults(run=lambda parsed, name=name: _say_where(name))


def script(name: str) -> str:
    """Where the script of a study lies in a checkout."""
    return f"examples/studies/{STUDIES[name]}.py"


def study_of(title: str) -> str | None:
    """The study whose results have this name, as ``eval paris-ablation``; None for others."""
    name = title.removeprefix("eval ")
    return name if name != title and name in STUDIES else None


def load_study(name: str) -> Any:
    """The measurement of a study, to make tables and pictures of its results.

    Raises:
        ValueError: this is no checkout; says where the script is.
    """
    if not (FOLDER / f"{STUDIES[name]}.py").is_file():
        raise ValueError(
            f"eval {name} is a study: its tables are made in a checkout of hf-kvret's repository, "
            f"which has {script(name)}"
        )
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(STUDIES[name]).STUDY
    finally:
        sys.path.remove(str(FOLDER))


def _say_where(name: str) -> int:
    raise ValueError(
        f"eval {name} is a script now: python {script(name)} takes the same options, in a checkout "
        "of hf-kvret's repository"
    )
