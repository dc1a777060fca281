"""Triton kernel that scores long codewords: a matrix product in parts of dims and tiles of queries.

For rows of latent attention, which are too long for a program to hold and are read by all query
heads. Shorter ones have the kernel of ``proxy.relevance``, which reads a codeword once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import capped_scores, score_factors

# Codewords, and at most so many queries, of a program, and dims that it multiplies at a time. So
# it spills no registers on sm80 and sm90, and takes 24 KiB of shared memory for two stages.
_CODEWORDS = 32
_MOST_READERS = 64
_FEWEST_READERS = 16
_COLUMNS = 32


def score_table(query: torch.Tensor, codebook: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """See ``hf_kvret_kernels.codebook.score_table``; of a query in fp32 that is scaled already."""
    B, Hq, Q, D = query.shape
    H, C, _ = codebook.shape
    table = query.new_empty(B, Hq, Q, C)
    if table.numel() == 0:
        return table
    readers = Hq // H * Q
    block_m = max(_FEWEST_READERS, min(_MOST_READERS, triton.next_power_of_2(readers)))
    grid = (triton.cdiv(C, _CODEWORDS), triton.cdiv(readers, block_m), B * H)
    _table_kernel[grid](
        query.contiguous(),
        codebook.contiguous(),
        table,
        H,
        C,
        readers,
        *score_factors(1.0, softcap),
        SOFTCAP=softcap is not None,
        D=D,
        BLOCK_D=_COLUMNS,
        BLOCK_M=block_m,
        BLOCK_C=_CODEWORDS,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return table


@triton.jit(do_not_specialize=["readers"])
def _table_kernel(
    query_ptr,
    codebook_ptr,
    table_ptr,
    heads,
    codewords,
    readers,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A tile of the queries that read one codebook, against a tile of its codewords."""
    index = tl.program_id(2).to(tl.int64)
    ids = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    codeword_mask, row_mask = ids < codewords, rows < readers
    query_ptr += index * readers * D
    codebook_ptr += index % heads * codewords * D
    scores = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for first in range(0, D, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)
        inside = columns < D
        query = tl.load(
            query_ptr + rows[:, None] * D + columns[None, :],
            mask=row_mask[:, None] & inside[None, :],
            other=0.0,
        )
        words = tl.load(
            codebook_ptr + ids[:, None] * D + columns[None, :],
            mask=codeword_mask[:, None] & inside[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(words).to(tl.float32), scores, input_precision="tf32x3")
    target = (index * readers + rows)[:, None] * codewords + ids[None, :]
    tl.store(
        table_ptr + target,
        capped_scores(scores, inner, outer, SOFTCAP),
        mask=row_mask[:, None] & codeword_mask[None, :],
    )
