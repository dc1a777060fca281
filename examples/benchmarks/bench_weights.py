"""Milliseconds of one layer's linear maps, and of the output head, with one row: what reading the
weights of a decode step costs on a CPU, in the ways that torch and torchao have for it, and by a
plain loop in C++ that reads bf16. All ways take turns, and each reads as many copies of the layer
as the processor's caches can't hold. Weights are random; of coded ones the error is told.

    hf-kvret bench weights --json weights.json
    hf-kvret bench weights --shape llama-3.2-1b --threads 2
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from kernel_clock import torch_threads
from torch import nn
from transformers import AutoModelForCausalLM

from hf_kvret.lab.bench import timed
from hf_kvret.lab.bench.shapes import SHAPES, Shape, load_shape
from hf_kvret.lab.bench.timing import measure_bandwidth
from hf_kvret.lab.evaluate.measurement import Measurement, Progress, Row
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.arguments import names
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_groups
from hf_kvret.lab.report.results import Cell, Results

_PARTS = ("layer", "head")
_GROUP = 64
# More than the largest caches of processors.
_COLD_BYTES = 768 << 20
_LOOP = r"""
#include <cstdint>
#include <cstring>
extern "C" void rows(const uint16_t* weight, const uint16_t* x, uint16_t* out, long n, long k) {
    #pragma omp parallel for schedule(static)
    for (long row = 0; row < n; ++row) {
        float sums[16] = {0};
        for (long i = 0; i < k; i += 16) {
            #pragma omp simd
            for (int j = 0; j < 16; ++j) {
                uint32_t a = uint32_t(weight[row * k + i + j]) << 16, b = uint32_t(x[i + j]) << 16;
                float w, v;
                std::memcpy(&w, &a, 4);
                std::memcpy(&v, &b, 4);
                sums[j] += w * v;
            }
        }
        float sum = 0;
        for (int j = 0; j < 16; ++j) sum += sums[j];
        uint32_t bits;
        std::memcpy(&bits, &sum, 4);
        out[row] = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}
"""

Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Way:
    """A way to multiply one row with a weight.

    Attributes:
        dtype: of the row.
        prepare: gives the multiplication with a weight ``[N, K]`` fp32.
        bytes: of a number of the weight.
    """

    dtype: torch.dtype
    prepare: Callable[[torch.Tensor], Multiply]
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Weights(Measurement):
    """Milliseconds to multiply one row with the weights of a layer and of the head."""

    command = "bench"
    name = "weights"
    smallest = "--shape tiny --repeats 2 --cold 1"

    shape: str = option(
        "qwen3-0.6b,llama-3.2-1b", f"of {', '.join(SHAPES)}, comma-separated, or folders"
    )
    repeats: int = common.repeats_option(9)
    threads: int | None = common.threads_option(None, "default: torch's")
    cold: int = common.count_option(_COLD_BYTES >> 20, "MiB of weights that a turn reads at least")
    seed: int = common.seed_option()

    def setup(self) -> dict[str, Any]:
        return timed.describe(
            self, "repeats", "cold", "seed", machine=("processor", "threads", "versions")
        )

    def cells(self) -> list[Cell]:
        return [
            {"cache": way, "shape": shape, "part": part}
            for shape in names(self.shape)
            for part in _PARTS
            for way in ways()
        ]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """All ways of a part, which take turns, where one of them waits."""
        waiting = [(cell["shape"], cell["part"]) for cell in self.waiting(results)]
        for place in dict.fromkeys(waiting):
            yield [cell for cell in self.cells() if (cell["shape"], cell["part"]) == place]

    def count(self, results: Results) -> int:
        """All cells of parts of which one waits."""
        return sum(map(len, self.plan(results)))

    @torch.inference_mode()
    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """The times of one part."""
        sizes = maps_of(load_shape(group[0]["shape"]), group[0]["part"])
        turns = {cell["cache"]: self._turn(cell["cache"], sizes, progress) for cell in group}
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        order = deque(turns)
        for number in range(self.repeats + 1):
            progress.say(f"{group[0]['shape']} {group[0]['part']}, turn {number}")
            order.rotate()
            for name in tuple(order):
                taken = turns[name].take()
                # The first turn makes memory and kernels warm.
                if number:
                    seconds[name].append(taken)
            progress.advance(len(group) / (self.repeats + 1))
        return [self._row(turns[name], seconds[name]) for name in turns]

    def _turn(self, name: str, sizes: Sequence[tuple[int, int]], progress: Progress) -> Turn:
        progress.say(f"weights for {name}")
        return Turn(ways()[name], sizes, self.cold << 20, self.seed)

    def _row(self, turn: Turn, seconds: Sequence[float]) -> Row:
        row = timed.calls_row(seconds) | {"bytes": turn.nbytes, "error": turn.error}
        return row | {"bandwidth": self._bandwidth}

    @cached_property
    def _bandwidth(self) -> float:
        return measure_bandwidth(torch.device("cpu")).device

    def surroundings(self) -> AbstractContextManager[Any]:
        """The number of threads."""
        return nullcontext() if self.threads is None else torch_threads(self.threads)

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each way: time, speed, and how it relates to the quickest of its bytes."""
        columns: tuple[timed.Column, ...] = (
            ("shape", lambda cell, row: cell["shape"]),
            ("part", lambda cell, row: cell["part"]),
            ("way", lambda cell, row: cell["cache"]),
            ("MB", lambda cell, row: f"{row['bytes'] / 1e6:.1f}"),
            ("ms", lambda cell, row: timed.ms(row["seconds"])),
            ("quartiles", lambda cell, row: timed.spread(row)),
            ("GB/s", lambda cell, row: f"{row['bytes'] / row['seconds'] / 1e9:.1f}"),
            ("of the floor", lambda cell, row: f"{_floors(row):.2f} x"),
            ("error", lambda cell, row: f"{row['error']:.1%}"),
        )
        said = (
            f"One row; medians of {results.setup['repeats']} turns on "
            f"{timed.thread_count(results.setup['threads'])}. The floor is the time in which "
            "memory gives the bytes; the error is that of the product, by its norm."
        )
        return timed.rows_table(columns, results, 3, said)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Bars of each way's milliseconds, by shape and part."""
        groups: dict[str, dict[str, float]] = {}
        for cell, row in results:
            place = f"{cell['shape']}: {cell['part']}"
            groups.setdefault(place, {})[cell["cache"]] = 1e3 * row["seconds"]
        found = dict.fromkeys(cell["cache"] for cell, _ in results)
        bars = {way: [one.get(way) for one in groups.values()] for way in found}
        plot_groups(path, list(groups), bars, title="one row times the weights", y="ms")


def _floors(row: Row) -> float:
    return float(row["seconds"] * row["bandwidth"] / row["bytes"])


class Turn:
    """Copies of the maps of a part, all multiplied one after the other.

    Attributes:
        nbytes: of the weights of one copy.
        error: of a product, relative to that of fp32, by its norm.
    """

    def __init__(
        self, way: Way, sizes: Sequence[tuple[int, int]], cold_bytes: int, seed: int
    ) -> None:
        self.nbytes = int(sum(n * k for n, k in sizes) * way.bytes)
        self._copies = max(1, math.ceil(cold_bytes / self.nbytes))
        generator = torch.Generator().manual_seed(seed)
        plain = [torch.randn(n, k, generator=generator) / math.sqrt(k) for n, k in sizes]
        rows = [torch.randn(1, k, generator=generator) for _, k in sizes]
        self._rows = [row.to(way.dtype) for row in rows]
        # Each copy has weights of its own, in memory of its own.
        self._maps = [[way.prepare(weight) for weight in plain] for _ in range(self._copies)]
        products = [one(row).float() for one, row in zip(self._maps[0], self._rows, strict=True)]
        exact = [row @ weight.T for row, weight in zip(rows, plain, strict=True)]
        difference = torch.cat(products, dim=1) - torch.cat(exact, dim=1)
        self.error = float(difference.norm() / torch.cat(exact, dim=1).norm())

    def take(self) -> float:
        """Seconds of one copy."""
        start = time.perf_counter()
        for maps in self._maps:
            for multiply, row in zip(maps, self._rows, strict=True):
                multiply(row)
        return (time.perf_counter() - start) / self._copies


def maps_of(shape: Shape, part: str) -> list[tuple[int, int]]:
    """``(N, K)`` of the linear maps of a layer, or of the head."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape.with_layers(1))
    head = model.get_output_embeddings()
    layers = [head] if part == "head" else model.modules()
    weights = (one.weight for one in layers if isinstance(one, nn.Linear))
    return [tuple(x.shape) for x in weights if (x is head.weight) == (part == "head")]


def ways() -> Mapping[str, Way]:
    """All ways that this machine has, by name."""
    fp32, bf16 = torch.float32, torch.bfloat16
    found = {
        "torch fp32": Way(fp32, lambda weight: _plain(weight.clone()), 4),
        "torch bf16": Way(bf16, lambda weight: _plain(weight.to(bf16)), 2),
        "oneDNN fp32, packed": Way(fp32, lambda weight: _packed(weight), 4),
        "torch int8": Way(bf16, _int8, 1),
        "torch int4": Way(bf16, _int4, 0.5 + 4 / _GROUP),
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found["oneDNN bf16, packed"] = Way(bf16, lambda weight: _packed(weight.to(bf16)), 2)
    if shutil.which("c++"):
        found["C++ loop, bf16"] = Way(bf16, _loop, 2)
    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError:
        return found
    int4 = PrototypeInt4WeightOnlyConfig(group_size=_GROUP)
    return found | {
        "torchao int8": Way(bf16, lambda weight: _torchao(weight, Int8WeightOnlyConfig()), 1),
        "torchao int4": Way(bf16, lambda weight: _torchao(weight, int4), 0.5 + 4 / _GROUP),
    }


def _plain(weight: torch.Tensor) -> Multiply:
    return lambda row: nn.functional.linear(row, weight)


def _packed(weight: torch.Tensor) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return lambda row: torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], "")


def _int8(weight: torch.Tensor) -> Multiply:
    scale = weight.abs().amax(dim=1) / 127
    codes = (weight / scale[:, None]).round().to(torch.int8)
    scales = scale.to(torch.bfloat16)
    return lambda row: torch._weight_int8pack_mm(row, codes, scales)


def _int4(weight: torch.Tensor) -> Multiply:
    groups = weight.unflatten(1, (-1, _GROUP))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((high - low) / 15).clamp(min=1e-9)
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).flatten(1).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    # The kernel counts from the middle code, 8.
    pairs = torch.stack([scale, low + 8 * scale], dim=-1).transpose(0, 1)
    pairs = pairs.contiguous().to(torch.bfloat16)
    return lambda row: torch.ops.aten._weight_int4pack_mm_for_cpu(row, packed, _GROUP, pairs)


def _torchao(weight: torch.Tensor, config: Any) -> Multiply:
    from torchao.quantization import quantize_

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
    quantize_(linear, config)
    return linear


def _loop(weight: torch.Tensor) -> Multiply:
    library, plain = _compiled(), weight.to(torch.bfloat16)

    def multiply(row: torch.Tensor) -> torch.Tensor:
        out = row.new_empty(1, len(plain))
        library.rows(plain.data_ptr(), row.data_ptr(), out.data_ptr(), *plain.shape)
        return out

    return multiply


_libraries: list[Any] = []


def _compiled() -> Any:
    """The loop as a library, compiled once."""
    if not _libraries:
        with TemporaryDirectory() as folder:
            source, target = Path(folder) / "loop.cpp", Path(folder) / "loop.so"
            source.write_text(_LOOP)
            flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
            subprocess.run(["c++", *flags, str(source), "-o", str(target)], check=True)
            library = ctypes.CDLL(str(target))
        library.rows.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 2
        _libraries.append(library)
    return _libraries[0]


MEASUREMENT = Weights

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
