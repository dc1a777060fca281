"""``hf-kvret bench all``: every measurement that a GPU is asked for, the most important first.

Each part is a command of ``hf-kvret bench`` with a time limit of its own. Finished rows are kept,
so that the same call goes on after an interruption; a part that is done is not run again. A page
NAME.md says what each part asks, how it ended, and what it found.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from hf_kvret.lab.evaluate.measurement import Measurement
from hf_kvret.lab.program.arguments import check_device, file_path, lengths, seconds_at_most
from hf_kvret.lab.program.help_text import HelpFormatter, example_lines
from hf_kvret.lab.program.options import add_options, option, read_options
from hf_kvret.lab.program.scripts import FOLDER, SCRIPTS, load_measurement
from hf_kvret.lab.report.outputs import check_own, page_mark
from hf_kvret.lab.report.pages import Part, shown_tables
from hf_kvret.lab.report.results import Results
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.saved.folder import replace_file
from hf_kvret_kernels.tuning import gpu_family

# The tiny run divides contexts and sizes by this; its windows are small enough to overflow.
_SHRINK = 256
_SMALL = "dense_below=0:recent=32:flush=32:sink=4"
_RETRIEVING = ("paris", "lrqk", "ctkvr", "a2ats", "aqua")
_OF_CUDA = ("dense-graph", "offloaded")
_INTERRUPTED_SECONDS = 30
# Columns of a result's table that its section shows; all others are in its file.
_COLUMNS = (
    "cache", "context", "batch", "check", "ms a step", "quartiles", "tokens/s", "floor ms",
    "time / floor", "cache device MB", "peak beyond weights MB",
)  # fmt: skip
# A model is not even loaded in less.
_LEAST_SECONDS = 30
_SHAPE, _DTYPE = "llama-3.1-8b", "bfloat16"

_Known = Mapping[str, type[Measurement]]


@dataclass(frozen=True)
class Command:
    """One part: a command of ``hf-kvret bench``.

    Attributes:
        name: of the part, and the end of its result file's name.
        seconds: it is interrupted after this long.
        asks: what it measures, in words.
        arguments: of ``hf-kvret bench``, without shape, device and output.
        aim: the figure that is aimed at; empty for none.
        shaped: it takes ``--shape``; others take sizes of their own.
        is_long: it is run by ``--long`` alone.
    """

    name: str
    seconds: int
    asks: str
    arguments: str
    aim: str = ""
    shaped: bool = True
    is_long: bool = False

    def command(self, out: Path, name: str, tiny: bool = False) -> list[str]:
        """The whole command, without the program's name; results go to ``name``_``part``.json."""
        words = shlex.split(self.arguments)
        if self.shaped:
            shape, dtype = ("tiny", "float32") if tiny else (_SHAPE, _DTYPE)
            words += ["--shape", shape, "--dtype", dtype]
        words += ["--device", "cpu" if tiny else "cuda"]
        return ["bench", *(_shrunk(words) if tiny else words), "--json", str(self.file(out, name))]

    def file(self, out: Path, name: str) -> Path:
        """Its results."""
        return out / f"{name}_{self.name}.json"

    @property
    def is_there(self) -> bool:
        """Whether it is a part of the package, or a script of the checkout that is run from."""
        script = SCRIPTS.get(f"bench {self.arguments.split()[0]}")
        return script is None or (FOLDER / script).is_file()


# Two rounds, so that a difference between them shows how steady the machine is.
_STEPS = "--fill random --warmup 8 --steps 64 --rounds 2 --limit 10"
_FEW_STEPS = "--fill random --warmup 3 --steps 8 --rounds 1 --limit 10"
_PARIS = "paris:top_k=100,paris:top_k=1024"

PLAN = (
    # First, so that all others run with the launch numbers that it finds.
    Command(
        "launch",
        180,
        "launch numbers of the kernels for this GPU",
        "launch --context 32K,128K --batch 1,8",
        shaped=False,
    ),
    Command(
        "decode",
        300,
        "a step of one sequence, beside full attention with and without a graph",
        f"decode --context 128K,32K --caches {_PARIS},paris:top_k=100:graph=false,"
        f"dense,dense-graph,full {_STEPS}",
        aim="at 128K `paris:top_k=100` at most 5 ms and 1.3 times its floor",
    ),
    # The artifacts of a2ats and aqua are made first, from random tokens, for this shape.
    Command(
        "methods",
        300,
        "a step of each of the five systems",
        "decode --context 128K,32K --caches paris:top_k=1024,lrqk:top_k=1024,ctkvr:top_k=1024,"
        "a2ats:top_k=1024,aqua,dense --fill random --warmup 4 --steps 16 --rounds 1 --limit 10",
    ),
    Command(
        "batch",
        240,
        "tokens a second of the largest batch that fits",
        "batch --context 128K,96K,64K --caches dense,dense-graph,paris:top_k=100,"
        "paris:top_k=100:store=higgs,paris:top_k=100:store=split:device_budget=60GB "
        "--fill random --warmup 6 --steps 16 --rounds 1 --limit 4",
        aim="at least 5 times the best dense batch",
    ),
    Command(
        "prefill",
        120,
        "time to the first token",
        f"prefill --context 128K --caches dense,{_PARIS} --warmup 1 --steps 2 --rounds 1",
        aim="`paris` at most 1.03 times `dense`",
    ),
    Command(
        "lrqk",
        120,
        "`lrqk` with rows on the host, beside transformers' offloaded cache",
        "decode --context 64K --caches lrqk:top_k=2048:store=resident:slots=2.0,"
        "lrqk:top_k=2048:store=host,offloaded "
        "--fill random --warmup 6 --steps 32 --rounds 2 --limit 10",
        aim="at least 25 times `offloaded` (published: 13.6)",
    ),
    Command(
        "offloaded",
        90,
        "transformers' offloaded cache",
        f"decode --context 128K,32K --caches offloaded {_FEW_STEPS}",
    ),
    Command(
        "static_compile",
        120,
        "transformers' static cache with its own compile",
        "decode --context 128K,32K --caches static-compile --fill random --warmup 8 --steps 32 "
        "--rounds 1 --limit 10",
    ),
    Command(
        "quantized",
        80,
        "transformers' quantized cache, where its package is installed",
        f"decode --context 128K,32K --caches quantized:nbits=4 {_FEW_STEPS}",
    ),
    Command(
        "kvpress",
        80,
        "a press of kvpress, where it is installed",
        "decode --context 32K --caches kvpress:SnapKV:compression_ratio=0.9 --warmup 3 --steps 32 "
        "--rounds 1 --limit 10",
    ),
    Command(
        "kernels",
        120,
        "each kernel's share of the memory's bandwidth",
        "kernels --ops paris,relevance,gather_attention,prompt_attention,higgs,proxy,gather_scores,"
        "centroid,codebook --context 128K --batch 8,1 --backends auto --top-k 1024 --repeats 20 "
        "--limit 2",
        aim="at least 80% at batch 8",
        shaped=False,
    ),
    Command(
        "decode_512k",
        300,
        "a step at 512K",
        f"decode --context 512K --caches {_PARIS},dense,dense-graph {_STEPS}",
        aim="at most 1.3 times the floor",
        is_long=True,
    ),
    Command(
        "decode_1m",
        500,
        "a step at 1M, with rows on device and host, and in 4 bits",
        "decode --context 1M --caches paris:top_k=100:store=split:device_budget=64GB,"
        "paris:top_k=1024:store=split:device_budget=64GB,paris:top_k=100:store=higgs,dense "
        "--fill random --warmup 8 --steps 32 --rounds 1 --limit 10",
        aim="at most 8 ms",
        is_long=True,
    ),
    Command(
        "flush",
        180,
        "many steps, with captures and flushes among them",
        "decode --context 128K --caches paris:top_k=100,paris:top_k=100:graph=false --fill random "
        "--warmup 8 --steps 600 --rounds 1 --limit 30",
        is_long=True,
    ),
)
"""What is measured, the most important first; without the long parts in 30 minutes."""


@dataclass(frozen=True, kw_only=True)
class BenchAll:
    """The options of ``hf-kvret bench all``."""

    out: Path = option(Path("results"), "folder for result files and the page", kind=file_path)
    name: str | None = option(
        None, "what files begin with; default: the GPU's, as h200", metavar="NAME"
    )
    budget: float = option(1800.0, "seconds for all parts together", kind=seconds_at_most)
    only: str | None = option(None, "parts, as decode,batch", metavar="PARTS")
    long: bool = option(False, "the parts that take longer, too: 512K, 1M, many steps")
    tiny: bool = option(False, "a tiny shape on a CPU: shows that the commands work")
    list: bool = option(False, "print the commands and end")
    page_only: bool = option(False, "measure nothing, write the page of what is there")


def add_all_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], measurements: _Known
) -> None:
    """Add ``all`` to the measurements of ``bench``, which are given by title."""
    parser = commands.add_parser(
        "all",
        help="measure all of it on a GPU: five methods and their opponents, in 30 minutes",
        description="Run the commands that --list prints, the most important first, each with a "
        f"time limit, in the shape of {_SHAPE}. What is finished is kept: the same call goes on.",
        epilog=example_lines(["hf-kvret bench all --out results", "hf-kvret bench all --tiny"]),
        formatter_class=HelpFormatter,
    )
    add_options(parser, BenchAll)
    parser.set_defaults(
        run=lambda parsed: run_all(read_options(BenchAll, parsed), measurements), json=True
    )


def run_all(options: BenchAll, measurements: _Known) -> int:
    """Run the plan and write its page; returns 1 where a part failed or was interrupted.

    Raises:
        ValueError: an unknown part, a name that is none of a file, or no GPU.
        OSError: the folder can't be written to.
    """
    parts = chosen_parts(options.only, options.long)
    name = options.name or ("tiny" if options.tiny else _name_of_gpu(options))
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"--name {name}: use letters, digits, '.', '-' and '_' alone")
    if options.list:
        for part in parts:
            print(f"hf-kvret {shlex.join(part.command(options.out, name, options.tiny))}")
        return 0
    rows: list[tuple[str, str]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.page_only:
        rows = measure(parts, options.out, name, options.tiny, options.budget)
    page = write_page(options.out, name, measurements, options.tiny, dict(rows))
    print(markdown_table(("part", "state"), rows) if rows else f"wrote {page}")
    return int(any(not state.startswith(("done", "left out")) for _, state in rows))


def _name_of_gpu(options: BenchAll) -> str:
    """The GPU's name without vendor and memory, as h200; "gpu" where it is not needed."""
    if not (options.list or options.page_only):
        check_device("cuda")
    if not torch.cuda.is_available():
        return "gpu"
    return gpu_family(torch.device("cuda")).partition("-")[2]


def chosen_parts(only: str | None, with_long: bool = False) -> list[Command]:
    """The parts of these names, in the order of ``PLAN``; ValueError for an unknown one."""
    if only is None:
        return [part for part in PLAN if with_long or not part.is_long]
    names = only.split(",")
    known = {part.name for part in PLAN}
    for name in names:
        if name not in known:
            raise ValueError(f"--only {name}: choose of {', '.join(part.name for part in PLAN)}")
    return [part for part in PLAN if part.name in names]


def run_part(part: Command, out: Path, name: str, tiny: bool, seconds: float) -> tuple[str, float]:
    """How it ended, and after how many seconds.

    Launch numbers are kept and read in the folder ``tuning`` below ``out``.
    """
    command = part.command(out, name, tiny)
    log = out / f"{name}_{part.name}.log"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        program = [sys.executable, "-m", "hf_kvret.cli", *command]
        process = subprocess.Popen(
            program,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_KVRET_TUNING": str((out / "tuning").resolve())},
            # A shell's background jobs ignore the interrupt that ends a part.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            status = process.wait(timeout=seconds)
            last = _last_line(log)
            ended = "done" if status == 0 else f"failed: {last}"
            if status and "pip install" in last:
                ended = f"left out: {last}"
        except subprocess.TimeoutExpired:
            ended = f"interrupted after {seconds:.0f} s: the same call goes on"
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=_INTERRUPTED_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return ended, time.monotonic() - started


def _last_line(log: Path) -> str:
    """What a command that failed said last."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def measure(
    parts: Sequence[Command], out: Path, name: str, tiny: bool, budget: float
) -> list[tuple[str, str]]:
    """Run what is not done yet while the budget lasts; name and state of each part."""
    rows: list[tuple[str, str]] = []
    end = time.monotonic() + budget
    for part in parts:
        done = _done(out, name)
        command = shlex.join(part.command(out, name, tiny))
        if done.get(part.name) == part.arguments:
            state = "done before"
        elif not part.is_there:
            state = "left out: it is a script of the repository, and needs a checkout"
        elif end - time.monotonic() < _LEAST_SECONDS:
            state = "not begun: the budget is spent"
        else:
            print(f"{part.name}: hf-kvret {command}", flush=True)
            limit = min(part.seconds, end - time.monotonic())
            state, seconds = run_part(part, out, name, tiny, limit)
            if state == "done":
                content = json.dumps(done | {part.name: part.arguments}, indent=1)
                replace_file(_done_file(out, name), f"{content}\n".encode())
            print(f"{part.name}: {state}, {seconds:.0f} s", flush=True)
        rows.append((part.name, state))
    return rows


def _done_file(out: Path, name: str) -> Path:
    """It has the arguments of the parts that are done."""
    return out / f"{name}.done"


def _done(out: Path, name: str) -> dict[str, str]:
    file = _done_file(out, name)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write_page(
    out: Path, name: str, measurements: _Known, tiny: bool, states: Mapping[str, str]
) -> Path:
    """``NAME.md``: what each part asks, how it ended, and the tables of what was found."""
    rows = []
    for part in PLAN:
        state = "**not measured**"
        if part.file(out, name).is_file():
            is_done = _done(out, name).get(part.name) == part.arguments
            state = "measured" if is_done else "measured in part"
        # A bar would end the cell.
        ended = states.get(part.name, "").replace("|", "/")
        state += f" ({ended})" if ended and not ended.startswith("done") else ""
        rows.append((part.name, part.asks, part.aim or "-", state))
    shape = "tiny" if tiny else f"{_SHAPE} in {_DTYPE}"
    notes = out / f"{name}.notes.txt"
    texts = [
        f"# How fast is it on this GPU: {name}?",
        *([notes.read_text(encoding="utf-8").strip()] if notes.is_file() else []),
        f"The shape is {shape}, with random weights; the opponents run in the same command. Random "
        'weights select at random, so `store="resident"` rarely finds a row in its slots. '
        "`--fill random` writes keys and values in place of a prompt; `prefill` reads one.",
        markdown_table(("part", "what it measures", "aim", "state"), rows),
        f"`hf-kvret bench all --out DIR --name {name}` measures for 30 minutes at most, and "
        "`--long` adds the parts from 512K on. The same call goes on after an interruption.",
    ]
    files = [part.file(out, name) for part in PLAN]
    others = sorted(set(out.glob(f"{glob.escape(name)}_*.json")) - set(files))
    texts += [_section(file, name, measurements) for file in (*files, *others) if file.is_file()]
    page = out / f"{name}.md"
    check_own("page", page, "move the file, or give another --name")
    texts.append(page_mark("bench all"))
    replace_file(page, ("\n\n".join(texts) + "\n").encode())
    return page


def _section(file: Path, name: str, measurements: _Known) -> str:
    """The table of a result file, and how it was made, or why it can't be shown."""
    heading = f"## {file.stem.removeprefix(f'{name}_')}"
    try:
        results = Results.load(file)
        measurement = measurements.get(results.name) or load_measurement(results.name)
    except (ValueError, KeyError) as error:
        return f"{heading}\n\n{file.name} can't be shown: {error}"
    table = measurement.table(results)
    columns = [column for column in _COLUMNS if f"| {column} " in table]
    environment = results.environments[-1]
    versions = ", ".join(f"{key} {value}" for key, value in environment["versions"].items())
    texts = [
        heading,
        shown_tables(table, Part(file.stem, columns=columns)),
        f"    {environment['command']}",
        f"{environment['accelerator'] or environment['processor']}; Python "
        f"{environment['python']}, {versions}. All numbers are in [{file.name}]({file.name}).",
    ]
    return "\n\n".join(texts)


def _shrunk(words: list[str]) -> list[str]:
    """The same command for the tiny shape on a CPU, without the caches that need CUDA."""
    small = dict(pairwise(words))
    changed = list(words)
    if "--context" in small:
        short = [str(max(64, length // _SHRINK)) for length in lengths(small["--context"])]
        changed[changed.index("--context") + 1] = ",".join(short)
    if "--caches" in small:
        kept = [_small_cache(text) for text in small["--caches"].split(",")]
        # A part whose caches all need CUDA shows the message that says so.
        changed[changed.index("--caches") + 1] = ",".join(filter(None, kept)) or small["--caches"]
    for name, value in (("--steps", "4"), ("--top-k", "32"), ("--repeats", "2")):
        if name in small:
            changed[changed.index(name) + 1] = value
    if words[0] == "batch":
        changed += ["--device-memory", "20MB"]
    return changed


def _small_cache(text: str) -> str:
    name, *options = text.split(":")
    if name in _OF_CUDA:
        return ""
    if name not in _RETRIEVING:
        return text
    sizes = {"top_k=100": "top_k=8", "top_k=1024": "top_k=16", "top_k=2048": "top_k=16"}
    kept = [sizes.get(option, option) for option in options]
    kept = ["device_budget=1MB" if "device_budget" in option else option for option in kept]
    return ":".join([name, *kept, _SMALL])
