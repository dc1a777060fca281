"""Exact attention by the package flash-attn (Dao 2023), where it is installed and fits."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from packaging.version import Version
from torch.nn.functional import pad

from hf_kvret.contracts.index import Scoring
from hf_kvret.contracts.store import AttentionResult

_log = logging.getLogger(__name__)


@functools.cache
def flash_attn() -> Any:
    """The functions of flash-attn 2.8 or newer; None where these can't be had."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        functions = importlib.import_module("flash_attn.flash_attn_interface")
        found = importlib.import_module("flash_attn").__version__
    except ImportError as error:
        _log.warning("flash_attn is installed, but can't be imported and is not used: %s", error)
        return None
    if Version(found) < Version("2.8"):
        _log.warning(
            "flash_attn %s is not used: pip install --no-build-isolation 'flash-attn>=2.8'", found
        )
        return None
    return functions


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether flash-attn serves these: 16 bits, one head dim, Ampere or newer, several queries."""
    dims, halves = {x.shape[3] for x in (query, key, value)}, (torch.float16, torch.bfloat16)
    # The varlen form wants as many queries as valid tokens; a single query has no such mask.
    if query.shape[2] == 1 or query.dtype not in halves or len(dims) > 1 or max(dims) > 256:
        return False
    ampere = query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return ampere and flash_attn() is not None


def attend_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    causal_offset: int | None = None,
) -> AttentionResult:
    """As ``attend_dense``, with ``out`` in the query's dtype; see ``fits``.

    ``causal_offset`` is None, or the number of keys less that of queries, which are the newest;
    those that are padding get 0 then. With ``scoring.valid`` valid tokens alone enter, which waits
    for the device.
    """
    causal, valid = causal_offset is not None, scoring.valid
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
    options = {"softmax_scale": scoring.scale, "softcap": scoring.softcap or 0.0, "causal": causal}
    if valid is None:
        out, lse, _ = flash_attn().flash_attn_func(q, k, v, **options, return_attn_probs=True)
    else:
        has_query = valid[:, -q.shape[1] :] if causal else valid.new_ones(q.shape[:2])
        starts = (pad(x.sum(1).cumsum(0), (1, 0)).int() for x in (has_query, valid))
        tokens = (q[has_query], k[valid], v[valid], *starts, q.shape[1], k.shape[1])
        varlen = flash_attn().flash_attn_varlen_func
        some, log, _ = varlen(*tokens, **options, return_attn_probs=True)
        out, lse = torch.zeros_like(q), log.new_full(q.shape[:3], float("-inf"))
        out[has_query], lse[has_query] = some, log.T
        lse = lse.transpose(1, 2)
    # Where a query sees no key, flash-attn says +inf.
    return out.transpose(1, 2), lse.masked_fill(lse == float("inf"), float("-inf"))
