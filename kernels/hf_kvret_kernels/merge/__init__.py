"""Attention over the union of disjoint token sets, from attention over each of them.

Attention over a set is a pair: ``out``, the softmax-weighted mean of the values, and ``lse``, the
natural log of the softmax's denominator. A kernel that shares a set among several programs gives it
in chunks, each the attention over some of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_kvret_kernels._dispatch import FLOATS, check_no_grad, check_tensor, run

__all__ = ["Partials", "merge_partials"]


def merge_partials(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    sink_logits: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out [B, Hq, Q, Dv]`` in ``out_dtype`` and ``lse [B, Hq, Q]`` fp32 of the union.

    Sums are fp32. Where every set is empty, out is 0 and lse -inf.

    Args:
        outs: one ``[B, Hq, Q, Dv]`` for each set, or ``[B, Hq, Q, S, Dv]`` of a set in S chunks,
            1 or more; fp32, fp16 or bf16, finite.
        lses: one ``[B, Hq, Q]`` or ``[B, Hq, Q, S]`` fp32 for each; -inf for an empty set or chunk.
        sink_logits: ``[Hq]`` floats, a learned token without value for each head whose logit
            joins the softmax (GPT-OSS); None for models without.
        out_dtype: fp32, fp16 or bf16.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: no set, shapes, dtypes or devices that do not fit, gradients.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"{len(outs)} outs and {len(lses)} lses: pass one of each for every set")
    first = outs[0]
    if first.ndim not in (4, 5):
        raise ValueError(
            f"outs[0] has shape {tuple(first.shape)}: pass [B, Hq, Q, Dv] or [B, Hq, Q, S, Dv]"
        )
    queries, width = first.shape[:3], first.shape[-1:]
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_no_grad(**{f"outs[{number}]": out, f"lses[{number}]": lse})
        splits = out.shape[3:4] if out.ndim == 5 else torch.Size()
        if splits == (0,):
            raise ValueError(f"outs[{number}] has shape {tuple(out.shape)}: pass a chunk or more")
        check_tensor(f"outs[{number}]", out, queries + splits + width, FLOATS, first.device)
        check_tensor(f"lses[{number}]", lse, queries + splits, (torch.float32,), first.device)
    if sink_logits is not None:
        check_no_grad(sink_logits=sink_logits)
        check_tensor("sink_logits", sink_logits, queries[1:2], FLOATS, first.device)
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype={out_dtype}: choose one of {FLOATS}")
    arguments = outs, lses, sink_logits, out_dtype
    return run(__name__, "merge_partials", backend, *arguments, on=first)


@dataclass(frozen=True, eq=False)
class Partials:
    """Attention of queries over a set of tokens in S chunks, not merged. Called, it is merged.

    Attributes:
        outs: ``[B, Hq, Q, S, Dv]`` fp32.
        lses: ``[B, Hq, Q, S]`` fp32; -inf for an empty chunk.
        tickets: ``[B, Hq, Q]`` int32, contiguous, zeros, for ``step_attention`` to count in, which
            leaves zeros again; None: it makes its own.
    """

    outs: torch.Tensor
    lses: torch.Tensor
    tickets: torch.Tensor | None = None

    @classmethod
    def whole(cls, out: torch.Tensor, lse: torch.Tensor) -> Partials:
        """A single chunk, of ``out [B, Hq, Q, Dv]`` and ``lse [B, Hq, Q]``."""
        return cls(out.unsqueeze(3), lse.unsqueeze(3))

    def __call__(self, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        """``(out [B, Hq, Q, Dv], lse [B, Hq, Q])`` fp32; ``backend`` as of ``merge_partials``."""
        if self.lses.shape[3] == 1:
            return self.outs.squeeze(3), self.lses.squeeze(3)
        return merge_partials([self.outs], [self.lses], backend=backend)
