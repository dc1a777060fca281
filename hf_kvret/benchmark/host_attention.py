"""``hf-kvret bench host-attention``: the compiled CPU kernel against torch on the same threads."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_kvret.benchmark.host_tables import host_table, plot_host
from hf_kvret.benchmark.host_torch import HostShape
from hf_kvret.benchmark.host_ways import (
    check_ways,
    draw_ids,
    make_rows,
    make_ways,
    random_row_bandwidth,
    time_ways,
)
from hf_kvret.benchmark.limits import available_host_memory, byte_count
from hf_kvret.benchmark.timing import measure_bandwidth, quartiles
from hf_kvret.evaluation.arguments import DTYPES, batches, length, lengths, names
from hf_kvret.evaluation.command import add_output_options, add_seed_option
from hf_kvret.evaluation.environment import describe_environment
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret_kernels import host_attention as host

# Gathered rows, and fp32 copies of their keys and their values.
_WORK_COPIES = 3


class HostAttention:
    """Attention over chosen rows in host memory: the compiled kernel against torch."""

    name = "host-attention"
    summary = "time of the compiled CPU kernel and of torch over the same rows"
    description = (
        "Attention over chosen rows in host memory: the compiled kernel against torch. Rows of "
        "--tokens tokens lie in pages; each call attends to --k random ones of them for each KV "
        "head, other ones than the call before. Compiled kernel (cpp) and torch run on the same "
        "number of threads and take turns call by call. A row is the median over --repeats "
        "calls."
    )
    examples = (
        "hf-kvret bench host-attention --k 256,1K,4K,16K --batch 1,8 --threads 2 --json host.json",
    )

    def table(self, results: Results) -> str:
        """One line for each size, all ways in it."""
        return host_table(results)

    def plot(self, path: Path, results: Results) -> None:
        """Milliseconds against k, the library and the quickest way in torch."""
        plot_host(path, results)


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Sizes, threads and where results go."""
    parser.add_argument("--k", type=lengths, default=lengths("256,1K,4K,16K"), help="rows a head")
    parser.add_argument("--batch", type=batches, default=[1], help="as 1,8")
    parser.add_argument("--dtypes", default="bfloat16,float32", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--tokens", type=length, default=length("128K"), help="of a sequence")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    parser.add_argument("--dim", type=int, default=128, help="of a key, and of a value")
    parser.add_argument(
        "--threads", type=int, help="of both; default: torch's, no more than processors"
    )
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each way")
    parser.add_argument(
        "--memory",
        type=byte_count,
        metavar="SIZE",
        help="the most to use, as 6GB; default: half of what is free. Where the rows of a batch "
        "take more, its sequences share rows, and the table says so",
    )
    add_seed_option(parser)
    add_output_options(parser)


def measure_host(options: argparse.Namespace) -> Results:
    """Measure what ``options`` name and ``--json`` does not hold yet; returns all of it.

    torch's number of threads is changed meanwhile.

    Raises:
        ValueError: sizes that make no sense, or rows that do not fit into memory.
        ModuleNotFoundError: the library was not built.
        CheckFailed: library and torch disagree.
    """
    dtypes = _understand(options)
    reason = host.why_not()
    if reason:
        raise ModuleNotFoundError(f"bench host-attention has nothing to measure: {reason}")
    before = torch.get_num_threads()
    torch.set_num_threads(_threads(options))
    try:
        return _measure(options, dtypes)
    finally:
        torch.set_num_threads(before)


def _understand(options: argparse.Namespace) -> dict[str, torch.dtype]:
    """The dtypes by name; ValueError for what makes no sense."""
    for name in ("heads", "group", "dim", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: at least 1")
    if max(options.k) > options.tokens:
        raise ValueError(
            f"--k {max(options.k)}: a head can't choose more than --tokens {options.tokens}"
        )
    processors = _processors()
    if not 1 <= _threads(options) <= processors:
        raise ValueError(
            f"--threads {options.threads}: 1 to {processors}, the processors of this process"
        )
    chosen = names(options.dtypes)
    for name in chosen:
        if name not in DTYPES:
            raise ValueError(f"--dtypes {name}: choose of {', '.join(DTYPES)}")
    if not chosen:
        raise ValueError(f"--dtypes is empty: choose of {', '.join(DTYPES)}")
    return {name: DTYPES[name] for name in chosen}


def _measure(options: argparse.Namespace, dtypes: dict[str, torch.dtype]) -> Results:
    results = Results("bench host-attention", _setup(options), options.json)
    sizes = [(batch, k) for batch in options.batch for k in options.k]
    waiting = {
        name: [size for size in sizes if not _finished(results, name, *size)] for name in dtypes
    }
    todo = {name: some for name, some in waiting.items() if some}
    if not todo:
        return results
    held = {name: _sequences(options, dtypes[name]) for name in todo}
    bandwidth = measure_bandwidth(torch.device("cpu")).device
    with tqdm(total=sum(map(len, todo.values())), desc="host-attention", unit="size") as bar:
        for name, some in todo.items():
            _measure_dtype(options, name, some, held[name], bandwidth, results, bar)
    return results


@torch.inference_mode()
def _measure_dtype(
    options: argparse.Namespace,
    dtype_name: str,
    sizes: list[tuple[int, int]],
    sequences: int,
    bandwidth: float,
    results: Results,
    bar: Any,
) -> None:
    """Measure ``sizes`` of batch and k over rows that are made once and freed at the end."""
    shape, dtype = _shape(options), DTYPES[dtype_name]
    generator = torch.Generator().manual_seed(options.seed)
    bar.set_postfix_str(f"{dtype_name}: making rows")
    every = make_rows(shape, dtype, max(options.batch), sequences, options.seed)
    random_bandwidth = random_row_bandwidth(every, generator)
    for batch, k in sizes:
        bar.set_postfix_str(f"{dtype_name}, batch {batch}, k {k}")
        rows = type(every)(every.chunks, every.table[:batch], shape.dim)
        query = torch.randn(batch, shape.heads * shape.group, 1, shape.dim, generator=generator)
        query = query.to(dtype)
        draw = partial(draw_ids, shape, batch, k, generator)
        ways = make_ways(shape, dtype, batch, k, _threads(options))
        errors = check_ways(ways, query, rows, draw())
        seconds = time_ways(ways, query, rows, draw, options.repeats)
        moved = batch * shape.heads * k * shape.row_bytes(dtype)
        for name, taken in seconds.items():
            low, middle, high = quartiles(taken)
            row = {
                "seconds": middle,
                "seconds_quartiles": [low, high],
                "seconds_least": min(taken),
                "timed": len(taken),
                "row_bytes": moved,
                "bytes_per_second": moved / middle,
                "of_sequential": moved / middle / bandwidth,
                "sequential_bandwidth": bandwidth,
                "random_row_bandwidth": random_bandwidth,
                "sequences_held": min(batch, sequences),
                "error": errors.get(name),
            }
            results.add(_cell(name, dtype_name, batch, k), row)
        bar.update()


def _setup(options: argparse.Namespace) -> dict[str, Any]:
    sizes = {key: getattr(options, key) for key in ("tokens", "heads", "group", "dim")}
    here = describe_environment()
    machine = {key: here[key] for key in ("processor", "threads", "versions")}
    calls = {"repeats": options.repeats, "seed": options.seed, "path": host.paths()[0]}
    return sizes | calls | machine


def _sequences(options: argparse.Namespace, dtype: torch.dtype) -> int:
    """How many sequences' rows are held; ValueError when not even one fits."""
    shape, batch = _shape(options), max(options.batch)
    each = shape.sequence_bytes(dtype)
    work = _WORK_COPIES * batch * shape.heads * max(options.k) * shape.row_bytes(torch.float32)
    free = available_host_memory()
    limit = free // 2 if options.memory is None else options.memory
    if each + work > min(limit, free):
        raise ValueError(
            f"rows of {options.tokens} tokens in {dtype} and the work space of batch {batch} take "
            f"{(each + work) / 1e9:.2f} GB; {free / 1e9:.2f} GB are free, and "
            f"{limit / 1e9:.2f} GB may be used: give fewer --tokens or --heads, a smaller --batch "
            "or --k, or more --memory"
        )
    return min(batch, (min(limit, free) - work) // each)


def _finished(results: Results, dtype: str, batch: int, k: int) -> bool:
    # The ways were timed against each other, and the last one is added last.
    return results.find(_cell("naive", dtype, batch, k)) is not None


def _cell(way: str, dtype: str, batch: int, k: int) -> Cell:
    # Called a cache as in all results, so that the overview of pages finds it.
    return {"cache": way, "dtype": dtype, "batch": batch, "k": k}


def _shape(options: argparse.Namespace) -> HostShape:
    return HostShape(options.tokens, options.heads, options.group, options.dim)


def _threads(options: argparse.Namespace) -> int:
    if options.threads is not None:
        return options.threads
    return min(torch.get_num_threads(), _processors())


def _processors() -> int:
    # Not every system can tell which processors a process may use.
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1
