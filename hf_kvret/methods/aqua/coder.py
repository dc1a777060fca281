"""RowCoder: encodes rows of one layer as residuals of a prediction from the layer below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from hf_kvret.methods.aqua.config import LayerPlan
from hf_kvret.methods.aqua.learned import (
    NOT_CODED,
    LearnedLayer,
    default_group,
    learned_layer,
    learned_options,
    make_codec,
)
from hf_kvret_kernels.higgs import Coded, HiggsCodec
from hf_kvret_model_patches.rope import Rope


@dataclass(eq=False)
class Rows:
    """Reconstructions of some consecutive tokens, as predictors read them: heads side by side.

    Attributes:
        start: index of the first token.
        keys: ``[B, n, Hkv * Dk]`` in the model's dtype, before RoPE if keys are un-rotated.
        values: ``[B, n, Hkv * Dv]``; of width 0 where values are a part of keys.
    """

    start: int
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty_like(cls, other: Rows, count: int) -> Rows:
        """Memory for the first ``count`` tokens."""
        return cls(0, *(x.new_empty(len(x), count, x.shape[2]) for x in (other.keys, other.values)))

    def to(self, device: torch.device) -> Rows:
        """These rows on a device; themselves if they lie there."""
        if self.keys.device == device:
            return self
        return Rows(self.start, self.keys.to(device), self.values.to(device))

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.keys.nbytes + self.values.nbytes

    def part(self, first: int, last: int) -> Rows:
        """Views of tokens ``first .. last``."""
        where = slice(first - self.start, last - self.start)
        return Rows(first, self.keys[:, where], self.values[:, where])

    def covers(self, first: int, last: int) -> bool:
        """Whether it contains tokens ``first .. last``."""
        return self.start <= first and last <= self.end

    def put(self, rows: Rows) -> None:
        """Overwrite the tokens of ``rows``."""
        target = self.part(rows.start, rows.end)
        target.keys.copy_(rows.keys)
        target.values.copy_(rows.values)


@dataclass(frozen=True, eq=False)
class RowCoder:
    """Codes of one layer's tokens. Shutova et al. (2025), section 3.3, algorithms 2 and 3.

    Attributes:
        heads, key_dim, value_dim: of its tokens; values that are a part of keys have no dim here.
        dtype: of the model.
        bits: of codes.
        key_codec, value_codec: of rows of all heads; None where rows are kept as they are, and for
            values that are a part of keys.
        predictors: predictors and rotation; None where neither is used.
        value_in_key: see ``TokenBlock``.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    bits: int
    key_codec: HiggsCodec | None
    value_codec: HiggsCodec | None
    predictors: LearnedLayer | None
    value_in_key: int = 0

    @classmethod
    def of(
        cls,
        plan: LayerPlan,
        lowest: bool,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        value_in_key: int = 0,
    ) -> Self:
        """The coder of a plan, for tokens of ``shape`` (heads, key dim, value dim).

        With ``value_in_key`` the value dim is 0.

        Raises:
            ValueError: a width that no group divides.
        """
        # Group sizes of keys and values in the calibration; None if not coded.
        predictors, learned_groups = None, (None, None)
        if plan.artifact is not None:
            settings = plan.artifact.options["layers"][str(plan.layer)]
            learned_groups = settings.get("group"), settings.get("value_group")
            with_inputs = plan.previous is not None
            predictors = learned_layer(plan.artifact, plan.layer, with_inputs, device, dtype)
        bits, (heads, *dims) = plan.bits, shape
        if lowest and plan.artifact is None:
            # Without an artifact the first layer is known by its place alone.
            bits = plan.options.first_bits or bits
        key_codec, value_codec = (
            _codec(plan, bits, heads * dim, learned_group, device)
            for dim, learned_group in zip(dims, learned_groups, strict=True)
        )
        return cls(*shape, dtype, bits, key_codec, value_codec, predictors, value_in_key)

    @property
    def rope(self) -> Rope | None:
        """The rotation that keys are coded before; None where they are coded after it."""
        return None if self.predictors is None else self.predictors.rope

    @property
    def row_nbytes(self) -> int:
        """Bytes of a token's codes and scales, keys and values, for each KV head."""
        assert self.key_codec is not None
        bits = self.key_codec.bits_per_value * self.heads * self.key_dim
        if self.value_codec is not None:
            bits += self.value_codec.bits_per_value * self.heads * self.value_dim
        return int(bits) // (8 * self.heads)

    def unrotated(self, keys: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """``[B, n, H * Dk]`` fp32 of post-RoPE ``keys [B, H, n, Dk]`` at ``positions [B, n]``."""
        if self.rope is not None:
            assert positions is not None, "the lowest store keeps positions where keys are rotated"
            keys = self.rope.unrotate(keys, positions, dtype=torch.float32)
        return joined(keys.float())

    def as_attention_reads(
        self, rows: Rows, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[B, H, n, Dk]`` as attention reads them, and values; views where possible."""
        keys = split(rows.keys, self.heads)
        if self.rope is not None:
            assert positions is not None, "the lowest store keeps positions where keys are rotated"
            keys = self.rope.rotate(keys, positions)
        if self.value_in_key:
            return keys, keys[..., : self.value_in_key]
        return keys, split(rows.values, self.heads)

    def rows(
        self, start: int, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> Rows:
        """``Rows`` of tokens as attention reads them, ``[B, H, n, D]``."""
        near_keys = self.unrotated(keys, positions).to(self.dtype)
        return Rows(start, near_keys, self.values_beside(values))

    def values_beside(self, values: torch.Tensor) -> torch.Tensor:
        """``[B, n, H * Dv]`` of ``values [B, H, n, Dv]``; of width 0 if they are in the keys."""
        return joined(values[..., :0] if self.value_in_key else values)

    def encode(
        self, start: int, keys: torch.Tensor, values: torch.Tensor, below: Rows | None
    ) -> tuple[torch.Tensor, torch.Tensor, Rows]:
        """Codes and scales ``[B, n, bytes]`` of keys and values, and what they decode to.

        Args:
            start: index of the first token.
            keys: ``[B, n, H * Dk]`` fp32, of ``unrotated``.
            values: ``[B, n, H * Dv]``.
            below: the same tokens in the layer that predicts this one; None for an anchor.
        """
        assert self.key_codec is not None
        prediction = self._predicted_keys(below)
        key_codes = self.key_codec.encode(keys if prediction is None else keys - prediction)
        near_keys = self.key_codec.decode(*key_codes, self.dtype, added=prediction)
        if self.value_codec is None:
            return *key_codes, Rows(start, near_keys, near_keys[..., :0])
        prediction = self._predicted_values(near_keys, below)
        values = values.float() if prediction is None else values.float() - prediction
        value_codes = self.value_codec.encode(values)
        near_values = self.value_codec.decode(*value_codes, self.dtype, added=prediction)
        codes, scales = zip(key_codes, value_codes, strict=True)
        return torch.cat(codes, -1), torch.cat(scales, -1), Rows(start, near_keys, near_values)

    def decode(
        self, start: int, codes: torch.Tensor, scales: torch.Tensor, below: Rows | None
    ) -> Rows:
        """The ``Rows`` that ``encode`` returned with these codes and scales; ``below`` as there."""
        key_codec, value_codec = self.key_codec, self.value_codec
        assert key_codec is not None
        width = self.heads * self.key_dim
        # Bytes of keys come first, those of values behind them.
        code_len, scale_len = key_codec.code_bytes(width), key_codec.scale_bytes(width)
        pair = Coded(codes[..., :code_len], scales[..., :scale_len])
        keys = key_codec.decode(*pair, self.dtype, added=self._predicted_keys(below))
        if value_codec is None:
            return Rows(start, keys, keys[..., :0])
        pair = Coded(codes[..., code_len:], scales[..., scale_len:])
        prediction = self._predicted_values(keys, below)
        return Rows(start, keys, value_codec.decode(*pair, self.dtype, added=prediction))

    def _predicted_keys(self, below: Rows | None) -> torch.Tensor | None:
        if self.predictors is None or self.predictors.key is None:
            return None
        return self.predictors.key(None if below is None else below.keys)

    def _predicted_values(self, keys: torch.Tensor, below: Rows | None) -> torch.Tensor | None:
        if self.predictors is None or self.predictors.value is None:
            return None
        inputs = None if below is None else torch.cat([keys, below.values], dim=-1)
        return self.predictors.value(inputs)


def joined(x: torch.Tensor) -> torch.Tensor:
    """``[B, n, H * D]``, the heads of each token side by side, of ``[B, H, n, D]``."""
    return x.transpose(1, 2).flatten(2)


def split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, H, n, D]``, a view of ``[B, n, H * D]``."""
    return rows.unflatten(2, (heads, -1)).transpose(1, 2)


def _codec(
    plan: LayerPlan, bits: int, width: int, learned_group: int | None, device: torch.device
) -> HiggsCodec | None:
    """The codec of rows of ``width`` numbers; None where they are kept as they are, or empty.

    Raises:
        ValueError: a width that groups don't fit.
    """
    if bits == NOT_CODED or not width:
        return None
    group = default_group(width, plan.options.group or learned_group)
    seed = 0 if plan.artifact is None else learned_options(plan.artifact).seed
    return make_codec(bits, group, seed, device)
