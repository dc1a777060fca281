"""Whatever one setting of a configuration changes, no rows of another computation are taken."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_kvret.lab.coverage
from hf_kvret.lab.coverage.small import small_model
from hf_kvret.saved.identity import facts_of
from hf_kvret_model_patches.decoders import decoder_of
from transformers import DynamicCache, PreTrainedConfig

TRIALS = Path(hf_kvret.lab.coverage.__file__).with_name("trials.json")
SERVED = [
    name
    for name, trial in json.loads(TRIALS.read_text(encoding="utf-8"))["types"].items()
    if trial["outcome"] == "equal"
]
DEFAULT = ("granite", "qwen2_vl", "gemma4_text")


def settings(part: Any) -> Iterator[tuple[Any, Any, Any]]:
    """``(owner, name, value)`` of all scalars in a configuration, those of lists included."""
    items = enumerate(part) if isinstance(part, list) else dict(vars(part) if isinstance(part, PreTrainedConfig) else part).items()
    for name, value in items:
        if isinstance(value, PreTrainedConfig | dict | list):
            yield from settings(value)
        elif isinstance(value, bool | int | float | str):
            yield part, name, value


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + ("_" if isinstance(value, str) else 1)


def change(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, PreTrainedConfig):
        setattr(owner, name, value)
    else:
        owner[name] = value
