"""A filled cache in files: read, mapped by one and by four processes, and rows of store="disk".

Each way has a process of its own, which opens the cache (or fills it at random) and takes steps of
a model of true shape with random weights. Seconds to open and to the first token; memory that no
file has; the share of the files that is in memory after one token and after all; steps with all
in memory, and with every page of the files taken out before each.

    hf-kvret bench mapped --json mapped.json
    python examples/benchmarks/bench_mapped.py --smallest
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from bench_save import check_saving, fill_cache

from hf_kvret.lab.bench import timed
from hf_kvret.lab.bench.shapes import SHAPES, load_shape
from hf_kvret.lab.evaluate.measurement import Measurement, Progress, Row
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.arguments import names
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_groups
from hf_kvret.lab.report.results import Cell, Results

_SAVED, _FILLED = ("read", "mapped", "mapped x 4"), ("cpu", "disk")
_PROGRAM = Path(__file__).with_name("mapped_process.py")


@dataclass(frozen=True, kw_only=True)
class Mapped(Measurement):
    """Time, memory and pages of a cache in files: read, mapped, and of store="disk"."""

    command = "bench"
    name = "mapped"
    smallest = "--shape tiny --context 3K --steps 4 --cold-steps 1 --caches paris:top_k=64"

    shape: str = option("qwen3-0.6b", f"of {', '.join(SHAPES)}, or a folder with config.json")
    caches: str = option("paris", "retrieval caches, comma-separated, options after colons")
    context: tuple[int, ...] = common.context_option((32_768,), "tokens that the cache holds")
    steps: int = option(64, "tokens that are decoded, at least 2", kind=int)
    cold_steps: int = option(3, "of them again, each with no page in memory before it", kind=int)
    folder: Path | None = option(
        None, "a disk's folder; default: the system's temporary files", kind=Path, metavar="DIR"
    )
    dtype: str = common.dtype_option("bfloat16")
    seed: int = common.seed_option()

    def check(self) -> None:
        if self.steps < 2 or self.cold_steps < 1:
            raise ValueError(f"--steps {self.steps} --cold-steps {self.cold_steps}: at least 2, 1")
        if not Path("/proc/self/smaps").is_file():
            raise ValueError("bench mapped counts pages in /proc, which Linux alone has")
        check_saving(self.caches, self.folder)

    def setup(self) -> dict[str, Any]:
        options = "shape", "steps", "cold_steps", "dtype", "seed"
        here = timed.describe(self, *options, machine=("processor", "threads", "versions"))
        return here | {"disk": "temporary files" if self.folder is None else "--folder"}

    def cells(self) -> list[Cell]:
        return [
            {"cache": name, "context": context, "way": way}
            for context in self.context
            for name in names(self.caches)
            for way in (*_SAVED, *_FILLED)
        ]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """The ways of a saved cache together, then each of the others."""
        waiting = self.waiting(results)
        for cell in waiting:
            if cell["way"] in _FILLED:
                yield [cell]
        for size in dict.fromkeys((cell["cache"], cell["context"]) for cell in waiting):
            saved = [
                cell
                for cell in waiting
                if (cell["cache"], cell["context"]) == size and cell["way"] in _SAVED
            ]
            if saved:
                yield saved

    @torch.inference_mode()
    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """What each way of ``group``, which has one cache, costs."""
        cell = group[0]
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            if cell["way"] not in _FILLED:
                # The system keeps the written files in its page cache, if they fit.
                cache = fill_cache(
                    load_shape(self.shape), cell["cache"], cell["context"], self.seed, self.dtype
                )
                cache.save_pretrained(place)
                del cache
            return [self._row(each, Path(place)) for each in group]

    def _row(self, cell: Cell, place: Path) -> Row:
        count = 4 if cell["way"] == "mapped x 4" else 1
        way = cell["way"].removesuffix(" x 4")
        asked = {"way": way, "folder": str(place), "cache": cell["cache"], "shape": self.shape}
        asked |= {"context": cell["context"], "steps": self.steps, "cold_steps": self.cold_steps}
        asked |= {"dtype": self.dtype, "seed": self.seed}
        if count > 1:
            asked["steps"] = 2
            # Pages that several processes have mapped are not taken out.
            asked["way"], asked["cold_steps"] = "mapped", 0
        with ExitStack() as stack:
            processes = [stack.enter_context(_process(asked)) for _ in range(count)]
            costs = [_answer(process) for process in processes]
            shares = [_answer(process, go_on=True) for process in processes]
        row: Row = max(costs, key=lambda cost: cost["first"])
        saved = sum(path.stat().st_size for path in place.iterdir())
        # Files without names are mapped once.
        files = saved or row["mapped"]
        # One process has given its pages up in between.
        pss = sum(shares) if count > 1 else row["touched_last"]
        return row | {"pss": pss, "files": files, "processes": count}

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each way."""
        columns: tuple[timed.Column, ...] = (
            ("cache", lambda cell, row: cell["cache"]),
            ("context", lambda cell, row: f"{cell['context']:,}"),
            ("way", lambda cell, row: cell["way"]),
            ("open or fill, s", lambda cell, row: f"{row['open']:.2f}"),
            ("to the first token, s", lambda cell, row: f"{row['first']:.2f}"),
            ("files, GB", _gigabytes("files")),
            ("memory without a file, GB", lambda cell, row: f"{row['own'] / 1e9:.2f}"),
            ("the index, GB", _gigabytes("index")),
            ("of files in memory after 1 token, GB", _gigabytes("touched_first")),
            (f"after {results.setup['steps']}", _gigabytes("touched_last")),
            ("shared out among processes, GB", _gigabytes("pss")),
            ("rows read a step", lambda cell, row: f"{row['read_ratio']:.1%}"),
            ("step, ms", lambda cell, row: timed.ms(row["step"])),
            ("no page in memory, ms", _milliseconds("cold")),
            ("nor asked for, ms", _milliseconds("cold_unasked")),
        )
        setup = results.setup
        said = (
            f"{setup['shape']} in {setup['dtype']}, {setup['steps']} tokens (2 where four "
            f"processes decode at once, the slowest is told); files among {setup['disk']}."
        )
        return timed.rows_table(columns, results, 3, said)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Bars of seconds to the first token."""
        firsts = {f"{cell['cache']}, {cell['way']}": row["first"] for cell, row in results}
        bars = {"first token": list(firsts.values())}
        plot_groups(path, list(firsts), bars, title="a cache in files", y="seconds")


@contextmanager
def _process(asked: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(_PROGRAM), json.dumps(asked)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def _answer(process: subprocess.Popen[str], go_on: bool = False) -> Any:
    """The next line of a process; it waits for one where it is to ``go_on``.

    Raises:
        RuntimeError: it ended instead; its errors stand above.
    """
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    if go_on:
        _send_line(stdin)
    line = stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the bench ended with {process.wait()}: see above")
    return json.loads(line)


def _send_line(stream: IO[str]) -> None:
    stream.write("\n")
    stream.flush()


def _gigabytes(name: str) -> Callable[[Cell, Row], str]:
    return lambda _, row: f"{row[name] / 1e9:.2f}"


def _milliseconds(name: str) -> Callable[[Cell, Row], str]:
    return lambda _, row: timed.ms(row[name]) if row.get(name) is not None else ""


MEASUREMENT = Mapped

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
