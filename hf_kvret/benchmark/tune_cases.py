"""The operations that ``bench tune`` knows, at the sizes that its options name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from hf_kvret.benchmark.kernels_inputs import Draw, KernelShape
from hf_kvret.benchmark.kernels_work import ATTENTION_ERRORS, SCORE_ERROR, as_tuple
from hf_kvret.benchmark.tune_search import TuneCase
from hf_kvret_kernels._dispatch import launching_on


@dataclass(frozen=True)
class TuneOp:
    """How cases of an operation are made.

    Attributes:
        prepare: the case of a shape, whose ``top_k`` is the tokens of a call, with rows on
            ``"device"`` or ``"host"``.
        chooses: whether it reads rows that ids name, which may lie on the host.
    """

    prepare: Callable[[KernelShape, str, Draw], TuneCase]
    chooses: bool


def _chosen(name: str, shape: KernelShape, rows: str, draw: Draw) -> TuneCase:
    """An operation over a store of ``shape.length`` rows, of which ids name ``top_k``."""
    choices, triton = _modules(name)
    query, stored, ids = draw.chosen_rows(shape, rows)

    def run(choice: Any) -> tuple[torch.Tensor, ...]:
        with launching_on(query):
            launch = getattr(triton, name)
            return as_tuple(launch(query, stored, ids, shape.scale, None, choice=choice))

    size = choices.size_of(query, stored, ids)
    tolerance = SCORE_ERROR if name == "gather_scores" else ATTENTION_ERRORS[shape.dtype]
    return TuneCase(choices.CHOICES, size, choices.rule(size), run, tolerance)


def _window(shape: KernelShape, rows: str, draw: Draw, masked: bool) -> TuneCase:
    """Attention over a window of ``top_k`` tokens, as a decode step asks: its query sees all."""
    choices, triton = _modules("prompt_attention")
    query, lead = draw.query(shape), (shape.batch, shape.heads, shape.top_k, shape.head_dim)
    key, value = (draw.normal(*lead, dtype=shape.dtype) for _ in range(2))
    valid = None
    if masked:
        valid = torch.ones(shape.batch, shape.top_k, dtype=torch.bool, device=draw.device)
    # Scale, causal offset, mask, softcap and the dtype of the output.
    rest = (shape.scale, None, valid, None, torch.float32)

    def run(choice: Any) -> tuple[torch.Tensor, ...]:
        with launching_on(query):
            return as_tuple(triton.prompt_attention(query, key, value, *rest, choice=choice))

    size, rule = choices.size_of(query, value, masked), triton.rule_for(query, value)
    return TuneCase(choices.CHOICES, size, rule, run, ATTENTION_ERRORS[shape.dtype])


def _modules(name: str) -> tuple[Any, Any]:
    """Choices and kernels of an operation; they need triton."""
    return tuple(import_module(f"hf_kvret_kernels.{name}.{part}") for part in ("choices", "triton"))


TUNE_OPS: dict[str, TuneOp] = {
    "gather_attention": TuneOp(partial(_chosen, "gather_attention"), chooses=True),
    "gather_scores": TuneOp(partial(_chosen, "gather_scores"), chooses=True),
    "prompt_attention": TuneOp(partial(_window, masked=False), chooses=False),
    "prompt_attention.masked": TuneOp(partial(_window, masked=True), chooses=False),
}
"""By name on the command line."""
