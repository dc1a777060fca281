"""Contexts to measure on: pieces of a text, or prompts of a file."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import torch

from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.texts import read_text, token_ids


def text_windows(
    subject: Subject, task: str, text: Path, length: int, new: int, count: int, then: Path | None
) -> list[torch.Tensor]:
    """At most ``count`` windows ``[length + new]`` of token ids from the start of the text.

    With ``then``, the last ``new`` tokens of each come from that other text.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no tokenizer, no text, or too little of it for one window.
    """
    ids = _tokens(subject, task, text)
    if then is None:
        return _windows(ids, length + new, count, text)
    heads = _windows(ids, length, count, text)
    # The other text goes on, it does not begin: without its BOS.
    rest = _tokens(subject, task, then)
    bos = subject.need_tokenizer(task).bos_token_id
    tails = _windows(rest if bos is None else rest[1:], new, len(heads), then)
    return [torch.cat(pair) for pair in zip(heads, tails, strict=False)]


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a JSON list of strings, or one a line with empty lines left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, another JSON, or no prompt in it.
    """
    describe_file("--prompts", path)
    try:
        content = path.read_text(encoding="utf-8")
        found = json.loads(content) if path.suffix == ".json" else content.splitlines()
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--prompts {path}: {error}") from error
    if not isinstance(found, list) or not all(isinstance(prompt, str) for prompt in found):
        raise ValueError(f"--prompts {path}: give a JSON list of strings, or one prompt a line")
    prompts = [prompt for prompt in found if prompt.strip()]
    if not prompts:
        raise ValueError(f"--prompts {path} has no prompt in it")
    return prompts


def describe_file(option: str, path: Path | None) -> str | None:
    """Name and fingerprint of a file for JSON, None for none; FileNotFoundError names the option.

    ``option`` is what the user gave the path to, as ``--text``.
    """
    if path is None:
        return None
    if not path.is_file():
        raise FileNotFoundError(f"{option} {path}: no such file")
    return f"{path.name} {sha256(path.read_bytes()).hexdigest()[:12]}"


def _tokens(subject: Subject, task: str, path: Path) -> torch.Tensor:
    return token_ids(subject.need_tokenizer(task), read_text(path))


def _windows(ids: torch.Tensor, size: int, count: int, path: Path) -> list[torch.Tensor]:
    found = min(count, len(ids) // size)
    if not found:
        raise ValueError(
            f"{path} has {len(ids)} tokens, fewer than the {size} of a window: give a "
            "shorter --context, fewer new tokens or a longer text"
        )
    return list(ids[: found * size].view(found, size))
