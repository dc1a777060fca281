"""``hf-kvret eval TASK``."""

from __future__ import annotations

import argparse

from hf_kvret.lab.evaluate.measurement import add_measurement
from hf_kvret.lab.evaluate.tasks import TASKS


def add_eval_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``eval`` with one sub-command a task to the program's commands."""
    parser = commands.add_parser(
        "eval",
        help="measure caches on tasks: answers, perplexity, agreement with full attention",
        description="Measure caches on a task. Give --json to keep finished cells: the same "
        "command goes on where it was interrupted.",
    )
    tasks = parser.add_subparsers(required=True, metavar="TASK")
    for task in TASKS.values():
        add_measurement(tasks, task)
