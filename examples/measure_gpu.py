"""Measure everything that docs/results/h200.md asks for, the most important first.

    python examples/measure_gpu.py --out docs/results --budget 1500

Each part is a command of ``hf-kvret bench`` with a time limit of its own. Finished rows are kept,
so after an interruption the same call goes on; a part that is done is not run again. ``--list``
prints the commands, ``--only decode,batch`` runs some of them. Without a GPU, ``--tiny`` runs all
parts of the plan that a CPU can run, with the shape tiny and short contexts: what it measures
means nothing, it shows that the commands work.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hf_kvret.lab.program.arguments import lengths
from hf_kvret.lab.report.tables import markdown_table

# The tiny run divides contexts and sizes by this; its windows are small enough to overflow.
_SHRINK = 256
_SMALL = "dense_below=0:recent=32:flush=32:sink=4"
_RETRIEVING = ("paris", "lrqk", "ctkvr", "a2ats", "aqua")
_OF_CUDA = ("dense-graph", "offloaded")
_INTERRUPTED_SECONDS = 30
# A model is not even loaded in less.
_LEAST_SECONDS = 30


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: of the part, and of its result file.
        seconds: it is interrupted after this long.
        arguments: of ``hf-kvret bench``, without shape, device and output.
        shaped: it takes ``--shape``; others take sizes of their own.
    """

    name: str
    seconds: int
    arguments: str
    shaped: bool = True

    def command(self, out: Path, tiny: bool = False) -> list[str]:
        """The whole command, without the program's name."""
        words = shlex.split(self.arguments)
        if self.shaped:
            shape, dtype = ("tiny", "float32") if tiny else ("llama-3.1-8b", "bfloat16")
            words += ["--shape", shape, "--dtype", dtype]
        words += ["--device", "cpu" if tiny else "cuda"]
        file = str(out / f"{'tiny' if tiny else 'h200'}_{self.name}.json")
        return ["bench", *(_shrunk(words) if tiny else words), "--json", file]


# Two rounds, so that a mood of the machine shows as a difference between them.
_STEPS = "--fill random --warmup 8 --steps 64 --rounds 2 --limit 10"
_FEW_STEPS = "--fill random --warmup 3 --steps 8 --rounds 1 --limit 10"
_PARIS = "paris:top_k=100,paris:top_k=1024"

PLAN = (
    # First, so that all others run with the launch numbers that it finds.
    Part("launch", 500, "launch --context 32K,128K --batch 1,8", shaped=False),
    Part(
        "decode",
        420,
        f"decode --context 128K,32K --caches {_PARIS},paris:top_k=100:graph=false,"
        f"dense,dense-graph,full {_STEPS}",
    ),
    Part("decode_512k", 300, f"decode --context 512K --caches {_PARIS},dense,dense-graph {_STEPS}"),
    Part(
        "decode_1m",
        500,
        "decode --context 1M --caches paris:top_k=100:store=split:device_budget=64GB,"
        "paris:top_k=1024:store=split:device_budget=64GB,paris:top_k=100:store=higgs,dense "
        "--fill random --warmup 8 --steps 32 --rounds 1 --limit 10",
    ),
    Part(
        "batch",
        580,
        "batch --context 128K,96K,64K --caches dense,dense-graph,paris:top_k=100,"
        "paris:top_k=100:store=higgs,paris:top_k=100:store=split:device_budget=60GB "
        "--fill random --warmup 6 --steps 16 --rounds 1 --limit 4",
    ),
    Part(
        "kernels",
        300,
        "kernels --ops paris,relevance,gather_attention,prompt_attention,higgs,proxy,gather_scores,"
        "centroid,codebook --context 128K --batch 8,1 --backends auto --top-k 1024 --repeats 20 "
        "--limit 2",
        shaped=False,
    ),
    Part(
        "prefill",
        400,
        f"prefill --context 128K --caches dense,{_PARIS} --warmup 1 --steps 2 --rounds 1",
    ),
    Part(
        "lrqk",
        240,
        "decode --context 64K --caches lrqk:top_k=2048:store=resident:slots=2.0,"
        "lrqk:top_k=2048:store=host,offloaded "
        "--fill random --warmup 6 --steps 32 --rounds 2 --limit 10",
    ),
    # The artifacts of a2ats and aqua are made first, from random tokens, for this shape.
    Part(
        "methods",
        600,
        "decode --context 128K,32K --caches paris:top_k=1024,lrqk:top_k=1024,ctkvr:top_k=1024,"
        "a2ats:top_k=1024,aqua,dense --fill random --warmup 4 --steps 16 --rounds 1 --limit 10",
    ),
    Part("offloaded", 300, f"decode --context 128K,32K --caches offloaded {_FEW_STEPS}"),
    Part(
        "flush",
        180,
        "decode --context 128K --caches paris:top_k=100,paris:top_k=100:graph=false --fill random "
        "--warmup 8 --steps 600 --rounds 1 --limit 30",
    ),
    Part(
        "static_compile",
        420,
        "decode --context 128K,32K --caches static-compile --fill random --warmup 8 --steps 32 "
        "--rounds 1 --limit 10",
    ),
    Part("quantized", 300, f"decode --context 128K,32K --caches quantized:nbits=4 {_FEW_STEPS}"),
    Part(
        "kvpress",
        300,
        "decode --context 32K --caches kvpress:SnapKV:compression_ratio=0.9 --warmup 3 --steps 32 "
        "--rounds 1 --limit 10",
    ),
)
"""What is measured, the most important first."""


def run_part(part: Part, out: Path, tiny: bool, seconds: float) -> tuple[str, float]:
    """How it ended, and after how many seconds.

    Launch numbers are kept and read in the folder ``tuning`` below ``out``.
    """
    command = part.command(out, tiny)
    log = out / f"{part.name}.log"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        program = [sys.executable, "-m", "hf_kvret.cli", *command]
        process = subprocess.Popen(
            program,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_KVRET_TUNING": str((out / "tuning").resolve())},
        )
        try:
            status = process.wait(timeout=seconds)
            ended = "done" if status == 0 else f"failed: {_last_line(log)}"
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


def measure(parts: list[Part], out: Path, tiny: bool, budget: float) -> list[tuple[str, ...]]:
    """Run what is not done yet while the budget lasts; a row for each part."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, ...]] = []
    left = budget
    for part in parts:
        mark = out / f".{part.name}.done"
        said = shlex.join(part.command(out, tiny))
        if mark.is_file() and mark.read_text(encoding="utf-8") == said:
            rows.append((part.name, "done before", "-"))
            continue
        if left < _LEAST_SECONDS:
            rows.append((part.name, "not begun: the budget is spent", "-"))
            continue
        print(f"{part.name}: hf-kvret {said}", flush=True)
        ended, took = run_part(part, out, tiny, min(part.seconds, left))
        left -= took
        if ended == "done":
            mark.write_text(said, encoding="utf-8")
        rows.append((part.name, ended, f"{took:.0f}"))
        print(f"{part.name}: {ended}, {took:.0f} s", flush=True)
    return rows


def main() -> int:
    """Run the plan; returns 1 where a part failed or was interrupted."""
    options = _options()
    parts_by_name = {part.name: part for part in PLAN}
    names = options.only.split(",") if options.only else list(parts_by_name)
    unknown = [name for name in names if name not in parts_by_name]
    if unknown:
        print(f"--only {unknown[0]}: choose of {', '.join(parts_by_name)}", file=sys.stderr)
        return 2
    parts = [parts_by_name[name] for name in names]
    if options.list:
        for part in parts:
            print(f"hf-kvret {shlex.join(part.command(options.out, options.tiny))}")
        return 0
    rows = measure(parts, options.out, options.tiny, options.budget)
    print(markdown_table(("part", "state", "seconds"), rows))
    return int(any(not state.startswith("done") for _, state, _ in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="for result files")
    parser.add_argument(
        "--budget",
        type=float,
        default=1e9,
        metavar="SECONDS",
        help="for all parts; none begins with less than 30 s of it left",
    )
    parser.add_argument("--only", help="names of parts, as decode,step")
    parser.add_argument("--tiny", action="store_true", help="the shape tiny, on a CPU")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    return parser.parse_args()


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


if __name__ == "__main__":
    sys.exit(main())
