"""Token sequences to learn from: texts, random UUIDs, the needle language."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.lab.evaluate.needles import NeedleLanguage
from hf_kvret.lab.evaluate.texts import token_ids

# Tokens of a needle document for each needle in it, and of the shortest document.
_NEEDLE_EVERY = 64


def random_uuids(count: int, tokenizer: PreTrainedTokenizerBase, seed: int) -> torch.Tensor:
    """At least ``count`` token ids of random UUIDs, one per line: unpredictable text."""
    draw = random.Random(seed)
    # Some tokenizers merge two or three digits; none makes fewer than eight tokens of a UUID.
    lines = (str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(count // 8 + 1))
    return token_ids(tokenizer, "\n".join(lines))


def needle_documents(count: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Documents of the bundled model's language, with questions and answers at their end.

    ``count`` tokens in all, at most ``length`` in each, in almost equal parts.

    Raises:
        ValueError: documents too short for a needle.
    """
    language, rng = NeedleLanguage(), np.random.default_rng(seed)
    for part in np.array_split(np.arange(count), -(-count // length)):
        size = len(part)
        if size < _NEEDLE_EVERY:
            raise ValueError(
                f"documents of {size} tokens are too short for needles: give --tokens and --length "
                f"of at least {2 * _NEEDLE_EVERY}"
            )
        keys, values = language.pairs(rng, size // _NEEDLE_EVERY)
        questions = language.questions(keys[: max(1, len(keys) // 4)])
        tail = np.concatenate([questions, values[: len(questions)]], axis=1).ravel()
        document, _ = language.document(rng, size - len(tail), keys, values)
        yield torch.from_numpy(np.concatenate([document, tail]))


def cut(ids: torch.Tensor, length: int, count: int, option: str) -> list[torch.Tensor]:
    """The first ``count`` tokens in sequences of at most ``length``, almost equal in size.

    Raises:
        ValueError: there are fewer; the message names the ``option`` that asked for them.
    """
    if len(ids) < count:
        raise ValueError(
            f"{option} {count}: the text has {len(ids)} tokens; give more text, or a smaller number"
        )
    return list(ids[:count].tensor_split(-(-count // length)))
