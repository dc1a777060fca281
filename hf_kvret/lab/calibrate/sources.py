"""Token sequences to learn from: texts, data sets of the hub, random UUIDs, the needle language."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.lab.evaluate.needles import NeedleLanguage
from hf_kvret.lab.evaluate.texts import token_ids

# Tokens of a needle document for each needle in it, and of the shortest document.
_NEEDLE_EVERY = 64


def dataset_loader(name: str) -> Callable[..., Iterable[dict[str, Any]]]:
    """``datasets.load_dataset``, for the data set ``name``.

    Raises:
        ModuleNotFoundError: ``datasets`` is not installed.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--dataset {name} needs datasets: pip install datasets, or give --text FILE"
        ) from error
    return load_dataset


def hub_text(name: str, count: int, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The first ``count`` token ids of a data set on the hub, streamed; its column ``text``.

    ``name`` may end in a configuration after a colon, as ``HuggingFaceFW/fineweb-edu:sample-10BT``.

    Raises:
        ModuleNotFoundError: ``datasets`` is not installed.
        OSError, ValueError: no such data set or configuration; no column ``text``; fewer tokens.
    """
    load_dataset = dataset_loader(name)
    repository, _, configuration = name.partition(":")
    rows = load_dataset(repository, configuration or None, split="train", streaming=True)
    ids: list[int] = []
    for row in rows:
        if "text" not in row:
            raise ValueError(f"--dataset {name} has columns {', '.join(row)}, but no 'text'")
        ids += token_ids(tokenizer, row["text"]).tolist()
        if len(ids) >= count:
            return torch.tensor(ids[:count])
    raise ValueError(
        f"--dataset {name} has {len(ids)} tokens, fewer than --tokens {count}: give another one, "
        "or a smaller number"
    )


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
