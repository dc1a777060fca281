"""Contexts at different places of a text, each with what follows it there."""

from __future__ import annotations

import numpy as np
import torch

from hf_kvret.lab.calibrate.sources import needle_documents


def cut_windows(
    ids: torch.Tensor, context: int, new: int, count: int, *, bos: int | None, seed: int
) -> list[torch.Tensor]:
    """``count`` windows ``[context + new]`` int64, of which no two share a token of their last.

    Each is drawn from its own part of the text, in a random order, so that the first ones are not
    of its beginning. Contexts of a short text overlap.

    Args:
        ids: ``[n]`` int64 of the text, without BOS.
        context: tokens of a context, with BOS.
        new: tokens that follow it.
        bos: put in front of every window; None for none.
        seed: of places and order.

    Raises:
        ValueError: fewer than ``context + count * new`` tokens.
    """
    begun = [] if bos is None else [bos]
    size = context + new - len(begun)
    # A part ends where the last of its windows that leaves the next part's tokens alone begins.
    part = (len(ids) - size + new) / count
    if part < new:
        raise ValueError(
            f"--text has {len(ids):,} tokens, fewer than the {context:,} of --context and the "
            f"{count * new:,} of --tokens: give a longer text, a shorter context or fewer tokens"
        )
    rng = np.random.default_rng(seed)
    starts = [int(part * place + rng.random() * (part - new)) for place in range(count)]
    front = torch.tensor(begun, dtype=ids.dtype)
    return [torch.cat([front, ids[start : start + size]]) for start in rng.permutation(starts)]


def needle_windows(context: int, new: int, count: int, seed: int) -> list[torch.Tensor]:
    """``count`` documents ``[context + new]`` int64 of the bundled model's language.

    They end with questions and answers.

    Raises:
        ValueError: documents too short for a needle.
    """
    size = context + new
    return list(needle_documents(count * size, size, seed))
