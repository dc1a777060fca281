"""Mean tokens: what stands for the cold tokens that a query does not select.

A mean token has the mean key and the mean value of a set of tokens, and the weight of as many of
them as are left out: its logit is ``score(q, mean key) + log(n - k)``, with ``n`` tokens in the
set, ``k`` of them selected. Dimensions: B batch, Hq query heads, Hkv KV heads, H heads that select,
Q queries, K ids, R mean tokens of a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_kvret_kernels._dispatch import (
    check_no_grad,
    check_softcap,
    check_tensor,
    choose_backend,
    launching_on,
)
from hf_kvret_kernels.mean_tokens import naive
from hf_kvret_kernels.merge import Partials

__all__ = ["BlockMeans", "MeanTokens", "mean_logits"]


@dataclass(frozen=True, eq=False)
class BlockMeans:
    """Means of R sets of a KV head's tokens.

    Attributes:
        keys: ``[B, Hkv, R, Dk]`` fp32, contiguous.
        values: ``[B, Hkv, R, Dv]`` fp32, contiguous.
        counts: ``[B, R]`` int32, contiguous: tokens of each set. Means of none are finite.
        block_len: set r is of the tokens ``r * block_len .. (r + 1) * block_len``; 0: there is one,
            of all of them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    block_len: int = 0

    def check(self, query: torch.Tensor, value_dim: int | None = None) -> None:
        """ValueError where they are not for ``query [B, Hq, Q, Dk]``, or not of ``value_dim``."""
        batch, dim = len(query), query.shape[3]
        heads, tokens = self.keys.shape[1:3]
        value_dim = self.values.shape[-1] if value_dim is None else value_dim
        wanted = {
            "keys": (self.keys, torch.float32, (batch, heads, tokens, dim)),
            "values": (self.values, torch.float32, (batch, heads, tokens, value_dim)),
            "counts": (self.counts, torch.int32, (batch, tokens)),
        }
        for name, (tensor, dtype, shape) in wanted.items():
            check_tensor(f"mean tokens' {name}", tensor, shape, (dtype,), query.device)
            if not tensor.is_contiguous():
                raise ValueError(f"mean tokens' {name} are strided: pass contiguous ones")
        if self.block_len < 0 or (self.block_len == 0 and tokens != 1):
            raise ValueError(
                f"block_len={self.block_len} with {tokens} mean tokens of a head: say how many "
                "tokens each of them stands for"
            )


class MeanTokens(NamedTuple):
    """Tokens that join a softmax.

    Attributes:
        logits: ``[B, Hq, Q, R]`` fp32, -inf for none.
        values: ``[B, Hkv, R, Dv]`` fp32, finite.
    """

    logits: torch.Tensor
    values: torch.Tensor

    def partials(self) -> Partials:
        """Attention to them, each as a chunk of one token."""
        group = self.logits.shape[1] // self.values.shape[1]
        outs = self.values.repeat_interleave(group, dim=1).unsqueeze(2)
        return Partials(outs.expand(*self.logits.shape, outs.shape[-1]), self.logits)


def mean_logits(
    query: torch.Tensor,
    means: BlockMeans,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Logits ``[B, Hq, Q, R]`` fp32 of the mean tokens of each query.

    ``scale * q . mean key``, capped as keys are, and then ``log(n - k)``: -inf where all tokens of
    a set are selected.

    Args:
        query: ``[B, Hq, Q, Dk]``, fp32, fp16 or bf16, contiguous in the last dimension.
        means: of the query's device.
        ids: ``[B, H, Q, K]`` int32 selected tokens, -1 for none, distinct otherwise; H is Hkv or a
            multiple of it that divides Hq.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(score / c)``, or None.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend, gradients.
        ImportError: ``"triton"`` without Triton.
    """
    check_no_grad(query=query)
    check_softcap(softcap)
    means.check(query)
    _check_ids(ids, query, means.keys.shape[1])
    arguments = query, means, ids, scale, softcap
    if choose_backend(backend, query) == "naive":
        return naive.mean_logits(*arguments)
    from hf_kvret_kernels.mean_tokens import triton

    with launching_on(query):
        return triton.mean_logits(*arguments)


def _check_ids(ids: torch.Tensor, query: torch.Tensor, heads: int) -> None:
    batch, query_heads, queries, _ = query.shape
    check_tensor("ids", ids, (batch, None, queries, None), (torch.int32,), query.device)
    if not ids.shape[1] or ids.shape[1] % heads or query_heads % ids.shape[1]:
        raise ValueError(
            f"ids {tuple(ids.shape)} for queries {tuple(query.shape)} and {heads} KV heads: pass "
            f"[{batch}, H, {queries}, K], H {heads} or a multiple that divides {query_heads}"
        )
