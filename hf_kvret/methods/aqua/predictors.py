"""AQUA-KV's predictors: the options they are learned with, their tensors in an artifact, a product.

Shutova et al., *Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models*
(2025), sections 3.2 and 3.3, algorithms 1 to 3. Rows are a token's KV heads side by side: ``Wk =
Hkv * D`` numbers of keys, ``Wv = Hkv * Dv`` of values. Hats are reconstructions: prediction plus
decoded residual. In an *anchor* (the first layer that is studied, and every ``anchor_every``-th)
nothing is predicted, but for the mean with ``anchor_mean``. In the others, with ``p`` the layer
that was studied before::

    key_residual   = codec(K(l) - key(K_hat(p)))                 K_hat(l) = key(..) + decoded
    value_residual = codec(V(l) - value([K_hat(l); V_hat(p)]))   V_hat(l) = value(..) + decoded

Sums are fp32; reconstructions are rounded to the model's dtype before anything reads them. The
value's inputs are as ``value_inputs`` says: ``"keys+values"`` as above, in this order;
``"keys"`` is K_hat(l) alone, ``"values"`` V_hat(p) alone, ``"none"`` predicts nothing (zeros); so
does ``key_inputs`` ``"none"``. Keys are those before RoPE where ``space`` is ``"before"``. A row of
latent attention, a latent and a rotated key, is one key with its value in it: nothing is learned or
coded of values, and ``value_inputs`` changes nothing.

Tensors of a layer, under ``layers.N.``; ``key.*``, ``value.*`` only where something is predicted:

=================== ============== ====== ====================================================
name                shape          dtype
=================== ============== ====== ====================================================
inv_freq            [R / 2]        fp32   of the layer's RoPE, in all layers
key.bias            [out]          fp32   added to what follows; in an anchor, with
                                          ``anchor_mean``, alone: what is predicted
key.weight          [out, in]      bf16   linear: ``weight @ x``
key.down            [rank, in]     bf16   low_rank: ``up @ (down @ x)``
key.up              [out, rank]    bf16
key.hidden.weight   [hidden, in]   bf16   mlp: ``out.weight @ h`` of
key.hidden.bias     [hidden]       fp32   ``h = gelu(hidden.weight @ x + hidden.bias)``,
key.out.weight      [out, hidden]  bf16   the exact gelu
value.*                                   the same
=================== ============== ====== ====================================================

With ``predictor_bits=4`` a matrix ``M [a, b]`` (weight, down, up) is replaced by ``M.codes`` uint8
``[a, b / 2]``, two columns a byte with the even one in the low half, and by ``M.scale`` and
``M.low``, fp16 ``[a, b / g]``: ``M[i, j] = low[i, j // g] + scale[i, j // g] * code[i, j]``.
``unpacked`` and ``Predictor`` read all of these by name.

The settings of a layer are ``layout``, ``attention_factor`` (RoPE's, as for A2ATS), ``role``
(``"anchor"`` or ``"predicted"``), ``previous`` (number of layer p; None in an anchor), ``bits`` (2,
3, 4; 16: not coded), ``group`` and ``value_group`` (of the codec, for keys and values), ``heads``,
``head_dim``, ``value_head_dim`` (0 where values are in their keys), and ``last``, True where the
last elements of a key are rotated. Options beside them are the fields of ``PredictorOptions``; the
codec's seed is ``seed``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_kvret.artifacts.checks import check_choices, check_least, check_types
from hf_kvret.methods.aqua.coding import BACKBONES, BITS, GROUPS

PREDICTORS = ("linear", "low_rank", "mlp")
SPACES = ("before", "after")
KEY_INPUTS = ("keys", "none")
VALUE_INPUTS = ("keys+values", "keys", "values", "none")


@dataclass(frozen=True)
class PredictorOptions:
    """How the predictors of keys and values of each layer are made.

    Attributes:
        bits: of residuals: 2, 3, 4; 16 for predictors that know no quantizer, for study.
        first_bits: of anchors: 2, 3, 4, 16 (left as they are), or ``"auto"``: 4, unless that leaves
            an error of more than ``ANCHOR_LIMIT`` of the variance, then 16.
        group: numbers that share a scale, a power of two from 8 to 1024; None for the largest that
            divides keys and values of a token, at most 1024 (64 without HIGGS).
        backbone: ``"higgs"``; ``"minmax"``: round-to-nearest from a group's least to largest; or
            ``"absmax"``: symmetric, in steps of its largest magnitude, as the paper's Quanto.
        predictor: ``"linear"``, ``"low_rank"`` or ``"mlp"``, with one hidden layer.
        rank: of ``"low_rank"``.
        hidden: units of ``"mlp"``; None for twice its outputs, as the paper has it.
        steps: of training of ``"mlp"``, 2048 tokens each.
        predictor_bits: 16 for bf16, 4 for GPTQ; ``"mlp"`` has 16 only.
        ridge: in units of the mean variance of an input.
        sinks: first tokens of each sequence that are left out.
        space: ``"before"`` or ``"after"`` RoPE.
        anchor_every: studied layers from one anchor to the next, which bounds the chain of
            reconstructions; None for one anchor.
        anchor_mean: take the mean of keys and values off in anchors [ours]: the codec's error grows
            with the whole row, and an offset is the same for all tokens.
        key_inputs, value_inputs: what predicts keys and values (table 5).
        seed: of the codec's signs, and of ``"mlp"``.

    Raises:
        TypeError: an option of another kind than above.
        ValueError: one that is out of its range, or that doesn't go with another.
    """

    bits: int = 2
    first_bits: int | str = 4
    group: int | None = None
    backbone: str = "higgs"
    predictor: str = "linear"
    rank: int = 256
    hidden: int | None = None
    steps: int = 1000
    predictor_bits: int = 16
    ridge: float = 1e-3
    sinks: int = 4
    space: str = "before"
    anchor_every: int | None = None
    anchor_mean: bool = False
    key_inputs: str = "keys"
    value_inputs: str = "keys+values"
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(
            self,
            bits=BITS,
            first_bits=(*BITS, "auto"),
            group=(None, *GROUPS),
            backbone=BACKBONES,
            predictor=PREDICTORS,
            predictor_bits=(16, 4),
            space=SPACES,
            key_inputs=KEY_INPUTS,
            value_inputs=VALUE_INPUTS,
        )
        check_least(self, rank=1, hidden=2, steps=0, sinks=0, seed=0)
        if self.anchor_every is not None and self.anchor_every < 1:
            raise ValueError(
                f"anchor_every={self.anchor_every}: 1 or more, or None for the first layer alone"
            )
        if not 0 < self.ridge < float("inf"):
            raise ValueError(f"ridge={self.ridge}: more than 0, 1e-3 is the paper's")
        if self.predictor == "low_rank" and self.predictor_bits == 4 and self.rank % 16:
            raise ValueError(
                f"rank={self.rank} with predictor_bits=4: give a multiple of 16, so that scales "
                "don't take more than codes"
            )
        if self.predictor == "mlp" and self.predictor_bits != 16:
            raise ValueError(
                f"predictor_bits={self.predictor_bits} with predictor='mlp': GPTQ is for 'linear' "
                "and 'low_rank', or give predictor_bits=16"
            )


GROUP = 128
"""Most columns of a matrix in 4 bits that share a scale; fewer where it does not divide these."""

CODE_PARTS = ("codes", "scale", "low")
"""Names of what a matrix in 4 bits is replaced by."""


def unpacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same predictor with matrices in 4 bits as fp32 matrices."""
    matrices = {}
    for name, x in tensors.items():
        matrix, _, part = name.rpartition(".")
        if part == "codes":
            matrices[matrix] = unpack_matrix(*(tensors[f"{matrix}.{one}"] for one in CODE_PARTS))
        elif part not in CODE_PARTS:
            matrices[name] = x
    return matrices


def unpack_matrix(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The matrix ``[a, b]`` fp32 of ``codes [a, b / 2]``, ``scale`` and ``low [a, b / g]``."""
    each = torch.stack([codes & 15, codes >> 4], -1).flatten(1).float()
    groups = each.unflatten(1, (scale.shape[1], -1))
    return (low.float()[..., None] + scale.float()[..., None] * groups).flatten(1)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A linear, reduced-rank or one-hidden-layer map of rows.

    Products are computed in ``dtype``, the model's; biases are added in fp32, because keys may have
    offsets far beyond their spread.

    Attributes:
        tensors: by the names in the table above, all on one device: biases
            fp32, matrices in ``dtype``, or as 4-bit codes, which are unpacked at each use.
        dtype: of the inputs.
    """

    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """``[B, n, out]`` fp32 of inputs that stand side by side, ``[B, n, *]`` in ``dtype``.

        Without a matrix there is the bias alone, ``[out]``.
        """
        tensors = self.unpacked().tensors
        if set(tensors) == {"bias"}:
            return tensors["bias"]
        x = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)
        if "down" in tensors:
            result = F.linear(F.linear(x, tensors["down"]), tensors["up"])
        elif "hidden.weight" in tensors:
            units = F.linear(x, tensors["hidden.weight"]).float() + tensors["hidden.bias"]
            result = F.linear(F.gelu(units).to(self.dtype), tensors["out.weight"])
        else:
            result = F.linear(x, tensors["weight"])
        return result.float() + tensors["bias"]

    def unpacked(self) -> Predictor:
        """A copy with 4-bit matrices unpacked to ``dtype``, for repeated use."""
        if not any(name.endswith(".codes") for name in self.tensors):
            return self
        matrices = unpacked(self.tensors)
        tensors = {n: x.to(self.dtype) if x.ndim == 2 else x for n, x in matrices.items()}
        return Predictor(tensors, self.dtype)
