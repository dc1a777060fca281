"""AQUA-KV's predictors: their options, their tensors in an artifact, and one layer's on a device.

Shutova et al., *Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models*
(2025), sections 3.2 and 3.3, algorithms 1 to 3. Rows are a token's KV heads side by side: ``Wk =
Hkv * D`` numbers of keys, ``Wv = Hkv * Dv`` of values. Hats are reconstructions: prediction plus
decoded residual. In the *anchor*, the first layer that is studied, nothing is predicted, but for
the mean with ``anchor_mean``. In the others, with ``p`` the layer that was studied before::

    key_residual   = codec(K(l) - key(K_hat(p)))                 K_hat(l) = key(..) + decoded
    value_residual = codec(V(l) - value([K_hat(l); V_hat(p)]))   V_hat(l) = value(..) + decoded

Sums are fp32; reconstructions are rounded to the model's dtype before anything reads them. Keys are
those before RoPE where ``space`` is ``"before"``. A row of latent attention, a latent and a rotated
key, is one key with its value in it: nothing is learned or coded of values.

Tensors of a layer, under ``layers.N.``:

=================== ============== ====== ====================================================
name                shape          dtype
=================== ============== ====== ====================================================
inv_freq            [R / 2]        fp32   of the layer's RoPE, in all layers
key.weight          [out, in]      bf16   ``weight @ x + bias``; no weight in an anchor
key.bias            [out]          fp32   in an anchor only with ``anchor_mean``: the mean
value.*                                   the same
=================== ============== ====== ====================================================

The settings of a layer are ``layout``, ``attention_factor`` (RoPE's, as for A2ATS), ``role``
(``"anchor"`` or ``"predicted"``), ``previous`` (number of layer p; None in an anchor), ``bits`` (2,
3, 4; 16: not coded), ``group`` and ``value_group`` (of the codec, for keys and values), ``heads``,
``head_dim``, ``value_head_dim`` (0 where values are in their keys), and ``last``, True where the
last elements of a key are rotated. Options beside them are the fields of ``PredictorOptions``; the
codec's seed is ``seed``. Artifacts of 0.1.0 may have several anchors, and more options.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.shared import (
    calibration_options,
    check_positions_known,
    damaged,
    learned_rope,
    made_once,
)
from hf_kvret.options.declare import FLAG, OneOf, check_options, integer, option, real
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_kernels.higgs.codec import LARGEST_GROUP, SMALLEST_GROUP
from hf_kvret_model_patches.rope import Rope

NOT_CODED = 16
"""Bits of uncoded rows."""
BITS = (2, 3, 4, NOT_CODED)
GROUPS = tuple(2**n for n in range(3, 11))
"""Numbers that may share a scale."""

METHOD = "aqua"
SPACES = ("before", "after")

# Options of older calibrations, with the value that is left, and those that changed other values.
_RETIRED = {
    "backbone": "higgs",
    "predictor": "linear",
    "predictor_bits": 16,
    "key_inputs": "keys",
    "value_inputs": "keys+values",
}
_UNREAD = ("rank", "hidden", "steps", "anchor_every")


@dataclass(frozen=True)
class PredictorOptions:
    """How the predictors of keys and values of each layer are made.

    Attributes:
        bits: of residuals: 2, 3, 4; 16 for predictors that know no quantizer, for study.
        first_bits: of the anchor: 2, 3, 4, 16 (left as it is), or ``"auto"``: 4, unless that leaves
            an error of more than ``ANCHOR_LIMIT`` of the variance, then 16.
        group: numbers that share a scale, a power of two from 8 to 1024; None for the largest that
            divides keys and values of a token.
        ridge: in units of the mean variance of an input.
        sinks: first tokens of each sequence that are left out.
        space: ``"before"`` or ``"after"`` RoPE.
        anchor_mean: take the mean of keys and values off in the anchor [ours]: the codec's error
            grows with the whole row, and an offset is the same for all tokens.
        seed: of the codec's signs.

    Raises:
        TypeError: an option of another kind than above.
        ValueError: one that is out of its range.
    """

    bits: int = option(2, OneOf(*BITS))
    first_bits: int | str = option(4, OneOf(*BITS, "auto"))
    group: int | None = option(None, OneOf(*GROUPS, None))
    ridge: float = option(1e-3, real(note="1e-3 is the paper's", above=0, below=math.inf))
    sinks: int = option(4, integer(0, "tokens"))
    space: str = option("before", OneOf(*SPACES))
    anchor_mean: bool = option(False, FLAG)
    seed: int = option(0, integer(0))

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A linear map of rows, or their mean.

    Products are computed in the model's dtype; biases are added in fp32, because keys may have
    offsets far beyond their spread.

    Attributes:
        weight: ``[out, in]`` in the model's dtype; None: the bias is all there is.
        bias: ``[out]`` fp32.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor

    def __call__(self, inputs: torch.Tensor | None) -> torch.Tensor:
        """``[B, n, out]`` fp32 of ``inputs [B, n, in]``; ``[out]`` where there is no weight."""
        if self.weight is None:
            return self.bias
        assert inputs is not None, "an anchor has no weight"
        return F.linear(inputs, self.weight).float() + self.bias

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.bias.nbytes + (0 if self.weight is None else self.weight.nbytes)


@dataclass(frozen=True, eq=False)
class LearnedLayer:
    """Predictors and rotation of one layer, shared by all caches.

    Attributes:
        key: predicts keys from those of the layer below; None: nothing is predicted.
        value: predicts values, from keys of this layer and values of the one below; None: the same.
        rope: un-rotates keys before they are coded; None: keys are coded after RoPE.
        source: all tensors of the layer, on the CPU.
    """

    key: Predictor | None
    value: Predictor | None
    rope: Rope | None
    source: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on the device."""
        frequencies = 0 if self.rope is None else self.rope.inv_freq.nbytes
        return frequencies + sum(p.nbytes for p in (self.key, self.value) if p is not None)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of the artifact's tensors: codes are valid with these only."""
        digest = hashlib.sha256()
        for name, x in sorted(self.source.items()):
            digest.update(name.encode())
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest()[:8]) >> 1


def check_artifact(artifact: CalibrationArtifact, config: PreTrainedConfig) -> None:
    """Refuse an artifact that can't be one of a model, before any token is cached.

    Raises:
        ValueError: the first thing that is wrong: architecture, options, or the model's positions.
    """
    artifact.check(config)
    if learned_options(artifact).space == "before":
        check_positions_known(config, "predictor='none'", "`hf-kvret calibrate aqua --space after`")


def learned_options(artifact: CalibrationArtifact) -> PredictorOptions:
    """The options of the calibration; ValueError for one that is missing or wrong."""
    return made_once(artifact, "options", partial(_read_options, artifact))


def _read_options(artifact: CalibrationArtifact) -> PredictorOptions:
    for name, value in _RETIRED.items():
        stored = artifact.options.get(name, value)
        if stored != value:
            raise damaged(artifact, f"has {name}={stored!r}, and this version reads {value!r} only")
    return calibration_options(artifact, PredictorOptions, unread=(*_RETIRED, *_UNREAD))


def needs_positions(artifact: CalibrationArtifact) -> bool:
    """Whether keys of any layer are un-rotated."""
    layers = artifact.options["layers"].values()
    is_before = learned_options(artifact).space == "before"
    return is_before and any(settings["layout"] != "none" for settings in layers)


def learned_layer(
    artifact: CalibrationArtifact,
    layer: int,
    with_inputs: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> LearnedLayer:
    """Layer number ``layer`` of an artifact, on ``device``, one for all caches.

    Without ``with_inputs`` predictors that have inputs are left out. ``dtype`` is the model's.
    """
    options = learned_options(artifact)

    def predictor(source: dict[str, torch.Tensor], name: str) -> Predictor | None:
        bias, weight = (source.get(f"{name}.{part}") for part in ("bias", "weight"))
        if bias is None or (weight is not None and not with_inputs):
            return None
        return Predictor(None if weight is None else weight.to(device, dtype), bias.to(device))

    def make() -> LearnedLayer:
        prefix = f"layers.{layer}."
        source = {
            name.removeprefix(prefix): x
            for name, x in artifact.tensors.items()
            if name.startswith(prefix)
        }
        rope = learned_rope(artifact, layer).to(device)
        is_before = options.space == "before" and rope.rotary_dim > 0
        return LearnedLayer(
            key=predictor(source, "key"),
            value=predictor(source, "value"),
            rope=rope if is_before else None,
            source=source,
        )

    return made_once(artifact, (layer, with_inputs, device, dtype), make)


def default_group(width: int, group: int | None = None) -> int:
    """Numbers that share a scale: the largest power of two that divides ``width``, at most 1024.

    Args:
        width: KV heads times head dim.
        group: takes its place where it is given.

    Raises:
        ValueError: no power of two from 8 on divides it, or ``group`` doesn't.
    """
    if group is not None and width % group:
        raise ValueError(
            f"group={group} does not divide the {width} numbers of a token's keys or values: leave "
            "group out, or give a power of two that does"
        )
    group = group or min(LARGEST_GROUP, width & -width)
    if group < SMALLEST_GROUP:
        raise ValueError(
            f"a token's keys or values are {width} numbers: the codec's group is a power of two "
            f"from {SMALLEST_GROUP} on, and none divides that; this model can't be coded"
        )
    return group


def make_codec(bits: int, group: int, seed: int, device: torch.device) -> HiggsCodec | None:
    """The codec of rows; None for 16 bits."""
    return None if bits == NOT_CODED else HiggsCodec(bits, group, seed=seed).to(device)
