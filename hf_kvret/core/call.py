"""What an attention call says beside its tensors, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from hf_kvret.core.merge import Partial
from hf_kvret_kernels.prompt_attention import prompt_attention


@dataclass(frozen=True)
class AttentionCall:
    """What one attention call says beside its tensors.

    Attributes:
        valid: ``[B, T]`` bool over all slots, the new tokens' included; None: all valid.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(score / c)``, or None.
        sink_logits: ``[Hq]`` learned attention sinks, or None.
        prompt: the base's full causal attention over the new tokens alone,
            ``() -> [B, Hq, Q, Dv]``.
        positions: ``[B, Q]`` integers, where RoPE puts the new tokens; None if it isn't told.
    """

    valid: torch.Tensor | None
    scale: float
    softcap: float | None
    sink_logits: torch.Tensor | None
    prompt: Callable[[], torch.Tensor]
    positions: torch.Tensor | None = None

    def partial(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor | None,
        causal_offset: int | None,
    ) -> Partial:
        """Attention over some dense tokens; arguments as in ``prompt_attention``."""
        out, lse = prompt_attention(
            query,
            keys,
            values,
            scale=self.scale,
            causal_offset=causal_offset,
            valid=valid,
            softcap=self.softcap,
            out_dtype=torch.float32,
        )
        return Partial(out, lse)


@dataclass(frozen=True)
class View:
    """How the newest attention call saw the tokens; names as in ``AttentionCall``."""

    valid: torch.Tensor | None
    scale: float
    softcap: float | None

    def reordered(self, rows: torch.Tensor) -> Self:
        """The same for the batch that the old ``rows`` make."""
        valid = None if self.valid is None else self.valid.index_select(0, rows)
        return replace(self, valid=valid)
