"""Seconds to make the index of one layer's prompt, method by method, beside the floor of its matrix
products: the same products, of the same shapes and blocks, by torch alone, in the same turns.

    hf-kvret bench index-build --json index_build.json
    hf-kvret bench index-build --methods paris,lrqk --context 32K --threads 2
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from kernel_clock import torch_threads
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvret.artifacts import CalibrationArtifact, ModelIdentity
from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index
from hf_kvret.lab.bench import timed
from hf_kvret.lab.evaluate.measurement import Measurement, Progress, Row
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.arguments import DTYPES, names
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.observe.recall import measure_recall
from hf_kvret.registry import registered_methods
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing.cold import all_valid
from hf_kvret_model_patches.rope import Rope

_METHODS = ("paris", "lrqk", "ctkvr", "a2ats")
_STEPS = ("prompt", "add", "build")
_ASKED = 16
_TOPIC_LEN, _RANK, _ROPE_BASE = 64, 16, 500_000.0
_FLOOR_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class IndexBuild(Measurement):
    """Seconds to make an index of one layer's prompt, beside its matrix products alone."""

    command = "bench"
    name = "index-build"
    smallest = "--context 3K --heads 2 --group 2 --dim 32 --codewords 64 --top-k 64 --repeats 2"

    context: tuple[int, ...] = common.context_option((32_768, 131_072), "cold tokens")
    methods: str = option(",".join(_METHODS), "comma-separated")
    heads: int = common.count_option(8, "KV heads")
    group: int = common.count_option(4, "query heads of a KV head")
    dim: int = common.count_option(128, "of a head, an even number")
    codewords: int = common.count_option(4096, "of a KV head, for a2ats; drawn")
    top_k: int = common.count_option(1024, "tokens that a query selects")
    repeats: int = common.repeats_option(3, "timed builds of each index")
    threads: int | None = common.threads_option(None, "default: torch's")
    dtype: str = common.dtype_option("bfloat16")
    seed: int = common.seed_option()

    def check(self) -> None:
        if unknown := [name for name in names(self.methods) if name not in _METHODS]:
            raise ValueError(f"--methods {','.join(unknown)}: choose of {', '.join(_METHODS)}")
        if self.dim % 2:
            raise ValueError(f"--dim {self.dim}: RoPE turns pairs of numbers; give an even one")

    def setup(self) -> dict[str, Any]:
        options = "heads", "group", "dim", "codewords", "top_k", "repeats", "dtype", "seed"
        return timed.describe(self, *options, machine=("processor", "threads", "versions"))

    def cells(self) -> list[Cell]:
        every = names(self.methods)
        return [{"cache": name, "context": n} for n in sorted(self.context) for name in every]

    def surroundings(self) -> AbstractContextManager[Any]:
        """The number of threads."""
        return nullcontext() if self.threads is None else torch_threads(self.threads)

    # Not inference_mode, in which products of more than two dimensions are not taken apart.
    @torch.no_grad()
    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """The times of one index, of its steps, and of its products."""
        (cell,) = group
        with TemporaryDirectory() as folder:
            make = partial(self._make, cell["cache"], Path(folder))
            prompt = self._prompt(cell["context"])
            with Products() as products:
                self._build(make(), prompt)
            turns, floors = [], []
            for number in range(self.repeats):
                progress.say(f"{cell['cache']}, {cell['context']:,} tokens, turn {number + 1}")
                index = make()
                turns.append(self._build(index, prompt))
                floors.append(products.seconds())
            index.on_reader(prompt.asked_positions)
            ids = index.search(prompt.asked, prompt.cold)
        recall = measure_recall(prompt.asked, ids, prompt.cold)
        quickest = min(turns, key=sum)
        row = timed.calls_row([sum(turn) for turn in turns]) | {"floor": min(floors)}
        row |= {f"{name}_seconds": s for name, s in zip(_STEPS, quickest, strict=True)}
        return [row | {"operations": products.operations, "recall": recall.overlap}]

    def _make(self, name: str, folder: Path) -> Index:
        cls: type[RetrievalCache] = registered_methods()[name]
        options: dict[str, Any] = {"top_k": self.top_k, "store": "device"}
        if cls.needs_artifact:
            options["artifact"] = str(folder)
            if not any(folder.iterdir()):
                draw_codebook(folder, self.heads, self.codewords, self.dim, self.seed)
        index = cls.make_index(cls.Config.from_options(**options), 0)
        assert index is not None, "all of the methods have one"
        return index

    def _build(self, index: Index, prompt: Prompt) -> list[float]:
        """Seconds of each of the steps that make ``index``."""
        keys, seconds = prompt.keys, list[float]()
        for step in (
            lambda: index.on_forward(prompt.queries, keys, 0, None, prompt.positions),
            lambda: index.add(TokenBlock(keys, keys, 0)),
            lambda: index.build(prompt.cold),
        ):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _prompt(self, length: int) -> Prompt:
        """The one of the last call, where it has this length."""
        if self._kept.get("length") != length:
            self._kept.clear()
            shape = self.heads, self.group, self.dim
            prompt = draw_prompt(*shape, length, DTYPES[self.dtype], self.seed, self.top_k)
            self._kept.update(length=length, prompt=prompt)
        return self._kept["prompt"]

    @cached_property
    def _kept(self) -> dict[str, Any]:
        return {}

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each length and method."""
        columns: tuple[timed.Column, ...] = (
            ("tokens", lambda cell, row: f"{cell['context']:,}"),
            ("index", lambda cell, row: cell["cache"]),
            ("s", lambda cell, row: f"{row['seconds_least']:.3g}"),
            ("quartiles", lambda cell, row: timed.spread(row, lambda x: f"{x:.3g}")),
            *((f"{step}, s", _seconds(f"{step}_seconds")) for step in _STEPS),
            ("products alone, s", lambda cell, row: f"{row['floor']:.3g}" if row["floor"] else "-"),
            ("of the floor", lambda cell, row: _ratio(row)),
            ("GFLOP", lambda cell, row: f"{row['operations'] / 1e9:,.0f}"),
            ("recall", lambda cell, row: f"{row['recall']:.3f}"),
        )
        setup = results.setup
        said = (
            f"{setup['heads']} KV heads of {setup['dim']} in {setup['dtype']}, {setup['group']} "
            f"query heads each, {setup['top_k']} tokens selected; the quickest of "
            f"{setup['repeats']} builds on {timed.thread_count(setup['threads'])}."
        )
        return timed.rows_table(columns, results, 2, said)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Seconds against tokens, a line for each method."""
        points = ((cell["cache"], float(cell["context"]), row["seconds"]) for cell, row in results)
        axes: dict[str, Any] = {"x": "tokens", "y": "seconds", "log_x": True, "log_y": True}
        plot_lines(path, timed.series(points), title="making a layer's index", **axes)


def _seconds(name: str) -> Callable[[Cell, Row], str]:
    return lambda _, row: f"{row[name]:.3g}"


def _ratio(row: Row) -> str:
    """Nothing where torch multiplied no matrices."""
    return f"{row['seconds_least'] / row['floor']:.2f} x" if row["floor"] else "-"


class Products(TorchDispatchMode):
    """Records the matrix products inside, and times the same ones alone.

    Attributes:
        operations: multiplications and additions of all.
    """

    _NAMES = ("mm", "bmm", "addmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self._counts: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self._NAMES:
            left, right = args[-2:]
            forms = [(tuple(x.shape), x.stride(-1) == 1, x.dtype) for x in (left, right)]
            self._counts[tuple(forms)] += 1
            self.operations += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))

    def seconds(self) -> float:
        """Of all products: the least of some calls of each form, as often as it was recorded."""
        return sum(count * _least(*forms) for forms, count in self._counts.items())


def _least(*forms: tuple[tuple[int, ...], bool, torch.dtype]) -> float:
    left, right = (
        torch.randn(shape if dense else (*shape[:-2], *shape[:-3:-1])).to(dtype)
        for shape, dense, dtype in forms
    )
    left, right = (
        x if dense else x.mT for x, (_, dense, _) in zip((left, right), forms, strict=True)
    )
    out, least, end = left @ right, float("inf"), time.perf_counter() + _FLOOR_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.matmul(left, right, out=out)
        least = min(least, time.perf_counter() - start)
    return least


class Prompt(NamedTuple):
    """``queries [1, Hq, n, D]``, ``keys [1, Hkv, n, D]``, ``positions [1, n]``; ``asked [1, Hq, Q,
    D]`` at ``asked_positions [1, Q]`` come after it, and ``cold`` has all its tokens."""

    queries: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    asked: torch.Tensor
    asked_positions: torch.Tensor
    cold: ColdTokens


def draw_prompt(
    heads: int, group: int, dim: int, length: int, dtype: torch.dtype, seed: int, top_k: int
) -> Prompt:
    """Keys and queries with some structure: maps of topics that drift, plus noise, then RoPE.

    So neighbours are alike, and a query is drawn to the tokens of topics like its own.
    """
    generator, total = torch.Generator().manual_seed(seed), length + _ASKED
    draw = partial(torch.randn, generator=generator)
    rope = Rope(_frequencies(dim))
    positions = torch.arange(total)[None]
    queries = torch.empty(1, heads * group, total, dim, dtype=dtype)
    keys = torch.empty(1, heads, total, dim, dtype=dtype)
    where = torch.arange(total) / _TOPIC_LEN
    before = where.long()
    for head in range(heads):
        anchors = draw(total // _TOPIC_LEN + 2, _RANK)
        topics = torch.lerp(anchors[before], anchors[before + 1], (where - before)[:, None])
        to_key = draw(_RANK, dim) * 1.4 / _RANK**0.5
        rows = [draw(dim) + draw(total, dim) + topics @ to_key]
        for _ in range(group):
            to_query = to_key + draw(_RANK, dim) * 0.5 / _RANK**0.5
            rows.append(draw(dim) + 0.5 * draw(total, dim) + topics @ to_query)
        turned = rope.rotate(torch.stack(rows)[None], positions)[0]
        keys[0, head], queries[0, head * group : (head + 1) * group] = turned[0], turned[1:]
    store, past = PagedStore(DeviceMemory(keys.device)), keys[:, :, :length]
    # Nothing reads values here.
    store.append(TokenBlock(past, keys.new_zeros(1, 1, 1, 1).expand_as(past), 0))
    cold = all_valid(store, 1, budget=min(top_k, length), scale=dim**-0.5)
    seen, asked = queries.tensor_split([length], dim=2)
    return Prompt(seen, past, positions[:, :length], asked, positions[:, length:], cold)


def _frequencies(dim: int) -> torch.Tensor:
    return _ROPE_BASE ** -(torch.arange(0, dim, 2) / dim)


def draw_codebook(folder: Path, heads: int, codewords: int, dim: int, seed: int) -> None:
    """An artifact of a2ats with normal codewords."""
    words = torch.randn(heads, codewords, dim, generator=torch.Generator().manual_seed(seed))
    tensors = {
        "layers.0.codewords": words,
        "layers.0.metric": torch.eye(dim).repeat(heads, 1, 1),
        "layers.0.inv_freq": _frequencies(dim),
    }
    layers = {"0": {"layout": "half", "attention_factor": 1.0}}
    options = {"space": "windowed", "window": 2048, "layers": layers}
    model = ModelIdentity("drawn", {"model_type": "none"})
    CalibrationArtifact("a2ats", model, tensors, options=options).save_pretrained(folder)


MEASUREMENT = IndexBuild

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
