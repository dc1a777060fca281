"""Single operations against the bytes and multiply-adds that they can't do without. Beside each
stands plain torch (naive) doing the same. Each call begins with cold caches; ways take turns call
by call, and a row is the median over --repeats calls, or over fewer where more would take longer
than --limit. Bandwidth and matrix products are measured in the same run.

    python examples/benchmarks/bench_kernels.py --ops codebook --context 4K,32K,128K \\
        --json kernels.json
    python examples/benchmarks/bench_kernels.py --device cuda --batch 1,8 \\
        --json gpu.json --plot gpu.png
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from kernel_clock import (
    CacheFlush,
    TimedTogether,
    calls_row,
    check_ways,
    measure_products,
    size_of,
    spread,
    thread_count,
    time_calls,
    time_once,
    torch_threads,
)
from kernel_work import NEEDS, count, method_shape

from hf_kvret.lab.bench.timing import describe, measure_bandwidth
from hf_kvret.lab.evaluate.measurement import Row, run_script
from hf_kvret.lab.program import options as common
from hf_kvret.lab.program.arguments import DTYPES, check_device, known_names, lengths, names
from hf_kvret.lab.program.options import option
from hf_kvret.lab.report.plots import plot_groups
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import Columns, table_of
from hf_kvret_kernels.catalog import OPERATIONS, Draw, KernelOp

OPS: dict[str, KernelOp] = {op.name: op for op in OPERATIONS if op.name in NEEDS}
"""By name: those of the catalog whose floor is known."""

_BACKENDS = ("auto", "naive", "triton", "cpp")
_SIZES = ("heads", "group", "head_dim", "top_k", "codewords", "rank")


@dataclass(frozen=True, kw_only=True)
class Kernels(TimedTogether):
    """Single operations against the bytes and multiply-adds that they can't do without."""

    command = "bench"
    name = "kernels"
    smallest = (
        "--device cpu --context 512 --repeats 1 --heads 1 --head-dim 32 --top-k 16 --codewords 16"
    )

    ops: str = option(
        ",".join(OPS), f"of {', '.join(OPS)}; codebook stands for all codebook.* (default: all)"
    )
    backends: tuple[str, ...] = option(
        ("auto", "naive"),
        f"of {', '.join(_BACKENDS)}; an operation is measured in those that it has",
        kind=known_names(_BACKENDS),
    )
    context: tuple[int, ...] = common.context_option((4096, 32_768, 131_072), "tokens")
    batch: tuple[int, ...] = option((1,), "as 1,8", kind=lengths)
    heads: int = common.count_option(8, "KV heads")
    group: int = common.count_option(4, "query heads of a KV head")
    head_dim: int = common.count_option(128, "of a key, and of a value")
    top_k: int = common.count_option(1024, "tokens that a head selects")
    codewords: int = common.count_option(4096, "of a codebook")
    rank: int = common.count_option(64, "numbers of a proxy")
    threads: int = common.threads_option(1, "of torch and the CPU kernels")
    repeats: int = common.count_option(20, "timed calls of each way")
    limit: float = common.limit_option(
        10.0, "time fewer calls of a way where --repeats of them would take longer"
    )
    dtype: str = common.dtype_option("bfloat16")
    device: str = common.device_option()
    seed: int = common.seed_option()

    def check(self) -> None:
        if self.top_k > min(self.context):
            raise ValueError(
                f"--top-k {self.top_k} with --context {min(self.context)}: a head can't select "
                "more tokens than there are"
            )
        check_device(self.device)
        self.cells()

    def surroundings(self) -> AbstractContextManager[Any]:
        """torch runs on ``--threads`` threads."""
        return torch_threads(self.threads)

    def setup(self) -> dict[str, Any]:
        machine = ("processor", "threads", "accelerator", "versions")
        return describe(self, (*_SIZES, "dtype", "device", "repeats", "seed"), machine)

    def cells(self) -> list[Cell]:
        """ValueError for operations and backends that don't go together."""
        ops = choose_ops(names(self.ops))
        had = {name: op.backends(torch.device(self.device)) for name, op in ops.items()}
        known = dict.fromkeys(way for some in had.values() for way in some)
        for way in self.backends:
            if way not in ("auto", *known):
                place = torch.device(self.device).type
                raise ValueError(
                    f"--backends {way}: on {place} these operations have {', '.join(known)}"
                )
        return [
            # Called a cache as in all results, so that the overview of pages finds it.
            {"op": name, "cache": way, "batch": batch, "length": length}
            for name, some in had.items()
            for batch in self.batch
            for length in self.context
            for way in dict.fromkeys(some[0] if way == "auto" else way for way in self.backends)
            if way in some
        ]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """Operation by operation, after rates and cold caches have got their memory."""
        groups = super().plan(results)
        first = next(groups, None)
        if first is not None:
            _ = self._rates, self._flush
            yield first
            yield from groups

    @cached_property
    def _rates(self) -> tuple[float, dict[str, float]]:
        """Bytes a second, and multiply-adds a second of matrix products by dtype."""
        device = torch.device(self.device)
        return measure_bandwidth(device).device, measure_products(device, DTYPES[self.dtype])

    @cached_property
    def _flush(self) -> CacheFlush:
        return CacheFlush(torch.device(self.device))

    @torch.inference_mode()
    def rows(self, group: Sequence[Cell]) -> list[Row]:
        """The ways of one operation and size."""
        name, device = group[0]["op"], torch.device(self.device)
        op, needs = OPS[name], NEEDS[name]
        sizes = {name: getattr(self, name) for name in _SIZES}
        sizes |= {name: group[0][name] for name in ("length", "batch")}
        shape = method_shape(dtype=DTYPES[self.dtype], **sizes)
        call, ways = op.prepare(shape, Draw(device, self.seed)), [cell["cache"] for cell in group]
        label = f"{op.name} at {shape.length} tokens, batch {shape.batch}"
        errors = check_ways(call.run, ways, "naive", call.error, lambda way: call.tolerance, label)
        calls = {way: partial(call.run, way) for way in ways}
        # Not the first calls, which may have compiled something.
        once = {way: time_once(calls[way], device) for way in ways}
        repeats = {
            way: max(1, int(min(self.repeats, self.limit / max(seconds, 1e-9))))
            for way, (_, seconds) in once.items()
        }
        seconds = time_calls(calls, repeats, self._flush, device)
        read, products = count(shape, needs.read), count(shape, needs.products)
        written = sum(one.nbytes for one in once[ways[0]][0])
        bandwidth, rates = self._rates
        # Bytes may move while products are computed, so the higher one is the floor.
        floors = {"bytes": (read + written) / bandwidth, "products": products / max(rates.values())}
        bound = max(floors, key=floors.__getitem__)
        return [
            (row := calls_row(seconds[way]))
            | {
                "read_bytes": read,
                "written_bytes": written,
                "multiply_adds": products,
                "bytes_per_second": (read + written) / row["seconds"],
                "of_bandwidth": floors["bytes"] / row["seconds"],
                "of_products": floors["products"] / row["seconds"],
                "bound": bound,
                "byte_floor_seconds": floors["bytes"],
                "product_floor_seconds": floors["products"],
                "floor_seconds": floors[bound],
                "bandwidth": bandwidth,
                "product_rates": dict(rates),
                "error": errors.get(way),
                "sizes": needs.describe(shape),
            }
            for way in ways
        ]

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each operation, length, batch and way, with the machine's rates above."""
        ops = list(dict.fromkeys(cell["op"] for cell, _ in results))

        def place(entry: tuple[Cell, Row]) -> tuple[int, int, int]:
            return ops.index(entry[0]["op"]), entry[0]["batch"], entry[0]["length"]

        def times(cell: Cell, row: Row) -> str:
            naive = results.find(cell | {"cache": "naive"}) or {}
            return f"{naive['seconds'] / row['seconds']:.3g}" if "seconds" in naive else "-"

        columns: Columns = {
            "operation": lambda cell, row: cell["op"],
            "tokens": lambda cell, row: f"{cell['length']:,}",
            "batch": lambda cell, row: str(cell["batch"]),
            "way": lambda cell, row: cell["cache"],
            "ms": lambda cell, row: _ms(row["seconds"]),
            "quartiles": lambda cell, row: spread(row, _ms),
            "naive / it": times,
            "MB to move": lambda cell, row: _megabytes(row["read_bytes"] + row["written_bytes"]),
            "GB/s": lambda cell, row: _three(row["bytes_per_second"] / 1e9),
            "of bandwidth": lambda cell, row: f"{row['of_bandwidth']:.1%}",
            "G mul-adds": lambda cell, row: _some(row, _three(row["multiply_adds"] / 1e9)),
            "of products": lambda cell, row: _some(row, f"{row['of_products']:.1%}"),
            "bound by": lambda cell, row: row["bound"],
            "floor ms": lambda cell, row: _ms(row["floor_seconds"]),
            "time / floor": lambda cell, row: _three(row["seconds"] / row["floor_seconds"]),
            "sizes": lambda cell, row: row["sizes"],
        }
        return f"{_said(results)}\n\n{table_of(sorted(results, key=place), columns, 4)}"

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Floor over time in percent: a group of bars an operation, a bar for each size.

        Of the ways, the quickest but plain torch is shown, or plain torch where nothing else was
        measured.
        """
        shares: dict[str, dict[tuple[int, int], float]] = {}
        for cell, row in results:
            if "seconds" in row and _is_shown(results, cell):
                # Several short lines, so that neighbours don't run into each other.
                lines = "\n".join((cell["op"].replace(".", ".\n"), cell["cache"]))
                share = 100 * row["floor_seconds"] / row["seconds"]
                shares.setdefault(lines, {})[cell["batch"], cell["length"]] = share
        bars = {
            f"{length:,} tokens, batch {batch}": [
                group.get((batch, length)) for group in shares.values()
            ]
            for batch, length in sorted({size for group in shares.values() for size in group})
        }
        title = f"operations against their floors, {_where(results.setup)}"
        plot_groups(path, list(shares), bars, title=title, y="floor / time, %")


def choose_ops(words: Sequence[str]) -> dict[str, KernelOp]:
    """The operations by name; ``"codebook"`` stands for all whose names begin with ``codebook.``.

    Raises:
        ValueError: an unknown name, one twice, or none.
    """
    results: dict[str, KernelOp] = {}
    for name in words:
        some = [known for known in OPS if known == name or known.startswith(f"{name}.")]
        if not some:
            raise ValueError(f"--ops {name}: choose of {', '.join(OPS)}")
        twice = [known for known in some if known in results]
        if twice:
            raise ValueError(f"--ops {','.join(words)}: {twice[0]} is named twice")
        results |= {known: OPS[known] for known in some}
    if not results:
        raise ValueError(f"--ops is empty: choose of {', '.join(OPS)}")
    return results


def _is_shown(results: Results, cell: Cell) -> bool:
    """Whether this way stands in the picture."""
    rivals = [
        (other["cache"] == "naive", row["seconds"], other["cache"])
        for other, row in results
        if "seconds" in row and size_of(other) == size_of(cell)
    ]
    return min(rivals)[2] == cell["cache"]


def _said(results: Results) -> str:
    setup = results.setup
    text = (
        f"{setup['heads']} KV heads of {setup['head_dim']} with {setup['group']} query heads each, "
        f"{setup['dtype']}; {_where(setup)}."
    )
    measured = [row for _, row in results if "seconds" in row]
    if not measured:
        return text
    products: dict[str, list[float]] = {}
    for row in measured:
        for name, rate in row["product_rates"].items():
            products.setdefault(name, []).append(rate)
    rates = ", ".join(f"{_span(result)} G in {name}" for name, result in products.items())
    bandwidth = _span([row["bandwidth"] for row in measured])
    return f"{text} Bandwidth {bandwidth} GB/s; multiply-adds a second: {rates}."


def _where(setup: dict[str, Any]) -> str:
    if setup["device"] != "cpu":
        return str(setup["accelerator"] or setup["device"])
    return thread_count(setup["threads"])


def _span(rates: list[float]) -> str:
    """In billions."""
    low, high = _three(min(rates) / 1e9), _three(max(rates) / 1e9)
    return low if low == high else f"{low} to {high}"


def _some(row: Row, text: str) -> str:
    return text if row["multiply_adds"] else "-"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3g}" if count < 1e9 else f"{count / 1e6:,.0f}"


def _ms(seconds: float) -> str:
    return _three(1e3 * seconds)


def _three(value: float) -> str:
    """Three digits that count, no powers of ten."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value >= 1e-3 else f"{value:.2g}"


MEASUREMENT = Kernels

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
