"""What a cache was filled by and with, beside its tensors in a saved cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from hf_kvret.core.token_record import TokenRecord
from hf_kvret.integration.identity import CacheIdentity

if TYPE_CHECKING:
    from hf_kvret.cache import RetrievalCache

_log = logging.getLogger(__name__)


def saved_origin(cache: RetrievalCache) -> dict[str, Any]:
    """``identity`` (of the model) and ``tokens``, each a dict of plain JSON or None.

    Values may be tensors, at any depth of dicts; they are saved beside those of the cache.
    """
    return {
        "identity": None if cache.identity is None else cache.identity.to_json(),
        "tokens": cache.tokens.to_json(cache.get_seq_length()),
    }


def restore_origin(
    cache: RetrievalCache, description: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Give ``cache`` the ``identity`` and ``tokens`` that ``saved_origin`` gave.

    Logs a warning of what will not be compared because it was not saved.

    Args:
        cache: restored but for these.
        description: ``cache.json`` of format 2, with ``identity`` and ``tokens``, tensors left out.
        tensors: those of both, named ``identity.<path>`` and ``tokens.<path>``, a path being keys
            with dots between them.

    Raises:
        ValueError: they are not what ``saved_origin`` makes.
    """
    identity, tokens = description.get("identity"), description.get("tokens")
    length = cache.get_seq_length()
    try:
        cache.identity = None if identity is None else CacheIdentity.from_json(identity)
        if tokens is not None:
            parts = {name: tensors[f"tokens.{name}"] for name in ("ids", "chain")}
            cache.tokens = TokenRecord.from_json(tokens, parts)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"what the saved cache was filled by and with is damaged ({error}): save it again"
        ) from error
    if tokens is not None:
        shape, ids = [cache.retrieval_layers[0].batch_size, length], parts["ids"]
        if list(ids.shape) != shape:
            raise ValueError(
                f"the saved cache holds tokens of shape {shape}, and ids of {list(ids.shape)}: it "
                "is damaged; save it again"
            )
    if length:
        unknown = cache.tokens.unknown(length)
        _tell(identity is None, unknown, length)
        if unknown:
            # `generate` need not say it again.
            cache.tokens.warn_once("unknown")


def _tell(no_model: bool, unknown: int, length: int) -> None:
    """Log what of a loaded cache can't be compared."""
    if no_model:
        _log.warning(
            "the saved cache does not say which model filled it, so no model is compared with it: "
            "a wrong one gives wrong tokens. Save it with save_pretrained(..., model=model)"
        )
    if unknown:
        _log.warning(
            "the saved cache does not say the ids of %d of its %d tokens (given as embeddings, by "
            "hand, or saved by an older version), so no prompt is compared with these",
            unknown,
            length,
        )
