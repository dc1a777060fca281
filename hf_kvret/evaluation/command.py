"""``hf-kvret eval TASK``: options, and the way from them to a table."""

from __future__ import annotations

import argparse

import torch

from hf_kvret.evaluation.arguments import (
    DTYPES,
    budget,
    check_device,
    device_name,
    file_path,
    names,
    seed,
    store_name,
)
from hf_kvret.evaluation.caches import choose_caches, known_caches
from hf_kvret.evaluation.help_text import HelpFormatter, example_lines
from hf_kvret.evaluation.outputs import check_outputs, write_outputs
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.subject import load_subject, model_folder
from hf_kvret.evaluation.task import Task, run_task
from hf_kvret.evaluation.tasks import TASKS
from hf_kvret.registry import registered_methods
from hf_kvret.stores import store_names

# What `--caches` means by itself.
_CACHES = ("full", "flat", "paris", "lrqk", "ctkvr")


def add_eval_parser(commands: argparse._SubParsersAction) -> None:
    """Add ``eval`` with one sub-command a task to the program's commands."""
    parser = commands.add_parser(
        "eval",
        help="measure caches on tasks: answers, perplexity, agreement with full attention",
        description="Measure caches on a task. Give --json to keep finished cells: the same "
        "command goes on where it was interrupted.",
    )
    tasks = parser.add_subparsers(required=True, metavar="TASK")
    for task in TASKS.values():
        one = tasks.add_parser(
            task.name,
            help=task.summary,
            description=task.description,
            epilog=example_lines(task.examples),
            formatter_class=HelpFormatter,
        )
        add_common_options(one)
        task.add_options(one)
        one.set_defaults(run=run_eval, task=task)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """What every measurement takes: model, caches, budget, where results go."""
    parser.add_argument(
        "--model",
        default="reference",
        help="a folder, a hub id, or a bundled model: reference (text), needle (token ids only)",
    )
    parser.add_argument(
        "--caches",
        help="comma-separated, options after colons as paris:top_k=100:store=host; known: "
        f"{', '.join(known_caches())}; default: {','.join(_CACHES)}, and those that the model's "
        "folder has an artifact for",
    )
    add_budget_options(parser)
    add_run_options(parser)


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Options of retrieval caches where ``--caches`` says nothing."""
    parser.add_argument(
        "--top-k", type=budget, default=256, help="of retrieval caches: a count, or a share as 0.04"
    )
    parser.add_argument(
        "--store",
        type=store_name,
        default="device",
        help=f"of retrieval caches that have it: {store_names()}",
    )


def add_run_options(parser: argparse.ArgumentParser, seed: int = 42) -> None:
    """What to compute in and where, and where results go."""
    add_place_options(parser)
    add_seed_option(parser, seed)
    add_output_options(parser)


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """What to compute in, and where; ``check_device`` looks at the latter."""
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model")
    parser.add_argument(
        "--device",
        type=device_name,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, or one of several as cuda:1",
    )


def add_seed_option(parser: argparse.ArgumentParser, usual: int = 42) -> None:
    """What random numbers begin with."""
    parser.add_argument("--seed", type=seed, default=usual, help="of all random numbers")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where results go; ``outputs.check_outputs`` looks at it."""
    parser.add_argument(
        "--json",
        type=file_path,
        metavar="FILE",
        help="keep results here, and go on from what is there",
    )
    parser.add_argument(
        "--plot", type=file_path, metavar="FILE", help="write a picture (PNG, SVG, PDF)"
    )
    parser.add_argument(
        "--table", type=file_path, metavar="FILE", help="write the markdown table too"
    )


def default_caches(model: str) -> list[str]:
    """Those that ``--caches`` means when it is not given, for the ``model`` of ``--model``."""
    home = model_folder(model)
    learned = [name for name, cls in registered_methods().items() if cls.needs_artifact]
    return [*_CACHES, *(name for name in learned if (home / name).is_dir())]


def run_eval(options: argparse.Namespace) -> int:
    """Run the task that the command line names, print its table, write what was asked for."""
    name = f"eval {options.task.name}"
    check_outputs(options, name, options.task)
    check_device(options.device)
    retrieval = {"top_k": options.top_k, "store": options.store}
    caches = names(options.caches) if options.caches else default_caches(options.model)
    choices = choose_caches(caches, retrieval, options.device)
    task: Task = options.task.from_options(options)
    # What the caches and the files alone can be wrong about is said before the model is loaded.
    cells, described = task.cells(list(choices)), task.setup()
    subject = load_subject(options.model, DTYPES[options.dtype], options.device)
    setup = subject.describe() | {"device": options.device, "seed": options.seed} | retrieval
    results = Results(name, setup | described, options.json)
    waiting = [cell for cell in cells if results.find(cell) is None]
    try:
        failed = run_task(task, subject, choices, results)
    finally:
        # What was finished is worth seeing, also when a later cell could not be.
        if len(results):
            print(f"\n{task.table(results)}")
    for cell, reason in failed:
        print(f"\nout of memory: {' '.join(map(str, cell.values()))} ({reason})")
    known = len(cells) - len(waiting)
    if known:
        print(f"\n{known} cells were finished already and were not run again")
    write_outputs(options, task, results)
    return 1 if failed else 0
