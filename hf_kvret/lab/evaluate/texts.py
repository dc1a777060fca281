"""Texts by path, and as token ids."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# Puts a prompt into a chat: what comes before it, and what after.
Chat = tuple[str, str]
_PLACE = "PUT THE PROMPT HERE"


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
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    if not content.strip():
        raise ValueError(f"{path} has no text in it")
    return content


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """``[n]`` int64 token ids of a text, with BOS in front where the tokenizer has one."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return torch.tensor([*first, *ids], dtype=torch.long)


def chat_parts(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """What the chat template puts before and after a user's message.

    The message is not given to the template itself, as some would strip its blanks.

    Raises:
        ValueError: the tokenizer has no chat template, or one that doesn't show the message as it
            is.
    """
    if not tokenizer.chat_template:
        raise ValueError("--chat: this tokenizer has no chat template, leave the option out")
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACE}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = shown.partition(_PLACE)
    if not found or _PLACE in after:
        raise ValueError("--chat: the chat template doesn't show a message once and as it is")
    bos = tokenizer.bos_token
    # BOS is put in front of all texts later.
    return (before.removeprefix(bos) if bos else before), after


def _strings(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [text for item in content for text in _strings(item)]
    if isinstance(content, dict):
        return _strings(content.get("text", []))
    return []
