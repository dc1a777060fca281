"""``hf-kvret bench all``: the minutes of a GPU, spent on what was prepared.

A worker builds the model once and measures the cells of ``gpu_stages``. A finished cell is a line
of ``rows.jsonl``, synced at once. A cell that hangs ends the worker, and the command starts another
one behind that cell.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_kvret.lab.bench.gpu_page import RowFile, label, write_page
from hf_kvret.lab.bench.gpu_stages import STAGES, Bench, Stage, cells_of
from hf_kvret.lab.bench.triton_cache import KEY_FILE, rewrite_groups, triton_key_facts
from hf_kvret.lab.evaluate.measurement import attempt
from hf_kvret.lab.program.arguments import check_device, file_path, seconds_at_most
from hf_kvret.lab.program.options import add_options, option, read_options
from hf_kvret.lab.program.program import example_lines
from hf_kvret.lab.report.outputs import check_folder
from hf_kvret.lab.report.results import Cell, sole_writer
from hf_kvret.lab.selftest.check import without_folders
from hf_kvret.lab.selftest.command import describe
from hf_kvret.saved.folder import replace_file

ROWS, LOG, NOW, PAGE = "rows.jsonl", "log.txt", "now.json", "gpu.md"
"""What a run leaves in its folder."""
# A cell takes more, and a worker is not even started in less.
_LEAST_CELL, _LEAST_WORKER = 3.0, 12.0
_BUILDING_SECONDS = 90.0
# Exit statuses of a worker: by the watchdog, and behind an error that its device does not survive.
_HUNG, _BROKEN = 1, 3


@dataclass(frozen=True, kw_only=True)
class BenchAll:
    """The options of ``hf-kvret bench all``."""

    out: Path = option(Path("gpu"), "folder for rows.jsonl, log.txt and gpu.md", kind=file_path)
    minutes: float = option(8.0, "time for all of it", kind=seconds_at_most)
    only: str | None = option(None, "stages to measure again, as stores,rest", metavar="STAGES")
    dry: bool = option(False, "a tiny model on a CPU: all of it runs, and no number means a thing")
    pages: Path | None = option(
        None,
        "measure nothing: write gpu.md in a folder, of all gpu*.jsonl there",
        kind=file_path,
    )


def add_all_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``all`` to the measurements of ``bench``."""
    names = ", ".join(stage.name for stage in STAGES)
    parser = commands.add_parser(
        "all",
        help="measure what matters on a GPU in some minutes",
        description="Measure on a GPU, in the shape of Llama-3.1-8B, the most important first: "
        f"{names}. A finished cell is kept whatever happens, and the same call goes on.",
        epilog=example_lines(["hf-kvret bench all --out gpu", "hf-kvret bench all --dry"]),
    )
    add_options(parser, BenchAll)
    parser.set_defaults(run=lambda parsed: run_all(read_options(BenchAll, parsed)), json=True)


def run_all(options: BenchAll) -> int:
    """Measure what is not there yet and write the page; returns 1 where cells are missing.

    Raises:
        ValueError: an unknown stage, no GPU, a folder that can't be written to, another run in it.
    """
    if options.pages is not None:
        print(f"wrote {write_page(options.pages / PAGE, sorted(options.pages.glob('gpu*.jsonl')))}")
        return 0
    stages = chosen_stages(options.only)
    if not options.dry:
        check_device("cuda")
    check_folder("--out", options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    with sole_writer(options.out / ROWS):
        file = RowFile(options.out / ROWS)
        # Older rows don't count where stages are named.
        plan = {
            "stages": [stage.name for stage in stages],
            "dry": options.dry,
            "since": 0 if options.only is None else len(file.rows()),
        }
        (options.out / NOW).unlink(missing_ok=True)
        while (left := end - time.monotonic()) > _LEAST_WORKER:
            status = _work(options.out, {**plan, "seconds": left})
            # A cell that was cut off when the time was over is measured by the next call.
            if status == 0 or time.monotonic() > end - 1.0:
                break
            if status != _BROKEN and not _blame(file, options.out / NOW, status):
                break
        (options.out / NOW).unlink(missing_ok=True)
    page = write_page(options.out / PAGE, [options.out / ROWS])
    missing = sum(1 for _ in waiting(file.rows(), plan, _card(options.dry)))
    print(f"{missing} cells are not measured: the same call goes on" if missing else f"see {page}")
    return int(missing > 0)


def chosen_stages(only: str | None) -> list[Stage]:
    """The stages of these names, in the order of ``STAGES``; ValueError for an unknown one."""
    known = {stage.name: stage for stage in STAGES}
    names = list(known) if only is None else only.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name}: choose of {', '.join(known)}")
    return [stage for name, stage in known.items() if name in names]


def waiting(
    rows: Sequence[dict[str, Any]], plan: dict[str, Any], card: str
) -> Iterator[tuple[Stage, Cell]]:
    """Stage and cell of all that has no row of this card yet, in their order."""
    done = [
        (row["stage"], row["cell"])
        for row in rows[plan["since"] :]
        if "cell" in row and row["card"] == card
    ]
    for stage in STAGES:
        if stage.name in plan["stages"]:
            for cell in cells_of(stage, plan["dry"]):
                if (stage.name, cell) not in done:
                    yield stage, cell


def _card(dry: bool) -> str:
    """The name of the GPU, by which rows differ."""
    return "CPU (dry)" if dry else torch.cuda.get_device_name()


def _work(out: Path, plan: dict[str, Any]) -> int:
    """The exit status of a worker. It ends when this process does, as its input is closed then."""
    command = [sys.executable, "-m", __name__, str(out), json.dumps(plan)]
    with (out / LOG).open("ab") as log:
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log)
        try:
            return worker.wait(timeout=plan["seconds"] + _BUILDING_SECONDS)
        except subprocess.TimeoutExpired:
            return _HUNG
        finally:
            worker.kill()
            worker.wait()


def _blame(file: RowFile, now: Path, status: int) -> bool:
    """Give the cell in which a worker ended a row that says so; False where there was none."""
    try:
        begun = json.loads(now.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    now.unlink()
    why = f"it took too long, or ended the process (status {status})"
    file.add(begun | {"row": {"failed": f"{why}: see {LOG}"}})
    print(f"{begun['stage']} {label(begun['cell'])}: {why}", flush=True)
    return True


def main(arguments: Sequence[str]) -> int:
    """The worker process; its arguments are the folder and the plan."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return measure(Path(arguments[0]), json.loads(arguments[1]))


def measure(out: Path, plan: dict[str, Any]) -> int:
    """Measure what is waiting until the time is over; returns the exit status of a worker."""
    started, file, card = time.monotonic(), RowFile(out / ROWS), _card(plan["dry"])
    bench = Bench(plan["dry"])
    if bench.dry:
        torch.set_num_threads(1)
    environment = {"card": card, "environment": describe(bench.device), "triton": _kernels()}
    if environment not in file.rows():
        file.add(environment)
    faulthandler.dump_traceback_later(_BUILDING_SECONDS, exit=True)
    _ = bench.subject
    faulthandler.cancel_dump_traceback_later()
    spent: dict[str, float] = {}
    for stage, cell in list(waiting(file.rows(), plan, card)):
        left = plan["seconds"] - (time.monotonic() - started)
        if left < _LEAST_CELL or spent.get(stage.name, 0.0) > stage.seconds:
            continue
        begun = {"stage": stage.name, "card": card, "cell": cell}
        replace_file(out / NOW, json.dumps(begun).encode())
        faulthandler.dump_traceback_later(min(left, stage.cell_seconds), exit=True)
        start = time.monotonic()
        row, is_sound = _measured(stage, bench, cell)
        seconds = time.monotonic() - start
        faulthandler.cancel_dump_traceback_later()
        spent[stage.name] = spent.get(stage.name, 0.0) + seconds
        file.add(begun | {"row": row, "took": round(seconds, 2)})
        (out / NOW).unlink()
        print(f"{stage.name} {label(cell)}: {_in_short(row)} ({seconds:.1f} s)", flush=True)
        if not is_sound:
            return _BROKEN
    return 0


def _kernels() -> dict[str, Any]:
    """Triton's key here, and that of the kernels which were carried along; empty without Triton."""
    if importlib.util.find_spec("triton") is None:
        return {}
    folder = Path(os.environ.get("TRITON_CACHE_DIR", os.devnull))
    key = folder / KEY_FILE
    try:
        if not key.is_file():
            return {"here": triton_key_facts()}
        # They lie elsewhere than where they were compiled.
        groups, carried = rewrite_groups(folder), json.loads(key.read_text())
        return {"here": triton_key_facts(), "carried": carried, "kernels": groups}
    # Triton's own code may be another one there; kernels are compiled then.
    except Exception as error:
        return {"failed": without_folders(f"{type(error).__name__}: {error}")}


def _measured(stage: Stage, bench: Bench, cell: Cell) -> tuple[dict[str, Any], bool]:
    """A cell's row, and whether the device goes on."""
    try:
        row, why = attempt(lambda: stage.row(bench, cell))
        row = why if row is None else row
    # Whatever a kernel, a driver or a compiler raises, the other cells are measured.
    except Exception as error:
        row = {"failed": without_folders(f"{type(error).__name__}: {error}")}
    try:
        if bench.device.type == "cuda":
            torch.cuda.synchronize(bench.device)
    except RuntimeError as error:
        return {"failed": without_folders(str(error))}, False
    return row, True


def _in_short(row: dict[str, Any]) -> str:
    for name in ("failed", "check_failed", "out_of_memory", "status"):
        if name in row:
            return str(row[name])
    seconds = row.get("seconds", row.get("span_us", 0.0) / 1e6)
    return f"{1e3 * seconds:.3g} ms"


def _end_with_parent() -> None:
    """End this process when the one that started it is gone."""
    sys.stdin.buffer.read()
    os._exit(_HUNG)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Behind an error that the device does not survive, Python's own end may abort.
    os._exit(status)
