"""The operations that ``bench tune`` knows, at the sizes that its options name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hf_kvret.benchmark.kernels_attention import (
    ATTENTION_ERRORS,
    PAGE_LEN,
    draw_pages,
    draw_query,
)
from hf_kvret.benchmark.kernels_work import Draw, KernelShape
from hf_kvret.benchmark.tune_search import TuneCase
from hf_kvret_kernels._dispatch import launching_on
from hf_kvret_kernels.paged import PagedRows

_SCORE_ERROR = 1e-3


@dataclass(frozen=True)
class TunePlace:
    """Where and how long.

    Attributes:
        length: tokens attended to, or scored.
        rows: ``"device"`` or ``"host"``, where they lie.
    """

    length: int
    rows: str


def _gather_attention(shape: KernelShape, place: TunePlace, draw: Draw) -> TuneCase:
    from hf_kvret_kernels.gather_attention import choices, triton

    query, rows, ids = _draw_chosen(shape, place, draw)
    size = choices.size_of(query, rows, ids)

    def run(choice: choices.GatherChoice) -> tuple[torch.Tensor, ...]:
        with launching_on(query):
            return triton.gather_attention(query, rows, ids, shape.scale, None, choice=choice)

    tolerance = ATTENTION_ERRORS[shape.dtype]
    return TuneCase(choices.CHOICES, size, choices.rule(size), run, tolerance)


def _gather_scores(shape: KernelShape, place: TunePlace, draw: Draw) -> TuneCase:
    from hf_kvret_kernels.gather_scores import choices, triton

    query, rows, ids = _draw_chosen(shape, place, draw)
    size = choices.size_of(query, rows, ids)

    def run(choice: choices.ScoresChoice) -> tuple[torch.Tensor, ...]:
        with launching_on(query):
            return (triton.gather_scores(query, rows, ids, shape.scale, None, choice=choice),)

    return TuneCase(choices.CHOICES, size, choices.rule(size), run, _SCORE_ERROR)


def _window(shape: KernelShape, place: TunePlace, draw: Draw, masked: bool) -> TuneCase:
    from hf_kvret_kernels.prompt_attention import choices, triton

    query = draw_query(shape, draw)
    lead = (shape.batch, shape.heads, place.length, shape.head_dim)
    key, value = (draw.normal(*lead, dtype=shape.dtype) for _ in range(2))
    valid = None
    if masked:
        valid = torch.ones(shape.batch, place.length, dtype=torch.bool, device=draw.device)
    size = choices.size_of(query, value, masked)

    def run(choice: choices.PromptChoice) -> tuple[torch.Tensor, ...]:
        with launching_on(query):
            return triton.prompt_attention(
                query,
                key,
                value,
                shape.scale,
                # As a decode step asks: its one query sees all.
                None,
                valid,
                None,
                torch.float32,
                choice=choice,
            )

    rule = triton.rule_for(query, value)
    return TuneCase(choices.CHOICES, size, rule, run, ATTENTION_ERRORS[shape.dtype])


def _draw_chosen(
    shape: KernelShape, place: TunePlace, draw: Draw
) -> tuple[torch.Tensor, PagedRows, torch.Tensor]:
    """Query, a store of ``shape.length`` normal rows, ids of ``place.length`` of them."""
    table = draw_pages(shape, draw)
    sizes = (table.numel(), shape.heads, PAGE_LEN, 2 * shape.head_dim)
    chunk = draw.normal(*sizes, dtype=shape.dtype)
    if place.rows == "host":
        chunk = chunk.cpu().pin_memory()
    rows = PagedRows([chunk], table, shape.head_dim)
    ids = draw.tokens(shape.length, (shape.batch, shape.heads, 1), place.length)
    return draw_query(shape, draw), rows, ids


@dataclass(frozen=True)
class TuneOp:
    """How cases of an operation are made.

    Attributes:
        prepare: the case of a shape and a place.
        chooses: whether it reads rows that ids name, which may lie on the host.
    """

    prepare: Callable[[KernelShape, TunePlace, Draw], TuneCase]
    chooses: bool


TUNE_OPS: dict[str, TuneOp] = {
    "gather_attention": TuneOp(_gather_attention, chooses=True),
    "gather_scores": TuneOp(_gather_scores, chooses=True),
    "prompt_attention": TuneOp(partial(_window, masked=False), chooses=False),
    "prompt_attention.masked": TuneOp(partial(_window, masked=True), chooses=False),
}
"""By name on the command line."""


def host_bytes(shape: KernelShape, place: TunePlace) -> int:
    """Pinned host memory that a case takes."""
    rows = shape.vectors(2 * shape.all_heads * shape.length)
    return rows if place.rows == "host" else 0
