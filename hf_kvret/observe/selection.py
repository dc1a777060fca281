"""Selection: what a step of a layer attends to, for those who watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvret.contracts.index import ColdTokens
from hf_kvret.layer.head_groups import HeadGroups
from hf_kvret.layer.window import Window


@dataclass(frozen=True, eq=False)
class Selection:
    """What the queries of one step attend to in one layer. Tensors are the observer's own.

    Attributes:
        layer: number of the layer in the model.
        query: ``[B, Hq, Q, Dk]`` as the keys are, after rotation; logits are its products with
            them, times ``scale``, and capped by ``softcap`` where that is not None.
        ids: ``[B, H, Q, K]`` int32 slots of the cold tokens that were selected, in any order, -1
            for none; H counts KV heads, or query heads where these select apart. None: all cold
            tokens, for a method without an index.
        sinks: ``[B, S]`` int64 slots of the sinks, which are always attended to, -1 for none.
        recent: the slots ``recent[0]`` to ``recent[1] - 1`` are the recent tokens, always attended
            to, the Q new ones at their end. Slots below ``recent[0]`` are cold.
    """

    layer: int
    query: torch.Tensor
    scale: float
    softcap: float | None
    ids: torch.Tensor | None
    sinks: torch.Tensor
    recent: tuple[int, int]


Observer = Callable[[Selection], None]


def selection(
    layer: int,
    query: torch.Tensor,
    cold: ColdTokens,
    ids: torch.Tensor | None,
    window: Window,
    groups: HeadGroups | None = None,
) -> Selection:
    """A selection with copies of ``query`` and ``ids``, folded where heads select in ``groups``."""
    query = query.clone() if groups is None else groups.unfold(query).clone()
    if ids is not None:
        ids = ids.clone() if groups is None else groups.unfold_ids(ids)
    recent = window.start, window.end
    sinks = window.sink_slots.clone()
    return Selection(layer, query, cold.scale, cold.softcap, ids, sinks, recent)
