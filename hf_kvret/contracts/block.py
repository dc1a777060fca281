"""TokenBlock: some consecutive tokens of one layer, on their way into store and index."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Numbers converted to fp32 at once: 4 MiB.
_NUMBERS = 1 << 20
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


UNKNOWN_POSITION = -(2**31)
"""Stands for the position of a token that a crop moved back to the window: the store has it."""


@dataclass(frozen=True)
class TokenBlock:
    """Tokens ``start .. start + len(block)`` of every sequence of the batch.

    Attributes:
        keys: ``[B, Hkv, n, Dk]`` post-RoPE, as the model passed them to the cache.
        values: ``[B, Hkv, n, Dv]``.
        value_in_key: Dv where values are the first numbers of keys, so that rows have no value of
            their own; else 0.
        start: token index of the first token.
        valid: ``[B, n]`` bool, False for padding and holes; None when all are valid.
        positions: ``[B, n]`` int32 RoPE positions of the tokens, ``UNKNOWN_POSITION`` for those
            that were in the store before; None unless the store needs positions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    valid: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    value_in_key: int = 0

    def __len__(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.keys.nbytes + (0 if self.value_in_key else self.values.nbytes)

    @property
    def end(self) -> int:
        """Token index after the last token."""
        return self.start + len(self)

    def mean_key(self) -> torch.Tensor:
        """``[B, Hkv, Dk]`` fp32 mean of the valid tokens' keys; 0 for none."""
        # In chunks: a prompt is never fp32 whole.
        batch, heads, _, dim = self.keys.shape
        total = self.keys.new_zeros(batch, heads, dim, dtype=torch.float32)
        step = max(1, _NUMBERS // max(1, batch * heads * dim))
        for start in range(0, len(self), step):
            part = slice(start, start + step)
            keys = self.keys[:, :, part]
            if self.valid is not None:
                keys = keys.masked_fill(~self.valid[:, None, part, None], 0.0)
            total += keys.sum(dim=2, dtype=torch.float32)
        if self.valid is None:
            return total / max(1, len(self))
        return total / self.valid.sum(1).clamp(min=1)[:, None, None]


def check_dtypes(**tensors: torch.Tensor) -> None:
    """ValueError unless all ``tensors``, by name, have one dtype that a cache can hold."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) == 1 and dtypes <= _DTYPES:
        return
    named = [f"{name} are {tensor.dtype}" for name, tensor in tensors.items()]
    form = ", ".join(named).replace("_", " ")
    if not dtypes <= _DTYPES:
        raise ValueError(
            f"{form}: a retrieval cache holds float32, bfloat16 or float16; convert the model with "
            "model.to(torch.float32)"
        )
    raise ValueError(
        f"{form}: a retrieval cache needs them in one dtype. Under torch.autocast a model of "
        "another dtype mixes them: leave autocast, and convert the model instead, as with "
        "model.to(torch.bfloat16)"
    )


def other_batch(held: int, new: int) -> str:
    """What is wrong with ``new`` sequences where ``held`` are in a cache; empty: nothing."""
    if held == new:
        return ""
    return (
        f"this cache holds a batch of {held}, the new tokens are a batch of {new}: use a new cache "
        "or reset(), or cache.batch_repeat_interleave(n)"
    )
