"""The compiled CPU attention kernel against torch on the same threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from host_ways import (
    TORCH_WAYS,
    check_ways,
    make_rows,
    make_ways,
    random_row_bandwidth,
    time_ways,
)
from kernel_clock import TimedTogether, size_of, torch_threads
from kernel_inputs import PAGE_LEN, Draw, KernelShape

from hf_kvret.lab.bench import timed
from hf_kvret.lab.bench.limits import available_host_memory, byte_count
from hf_kvret.lab.bench.timing import measure_bandwidth
from hf_kvret.lab.evaluate.measurement import Progress, Row
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.arguments import DTYPES, known_names, length, lengths, processors
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret_kernels import host_attention as host
from hf_kvret_kernels.paged import PagedRows

_CPU = torch.device("cpu")
_WAYS = ("cpp", *TORCH_WAYS, "naive")
# Gathered rows, and fp32 copies of their keys and their values.
_WORK_COPIES = 3


@dataclass(frozen=True, kw_only=True)
class HostAttention(TimedTogether):
    """Attention over chosen rows in host memory: the compiled kernel against torch."""

    command: ClassVar[str] = "bench"
    name: ClassVar[str] = "host-attention"
    summary: ClassVar[str] = "time of the compiled CPU kernel and of torch over the same rows"
    description: ClassVar[str] = (
        "Attention over chosen rows in host memory: the compiled kernel against torch. Rows of "
        "--tokens tokens lie in pages; each call attends to --k random ones of them for each KV "
        "head, other ones than the call before. Compiled kernel (cpp) and torch run on the same "
        "number of threads and take turns call by call. A row is the median over --repeats "
        "calls."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "python examples/benchmarks/bench_host_attention.py --k 256,1K,4K,16K --batch 1,8 "
        "--threads 2 --json host.json",
    )
    smallest: ClassVar[str] = (
        "--k 16 --tokens 128 --heads 2 --dim 32 --repeats 1 --dtypes float32 --threads 1"
    )

    k: tuple[int, ...] = option((256, 1024, 4096, 16_384), "rows a head", kind=lengths)
    batch: tuple[int, ...] = common.batch_option()
    dtypes: tuple[str, ...] = option(
        ("bfloat16", "float32"), f"of {', '.join(DTYPES)}", kind=known_names(DTYPES)
    )
    tokens: int = option(131_072, "of a sequence", kind=length)
    heads: int = common.heads_option()
    group: int = common.group_option()
    dim: int = common.dim_option()
    threads: int | None = common.threads_option(
        None, "of both; default: torch's, no more than processors"
    )
    repeats: int = common.repeats_option(20)
    memory: int | None = option(
        None,
        "the most to use, as 6GB; default: half of what is free. Where the rows of a batch "
        "take more, its sequences share rows, and the table says so",
        kind=byte_count,
        metavar="SIZE",
    )
    seed: int = common.seed_option()

    def check(self) -> None:
        """ModuleNotFoundError where the library was not built."""
        if max(self.k) > self.tokens:
            raise ValueError(
                f"--k {max(self.k)}: a head can't choose more than --tokens {self.tokens}"
            )
        reason = host.why_not()
        if reason:
            raise ModuleNotFoundError(f"bench host-attention has nothing to measure: {reason}")

    def surroundings(self) -> AbstractContextManager[Any]:
        """torch runs on ``--threads`` threads."""
        return torch_threads(self._threads)

    def setup(self) -> dict[str, Any]:
        sizes = ("tokens", "heads", "group", "dim", "repeats", "seed")
        machine = ("processor", "threads", "versions")
        return timed.describe(self, *sizes, machine=machine) | {"path": host.paths()[0]}

    def cells(self) -> list[Cell]:
        return [
            # Called a cache as in all results, so that the overview of pages finds it.
            {"cache": way, "dtype": dtype, "batch": batch, "k": k}
            for dtype in self.dtypes
            for batch in self.batch
            for k in self.k
            for way in _WAYS
        ]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """Sizes one by one; ValueError for rows that don't fit into memory."""
        for dtype in dict.fromkeys(cell["dtype"] for cell in self.waiting(results)):
            self._sequences(dtype)
        # Measured now, before the rows take the memory.
        _ = self._bandwidth
        yield from super().plan(results)

    @torch.inference_mode()
    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """All ways of a size, over rows that are made once for a dtype."""
        dtype, batch, k = (group[0][name] for name in ("dtype", "batch", "k"))
        if dtype not in self._stored:
            progress.say(f"{dtype}: making rows")
            self._stored.clear()
            draw = Draw(_CPU, self.seed)
            every = make_rows(self._largest(dtype), self._sequences(dtype), draw)
            self._stored[dtype] = every, draw, random_row_bandwidth(every, draw.generator)
        every, draw, random_bandwidth = self._stored[dtype]
        shape = replace(self._largest(dtype), batch=batch, top_k=k)
        rows = PagedRows(every.chunks, every.table[:batch], self.dim)
        query, ids = draw.query(shape), partial(draw.ids, shape, k)
        ways = make_ways(shape, self._threads)
        errors = check_ways(ways, query, rows, ids())
        seconds = time_ways(ways, query, rows, ids, self.repeats)
        moved = shape.count("2 B H K D x")
        return [
            (row := timed.calls_row(seconds[cell["cache"]]))
            | {
                "row_bytes": moved,
                "bytes_per_second": moved / row["seconds"],
                "of_sequential": moved / row["seconds"] / self._bandwidth,
                "sequential_bandwidth": self._bandwidth,
                "random_row_bandwidth": random_bandwidth,
                "sequences_held": min(batch, len(every.chunks[0]) // shape.pages),
                "error": errors.get(cell["cache"]),
            }
            for cell in group
        ]

    @cached_property
    def _threads(self) -> int:
        return self.threads or min(torch.get_num_threads(), processors())

    @cached_property
    def _bandwidth(self) -> float:
        return measure_bandwidth(_CPU).device

    @cached_property
    def _stored(self) -> dict[str, tuple[PagedRows, Draw, float]]:
        """Of the last dtype: rows for the largest batch, what draws, bandwidth of random rows."""
        return {}

    def _sequences(self, dtype: str) -> int:
        """How many sequences' rows are held; ValueError when not even one fits."""
        shape = self._largest(dtype)
        each = shape.pages * PAGE_LEN * shape.count("2 H D x")
        work = _WORK_COPIES * shape.count("2 B H K D f32")
        free = available_host_memory()
        limit = free // 2 if self.memory is None else self.memory
        if each + work > min(limit, free):
            raise ValueError(
                f"rows of {self.tokens} tokens in {dtype} and the work space of batch "
                f"{shape.batch} take {(each + work) / 1e9:.2f} GB; {free / 1e9:.2f} GB are free, "
                f"and {limit / 1e9:.2f} GB may be used: give fewer --tokens or --heads, a smaller "
                "--batch or --k, or more --memory"
            )
        return min(shape.batch, (min(limit, free) - work) // each)

    def _largest(self, dtype: str) -> KernelShape:
        sizes = (self.tokens, max(self.batch), self.heads, self.group, self.dim)
        return KernelShape(*sizes, DTYPES[dtype], max(self.k))

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each dtype, batch and k; ``torch`` is its quickest way there.

        ``torch / cpp`` is of the medians, ``of the least`` of the quickest calls. Where they are
        far apart, other programs had the processors.
        """

        def held(cell: Cell, row: Row) -> str:
            count = row["cpp"]["sequences_held"] if "cpp" in row else cell["batch"]
            return f"{cell['batch']}" + (f" (rows of {count})" if count != cell["batch"] else "")

        def ratio(row: Row, name: str) -> str:
            return f"{row['torch'][name] / row['cpp'][name]:.2f}"

        columns: tuple[timed.Column, ...] = (
            ("dtype", lambda cell, row: cell["dtype"]),
            ("batch", held),
            ("k", lambda cell, row: f"{cell['k']:,}"),
            ("cpp ms", lambda cell, row: timed.ms(row["cpp"]["seconds"])),
            ("quartiles", lambda cell, row: timed.spread(row["cpp"])),
            ("torch ms", lambda cell, row: timed.ms(row["torch"]["seconds"])),
            ("quartiles", lambda cell, row: timed.spread(row["torch"])),
            ("torch is", lambda cell, row: row["torch_is"]),
            ("torch / cpp", lambda cell, row: ratio(row, "seconds")),
            ("of the least", lambda cell, row: ratio(row, "seconds_least")),
            ("naive ms", lambda cell, row: timed.ms(row["naive"]["seconds"])),
            ("cpp GB/s", lambda cell, row: _gb(row["cpp"]["bytes_per_second"])),
            ("of sequential", lambda cell, row: f"{row['cpp']['of_sequential']:.0%}"),
            ("sequential GB/s", lambda cell, row: _gb(row["cpp"]["sequential_bandwidth"])),
            ("random rows GB/s", lambda cell, row: _gb(row["cpp"]["random_row_bandwidth"])),
            ("path", lambda cell, row: results.setup["path"]),
        )
        setup = results.setup
        said = (
            f"{setup['tokens']:,} tokens, {setup['heads']} KV heads of {setup['dim']} with "
            f"{setup['group']} query heads each, {timed.thread_count(setup['threads'])}."
        )
        return timed.rows_table(columns, _by_size(results), 3, said)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Milliseconds against k, two lines for each dtype and batch."""
        sizes = [(cell, ways) for cell, ways in _by_size(results) if "cpp" in ways]
        sizes.sort(key=lambda size: tuple(size[0].values()))
        several = len({cell["batch"] for cell, _ in sizes}) > 1
        lines = timed.series(
            (
                f"{name}, {cell['dtype']}" + (f", batch {cell['batch']}" if several else ""),
                float(cell["k"]),
                1e3 * ways[name]["seconds"],
            )
            for cell, ways in sizes
            for name in ("cpp", "torch")
        )
        threads = timed.thread_count(results.setup["threads"])
        title = f"attention over chosen rows in host memory, {threads}"
        plot_lines(path, lines, title=title, x="rows of a head", y="ms", log_x=True, log_y=True)


def _by_size(results: Results) -> Iterator[tuple[Cell, Row]]:
    """For each size its rows by way, the quickest of torch's as ``torch``; or one that failed.

    Sizes that lack a way are left out.
    """
    found: dict[str, tuple[Cell, dict[str, Any]]] = {}
    for cell, row in results:
        size = size_of(cell)
        found.setdefault(str(size), (size, {}))[1][cell["cache"]] = row
    for size, ways in found.values():
        failed = [row for row in ways.values() if "seconds" not in row]
        if failed:
            yield size, failed[0]
        elif {*_WAYS} <= {*ways}:
            quickest = min(TORCH_WAYS, key=lambda name: ways[name]["seconds"])
            yield size, ways | {"torch": ways[quickest], "torch_is": quickest}


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"


MEASUREMENT = HostAttention

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
