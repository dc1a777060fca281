"""``hf-kvret eval TASK``: the evaluation tasks, one a file."""

from __future__ import annotations

import argparse

from hf_kvret.lab.evaluate.measurement import add_group
from hf_kvret.lab.evaluate.task import Task
from hf_kvret.lab.evaluate.tasks.agreement import Agreement
from hf_kvret.lab.evaluate.tasks.arena import Arena
from hf_kvret.lab.evaluate.tasks.multiturn import MultiTurn
from hf_kvret.lab.evaluate.tasks.niah import NeedleInHaystack
from hf_kvret.lab.evaluate.tasks.ppl import Perplexity
from hf_kvret.lab.evaluate.tasks.ruler import Ruler

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Arena, Perplexity, Ruler, NeedleInHaystack, MultiTurn, Agreement)
}


def add_eval_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``eval`` with one sub-command a task to the program's commands."""
    add_group(
        commands,
        "eval",
        TASKS.values(),
        "TASK",
        help="measure caches on tasks: answers, perplexity, agreement with full attention",
        description="Measure caches on a task. Give --json to keep finished cells: the same "
        "command goes on where it was interrupted.",
    )
