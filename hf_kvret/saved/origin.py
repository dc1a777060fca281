"""What a cache was filled by and with, beside its tensors in a saved cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

import torch
from transformers import PreTrainedConfig

from hf_kvret.layer.layer import LayerStack, RetrievalLayer
from hf_kvret.layer.model_state import ModelState
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.saved.identity import CacheIdentity
from hf_kvret.saved.token_record import UNKNOWN, InputDigest, TokenRecord

_log = logging.getLogger(__name__)


class FilledCache(Protocol):
    """What saving and loading know of a ``RetrievalCache``; see there."""

    name: ClassVar[str]
    Config: ClassVar[type[RetrievalConfig]]
    needs_artifact: ClassVar[bool]
    layers: list[Any]
    stack: LayerStack
    identity: CacheIdentity | None
    tokens: TokenRecord
    model_state: ModelState
    model_shape: dict[str, Any]
    saved_digests: dict[str, str]

    def __init__(self, config: PreTrainedConfig, options: RetrievalConfig) -> None: ...

    @property
    def retrieval_layers(self) -> list[RetrievalLayer]: ...

    def get_seq_length(self) -> int: ...

    def options_to_load(self) -> RetrievalConfig: ...


def saved_origin(cache: FilledCache) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """``identity`` (of the model) and ``tokens``, each plain JSON or None; their CPU tensors."""
    length = cache.get_seq_length()
    ids = cache.tokens.ids(length) if length else None
    plain = {
        "identity": None if cache.identity is None else asdict(cache.identity),
        "tokens": None if ids is None else {"passes": cache.tokens.passes},
    }
    return plain, {} if ids is None else {"tokens.ids": ids.cpu().contiguous()}


def restore_origin(
    cache: FilledCache,
    origin: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Give ``cache``, restored but for these, what ``saved_origin`` gave; ids on ``device``.

    A warning tells of a model that is not known; ValueError for what no save writes.
    """
    identity, tokens = origin["identity"], origin["tokens"]
    length = cache.get_seq_length()
    try:
        cache.identity = None if identity is None else CacheIdentity.from_json(identity)
        if tokens is not None and length:
            ids, shape = tensors["tokens.ids"], [cache.retrieval_layers[0].batch_size, length]
            if ids.dtype != torch.int32 or list(ids.shape) != shape or int(ids.min()) < UNKNOWN:
                raise ValueError(f"ids of {ids.dtype} {list(ids.shape)} for tokens of {shape}")
            cache.tokens.note(ids.to(device), 0)
            cache.tokens.passes = tuple(
                InputDigest(int(start), int(end), str(sha256))
                for start, end, sha256 in tokens["passes"]
            )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"what the saved cache was filled by and with is damaged ({error}): save it again"
        ) from error
    if length and identity is None:
        _log.warning(
            "the saved cache does not say which model filled it, so no model is compared with it: "
            "a wrong one gives wrong tokens. Save it with save_pretrained(..., model=model)"
        )
