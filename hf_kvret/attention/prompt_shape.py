"""What a prompt and its mask must be like before a retrieval cache takes them."""

from __future__ import annotations

from typing import Any

import torch

_REMEDY = "give it at least a token (tokenizer.bos_token_id), or leave the row out of the batch"


def check_form(prompt: torch.Tensor | None, mask: Any, past_len: int = 0) -> None:
    """Refuse a prompt without tokens, and a mask of another shape. Reads no numbers.

    Args:
        prompt: ids ``[B, n]`` or embeddings ``[B, n, hidden]``; None: not known.
        mask: ``[B, n]`` or ``[B, past_len + n]``; None: all are tokens.
        past_len: tokens that the cache holds.

    Raises:
        TypeError: a mask that is no tensor.
        ValueError: no rows, no tokens, or another shape.
    """
    if prompt is not None and 0 in prompt.shape[:2]:
        raise ValueError(
            f"the prompt is of shape {list(prompt.shape)} and has no token: give each row at least "
            "one (tokenizer.bos_token_id), and at least one row"
        )
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(
            f"attention_mask is a {type(mask).__name__}: pass a tensor (tokenizer(..., "
            "return_tensors='pt'))"
        )
    shape = list(mask.shape)
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask is of shape {shape}: custom 4D masks and others are not supported; "
            "pass one of two dimensions, with a row for each row of the prompt and a column for "
            "every token"
        )
    if prompt is None:
        return
    rows, new_len = prompt.shape[:2]
    if shape not in ([rows, new_len], [rows, past_len + new_len]):
        raise ValueError(
            f"attention_mask is of shape {shape}, the prompt has {rows} rows of {new_len} tokens: "
            "pass one column for every token, past and new, and one row for each row"
        )


def check_rows(mask: torch.Tensor, past_len: int = 0) -> None:
    """Refuse rows that new tokens can't follow.

    Padding on the left and holes in the middle of a row are as good as none.

    Args:
        mask: ``[B, m]`` of any dtype, nonzero for tokens.
        past_len: how many of the m columns are of tokens that the cache holds.

    Raises:
        ValueError: a row without a token, padding on the right, a mask to be added to scores.
    """
    if mask.is_floating_point() and not bool((mask >= 0).all()):
        raise ValueError(
            "attention_mask has negative numbers or NaN, as one that is added to scores: pass 1 "
            "for tokens and 0 for padding"
        )
    valid = mask != 0
    ends = valid[:, -1]
    if bool(ends.all()):
        return
    empty = (~valid.any(dim=1)).nonzero()
    if len(empty):
        row = int(empty[0])
        raise ValueError(f"row {row} of the prompt has no token, only padding: {_REMEDY}")
    row = int((~ends).nonzero()[0])
    if past_len and not bool(valid[row, past_len:].any()):
        raise ValueError(
            f"row {row} of the prompt has no token behind those that the cache holds: {_REMEDY}"
        )
    raise ValueError(
        f"the prompt is padded on the right in row {row}: new tokens would follow padding. Pad on "
        "the left (tokenizer.padding_side = 'left')"
    )
