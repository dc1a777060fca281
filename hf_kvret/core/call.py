"""AttentionCall: what an attention call says beside its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvret.core.scoring import Scoring


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What one attention call says beside its tensors.

    Attributes:
        scoring: ``valid [B, T]`` over all slots, the new tokens' included.
        prompt: the base's full causal attention over the new tokens alone,
            ``() -> [B, Hq, Q, Dv]``.
        sink_logits: ``[Hq]`` learned attention sinks, or None.
        positions: ``[B, Q]`` integers, where RoPE puts the new tokens; None if it isn't told.
    """

    scoring: Scoring
    prompt: Callable[[], torch.Tensor]
    sink_logits: torch.Tensor | None = None
    positions: torch.Tensor | None = None
