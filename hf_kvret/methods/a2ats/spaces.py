"""In which space keys are quantized: before RoPE, with queries at a fixed distance, or after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from transformers import PreTrainedConfig

from hf_kvret.methods.a2ats.vector_quantization import at_distance
from hf_kvret_model_patches.rope import Rope


@dataclass(frozen=True, eq=False)
class KeySpace(ABC):
    """Maps post-RoPE keys and queries to the space of the codewords.

    Attributes:
        rope: RoPE of the layer.
        window: b, the distance assumed between queries and all cold tokens (equation 10).
    """

    rope: Rope
    window: int

    @classmethod  # noqa: B027 - not every space refuses models
    def check_model(cls, config: PreTrainedConfig) -> None:
        """ValueError for a model whose keys can't be mapped to this space."""

    def to(self, device: torch.device) -> Self:
        """The same on ``device``."""
        return replace(self, rope=self.rope.to(device))

    @abstractmethod
    def keys(self, keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """``[B, H, n, D]`` fp32 of post-RoPE keys at ``positions [B, n]``."""

    @abstractmethod
    def queries(self, queries: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """``[B, Hq, n, D]`` fp32 of post-RoPE queries at ``positions [B, n]``."""


class WindowedSpace(KeySpace):
    """Windowed RoPE: keys before RoPE, queries rotated to position b (section 4.1).

    Un-rotated keys lose YaRN's factor. Queries have it twice, in the rotated dims, so that scores
    equal those of attention.
    """

    @classmethod
    def check_model(cls, config: PreTrainedConfig) -> None:
        text = config.get_text_config(decoder=True)
        rotation = getattr(text, "rope_parameters", None) or {}
        if text is not config and "mrope_section" in rotation:
            raise ValueError(
                f"{config.model_type} puts images at positions of three parts and doesn't tell its "
                "attention all of them, so the rotation of its keys can't be undone: use another "
                "method, or an artifact made with `hf-kvret calibrate a2ats --space rotated`"
            )

    def keys(self, keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return self._before(keys, positions)

    def queries(self, queries: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return at_distance(self._before(queries, positions), self.rope, self.window)

    def _before(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        if not self.rope.rotary_dim:
            return x.float()
        if positions is None:
            raise ValueError(
                "this model does not tell its attention the positions of tokens, and windowed RoPE "
                "needs them: pass position_ids to the model, or use another method"
            )
        return self.rope.unrotate(x, positions, dtype=torch.float32)


class RotatedSpace(KeySpace):
    """Keys and queries as attention sees them (table 2, without windowed RoPE)."""

    def keys(self, keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return keys.float()

    def queries(self, queries: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return queries.float()


SPACES: dict[str, type[KeySpace]] = {"windowed": WindowedSpace, "rotated": RotatedSpace}
