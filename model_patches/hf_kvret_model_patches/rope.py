"""Rope: the rotation of queries and keys in one layer of a model, and its inverse.

RoPE turns pairs of elements of each head by an angle: position times a frequency of the pair's own.
Scaled variants change the frequencies, and YaRN also multiplies by an attention factor. Su et al.,
*RoFormer* (2021), section 3.4; Peng et al., *YaRN* (2023), section 3.4.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_ROTATION = "apply_rotary_pos_emb"
# Rotations of latent attention; the last takes complex numbers.
_LATENT_ROTATIONS = (_ROTATION, f"{_ROTATION}_interleave", "apply_rotary_emb")

LAYOUTS = ("half", "interleaved", "none")
"""How the R rotated elements of a head are paired: ``"half"`` pairs element i with i + R / 2,
``"interleaved"`` pairs neighbours, ``"none"`` is for layers that don't rotate."""

_SCALED = ("linear", "llama3", "yarn", "proportional")
_CHANGING = {
    "dynamic": "frequencies that change with the length of the text",
    "longrope": "one set of frequencies for short texts and another for long ones",
}
# Their attention rotates in layers that slide and nowhere else; the second set does so only where
# the config has a sliding window at all.
_SLIDING_ONLY = {"cohere2"}
_SLIDING_ONLY_IF_ANY = {"exaone4", "exaone4_5_text", "exaone_moe"}


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of one layer. Without frequencies it changes nothing.

    Attributes:
        inv_freq: ``[R / 2]`` fp32, radians for each position; R elements of a head are rotated, the
            others pass.
        attention_factor: multiplies the rotated elements; 1 but for YaRN.
        layout: one of ``LAYOUTS``; ``"none"`` if and only if there are no frequencies.
        last: whether the last R elements are rotated, in place of the first: in rows of latent
            attention, and in their queries, absorbed or not.

    Raises:
        ValueError: an unknown layout.
    """

    inv_freq: torch.Tensor
    attention_factor: float = 1.0
    layout: str = "half"
    last: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}: allowed are {', '.join(map(repr, LAYOUTS))}")

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
                the text (dynamic NTK, LongRoPE), or of an unknown type.
        """
        text = layer_config(config, layer)
        if layout is None:
            layout = _layout(text) if _rotates(text, layer) else "none"
        if layout == "none":
            return cls(torch.empty(0, dtype=torch.float32, device="cpu"), 1.0, "none")
        return cls(*_frequencies(text, layer), layout, _is_latent(text))

    @property
    def settings(self) -> dict[str, Any]:
        """All but the frequencies, plain JSON; ``last`` only where it is True."""
        settings = {"layout": self.layout, "attention_factor": self.attention_factor}
        return settings | ({"last": True} if self.last else {})

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated; 0 without RoPE."""
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
        """
        return self._turn(x, positions, 1.0, self.attention_factor, dtype)

    def unrotate(
        self, x: torch.Tensor, positions: torch.Tensor, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The inverse of ``rotate``: the pre-RoPE vectors of ``x``, with the attention factor
        divided out. Arguments as there."""
        return self._turn(x, positions, -1.0, 1.0 / self.attention_factor, dtype)

    def rotate_to(
        self, x: torch.Tensor, position: int, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """``rotate`` with all tokens of ``x`` at one position."""
        positions = torch.full((1,), position, device=x.device)
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
        halves = x[..., :cut], x[..., cut:]
        turned = halves[self.last].float()
        if self.layout == "half":
            first, second = turned.chunk(2, dim=-1)
        else:
            first, second = turned[..., 0::2], turned[..., 1::2]
        pair = ((first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin))
        turned = torch.cat(pair, -1) if self.layout == "half" else torch.stack(pair, -1).flatten(-2)
        others = halves[not self.last].to(dtype)
        if not others.shape[-1]:
            return turned.to(dtype)
        return torch.cat([others, turned.to(dtype)][:: 1 if self.last else -1], dim=-1)


def has_rope(config: PreTrainedConfig, layer: int) -> bool:
    """Whether the configuration has parameters of RoPE for a layer; errors as of ``Rope.of``."""
    return _parameters(layer_config(config, layer), layer)[0] is not None


def layer_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The configuration of one layer of the text decoder, or of all where layers are alike.

    Raises:
        TypeError: ``config`` is not a transformers configuration.
        ValueError: the model has no layer of that number.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config is a {type(config).__name__}: pass model.config")
    text = config.get_text_config(decoder=True)
    if not 0 <= layer < text.num_hidden_layers:
        raise ValueError(f"layer={layer}: the model has layers 0 to {text.num_hidden_layers - 1}")
    return text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text


def _rotates(text: PreTrainedConfig, layer: int) -> bool:
    """Whether queries and keys of the layer are rotated, as far as the configuration says."""
    if _parameters(text, layer)[0] is None:
        return False
    rope_layers = getattr(text, "no_rope_layers", None)
    if rope_layers:
        return bool(rope_layers[layer])  # the list's name lies: 1 is a layer with RoPE
    slides = _layer_type(text, layer) == "sliding_attention"
    if text.model_type in _SLIDING_ONLY:
        return slides
    if text.model_type in _SLIDING_ONLY_IF_ANY:
        return slides or text.sliding_window is None
    return True


def _is_latent(text: PreTrainedConfig) -> bool:
    """Whether attention is latent, where the last elements of a head are rotated."""
    return bool(getattr(text, "kv_lora_rank", None))


def _frequencies(text: PreTrainedConfig, layer: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies ``[rotary_dim / 2]``, fp32 on the CPU, and the factor on cos and sin.

    Scaled frequencies come from transformers itself, so that they have the model's very bits: at
    large positions the last bit of a frequency moves the angle.

    Raises:
        ValueError: no RoPE at all; a type of RoPE whose frequencies are not the same at all
            lengths, or that we don't know.
    """
    parameters, is_by_type = _parameters(text, layer)
    if parameters is None:
        raise ValueError(
            f"config.rope_parameters has nothing for layer {layer}: use layout='none' for it"
        )
    name = parameters.get("rope_type", "default")
    # Sizes are computed on the CPU also where someone builds a model on another default device.
    with torch.device("cpu"):
        if name in _SCALED:
            options = {"layer_type": _layer_type(text, layer)} if is_by_type else {}
            inv_freq, factor = ROPE_INIT_FUNCTIONS[name](text, torch.device("cpu"), **options)
            return inv_freq.float(), float(factor)
        if name == "default":
            if _is_latent(text):
                rotary_dim = text.qk_rope_head_dim
            else:
                own_dim = getattr(text, "head_dim", None)
                head_dim = own_dim or text.hidden_size // text.num_attention_heads
                rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
            return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    if name in _CHANGING:
        raise ValueError(
            f"rope_type={name!r} in layer {layer}: {_CHANGING[name]}, so a key cannot be "
            "un-rotated once the text has grown: set config.rope_parameters to 'yarn', 'linear' "
            "or 'default' before loading, or use a method that keeps rotated keys"
        )
    raise ValueError(
        f"rope_type={name!r} in layer {layer} is not known; known are 'default', "
        f"{', '.join(map(repr, _SCALED))}: use a method that keeps rotated keys"
    )


def _layout(text: PreTrainedConfig) -> str:
    """How the model's own rotation pairs the elements of a head: ``"half"`` or ``"interleaved"``.

    The configuration doesn't say it. So the rotation is taken from the modeling module that belongs
    to the configuration's, and turns ``0, 1, 2, ...`` by 90 degrees.

    Raises:
        ValueError: there is no such module or rotation, or it pairs the elements in another way.
    """
    home = type(text).__module__.replace(".configuration_", ".modeling_")
    names = _LATENT_ROTATIONS if _is_latent(text) else (_ROTATION,)
    try:
        module = importlib.import_module(home)
        rotation = next(getattr(module, name) for name in names if hasattr(module, name))
    except (ImportError, StopIteration) as error:
        raise ValueError(
            f"{home} has no {' or '.join(names)} to look at: give layout='half' or 'interleaved' "
            "where you know it"
        ) from error
    turned = _quarter_turn(rotation)
    # A pair (x, y) becomes (-y, x): the first two elements name their partners. The second
    # list is of a rotation that moves pairs of neighbours into two halves while it turns them.
    if turned[:2] in ([-4.0, -5.0], [-1.0, -3.0]):
        return "half"
    if turned[:2] == [-1.0, 0.0]:
        return "interleaved"
    raise ValueError(
        f"the rotation of {home} makes {turned} of 0 to 7 at 90 degrees; known are 'half', which "
        "makes [-4, -5, -6, -7, 0, 1, 2, 3], and 'interleaved', which makes [-1, 0, -3, 2, ...]: "
        "use a method that keeps rotated keys"
    )


def _quarter_turn(rotation: Any) -> list[float]:
    """``0 .. 7`` turned by 90 degrees, or an empty list where ``rotation`` can't be called so."""
    x = torch.arange(8.0, device="cpu").view(1, 1, 1, 8)
    # Most rotations take tables as wide as a head, some of half that width or of complex numbers.
    cos, sin = torch.zeros(1, 1, 8, device="cpu"), torch.ones(1, 1, 8, device="cpu")
    half = cos[..., :4], sin[..., :4]
    both = ((x, x, *tables) for tables in ((cos, sin), half, (torch.complex(*half),)))
    # A few take queries or keys.
    for arguments in (*both, (x, cos, sin)):
        try:
            result = rotation(*arguments)
            query = result if isinstance(result, torch.Tensor) else result[0]
        except (RuntimeError, TypeError, ValueError):
            continue
        return query.flatten().tolist()
    return []


def _layer_type(text: PreTrainedConfig, layer: int) -> str | None:
    types = getattr(text, "layer_types", None)
    return types[layer] if types else None


def _parameters(text: PreTrainedConfig, layer: int) -> tuple[Mapping[str, Any] | None, bool]:
    """The layer's RoPE parameters, None for none, and whether they are listed by type of layer."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return None, False
    is_by_type = any(isinstance(value, Mapping) for value in parameters.values())
    return (parameters.get(_layer_type(text, layer)) if is_by_type else parameters), is_by_type
