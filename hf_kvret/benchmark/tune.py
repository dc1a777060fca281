"""``hf-kvret bench tune``: which launch numbers are quickest on this GPU family."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from hf_kvret.benchmark.kernels_clock import CacheFlush, time_calls
from hf_kvret.benchmark.kernels_work import Draw, KernelShape
from hf_kvret.benchmark.limits import available_host_memory
from hf_kvret.benchmark.runs import attempt
from hf_kvret.benchmark.tune_cases import TUNE_OPS, TunePlace, host_bytes
from hf_kvret.benchmark.tune_search import MARGIN, Timer, TuneCase, search
from hf_kvret.benchmark.tune_tables import plot_tune, tune_table
from hf_kvret.evaluation.arguments import DTYPES, batches, lengths, names
from hf_kvret.evaluation.command import add_run_options
from hf_kvret.evaluation.environment import describe_environment
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret_kernels import tuning
from hf_kvret_kernels._dispatch import interpreted
from hf_kvret_kernels.prompt_attention.choices import FEW_ROWS

_SIZES = ("heads", "group", "head_dim", "cold", "repeats")
_ROWS = ("device", "host")


class Tune:
    """Which launch numbers are quickest here, for each operation and size."""

    name = "tune"
    summary = "find the quickest launch numbers of kernels, and keep them for this GPU family"
    description = (
        "Which launch numbers are quickest here, for each operation and size. Each candidate's "
        "result is compared with that of the rule, the launch numbers without measurements; one "
        "that is wrong or does not run is refused. Candidates take turns, with cold caches "
        "before each call. What beats the rule by 5% in the median is written to the file that "
        "launches of this GPU family read; where nothing does, it says that the rule is best. "
        "Other sizes in the file stay."
    )
    examples = (
        "hf-kvret bench tune --device cuda --json tune.json",
        "hf-kvret bench tune --device cuda --heads 8 --group 4 --head-dim 128 --batch 1,8,64",
    )

    def table(self, results: Results) -> str:
        """One line for each operation and size."""
        return tune_table(results)

    def plot(self, path: Path, results: Results) -> None:
        """Time of the rule over time of the best, bars for each operation."""
        plot_tune(path, results)


class _Todo(NamedTuple):
    op: str
    batch: int
    place: TunePlace

    @property
    def cell(self) -> Cell:
        # Called a cache as in all results, so that the overview of pages finds it.
        return {
            "op": self.op,
            "cache": f"rows on {self.place.rows}",
            "batch": self.batch,
            "length": self.place.length,
        }


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Operations, sizes, and where results go."""
    parser.add_argument(
        "--ops", default=",".join(TUNE_OPS), help=f"of {', '.join(TUNE_OPS)} (default: all)"
    )
    parser.add_argument(
        "--lengths",
        type=lengths,
        default=lengths("256,512,1K,2K,4K"),
        help="tokens of a call: rows selected, keys of a window; sizes between two powers of two "
        "share the choice of the larger",
    )
    parser.add_argument("--batch", type=batches, default=[1, 8], help="as 1,8")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    parser.add_argument("--head-dim", type=int, default=128, help="of a key, and of a value")
    parser.add_argument(
        "--rows",
        help="where selected rows lie, of device, host; default: both on a GPU, else device",
    )
    parser.add_argument(
        "--cold", type=int, default=32_768, help="tokens of a store that rows are selected from"
    )
    parser.add_argument("--repeats", type=int, default=25, help="timed calls of each candidate")
    parser.add_argument(
        "--dry-run", action="store_true", help="measure and print, but write no choices"
    )
    add_run_options(parser)
    parser.set_defaults(dtype="bfloat16")


def measure_tune(options: argparse.Namespace, timer: Timer | None = None) -> Results:
    """Measure what ``options`` name and ``--json`` does not hold yet; returns all of it.

    After each size its choice is written to ``tuning.user_file``, unless ``--dry-run``; those of
    ``--json`` too. Launches of this process take them from the end on.

    Args:
        timer: None for a clock of ``--device``: ``--repeats`` calls, with cold caches.

    Raises:
        ValueError: options that make no sense, or a device without anything to choose.
        OSError: the choices can't be written.
    """
    todo = _understand(options)
    device = torch.device(options.device)
    family = tuning.gpu_family(device)
    path = tuning.user_file(family)
    if not options.dry_run:
        _check_writable(path)
    results = Results("bench tune", _setup(options), options.json)
    if timer is None:
        timer = _timer(options, device)
    with torch.inference_mode(), tqdm(total=len(todo), desc="tune", unit="size") as bar:
        for one in todo:
            bar.set_postfix_str(f"{one.op}, batch {one.batch}, {one.place.length:,} tokens")
            row = results.find(one.cell)
            if row is None:
                row, lacking = attempt(partial(_measure, options, one, timer))
                row = {"out_of_memory": lacking} if lacking is not None else row
                results.add(one.cell, row)
            if "size" in row and not options.dry_run:
                _keep(path, family, row, results)
            bar.update()
    tuning.reload()
    if options.dry_run:
        print(f"dry run: {path} is as it was")
    else:
        print(f"launches on {family} take their numbers from {path}")
    return results


def _understand(options: argparse.Namespace) -> list[_Todo]:
    """What to measure; ValueError for what makes no sense."""
    for name in _SIZES:
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: no CUDA device here; run this where one is")
    if device.type != "cuda" and not interpreted():
        raise ValueError(
            f"--device {options.device}: there is nothing to tune on it. Choices are launch "
            "numbers of Triton kernels, which run on a CUDA device; torch and the compiled "
            "library, which a CPU uses, have none. Run this with --device cuda, on the GPU to tune "
            "for"
        )
    chosen = names(options.ops)
    for name in chosen:
        if name not in TUNE_OPS:
            raise ValueError(f"--ops {name}: choose of {', '.join(TUNE_OPS)}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"--ops {options.ops!r}: name operations, each once")
    if options.group > FEW_ROWS and any(name.startswith("prompt_") for name in chosen):
        raise ValueError(
            f"--group {options.group}: prompt_attention looks up choices for at most {FEW_ROWS} "
            "query heads of a KV head; leave it out of --ops"
        )
    if any(TUNE_OPS[name].chooses for name in chosen) and max(options.lengths) > options.cold:
        raise ValueError(
            f"--lengths {max(options.lengths)} with --cold {options.cold}: more rows can't be "
            "selected than there are"
        )
    return list(_todo(chosen, options, _places(options, device)))


def _places(options: argparse.Namespace, device: torch.device) -> list[str]:
    """Where rows lie; ValueError for a place that there is not."""
    here = _ROWS if device.type == "cuda" else _ROWS[:1]
    places = list(here) if options.rows is None else names(options.rows)
    if not places or len(set(places)) < len(places) or not set(places) <= set(here):
        raise ValueError(
            f"--rows {options.rows} with --device {options.device}: choose of {', '.join(here)}"
        )
    return places


def _todo(chosen: list[str], options: argparse.Namespace, places: list[str]) -> Iterator[_Todo]:
    for name in chosen:
        for batch in options.batch:
            for length in options.lengths:
                # A window is on the device, wherever the store is.
                for rows in places if TUNE_OPS[name].chooses else _ROWS[:1]:
                    yield _Todo(name, batch, TunePlace(length, rows))


def _measure(options: argparse.Namespace, one: _Todo, timer: Timer) -> dict[str, Any]:
    """The row of one operation and size; MemoryError where the host lacks memory."""
    case = _prepare(options, one)
    found = search(case, timer)
    return {
        "operation": case.op.name,
        "version": case.op.version,
        "size": case.size._asdict(),
        "rule": case.op.told(case.rule),
        "best": case.op.told(found.best),
        "rule_seconds": found.rule_seconds,
        "best_seconds": found.best_seconds,
        "ratio": found.ratio,
        "worth_it": found.worth_it,
        "timed": dict(found.timed),
        "refused": dict(found.refused),
    }


def _prepare(options: argparse.Namespace, one: _Todo) -> TuneCase:
    shape = KernelShape(
        length=options.cold,
        batch=one.batch,
        heads=options.heads,
        group=options.group,
        head_dim=options.head_dim,
        dtype=DTYPES[options.dtype],
        top_k=one.place.length,
        codewords=1,
        rank=1,
    )
    needed, free = host_bytes(shape, one.place), available_host_memory()
    if needed > free:
        raise MemoryError(f"predicted: {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free")
    draw = Draw(torch.device(options.device), options.seed)
    return TUNE_OPS[one.op].prepare(shape, one.place, draw)


def _keep(path: Path, family: str, row: dict[str, Any], results: Results) -> None:
    """Write the row's choice; None stands for the rule."""
    known = tuning.operations()
    op = known[row["operation"]]
    choice = op.choice_from(row["best"]) if row["worth_it"] else None
    measured = {key: row[key] for key in ("rule_seconds", "best_seconds", "ratio")}
    measured |= {key: results.setup[key] for key in ("accelerator", "repeats", "versions")}
    entry = tuning.Entry(op, op.size_from(row["size"]), choice, measured)
    tuning.write_entries(path, family, [entry], known)


def _timer(options: argparse.Namespace, device: torch.device) -> Timer:
    flush = CacheFlush(device)

    def timer(calls: Any) -> dict[str, list[float]]:
        return time_calls(calls, dict.fromkeys(calls, options.repeats), flush, device)

    return timer


def _check_writable(path: Path) -> None:
    """Before the work, not after it; ValueError where the file can't be written."""
    tuning.check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: {error}; name a folder in HF_KVRET_TUNING") from error
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path.parent} can't be written: name a folder in HF_KVRET_TUNING")


def _setup(options: argparse.Namespace) -> dict[str, Any]:
    keys = (*_SIZES, "dtype", "device", "seed")
    here = describe_environment()
    machine = {key: here[key] for key in ("accelerator", "versions")}
    ops = {op.name: op.version for op in tuning.operations().values()}
    return {key: getattr(options, key) for key in keys} | machine | {"margin": MARGIN, "ops": ops}
