"""What a model says without any cache, and with one of 8 tokens."""

from functools import partial
from typing import Any

import torch

from hf_kvret import FlatKVCache
from hf_kvret.lab.evaluate.subject import Subject


def greedy(model: Any, tokens: torch.Tensor, count: int) -> list[int]:
    """``count`` best tokens after ``tokens [n]``, each of a pass over all before it."""
    answer: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            text = torch.cat([tokens, torch.tensor(answer, dtype=torch.long)])
            logits = model(text[None], use_cache=False).logits[0, -1]
            answer.append(int(logits.argmax()))
    return answer


def flat_logits(
    subject: Subject, context: torch.Tensor, count: int, forced: list[int] | None = None
) -> torch.Tensor:
    """``[count, vocab]`` of flat with 8 tokens, fed ``forced`` or, after its first, its own."""
    cache = FlatKVCache(subject.model.config, top_k=8, dense_below=0, recent=16, flush=16)
    feed = partial(subject.model, past_key_values=cache)
    rows = []
    with torch.inference_mode():
        logits = feed(context[None]).logits[0, -1]
        for step in range(count):
            last = forced[step] if forced else int(logits.argmax())
            logits = feed(torch.tensor([[last]])).logits[0, -1]
            rows.append(logits)
    return torch.stack(rows)
