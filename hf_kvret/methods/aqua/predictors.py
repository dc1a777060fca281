"""AQUA-KV's predictors: the options they are learned with, their tensors in an artifact, a product.

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

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_kvret.artifacts.checks import check_choices, check_least, check_types
from hf_kvret.methods.aqua.coding import BITS, GROUPS

SPACES = ("before", "after")


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

    bits: int = 2
    first_bits: int | str = 4
    group: int | None = None
    ridge: float = 1e-3
    sinks: int = 4
    space: str = "before"
    anchor_mean: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(
            self,
            bits=BITS,
            first_bits=(*BITS, "auto"),
            group=(None, *GROUPS),
            space=SPACES,
        )
        check_least(self, sinks=0, seed=0)
        if not 0 < self.ridge < float("inf"):
            raise ValueError(f"ridge={self.ridge}: more than 0, 1e-3 is the paper's")


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
