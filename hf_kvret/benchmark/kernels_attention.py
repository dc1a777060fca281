"""Attention over chosen rows and over a dense window, as ``bench kernels`` measures them."""

from __future__ import annotations

import torch

from hf_kvret.benchmark.kernels_work import Call, Draw, KernelOp, KernelShape, Work, distance
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.host_attention import why_not
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.prompt_attention import prompt_attention

_FP32_BYTES = 4
_ID_BYTES = 4
PAGE_LEN = 64
_SCORE_ERROR = 1e-3
# Kernels round softmax weights to the rows' dtype before they meet the values.
ATTENTION_ERRORS = {torch.float32: 1e-4, torch.float16: 2**-9, torch.bfloat16: 2**-6}


class _ChosenRows(KernelOp):
    """k random rows of a paged store for each KV head."""

    def backends(self, device: torch.device) -> tuple[str, ...]:
        """The compiled library first, for CPU tensors where it was built."""
        known = super().backends(device)
        return ("cpp", *known) if device.type == "cpu" and not why_not() else known

    def held_bytes(self, shape: KernelShape) -> int:
        """All rows of the store lie there too."""
        return super().held_bytes(shape) + shape.vectors(2 * shape.all_heads * shape.length)

    def sizes(self, shape: KernelShape) -> str:
        return f"{shape.top_k:,} rows"


class GatherAttention(_ChosenRows):
    """Attention of a step's query over k chosen rows of each KV head."""

    name = "gather_attention"

    def work(self, shape: KernelShape) -> Work:
        """Reads 4-byte ids, keys and values of the chosen rows once for a group, and the query;
        writes the output in fp32 and a log-sum for each query head. Two multiply-adds for each
        number of a key and query head. The page table is left out."""
        rows, queries = shape.all_heads * shape.top_k, shape.batch * shape.query_heads
        return Work(
            rows * _ID_BYTES + shape.vectors(2 * rows + queries),
            queries * (shape.head_dim + 1) * _FP32_BYTES,
            2 * rows * shape.group * shape.head_dim,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        query, rows, ids = _draw_chosen(shape, draw)
        scale = shape.scale
        return Call(
            lambda backend: gather_attention(query, rows, ids, scale=scale, backend=backend),
            distance,
            ATTENTION_ERRORS[shape.dtype],
        )


class GatherScores(_ChosenRows):
    """Exact scores of k chosen keys of each KV head."""

    name = "gather_scores"

    def work(self, shape: KernelShape) -> Work:
        """Reads 4-byte ids and the chosen keys once for a group, and the query; writes 4 bytes a
        key and query head. A multiply-add for each number of a key and query head. The page table
        is left out, and so are the values between the keys."""
        rows, queries = shape.all_heads * shape.top_k, shape.batch * shape.query_heads
        return Work(
            rows * _ID_BYTES + shape.vectors(rows + queries),
            rows * shape.group * _FP32_BYTES,
            rows * shape.group * shape.head_dim,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        query, rows, ids = _draw_chosen(shape, draw)
        scale = shape.scale
        return Call(
            lambda backend: (gather_scores(query, rows, ids, scale=scale, backend=backend),),
            distance,
            _SCORE_ERROR,
        )


class WindowAttention(KernelOp):
    """A decode step's query over a dense window of all tokens."""

    name = "prompt_attention"

    def work(self, shape: KernelShape) -> Work:
        """Reads keys and values ``[B, H, n, D]`` once for a group, the query and a byte of mask a
        token; writes the output in fp32, to be merged, and a log-sum for each query head. Two
        multiply-adds for each number of a key and query head."""
        tokens, queries = shape.all_heads * shape.length, shape.batch * shape.query_heads
        return Work(
            shape.vectors(2 * tokens + queries) + shape.batch * shape.length,
            queries * (shape.head_dim + 1) * _FP32_BYTES,
            2 * tokens * shape.group * shape.head_dim,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        lead = (shape.batch, shape.heads, shape.length, shape.head_dim)
        query = draw_query(shape, draw)
        key, value = (draw.normal(*lead, dtype=shape.dtype) for _ in range(2))
        valid, scale = draw.all_valid(shape), shape.scale

        def run(backend: str) -> tuple[torch.Tensor, ...]:
            return prompt_attention(
                query,
                key,
                value,
                scale=scale,
                causal_offset=shape.length - 1,
                valid=valid,
                out_dtype=torch.float32,
                backend=backend,
            )

        return Call(run, distance, ATTENTION_ERRORS[shape.dtype])


def draw_pages(shape: KernelShape, draw: Draw) -> torch.Tensor:
    """``[B, pages]`` int32: the page table of a store in which pages lie in random order."""
    pages = -(-shape.length // PAGE_LEN)
    return draw.tokens(shape.batch * pages, (), shape.batch * pages).view(shape.batch, pages)


def draw_query(shape: KernelShape, draw: Draw) -> torch.Tensor:
    """``[B, Hq, 1, D]`` in the shape's dtype."""
    return draw.normal(shape.batch, shape.query_heads, 1, shape.head_dim, dtype=shape.dtype)


def _draw_chosen(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, PagedRows, torch.Tensor]:
    """Query, a store of normal rows, ids."""
    table = draw_pages(shape, draw)
    sizes = (table.numel(), shape.heads, PAGE_LEN, 2 * shape.head_dim)
    rows = PagedRows([draw.normal(*sizes, dtype=shape.dtype)], table, shape.head_dim)
    ids = draw.tokens(shape.length, (shape.batch, shape.heads, 1), shape.top_k)
    return draw_query(shape, draw), rows, ids


ATTENTION_OPS: tuple[KernelOp, ...] = (GatherAttention(), GatherScores(), WindowAttention())
