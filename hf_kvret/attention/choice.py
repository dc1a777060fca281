"""What a model's own indexer chose for its queries, in whichever way it tells its attention.

Most pass the tokens' indices (DeepSeek-V3.2), one those of blocks (MiniMax-M3), one restricts its
mask (Qwen4), and one passes indices in its place (GLM-5.3-Flash, patched).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_kvret.attention.masks import mask_info
from hf_kvret_model_patches.pooled_choice import mask_of_choice

CHOICES = ("indices", "block_indices")
"""Keywords by which models pass a choice."""

# Marks of tokens that are counted at once.
_ELEMENTS = 1 << 22


def chosen_tokens(
    module: Any, mask: torch.Tensor | None, keywords: Mapping[str, Any]
) -> torch.Tensor | None:
    """``[B, Hkv or 1, Q, K]`` int64 tokens by query, -1 for none; None: nothing was chosen.

    Args:
        module: the attention of a layer.
        mask: what the model passed as its mask.
        keywords: what it passed beside.

    Raises:
        ValueError: blocks of a batch that begins with padding.
    """
    info = mask_info(mask)
    if (passed := passed_choice(module, keywords)) is not None:
        if keywords.get("block_indices") is not None and info is not None and info.starts_padded:
            raise ValueError(
                "this model counts its blocks from the first token index, and its queries' blocks "
                "from the first token, so behind padding it chooses others, or none: give it "
                "prompts of one length, or one at a time"
            )
        return passed
    if mask is not None and mask_of_choice(mask) is not None:
        return _without_repeats(mask.long())[:, None]
    return None if info is None or info.chosen is None else _marked(info.chosen)


def passed_choice(module: Any, keywords: Mapping[str, Any]) -> torch.Tensor | None:
    """As ``chosen_tokens``, of a choice among ``keywords``."""
    indices, blocks = (keywords.get(name) for name in CHOICES)
    if indices is not None:
        return indices.long()[:, None]
    if blocks is None:
        return None
    size = module.indexer.block_size
    tokens = blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)
    return tokens.masked_fill(blocks.unsqueeze(-1) < 0, -1).flatten(-2)


def _without_repeats(ids: torch.Tensor) -> torch.Tensor:
    """``ids [B, Q, K]`` in order, -1 in place of those that come again.

    Behind padding in the middle of a text the tail of GLM-5.3-Flash has tokens of its pools.
    """
    ids = ids.sort(-1).values
    repeats = ids[..., 1:] == ids[..., :-1]
    return ids.masked_fill(torch.nn.functional.pad(repeats, (1, 0)), -1)


def _marked(marks: torch.Tensor) -> torch.Tensor:
    """The places that are True along the last dim of ``marks [B, H, Q, T]``, some queries a time.

    Waits for the device.
    """
    most, total = int(marks.sum(-1).max()), marks.shape[-1]
    places = torch.arange(total, device=marks.device)
    step = max(1, _ELEMENTS // (marks[:, :, :1].numel()))
    parts = []
    for some in marks.split(step, dim=2):
        column = (some.cumsum(-1) - 1).masked_fill_(~some, most)
        part = torch.full((*some.shape[:3], most + 1), -1, device=marks.device)
        parts.append(part.scatter_(-1, column, places.expand_as(some))[..., :most])
    return torch.cat(parts, dim=2)
