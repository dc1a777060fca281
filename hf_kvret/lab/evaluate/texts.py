"""Texts and prompts by path, as token ids, and cut into contexts."""

from __future__ import annotations

import json
import random
import uuid
from hashlib import sha256
from pathlib import Path

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.lab.evaluate.subject import Subject


def read_text(path: Path) -> str:
    """The text of a file: plain, or JSON with a string, a list of strings, or ``text`` in them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, broken JSON, JSON without text, or nothing in it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give a text file")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix == ".json":
        try:
            content = "\n\n".join(_strings(json.loads(content)))
            content.encode()
        except (json.JSONDecodeError, RecursionError, UnicodeEncodeError) as error:
            raise ValueError(f"{path} is not JSON of text: {error}") from error
    if not content.strip():
        raise ValueError(f"{path} has no text in it")
    return content


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text, none added."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """BOS, where the tokenizer has one."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """``[n]`` int64 token ids of a text, with BOS in front where the tokenizer has one."""
    return torch.tensor([*first_tokens(tokenizer), *encode(tokenizer, text)], dtype=torch.long)


def text_windows(
    subject: Subject, task: str, text: Path, length: int, count: int
) -> list[torch.Tensor]:
    """At most ``count`` windows ``[length]`` of token ids from the start of the text.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no tokenizer, no text, or too little of it for one window.
    """
    ids = token_ids(subject.need_tokenizer(task), read_text(text))
    count = min(count, len(ids) // length)
    if not count:
        raise ValueError(
            f"{text} has {len(ids)} tokens, fewer than the {length} of a window: give a shorter "
            "--context, fewer new tokens or a longer text"
        )
    return list(ids[: count * length].view(count, length))


def random_uuids(count: int, tokenizer: PreTrainedTokenizerBase, seed: int) -> torch.Tensor:
    """At least ``count`` token ids of random UUIDs, one per line: unpredictable text."""
    draw = random.Random(seed)
    # Some tokenizers merge two or three digits; none makes fewer than eight tokens of a UUID.
    lines = (str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(count // 8 + 1))
    return token_ids(tokenizer, "\n".join(lines))


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


def describe_file(option: str, path: Path | None) -> str | None:
    """Name and fingerprint of a file for JSON, None for none; FileNotFoundError names the option.

    ``option`` is what the user gave the path to, as ``--text``.
    """
    if path is None:
        return None
    if not path.is_file():
        raise FileNotFoundError(f"{option} {path}: no such file")
    return f"{path.name} {sha256(path.read_bytes()).hexdigest()[:12]}"


def _strings(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [text for item in content for text in _strings(item)]
    if isinstance(content, dict):
        return _strings(content.get("text", []))
    return []
