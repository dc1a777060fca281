"""``hf-kvret eval TASK``: options, and the way from them to a table."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from hf_kvret.evaluation.caches import choose_caches, known_caches
from hf_kvret.evaluation.plots import require_matplotlib
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.subject import load_subject, model_folder
from hf_kvret.evaluation.task import Task, run_task
from hf_kvret.evaluation.tasks import TASKS
from hf_kvret.registry import registered_methods
from hf_kvret.stores import store_names

# What `--caches` means by itself.
_CACHES = ("full", "flat", "paris", "lrqk", "ctkvr")
_PICTURES = (".png", ".svg", ".pdf")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
            description=task.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
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
        "--store", default="device", help=f"of retrieval caches that have it: {store_names()}"
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Where to compute, and where results go; ``check_outputs`` looks at the latter."""
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--device", type=device_name, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep results here, and go on from what is there"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (PNG, SVG, PDF)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the markdown table too")


def device_name(text: str) -> str:
    """A device that torch knows, for argparse."""
    try:
        return str(torch.device(text))
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: write cpu or cuda") from None


def check_outputs(options: argparse.Namespace) -> None:
    """Look at ``--json``, ``--plot`` and ``--table`` before the work, not after it.

    Raises:
        ValueError: a path that can't be written, or a picture of unknown kind.
        ModuleNotFoundError: a picture without matplotlib.
    """
    for option in ("json", "plot", "table"):
        path: Path | None = getattr(options, option)
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"--{option} {path} is a folder: give a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--{option} {path}: {error}") from error
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"--{option} {path} can't be written: give another file")
    if options.plot:
        require_matplotlib()
        if options.plot.suffix not in _PICTURES:
            raise ValueError(f"--plot {options.plot}: its name must end in {', '.join(_PICTURES)}")


def budget(text: str) -> int | float:
    """A count or a share, for argparse."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        message = f"{text!r} is neither a count (256) nor a share (0.04)"
        raise argparse.ArgumentTypeError(message) from None


def lengths(text: str) -> list[int]:
    """Comma-separated token counts, each with an optional K (1,024) or M, for argparse."""
    units = {"k": 1024, "m": 1024**2}
    found = []
    for part in text.split(","):
        digits, unit = part.strip().lower(), 1
        if digits and digits[-1] in units:
            digits, unit = digits[:-1], units[digits[-1]]
        if not digits.isdigit() or int(digits) < 1:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is no length: write 4096 or 4K")
        found.append(int(digits) * unit)
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"the same length twice in {text!r}")
    return found


def names(text: str) -> list[str]:
    """Comma-separated names, blanks dropped."""
    return [name.strip() for name in text.split(",") if name.strip()]


def default_caches(model: str) -> list[str]:
    """Those that ``--caches`` means when it is not given, for the ``model`` of ``--model``."""
    home = model_folder(model)
    learned = [name for name, cls in registered_methods().items() if cls.needs_artifact]
    return [*_CACHES, *(name for name in learned if (home / name).is_dir())]


def run_eval(options: argparse.Namespace) -> int:
    """Run the task that the command line names, print its table, write what was asked for."""
    check_outputs(options)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: no CUDA device here; use --device cpu")
    retrieval = {"top_k": options.top_k, "store": options.store}
    caches = names(options.caches) if options.caches else default_caches(options.model)
    choices = choose_caches(caches, retrieval, options.device)
    task: Task = options.task.from_options(options)
    subject = load_subject(options.model, DTYPES[options.dtype], options.device)
    setup = subject.describe() | {"device": options.device, "seed": options.seed} | retrieval
    results = Results(f"eval {task.name}", setup | task.setup(), options.json)
    waiting = [cell for cell in task.cells(list(choices)) if results.find(cell) is None]
    try:
        failed = run_task(task, subject, choices, results)
    finally:
        # What was finished is worth seeing, also when a later cell could not be.
        if len(results):
            print(f"\n{task.table(results)}")
    for cell, reason in failed:
        print(f"\nout of memory: {' '.join(map(str, cell.values()))} ({reason})")
    known = len(task.cells(list(choices))) - len(waiting)
    if known:
        print(f"\n{known} cells were finished already and were not run again")
    if options.table:
        options.table.parent.mkdir(parents=True, exist_ok=True)
        options.table.write_text(task.table(results) + "\n", encoding="utf-8")
        print(f"wrote {options.table}")
    if options.plot:
        task.plot(options.plot, results)
        print(f"wrote {options.plot}")
    if options.json:
        print(f"results are in {options.json}")
    return 1 if failed else 0
