"""Ways to attend to chosen rows in host memory: rows to read, ids to draw, a check, a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from hf_kvret.benchmark.checks import CheckFailed
from hf_kvret.benchmark.host_torch import PAGE_LEN, TORCH_WAYS, HostShape
from hf_kvret.stores.memory import HostMemory
from hf_kvret_kernels.host_attention import host_attention
from hf_kvret_kernels.paged import PagedRows

WARMUP = 2
CALM_SECONDS = 0.015
SLOW_SECONDS = 0.5
SLOW_TURNS = 4
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""How far the ways in torch may be from the library: the error of a query's output, root mean
square, over that of the output. Half floats round the weights and the result."""

_NAIVE_TOLERANCE = 1e-5
_RANDOM_BYTES = 1 << 26
_RANDOM_CALL_BYTES = 1 << 20
_RANDOM_ROUNDS = 10

Way = Callable[[torch.Tensor, PagedRows, torch.Tensor], torch.Tensor]
"""``(query, rows, ids)`` to ``[B, Hq, 1, D]``, as ``host_attention`` takes them."""


def make_rows(
    shape: HostShape, dtype: torch.dtype, batch: int, sequences: int, seed: int
) -> PagedRows:
    """Normal rows of ``sequences`` sequences in one chunk of a store's host memory, their pages in
    random order.

    With more of ``batch`` than ``sequences``, batch rows share pages in turn.
    """
    generator = torch.Generator().manual_seed(seed)
    count = sequences * shape.pages()
    memory = HostMemory(torch.device("cpu"))
    chunk = memory.allocate((count, shape.heads, PAGE_LEN, 2 * shape.dim), dtype)
    chunk.normal_(generator=generator)
    order = torch.randperm(count, generator=generator, dtype=torch.int32).view(sequences, -1)
    return PagedRows([chunk], order[torch.arange(batch) % sequences], shape.dim)


def draw_ids(shape: HostShape, batch: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """``[batch, heads, 1, count]`` int32: other distinct tokens for each head, in random order."""
    ids = torch.empty(batch * shape.heads, count, dtype=torch.int32)
    for one in ids:
        one.copy_(torch.randperm(shape.tokens, generator=generator, dtype=torch.int32)[:count])
    return ids.view(batch, shape.heads, 1, count)


def make_ways(
    shape: HostShape, dtype: torch.dtype, batch: int, count: int, threads: int
) -> dict[str, Way]:
    """The opponents by name, for one size: ``cpp``, the ways in torch, and ours in plain torch.

    The ways in torch share one buffer for the rows that they gather: with a new one for each call
    they would be timed together with the system's clearing of memory.
    """
    gathered = torch.empty(batch * shape.heads, count, 2 * shape.dim, dtype=dtype)

    def ours(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, backend: str) -> torch.Tensor:
        given = threads if backend == "cpp" else None
        out, _ = host_attention(query, rows, ids, scale=shape.scale, threads=given, backend=backend)
        return out

    return {
        "cpp": partial(ours, backend="cpp"),
        **{name: partial(way, shape, gathered) for name, way in TORCH_WAYS.items()},
        "naive": partial(ours, backend="naive"),
    }


def check_ways(
    ways: Mapping[str, Way], query: torch.Tensor, rows: PagedRows, ids: torch.Tensor
) -> dict[str, float]:
    """Error of each way but ``cpp`` against ``cpp``: the worst query's, see ``TOLERANCES``.

    Raises:
        CheckFailed: one is further away than its tolerance, or not finite.
    """
    want = ways["cpp"](query, rows, ids)
    errors = {}
    for name, way in ways.items():
        if name == "cpp":
            continue
        found = way(query, rows, ids)
        assert found.shape == want.shape, f"{name} returned {tuple(found.shape)}"
        off = (found.float() - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
        errors[name] = off.max().item()
        allowed = _NAIVE_TOLERANCE if name == "naive" else TOLERANCES[rows.dtype]
        # A comparison with NaN is false, so that NaN fails.
        if not errors[name] <= allowed:
            raise CheckFailed(
                f"cpp and {name} differ by {errors[name]:.1e} of the output with {rows.dtype}, "
                f"batch {ids.shape[0]} and k {ids.shape[3]}; allowed are {allowed:.1e}. Nothing "
                "was reported of them"
            )
    return errors


def time_ways(
    ways: Mapping[str, Way],
    query: torch.Tensor,
    rows: PagedRows,
    draw: Callable[[], torch.Tensor],
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds of ``repeats`` calls of each way, after ``WARMUP`` that do not count.

    A way that took more than ``SLOW_SECONDS`` in every warm-up call takes part in one of
    ``SLOW_TURNS`` turns only, or nearly all the time would go to it.

    The ways take turns call by call, each turn beginning with another one. Each call gets ids of
    its own, or a way would find in the processor's caches the rows that its neighbour read, and
    starts ``CALM_SECONDS`` after they were drawn: torch's threads spin for some milliseconds when
    they have done their part, and would be in the way of the library's.
    """
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    slow = set(names)
    for turn in range(-WARMUP, repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn % SLOW_TURNS and turn >= 0 and name in slow:
                continue
            ids = draw()
            # Not asleep: a processor that slept is slow to begin with.
            calm = time.perf_counter() + CALM_SECONDS
            while (start := time.perf_counter()) < calm:
                pass
            ways[name](query, rows, ids)
            taken = time.perf_counter() - start
            if turn >= 0:
                seconds[name].append(taken)
            elif taken <= SLOW_SECONDS:
                slow.discard(name)
    return seconds


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
