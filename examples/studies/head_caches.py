"""Caches whose query heads select together, and how far their logits are from full attention's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from shared_heads import Selections, measured
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.core.index import ColdTokens
from hf_kvret.core.recall import exact_scores
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.following import Kept, full_logits
from hf_kvret.evaluation.reader import Reader
from hf_kvret.evaluation.subject import Subject

Search = Callable[[torch.Tensor, ColdTokens], torch.Tensor]
_expected = Kept(most=8)


def noting(search: Search, heads: int, found: list[Selections]) -> Search:
    """A search that appends to ``found`` what it selects for the ``heads`` of one KV head.

    It is for batches of one. Groups that select apart come to it as more queries, see
    ``core.head_groups``.
    """

    def search_and_note(query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        ids = search(query, cold)
        groups = -(-heads // query.shape[1])
        scores = torch.cat(
            [
                exact_scores(query, keys, cold.scale, cold.softcap)
                for _, keys in cold.store.key_chunks()
            ],
            dim=-1,
        ).masked_fill(~cold.valid[:, None, None], float("-inf"))
        apart = scores[0].unflatten(1, (-1, groups)).permute(2, 0, 1, 3).flatten(0, 1)[:heads]
        chosen = ids[0].unflatten(1, (-1, groups)).permute(2, 0, 1, 3).flatten(0, 1)
        count = scores.shape[-1]
        marks = torch.zeros(*chosen.shape[:2], count + 1, dtype=torch.bool)
        marks.scatter_(-1, chosen.long().masked_fill(chosen < 0, count), True)
        found.append(Selections.of_marks(apart.softmax(-1), marks[..., :-1], query.shape[1]))
        return ids

    return search_and_note


def read_contexts(
    subject: Subject, choice: CacheChoice, windows: Sequence[torch.Tensor], length: int
) -> list[Reader]:
    """For each of the windows ``[n]`` a reader of its first ``length`` tokens, in one pass."""
    readers = []
    for window in windows:
        readers.append(Reader(subject.model, choice, len(window)))
        readers[-1].prefill(window[:length])
    return readers


def follow_all(
    readers: Sequence[Reader], windows: Sequence[torch.Tensor], step: int, **changes: Any
) -> dict[str, Any]:
    """Go on from contexts to the ends of their windows; means as plain JSON values.

    ``kl`` is the divergence of the next token's distribution from full attention's, in nats,
    ``equal`` the share of places with the same best token, ``loss`` and ``full_loss`` the losses of
    the text's own next tokens; the rest as of ``measured``.

    Args:
        readers: of ``read_contexts``; they stay where they are.
        windows: ``[n]`` int64 each.
        step: tokens of a pass.
        changes: options of the cache from there on.

    Raises:
        ValueError: nothing was cold.
    """
    layers: dict[int, list[Selections]] = {}
    numbers: list[dict[str, float]] = []
    for start, window in zip(readers, windows, strict=True):
        start.check_step(step)
        reader, rest = start.fork(**changes), window[start.length :]
        heads = reader.model.config.get_text_config(decoder=True).num_attention_heads
        cache = reader.cache
        assert isinstance(cache, RetrievalCache)
        for number, layer in enumerate(cache.retrieval_layers):
            index = layer.regions and layer.regions.index
            assert index is not None
            found = layers.setdefault(number, [])
            index.search = noting(index.search, heads, found)  # type: ignore[method-assign]
        pieces = tqdm(rest.split(step), leave=False, desc=reader.choice.name, mininterval=1)
        logits = torch.cat([reader.feed(piece, keep=len(piece)) for piece in pieces])
        expected = expected_of(reader.model, window, start.length)
        numbers.append(_distance(logits, expected, rest))
    if not all(layers.values()):
        raise ValueError(
            "nothing was cold: take a longer --context, or flat:dense_below=0:recent=64"
        )
    means = {name: fmean(one[name] for one in numbers) for name in numbers[0]}
    return means | measured([Selections.mean(found) for found in layers.values()])


def expected_of(model: PreTrainedModel, window: torch.Tensor, length: int) -> torch.Tensor:
    """Log-probabilities ``[n, vocab]`` of full attention after ``window[length:]``."""

    def make() -> torch.Tensor:
        return full_logits(model, window, length).log_softmax(-1)

    return _expected.get(model, (tuple(window.tolist()), length), make)


def _distance(
    logits: torch.Tensor, expected: torch.Tensor, tokens: torch.Tensor
) -> dict[str, float]:
    """See ``follow_all``; ``logits [n, vocab]`` and ``expected`` are those after ``tokens [n]``."""
    given, after = logits.float().log_softmax(-1), tokens[1:, None]
    return {
        "kl": float((expected.exp() * (expected - given)).sum(-1).mean()),
        "equal": float((given.argmax(-1) == expected.argmax(-1)).double().mean()),
        "loss": float(-given[:-1].gather(-1, after).mean()),
        "full_loss": float(-expected[:-1].gather(-1, after).mean()),
    }
