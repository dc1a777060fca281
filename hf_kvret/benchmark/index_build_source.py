"""Where the keys of ``bench index-build`` come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hf_kvret.benchmark.index_build_keys import RECENT, LayerKeys, LayerShape, random_layer
from hf_kvret.benchmark.limits import available_host_memory
from hf_kvret.calibration.sources import needle_documents
from hf_kvret.compatibility import head_dim, model_layers
from hf_kvret.evaluation.lrqk_study import read_layers
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.texts import read_text, token_ids

# Tokens of a document of the needle model.
_DOCUMENT_LEN = 2048


@dataclass(frozen=True)
class Source:
    """Keys and queries of one layer, made when they are asked for.

    Attributes:
        shape: sizes of the layer.
        read: makes those of so many tokens.
        description: what identifies them, for JSON.
    """

    shape: LayerShape
    read: Callable[[int], LayerKeys]
    description: dict[str, Any]


def random_source(shape: LayerShape, dtype: torch.dtype, device: str, seed: int) -> Source:
    """Synthetic ones, see ``random_layer``."""
    place = torch.device(device)
    description = {"keys": "random", **vars(shape)}
    return Source(
        shape, lambda tokens: random_layer(shape, tokens, dtype, place, seed), description
    )


def model_source(
    subject: Subject, text: Path | None, layer: int | None, needed: int, seed: int = 0
) -> Source:
    """Those of a model's layer while it reads the beginning of a text; of all layers meanwhile.

    Args:
        text: of at least ``needed`` tokens; None for the model ``needle``, which has a language of
            its own and reads documents drawn with ``seed``.
        layer: None for the middle one.

    Raises:
        ValueError: no text or one that is too short, or a layer without full attention. ``read``
            raises it for more tokens than the model has positions for.
        FileNotFoundError: no such text.
    """
    ids, told = _model_tokens(subject, text, needed, seed)
    number = _layer_number(subject, layer)
    config = subject.model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    shape = LayerShape(kv_heads, heads // kv_heads, head_dim(subject.model.config))

    def read(tokens: int) -> LayerKeys:
        studies = read_layers(subject.model, ids[:tokens], last=1)
        (study,) = (study for study in studies if study.layer == number)
        queries, keys = (x[None].to(subject.model.dtype) for x in (study.queries, study.keys))
        return LayerKeys(queries, keys, study.scale, study.softcap)

    where = {"layer": number, **told, **vars(shape)}
    return Source(shape, read, {"keys": "model"} | subject.describe() | where)


def _model_tokens(
    subject: Subject, text: Path | None, needed: int, seed: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Token ids, and what they are, for JSON."""
    if subject.name == "needle":
        if text is not None:
            raise ValueError(
                "--model needle reads no text: leave --text out, and documents of its own language "
                "are read"
            )
        # Whole documents, so that a longer text begins as a shorter one does.
        count = -(-needed // _DOCUMENT_LEN) * _DOCUMENT_LEN
        ids = torch.cat(list(needle_documents(count, _DOCUMENT_LEN, seed)))
        return ids, {"text": "needle language"}
    tokenizer = subject.need_tokenizer("--keys model")
    if text is None:
        raise ValueError("--keys model reads a text: give --text FILE")
    ids = token_ids(tokenizer, read_text(text))
    if len(ids) < needed:
        raise ValueError(
            f"--text {text} has {len(ids)} tokens, the longest --context, {RECENT} recent ones and "
            f"--queries take {needed}: give a longer text, or a shorter --context"
        )
    return ids, {"text": text.name, "text_tokens": len(ids)}


def _layer_number(subject: Subject, layer: int | None) -> int:
    layers = enumerate(model_layers(subject.model.config))
    full = [number for number, one in layers if type(one) is DynamicLayer]
    if layer is not None and layer not in full:
        raise ValueError(
            f"--layer {layer}: layers of full attention in {subject.name} are "
            f"{', '.join(map(str, full))}"
        )
    return full[len(full) // 2] if layer is None else layer


def check_memory(shape: LayerShape, tokens: int, dtype: torch.dtype, device: str) -> None:
    """ValueError when host memory is short of what ``tokens`` take, as far as it can be foreseen.

    Keys and queries, on a CPU the store and its copy while it is filled; and, in fp32, the keys
    for faiss and in its index, or an index of ours.
    """
    row = tokens * shape.heads * shape.dim
    stored = 4 * row * dtype.itemsize if device == "cpu" else 0
    needed = (1 + shape.group) * row * dtype.itemsize + stored + 3 * row * 4
    free = available_host_memory()
    if needed > free:
        raise ValueError(
            f"{tokens} tokens of {shape.heads} KV heads take {needed / 1e9:.1f} GB of host memory, "
            f"and {free / 1e9:.1f} GB are free: give a shorter --context, or fewer --heads or a "
            "smaller --group"
        )
