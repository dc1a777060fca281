"""Ways to attend to chosen rows in host memory: the compiled kernel, and its opponents in torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import kernel_clock
import torch
from kernel_clock import time_calls, wait_until_calm
from kernel_inputs import PAGE_LEN, Draw, KernelShape
from kernel_work import ATTENTION_ERRORS, distance
from torch.nn import functional

from hf_kvret.stores.memory import HostMemory
from hf_kvret_kernels.host_attention import host_attention
from hf_kvret_kernels.paged import PagedRows

WARMUP = 2
SLOW_SECONDS = 0.5
SLOW_TURNS = 4
TORCH_WAYS = ("sdpa", "sdpa-apart", "sdpa-by-head")
"""The ways in torch that compute in the rows' dtype; the quickest is the opponent."""
TOLERANCES = ATTENTION_ERRORS | {torch.float32: 1e-5}
"""How far they may be from the library: half floats round the weights and the result."""

_NAIVE_TOLERANCE = 1e-5
_PAGE_BITS = PAGE_LEN.bit_length() - 1
_RANDOM_BYTES = 1 << 26
_RANDOM_CALL_BYTES = 1 << 20
_RANDOM_ROUNDS = 10

Way = Callable[[torch.Tensor, PagedRows, torch.Tensor], torch.Tensor]
"""``(query, rows, ids)`` to ``[B, Hq, 1, D]``, as ``host_attention`` takes them."""


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


def make_ways(shape: KernelShape, threads: int) -> dict[str, Way]:
    """The opponents by name, for one size: ``cpp``, the ways in torch, and ours in plain torch."""

    def ours(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, backend: str) -> torch.Tensor:
        given = threads if backend == "cpp" else None
        out, _ = host_attention(query, rows, ids, scale=shape.scale, threads=given, backend=backend)
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

    A way that took more than ``SLOW_SECONDS`` in every warm-up call takes part in one of
    ``SLOW_TURNS`` turns only, or nearly all the time would go to it. Each call gets ids of its own,
    or a way would find in the processor's caches the rows that its neighbour read.
    """
    ids = draw()

    def prepare() -> None:
        nonlocal ids
        ids = draw()
        wait_until_calm()

    calls = {name: lambda way=way: way(query, rows, ids) for name, way in ways.items()}
    warm = time_calls(calls, dict.fromkeys(calls, WARMUP), prepare, query.device)
    few = -(-repeats // SLOW_TURNS)
    counts = {name: few if min(warm[name]) > SLOW_SECONDS else repeats for name in ways}
    return time_calls(calls, counts, prepare, query.device)


def random_row_bandwidth(rows: PagedRows, generator: torch.Generator) -> float:
    """Bytes a second that ``index_select`` reads in random rows; the best of ten rounds.

    It writes what it reads into a buffer that stays in the processor's caches.
    """
    matrix = rows.chunks[0].view(-1, rows.width)
    row_bytes = rows.width * rows.dtype.itemsize
    some = max(1, _RANDOM_CALL_BYTES // row_bytes)
    calls = max(1, _RANDOM_BYTES // (some * row_bytes))
    buffer = torch.empty(some, rows.width, dtype=rows.dtype)
    best = float("inf")
    for _ in range(_RANDOM_ROUNDS):
        index = torch.randint(len(matrix), (calls, some), generator=generator)
        start = time.perf_counter()
        for one in index:
            torch.index_select(matrix, 0, one, out=buffer)
        best = min(best, time.perf_counter() - start)
    return calls * some * row_bytes / best
