"""LRQK's index with closed factors in use, without a model: a prompt, and passes behind it."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvret.methods.lrqk import LRQKConfig, LRQKIndex

from .codebooks import HEADS
from .index_runs import IndexRun

DIM = 32


def closed_options(**changes: Any) -> LRQKConfig:
    return LRQKConfig.from_options(**{"rank": 12, **changes})


def fill(
    options: LRQKConfig,
    queries: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    cuts: tuple[int, ...] = (),
    softcap: float | None = None,
) -> IndexRun:
    """An index that has read a prompt, in chunks that end at ``cuts``; all of it is cold."""
    run = IndexRun(lambda: LRQKIndex(options), range(len(keys)), dim=DIM, softcap=softcap)
    run.prompt((queries, keys), valid, cuts, recent=0).ready()
    return run


def ask(run: IndexRun, queries: torch.Tensor) -> None:
    """A pass of new tokens, which stay in the window; nothing is due after it."""
    run.see(queries, torch.zeros_like(queries[:, :HEADS]))
    run.ready()


def reprojections(run: IndexRun) -> int:
    return run.index.stats()["reprojections"]
