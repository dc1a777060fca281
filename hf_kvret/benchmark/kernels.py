"""``hf-kvret bench kernels``: single operations against their floors and plain torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_kvret.benchmark.checks import CheckFailed
from hf_kvret.benchmark.kernels_clock import CacheFlush, measure_products, time_calls, time_once
from hf_kvret.benchmark.kernels_ops import OPS, choose_ops
from hf_kvret.benchmark.kernels_tables import kernels_table, plot_kernels
from hf_kvret.benchmark.kernels_work import Call, Draw, KernelOp, KernelShape, Rates
from hf_kvret.benchmark.limits import available_host_memory
from hf_kvret.benchmark.runs import attempt
from hf_kvret.benchmark.timing import measure_bandwidth, quartiles
from hf_kvret.evaluation.arguments import (
    DTYPES,
    batches,
    check_device,
    lengths,
    names,
    seconds_at_most,
)
from hf_kvret.evaluation.command import add_run_options
from hf_kvret.evaluation.environment import describe_environment
from hf_kvret.evaluation.results import Cell, Results

_BACKENDS = ("auto", "naive", "triton", "cpp")
_SIZES = ("heads", "group", "head_dim", "top_k", "codewords", "rank")


class Kernels:
    """Single operations against the bytes and multiply-adds that they can't do without."""

    name = "kernels"
    summary = "time of single operations against their floors, and of plain torch"
    description = (
        "Single operations against the bytes and multiply-adds that they can't do without. "
        "Beside each stands plain torch (naive) doing the same. Each call begins with cold "
        "caches; ways take turns call by call, and a row is the median over --repeats calls, or "
        "over fewer where more would take longer than --limit. Bandwidth and matrix products "
        "are measured in the same run."
    )
    examples = (
        "hf-kvret bench kernels --ops codebook --lengths 4K,32K,128K --json kernels.json",
        "hf-kvret bench kernels --device cuda --batch 1,8 --json gpu.json --plot gpu.png",
    )

    def table(self, results: Results) -> str:
        """One line for each operation, length, batch and way."""
        return kernels_table(results)

    def plot(self, path: Path, results: Results) -> None:
        """Floor over time, bars for each operation."""
        plot_kernels(path, results)


def add_kernels_options(parser: argparse.ArgumentParser) -> None:
    """Operations, sizes, and where results go."""
    parser.add_argument(
        "--ops",
        default=",".join(OPS),
        help=f"of {', '.join(OPS)}; codebook stands for all codebook.* (default: all)",
    )
    parser.add_argument(
        "--backends",
        default="auto,naive",
        help=f"of {', '.join(_BACKENDS)}; an operation is measured in those that it has",
    )
    parser.add_argument("--lengths", type=lengths, default=lengths("4K,32K,128K"), help="tokens")
    parser.add_argument("--batch", type=batches, default=[1], help="as 1,8")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    parser.add_argument("--head-dim", type=int, default=128, help="of a key, and of a value")
    parser.add_argument("--top-k", type=int, default=1024, help="tokens that a head selects")
    parser.add_argument("--codewords", type=int, default=4096, help="of a codebook")
    parser.add_argument("--rank", type=int, default=32, help="numbers of a proxy")
    parser.add_argument("--threads", type=int, default=1, help="of torch and the CPU kernels")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each way")
    parser.add_argument(
        "--limit",
        type=seconds_at_most,
        default=10.0,
        metavar="SECONDS",
        help="time fewer calls of a way where --repeats of them would take longer",
    )
    add_run_options(parser)
    parser.set_defaults(dtype="bfloat16")


def measure_kernels(options: argparse.Namespace) -> Results:
    """Measure what ``options`` name and ``--json`` does not hold yet; returns all of it.

    torch's number of threads is changed meanwhile.

    Raises:
        ValueError: options that make no sense.
        CheckFailed: a way and plain torch disagree.
    """
    chosen = _understand(options)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        return _measure(options, chosen)
    finally:
        torch.set_num_threads(before)


def _understand(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The ways of each operation by its name; ValueError for what makes no sense."""
    for name in (*_SIZES, "repeats"):
        if getattr(options, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {getattr(options, name)}: at least 1")
    processors = os.cpu_count() or 1
    if not 1 <= options.threads <= processors:
        raise ValueError(f"--threads {options.threads}: 1 to {processors}, the processors here")
    if options.top_k > min(options.lengths):
        raise ValueError(
            f"--top-k {options.top_k} with --lengths {min(options.lengths)}: a head can't select "
            "more tokens than there are"
        )
    device = torch.device(options.device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {options.device}: choose cpu or cuda")
    check_device(options.device)
    return _choose_ways(options, choose_ops(names(options.ops)), device)


def _choose_ways(
    options: argparse.Namespace, ops: dict[str, KernelOp], device: torch.device
) -> dict[str, tuple[str, ...]]:
    wanted = names(options.backends)
    for name in wanted:
        if name not in _BACKENDS:
            raise ValueError(f"--backends {name}: choose of {', '.join(_BACKENDS)}")
    if not wanted:
        raise ValueError(f"--backends is empty: choose of {', '.join(_BACKENDS)}")
    had = {name: op.backends(device) for name, op in ops.items()}
    known = dict.fromkeys(backend for some in had.values() for backend in some)
    for name in wanted:
        if name != "auto" and name not in known:
            raise ValueError(
                f"--backends {name}: on {device.type} these operations have {', '.join(known)}"
            )
    chosen = {
        name: tuple(dict.fromkeys(some[0] if one == "auto" else one for one in wanted))
        for name, some in had.items()
    }
    return {
        name: kept
        for name, some in chosen.items()
        if (kept := tuple(one for one in some if one in had[name]))
    }


def _measure(options: argparse.Namespace, ways: dict[str, tuple[str, ...]]) -> Results:
    results = Results("bench kernels", _setup(options), options.json)
    todo = [
        (name, batch, length)
        for name, some in ways.items()
        for batch in options.batch
        for length in options.lengths
        if any(results.find(_cell(name, way, batch, length)) is None for way in some)
    ]
    if not todo:
        return results
    device = torch.device(options.device)
    rates = Rates(measure_bandwidth(device).device, measure_products(device, DTYPES[options.dtype]))
    flush = CacheFlush(device)
    with torch.inference_mode(), tqdm(total=len(todo), desc="kernels", unit="size") as bar:
        for name, batch, length in todo:
            bar.set_postfix_str(f"{name}, batch {batch}, {length:,} tokens")
            shape = _shape(options, batch, length)
            rows, lacking = attempt(
                partial(_measure_size, options, OPS[name], ways[name], shape, flush, rates)
            )
            for way in ways[name]:
                row = rows[way] if lacking is None else {"out_of_memory": lacking}
                results.add(_cell(name, way, batch, length), row)
            bar.update()
    return results


def _measure_size(
    options: argparse.Namespace,
    op: KernelOp,
    ways: Sequence[str],
    shape: KernelShape,
    flush: CacheFlush,
    rates: Rates,
) -> dict[str, dict[str, Any]]:
    """Rows by way, for one operation and size.

    Raises:
        MemoryError: host memory would not suffice.
        CheckFailed: a way and plain torch disagree.
    """
    device = torch.device(options.device)
    needed, free = op.held_bytes(shape), available_host_memory()
    if device.type == "cpu" and needed > free:
        # A host that runs out kills its processes, so it isn't tried.
        raise MemoryError(f"predicted: {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free")
    call = op.prepare(shape, Draw(device, options.seed))
    errors, expected = _check(op, call, ways, shape, device)
    repeats = {way: _repeats(options, expected[way]) for way in ways}
    calls = {way: partial(call.run, way) for way in ways}
    work, rows = op.work(shape), {}
    for way, seconds in time_calls(calls, repeats, flush, device).items():
        low, middle, high = quartiles(seconds)
        rows[way] = {
            "seconds": middle,
            "seconds_quartiles": [low, high],
            "seconds_least": min(seconds),
            "timed": len(seconds),
            "read_bytes": work.read_bytes,
            "written_bytes": work.written_bytes,
            "multiply_adds": work.multiply_adds,
            "bytes_per_second": work.moved_bytes / middle,
            "of_bandwidth": work.byte_seconds(rates) / middle,
            "of_products": work.product_seconds(rates) / middle,
            "bound": work.bound(rates),
            "byte_floor_seconds": work.byte_seconds(rates),
            "product_floor_seconds": work.product_seconds(rates),
            "floor_seconds": work.seconds(rates),
            "bandwidth": rates.bandwidth,
            "product_rates": dict(rates.products),
            "error": errors.get(way),
            "sizes": op.sizes(shape),
        }
    return rows


def _check(
    op: KernelOp, call: Call, ways: Sequence[str], shape: KernelShape, device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of the ways against plain torch, and seconds that a call of each takes, about.

    Raises:
        CheckFailed: an error is above what rounding explains.
    """
    want, seconds = time_once(partial(call.run, "naive"), device)
    errors, expected = {}, {"naive": seconds}
    for way in ways:
        if way == "naive":
            continue
        found = call.run(way)
        errors[way] = call.error(found, want)
        # A comparison with NaN is false, so that NaN fails.
        if not errors[way] <= call.tolerance:
            raise CheckFailed(
                f"{op.name}: {way} and naive differ by {errors[way]:.1e} at {shape.length} tokens, "
                f"batch {shape.batch}; allowed are {call.tolerance:.1e}. Nothing was reported of "
                "them"
            )
        # The first call may have compiled something.
        del found
        _, expected[way] = time_once(partial(call.run, way), device)
    return errors, expected


def _repeats(options: argparse.Namespace, seconds: float) -> int:
    return max(1, int(min(options.repeats, options.limit / max(seconds, 1e-9))))


def _setup(options: argparse.Namespace) -> dict[str, Any]:
    keys = (*_SIZES, "dtype", "device", "repeats", "seed")
    here = describe_environment()
    machine = {key: here[key] for key in ("processor", "threads", "accelerator", "versions")}
    return {key: getattr(options, key) for key in keys} | machine


def _shape(options: argparse.Namespace, batch: int, length: int) -> KernelShape:
    sizes = {name: getattr(options, name) for name in _SIZES}
    return KernelShape(length=length, batch=batch, dtype=DTYPES[options.dtype], **sizes)


def _cell(op: str, way: str, batch: int, length: int) -> Cell:
    # Called a cache as in all results, so that the overview of pages finds it.
    return {"op": op, "cache": way, "batch": batch, "length": length}
