"""What a model says without any cache."""

from __future__ import annotations

from typing import Any

import torch


def greedy(model: Any, tokens: torch.Tensor, count: int) -> list[int]:
    """``count`` best tokens after ``tokens [n]``, each of a pass over all before it."""
    answer: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            text = torch.cat([tokens, torch.tensor(answer, dtype=torch.long)])
            logits = model(text[None], use_cache=False).logits[0, -1]
            answer.append(int(logits.argmax()))
    return answer
