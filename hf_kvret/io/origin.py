"""What a cache was filled by and with, beside its tensors in a saved cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hf_kvret.cache import RetrievalCache


def saved_origin(cache: RetrievalCache) -> dict[str, Any]:
    """``identity`` (of the model) and ``tokens``, each a dict of plain JSON or None.

    Values may be tensors, at any depth of dicts; they are saved beside those of the cache.
    """
    del cache
    return {"identity": None, "tokens": None}


def restore_origin(
    cache: RetrievalCache, description: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Give ``cache`` the ``identity`` and ``tokens`` that ``saved_origin`` gave.

    Args:
        cache: restored but for these.
        description: ``cache.json`` of format 2, with ``identity`` and ``tokens``, tensors left out.
        tensors: those of both, named ``identity.<path>`` and ``tokens.<path>``, a path being keys
            with dots between them.

    Raises:
        ValueError: they are not what ``saved_origin`` makes.
    """
    del cache, description, tensors
