"""Options that several commands have, each a field for a dataclass (see ``options.option``)."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

import torch

from hf_kvret.lab.program import arguments
from hf_kvret.lab.program.options import option
from hf_kvret.stores import DISK, store_names

# A store in files needs a folder, so it is named with its cache.
_STORES = [name for name in store_names().split(", ") if name != DISK]


def budget_option(usual: int | float = 256) -> Any:
    """``--top-k`` of retrieval caches that name none."""
    return option(usual, "of retrieval caches: a count, or a share as 0.04", kind=arguments.budget)


def store_option() -> Any:
    """``--store`` of retrieval caches that name none."""
    return option("device", "of caches that have it", choices=_STORES)


def dtype_option(usual: str = "float32") -> Any:
    """``--dtype``, a name of ``arguments.DTYPES``."""
    return option(usual, "of the model", choices=arguments.DTYPES)


def device_option() -> Any:
    """``--device``; ``arguments.check_device`` says whether it is there."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    return option(usual, "cpu, cuda, or one of several as cuda:1", kind=arguments.device_name)


def device_map_option() -> Any:
    """``--device-map``, over which devices a model is spread."""
    return option(
        None,
        "auto: spread a model that is too large for one device over all of them, over the host's "
        "memory and the disk (takes accelerate)",
        choices=("auto",),
    )


def seed_option(usual: int = 42) -> Any:
    """``--seed``, what random numbers begin with."""
    return option(usual, "of all random numbers", kind=arguments.seed)


def context_option(usual: tuple[int, ...], of: str) -> Any:
    """``--context``, numbers of tokens."""
    return option(usual, of, kind=arguments.lengths)


def text_option(of: str = "contexts are cut from it", *, required: bool = True) -> Any:
    """``--text``, a file."""
    usual = MISSING if required else None
    return option(usual, of, kind=arguments.file_path, metavar="FILE")


def count_option(usual: int, of: str) -> Any:
    """A whole number from 1."""
    return option(usual, of, kind=arguments.whole_number(1))


def batch_option(usual: tuple[int, ...] = (1,)) -> Any:
    """``--batch``, numbers of sequences."""
    return option(usual, "as 1,8", kind=arguments.lengths)


def threads_option(usual: int | None, of: str) -> Any:
    """``--threads``, at most the processors of this process."""
    return option(usual, of, kind=arguments.whole_number(1, arguments.processors()))


def limit_option(usual: float, of: str) -> Any:
    """``--limit`` in seconds."""
    return option(usual, of, kind=arguments.number(0), metavar="SECONDS")


def questions_option() -> Any:
    """``--questions``, a tuple of "inside" and "after"."""
    return option(
        ("inside",),
        "read with the text, or fed after it",
        kind=arguments.one_or_both("inside", "after"),
        metavar="{inside,after,both}",
    )


def essays_option() -> Any:
    """``--essays``, a file to make haystacks of."""
    return option(
        None,
        "haystack: plain text or a JSON list of texts; RULER's noise without it",
        kind=arguments.file_path,
        metavar="FILE",
    )


def answer_tokens_option() -> Any:
    """``--answer-tokens``."""
    return count_option(32, "most tokens of an answer in text")
