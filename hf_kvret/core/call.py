"""AttentionCall: the arguments of an attention call other than query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvret.core.scoring import Scoring


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Arguments of one attention call other than query, key and value.

    Attributes:
        scoring: ``valid [B, T]`` over all slots, the new tokens' included.
        prompt: the base's full causal attention over the new tokens alone,
            ``() -> [B, Hq, Q, Dv]``.
        sink_logits: ``[Hq]`` learned attention sinks, or None.
        positions: ``[B, Q]`` integers, RoPE positions of the new tokens; None if not passed.
    """

    scoring: Scoring
    prompt: Callable[[], torch.Tensor]
    sink_logits: torch.Tensor | None = None
    positions: torch.Tensor | None = None
