"""Attention over chosen rows in host memory: the compiled kernel against torch. Rows of --tokens
tokens lie in pages; each call attends to --k random ones of them for each KV head, other ones than
the call before. Compiled kernel (cpp) and torch run on the same number of threads and take turns
call by call. A row is the median over --repeats calls.

    python examples/benchmarks/bench_host_attention.py --k 256,1K,4K,16K --batch 1,8 --threads 2 \\
        --json host.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import kernel_clock
import torch
from kernel_clock import (
    TimedTogether,
    calls_row,
    size_of,
    spread,
    thread_count,
    time_calls,
    torch_threads,
    wait_until_calm,
)
from kernel_work import count
from torch.nn import functional

from hf_kvret.lab.bench.model_measurement import available_host_memory
from hf_kvret.lab.bench.tables import ms
from hf_kvret.lab.bench.timing import describe, measure_bandwidth
from hf_kvret.lab.evaluate.measurement import Row, run_script
from hf_kvret.lab.program import options as common
from hf_kvret.lab.program.arguments import DTYPES, byte_count, known_names, length, lengths
from hf_kvret.lab.program.options import option
from hf_kvret.lab.report.plots import plot_lines, series
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import Columns, table_of
from hf_kvret.stores.memory import HostMemory
from hf_kvret_kernels import host_library
from hf_kvret_kernels.catalog import ATTENTION_ERRORS, PAGE_LEN, Draw, KernelShape, distance
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.paged import PagedRows

WARMUP = 2
TORCH_WAYS = ("sdpa", "sdpa-apart", "sdpa-by-head")
"""The ways in torch that compute in the rows' dtype; the quickest is the opponent."""
TOLERANCES = ATTENTION_ERRORS | {torch.float32: 1e-5}
"""How far they may be from the library: half floats round the weights and the result."""

_NAIVE_TOLERANCE = 1e-5
_PAGE_BITS = PAGE_LEN.bit_length() - 1

Way = Callable[[torch.Tensor, PagedRows, torch.Tensor], torch.Tensor]
"""``(query, rows, ids)`` to ``[B, Hq, 1, D]``, as ``gather_attention`` takes them."""


def make_rows(shape: KernelShape, sequences: int, draw: Draw) -> PagedRows:
    """Normal rows of ``sequences`` sequences in one chunk of a store's host memory, their pages in
    random order.

    With a larger batch than ``sequences``, batch rows share pages in turn.
    """
    count = sequences * shape.pages
    memory = HostMemory(draw.device)
    chunk = memory.allocate((count, shape.heads, PAGE_LEN, 2 * shape.head_dim), shape.dtype)
    chunk.normal_(generator=draw.generator)
    order = draw.tokens(count, (), count).view(sequences, -1)
    return PagedRows([chunk], order[torch.arange(shape.batch) % sequences], shape.head_dim)


def make_ways(shape: KernelShape) -> dict[str, Way]:
    """The opponents by name, for one size: ``cpp``, the ways in torch, and ours in plain torch."""

    def ours(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, backend: str) -> torch.Tensor:
        out, _ = gather_attention(query, rows, ids, scale=shape.scale, backend=backend)
        return out

    naive = {"naive": partial(ours, backend="naive")}
    return {"cpp": partial(ours, backend="cpp")} | _torch_ways(shape) | naive


def _torch_ways(shape: KernelShape) -> dict[str, Way]:
    """By the names of ``TORCH_WAYS``.

    They gather the rows of all heads, or keys and values apart, and attend once; or go head by
    head, so that gathered rows are still in the processor's caches when they are used. Tried and
    left out, for they were at most as quick: softmax between two matrix products, ``enable_gqa``,
    expanded heads. They share one buffer for what they gather: with a new one for each call they
    would be timed together with the system's clearing of memory.
    """
    dim = shape.head_dim
    gathered = torch.empty(shape.batch * shape.heads, shape.top_k, 2 * dim, dtype=shape.dtype)

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        # The query heads of a group stand where sdpa has the queries of one head: without a mask
        # that is the same attention, and no key is copied for them.
        grouped = query.view(1, -1, shape.group, dim)
        keys, values = (part.view(1, -1, shape.top_k, dim) for part in (keys, values))
        return functional.scaled_dot_product_attention(grouped, keys, values, scale=shape.scale)

    def sdpa(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor) -> torch.Tensor:
        matrix, flat = rows.chunks[0].view(-1, 2 * dim), gathered.view(-1, 2 * dim)
        torch.index_select(matrix, 0, _row_numbers(rows, ids).flatten(), out=flat)
        return attend(query, gathered[..., :dim], gathered[..., dim:]).reshape(query.shape)

    def sdpa_apart(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor) -> torch.Tensor:
        matrix, index = rows.chunks[0].view(-1, dim), _row_numbers(rows, ids).flatten().mul_(2)
        keys, values = gathered.view(2, -1, dim)
        torch.index_select(matrix, 0, index, out=keys)
        torch.index_select(matrix, 0, index.add_(1), out=values)
        return attend(query, keys, values).reshape(query.shape)

    def sdpa_by_head(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor) -> torch.Tensor:
        matrix, some = rows.chunks[0].view(-1, 2 * dim), gathered[0]
        grouped = query.view(-1, shape.group, dim)
        out = torch.empty_like(grouped)
        for number, index in enumerate(_row_numbers(rows, ids)):
            torch.index_select(matrix, 0, index, out=some)
            out[number] = attend(grouped[number], some[..., :dim], some[..., dim:])
        return out.view(query.shape)

    return dict(zip(TORCH_WAYS, (sdpa, sdpa_apart, sdpa_by_head), strict=True))


def _row_numbers(rows: PagedRows, ids: torch.Tensor) -> torch.Tensor:
    """``[B * H, K]`` int64: where the rows of ``ids`` stand in the chunk, seen as a matrix."""
    batch, heads, _, count = ids.shape
    tokens = ids.view(batch, heads * count)
    pages = rows.table.gather(1, (tokens >> _PAGE_BITS).long()).long()
    starts = torch.arange(heads).mul_(PAGE_LEN).repeat_interleave(count)
    index = pages.mul_(heads * PAGE_LEN).add_(tokens & (PAGE_LEN - 1)).add_(starts)
    return index.view(batch * heads, count)


def check_ways(
    ways: Mapping[str, Way], query: torch.Tensor, rows: PagedRows, ids: torch.Tensor
) -> dict[str, float]:
    """Error of each way but ``cpp`` against ``cpp``: ``distance``, that of the worst query.

    Raises:
        CheckFailed: one is further away than its tolerance, or not finite.
    """
    return kernel_clock.check_ways(
        lambda name: (ways[name](query, rows, ids),),
        ways,
        "cpp",
        distance,
        lambda name: _NAIVE_TOLERANCE if name == "naive" else TOLERANCES[rows.dtype],
        f"{rows.dtype}, batch {ids.shape[0]}, k {ids.shape[3]}",
    )


def time_ways(
    ways: Mapping[str, Way],
    query: torch.Tensor,
    rows: PagedRows,
    draw: Callable[[], torch.Tensor],
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds of ``repeats`` calls of each way, after ``WARMUP`` that do not count.

    Each call gets ids of its own, or a way would find in the processor's caches the rows that its
    neighbour read.
    """
    ids = draw()

    def prepare() -> None:
        nonlocal ids
        ids = draw()
        wait_until_calm()

    calls = {name: lambda way=way: way(query, rows, ids) for name, way in ways.items()}
    time_calls(calls, dict.fromkeys(calls, WARMUP), prepare, query.device)
    return time_calls(calls, dict.fromkeys(calls, repeats), prepare, query.device)


_CPU = torch.device("cpu")
_WAYS = ("cpp", *TORCH_WAYS, "naive")
# Gathered rows, and fp32 copies of their keys and their values.
_WORK_COPIES = 3


@dataclass(frozen=True, kw_only=True)
class HostAttention(TimedTogether):
    """Attention over chosen rows in host memory: the compiled kernel against torch."""

    command = "bench"
    name = "host-attention"
    smallest = "--k 16 --tokens 128 --heads 2 --dim 32 --repeats 1 --dtypes float32 --threads 1"

    k: tuple[int, ...] = option((256, 1024, 4096, 16_384), "rows a head", kind=lengths)
    batch: tuple[int, ...] = option((1,), "as 1,8", kind=lengths)
    dtypes: tuple[str, ...] = option(
        ("bfloat16", "float32"), f"of {', '.join(DTYPES)}", kind=known_names(DTYPES)
    )
    tokens: int = option(131_072, "of a sequence", kind=length)
    heads: int = common.count_option(8, "KV heads")
    group: int = common.count_option(4, "query heads of a KV head")
    dim: int = common.count_option(128, "of a key, and of a value")
    threads: int | None = common.threads_option(
        None, "of both; default: torch's, no more than processors"
    )
    repeats: int = common.count_option(20, "timed calls of each way")
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
        reason = host_library.why_not()
        if reason:
            raise ModuleNotFoundError(f"bench host-attention has nothing to measure: {reason}")

    def surroundings(self) -> AbstractContextManager[Any]:
        """torch runs on ``--threads`` threads."""
        return torch_threads(self._threads)

    def setup(self) -> dict[str, Any]:
        sizes = ("tokens", "heads", "group", "dim", "repeats", "seed")
        machine = ("processor", "threads", "versions")
        return describe(self, sizes, machine) | {"path": host_library.paths()[0]}

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
    def rows(self, group: Sequence[Cell]) -> list[Row]:
        """All ways of a size, over rows that are made once for a dtype."""
        dtype, batch, k = (group[0][name] for name in ("dtype", "batch", "k"))
        if dtype not in self._stored:
            self._stored.clear()
            draw = Draw(_CPU, self.seed)
            every = make_rows(self._largest(dtype), self._sequences(dtype), draw)
            self._stored[dtype] = every, draw
        every, draw = self._stored[dtype]
        shape = replace(self._largest(dtype), batch=batch, top_k=k)
        rows = PagedRows(every.chunks, every.table[:batch], self.dim)
        query, ids = draw.query(shape), partial(draw.ids, shape, k)
        ways = make_ways(shape)
        errors = check_ways(ways, query, rows, ids())
        seconds = time_ways(ways, query, rows, ids, self.repeats)
        moved = count(shape, "2 B H K D x")
        return [
            (row := calls_row(seconds[cell["cache"]]))
            | {
                "row_bytes": moved,
                "bytes_per_second": moved / row["seconds"],
                "of_sequential": moved / row["seconds"] / self._bandwidth,
                "sequential_bandwidth": self._bandwidth,
                "sequences_held": min(batch, len(every.chunks[0]) // shape.pages),
                "error": errors.get(cell["cache"]),
            }
            for cell in group
        ]

    @cached_property
    def _threads(self) -> int:
        return self.threads or host_library.thread_count()

    @cached_property
    def _bandwidth(self) -> float:
        return measure_bandwidth(_CPU).device

    @cached_property
    def _stored(self) -> dict[str, tuple[PagedRows, Draw]]:
        """Of the last dtype: rows for the largest batch, and what draws."""
        return {}

    def _sequences(self, dtype: str) -> int:
        """How many sequences' rows are held; ValueError when not even one fits."""
        shape = self._largest(dtype)
        each = shape.pages * PAGE_LEN * count(shape, "2 H D x")
        work = _WORK_COPIES * count(shape, "2 B H K D f32")
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
        """A line for each dtype, batch and k; ``torch`` is its quickest way there."""

        def held(cell: Cell, row: Row) -> str:
            count = row["cpp"]["sequences_held"] if "cpp" in row else cell["batch"]
            return f"{cell['batch']}" + (f" (rows of {count})" if count != cell["batch"] else "")

        columns: Columns = {
            "dtype": lambda cell, row: cell["dtype"],
            "batch": held,
            "k": lambda cell, row: f"{cell['k']:,}",
            "cpp ms": lambda cell, row: ms(row["cpp"]["seconds"]),
            "quartiles": lambda cell, row: spread(row["cpp"]),
            "torch ms": lambda cell, row: ms(row["torch"]["seconds"]),
            "quartiles ": lambda cell, row: spread(row["torch"]),
            "torch is": lambda cell, row: row["torch_is"],
            "torch / cpp": lambda cell, row: (
                f"{row['torch']['seconds'] / row['cpp']['seconds']:.2f}"
            ),
            "naive ms": lambda cell, row: ms(row["naive"]["seconds"]),
            "cpp GB/s": lambda cell, row: _gb(row["cpp"]["bytes_per_second"]),
            "of sequential": lambda cell, row: f"{row['cpp']['of_sequential']:.0%}",
            "sequential GB/s": lambda cell, row: _gb(row["cpp"]["sequential_bandwidth"]),
        }
        setup = results.setup
        said = (
            f"{setup['tokens']:,} tokens, {setup['heads']} KV heads of {setup['dim']} with "
            f"{setup['group']} query heads each, {thread_count(setup['threads'])}."
        )
        return f"{said}\n\n{table_of(_by_size(results), columns, 3)}"

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Milliseconds against k, two lines for each dtype and batch."""
        sizes = [(cell, ways) for cell, ways in _by_size(results) if "cpp" in ways]
        sizes.sort(key=lambda size: tuple(size[0].values()))
        several = len({cell["batch"] for cell, _ in sizes}) > 1
        lines = series(
            (
                f"{name}, {cell['dtype']}" + (f", batch {cell['batch']}" if several else ""),
                float(cell["k"]),
                1e3 * ways[name]["seconds"],
            )
            for cell, ways in sizes
            for name in ("cpp", "torch")
        )
        threads = thread_count(results.setup["threads"])
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
