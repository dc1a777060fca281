"""Rope: the rotation of queries and keys in one layer of a model, and its inverse.

RoPE turns pairs of numbers of each head by an angle: position times a frequency of the pair's own.
Scaled kinds change the frequencies, and YaRN also multiplies by an attention factor. Su et al.,
*RoFormer* (2021), section 3.4; Peng et al., *YaRN* (2023), section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_kvret_model_patches import rope_config

LAYOUTS = ("half", "interleaved", "none")
"""How the R rotated numbers of a head are paired: ``"half"`` pairs number i with number i + R / 2,
``"interleaved"`` pairs neighbours, ``"none"`` is for layers that don't rotate."""


@dataclass(frozen=True, eq=False)
class Rope:
    """How one layer rotates. Without frequencies it returns what it is given.

    Attributes:
        inv_freq: ``[R / 2]`` fp32, radians for each position; R numbers of a head are rotated, the
            others pass.
        attention_factor: what the rotated numbers are multiplied by; 1 but for YaRN.
        layout: one of ``LAYOUTS``; ``"none"`` if and only if there are no frequencies.
        last: whether the last R numbers are rotated, in place of the first: in rows of latent
            attention, and in queries that meet them, absorbed or not.

    Raises:
        ValueError: an attribute out of these bounds.
    """

    inv_freq: torch.Tensor
    attention_factor: float = 1.0
    layout: str = "half"
    last: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}: allowed are {', '.join(map(repr, LAYOUTS))}")
        if self.inv_freq.ndim != 1 or self.inv_freq.dtype != torch.float32:
            raise ValueError(
                f"inv_freq is {self.inv_freq.dtype} of shape {list(self.inv_freq.shape)}: give one "
                "fp32 number for each rotated pair"
            )
        if (self.layout == "none") != (len(self.inv_freq) == 0):
            raise ValueError(
                f"layout={self.layout!r} with {len(self.inv_freq)} frequencies: 'none' has no "
                "frequencies, the others have some"
            )
        if not 0 < self.attention_factor < float("inf"):
            raise ValueError(f"attention_factor={self.attention_factor}: it must be positive")

    @classmethod
    def of(cls, config: PreTrainedConfig, layer: int, layout: str | None = None) -> Rope:
        """The rotation of one layer, on the CPU.

        A model with three-part positions (Qwen2-VL) gets the rotation of its text, where the three
        parts agree.

        Args:
            config: the model's; of a multimodal model the text decoder's part is read.
            layer: number of the layer in the model.
            layout: one of ``LAYOUTS``, believed; None to find it out: ``"none"`` for layers that
                the configuration leaves without RoPE, else what the model's code does.

        Raises:
            TypeError: ``config`` is not a transformers configuration.
            ValueError: no such layer; an unknown layout; frequencies that depend on the length of
                the text (dynamic NTK, LongRoPE), or of an unknown kind.
        """
        if layout is None:
            turns = rope_config.rotates(config, layer)
            layout = rope_config.layout_of(config, layer) if turns else "none"
        if layout == "none":
            rope_config.text_config(config, layer)
            return cls(torch.empty(0, dtype=torch.float32, device="cpu"), 1.0, "none")
        last = rope_config.rotates_last(config)
        return cls(*rope_config.frequencies(config, layer), layout, last)

    @property
    def settings(self) -> dict[str, Any]:
        """All but the frequencies, plain JSON; ``last`` only where it is True."""
        settings = {"layout": self.layout, "attention_factor": self.attention_factor}
        return settings | ({"last": True} if self.last else {})

    @property
    def rotary_dim(self) -> int:
        """Numbers of each head that are rotated; 0 without RoPE."""
        return 2 * len(self.inv_freq)

    def to(self, device: torch.device | str) -> Rope:
        """The same on ``device``."""
        return replace(self, inv_freq=self.inv_freq.to(device))

    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """``x`` as the model would pass it to attention; ``x`` itself where nothing is to do.

        Args:
            x: ``[B, H, n, D]``, pre-RoPE queries or keys, on the device of ``inv_freq``.
            positions: integers ``[n]``, ``[1, n]`` or ``[B, n]`` on the same device.
            dtype: of the result; None for that of ``x``. The arithmetic is fp32 in any case.

        Raises:
            ValueError: shapes, dtypes or devices that don't fit together, or three-part positions.
        """
        self._check(x, positions)
        return self._turn(x, positions, 1.0, self.attention_factor, dtype)

    def unrotate(
        self, x: torch.Tensor, positions: torch.Tensor, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The inverse of ``rotate``: the pre-RoPE vectors of ``x``, with the attention factor
        divided out. Arguments and errors as there."""
        self._check(x, positions)
        return self._turn(x, positions, -1.0, 1.0 / self.attention_factor, dtype)

    def rotate_to(
        self, x: torch.Tensor, position: int, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """``rotate`` with all tokens of ``x`` at one position."""
        positions = torch.full((1,), position, device=x.device)
        self._check(x, positions.expand(x.shape[2]))
        return self._turn(x, positions, 1.0, self.attention_factor, dtype)

    def _turn(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        sign: float,
        factor: float,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        dtype = dtype or x.dtype
        if self.layout == "none":
            return x.to(dtype)
        # The model forms its angles by this very product; another one is off at large positions.
        angles = positions[..., None].float() * self.inv_freq
        if angles.ndim == 3:
            angles = angles[:, None]
        cos, sin = angles.cos() * factor, angles.sin() * (sign * factor)
        cut = x.shape[-1] - self.rotary_dim if self.last else self.rotary_dim
        parts = x[..., :cut], x[..., cut:]
        turned = parts[self.last].float()
        if self.layout == "half":
            first, second = turned.chunk(2, dim=-1)
        else:
            first, second = turned[..., 0::2], turned[..., 1::2]
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.cat(pair, -1) if self.layout == "half" else torch.stack(pair, -1).flatten(-2)
        others = parts[not self.last].to(dtype)
        return torch.cat([others, turned.to(dtype)][:: 1 if self.last else -1], dim=-1)

    def _check(self, x: torch.Tensor, positions: torch.Tensor) -> None:
        if x.ndim != 4 or not x.is_floating_point():
            raise ValueError(f"x is {x.dtype} of shape {list(x.shape)}: give floats [B, H, n, D]")
        if positions.ndim == 3:
            raise ValueError(
                f"positions of shape {list(positions.shape)} have several parts (images, video): "
                "only text can be rotated, where the parts agree; pass one of them, [B, n]"
            )
        batch, _, n, width = x.shape
        if list(positions.shape) not in ([n], [1, n], [batch, n]):
            raise ValueError(
                f"positions of shape {list(positions.shape)} for x of shape {list(x.shape)}: give "
                f"[{n}] or [{batch}, {n}]"
            )
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise ValueError(f"positions are {positions.dtype}: give integers")
        if width < self.rotary_dim:
            raise ValueError(f"x has {width} numbers in a head, RoPE turns {self.rotary_dim}")
        if self.layout != "none" and not x.device == positions.device == self.inv_freq.device:
            raise ValueError(
                f"x is on {x.device}, positions on {positions.device}, the rotation on "
                f"{self.inv_freq.device}: use rope.to(x.device) and positions.to(x.device)"
            )
