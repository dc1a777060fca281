"""Exact attention over all tokens of a layer, the cold ones chunk by chunk.

By the package flash-attn (Dao 2023), where it is installed and fits.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch
from packaging.version import Version
from torch.nn.functional import pad

from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.contracts.store import AttentionResult, Store, all_of
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.stores.chunks import chunk_len
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import PREFERRED
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.merge import merge_partials
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.prompt_attention import prompt_attention

_log = logging.getLogger(__name__)
# Up to so many queries each row is used less often than it takes to copy it: drafts and their pass.
_FEW = 64


def merge(
    parts: Sequence[AttentionResult],
    sink_logits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionResult:
    """``out [B, Hq, Q, Dv]`` in ``dtype`` and ``lse [B, Hq, Q]`` fp32 over all tokens of ``parts``.

    Sums are fp32. Where no part has a token, out is 0 and lse is -inf.

    Args:
        parts: at least one pair; all have the same shapes, but a set in S chunks is
            ``[B, Hq, Q, S, Dv]`` and ``[B, Hq, Q, S]``. A set without tokens has lse -inf.
        sink_logits: ``[Hq]`` attention sink logits (GPT-OSS). Each is a token without a value
            whose logit joins the softmax. None for models that have none.
        dtype: of the merged ``out``.
    """
    outs, lses = zip(*parts, strict=True)
    return merge_partials(outs, lses, sink_logits=sink_logits, out_dtype=dtype)


def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    causal_offset: int | None = None,
) -> AttentionResult:
    """Attention over dense ``keys`` and ``values [B, Hkv, n, D]``, which ``scoring.valid`` covers.

    ``causal_offset`` as of ``prompt_attention``.
    """
    return prompt_attention(
        query,
        keys,
        values,
        scale=scoring.scale,
        causal_offset=causal_offset,
        valid=scoring.valid,
        softcap=scoring.softcap,
        out_dtype=torch.float32,
    )


def attend_cold(query: torch.Tensor, cold: ColdTokens, length: int) -> AttentionResult:
    """Attention of ``query [B, Hq, Q, Dk]`` over all ``cold`` tokens, ``length`` at a time.

    Raises:
        RuntimeError: the store does not give all of them.
    """
    total = None
    for start, keys, values in all_of(cold.store, cold.store.chunks(length)):
        valid = cold.valid[:, start : start + keys.shape[2]]
        part = attend_dense(query, keys, values, cold.scoring.of(valid))
        # Not held while the next chunk is made.
        del keys, values
        total = part if total is None else merge([total, part])
    assert total is not None, "cold tokens are at least one"
    return total


def attend_exactly(
    kv: LayerKV,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past: int,
    call: AttentionCall,
) -> torch.Tensor:
    """Attention of new tokens to all before slot ``past`` and, causally, to each other.

    ``key`` and ``value [B, Hkv, n, D]`` are those of the new tokens, ``query [B, Hq, Q, Dk]`` of
    the newest.
    Returns ``[B, Hq, Q, Dv]`` fp32, of parts in the query's dtype where flash-attn fits.

    Raises:
        RuntimeError: the store does not give all of its tokens.
    """
    scoring, window, store = call.scoring, kv.window, kv.store
    valid = scoring.valid
    # Sinks are in the window, and exact there whatever the store does to its rows.
    cold_valid = None if store is None else kv.retrievable(valid)
    # Requested first: a store that reads over the bus starts now, behind the work below.
    length = chunk_len(query.shape[2], key, call.heads.expanded_elements(key, value))
    # Other queries than those that are compared with rows attend to what rows are expanded to.
    expands = call.heads.makes_rows or fits(query, key, value)
    in_place = store if store and not expands and _is_read_in_place(store, query) else None
    in_chunks = store if in_place is None else None
    chunks = () if in_chunks is None else all_of(in_chunks, in_chunks.chunks(length, past), past)
    new_valid = None if valid is None else valid[:, past:]
    new = call.heads.expand(key, value)
    attend = attend_flash if fits(query, *new) else attend_dense
    older = key.shape[2] - query.shape[2]
    total = attend(query, *new, scoring.of(new_valid), causal_offset=older)
    del new
    near_keys, near_values = window.tokens()
    near_valid = window.validity(valid, past)
    # Made of all tokens at once, keys and values would outgrow any chunk.
    step = length if call.heads.makes_rows else max(1, near_keys.shape[2])
    for start in range(0, near_keys.shape[2], step):
        some = slice(start, start + step)
        near = call.heads.expand(near_keys[:, :, some], near_values[:, :, some])
        some_valid = None if near_valid is None else near_valid[:, some]
        total = merge([total, attend(query, *near, scoring.of(some_valid))])
        del near
    for start, keys, values in chunks:
        # Some stores also yield the new tokens, in the form in which they are stored.
        count = min(keys.shape[2], past - start)
        if count > 0:
            old_valid = None if cold_valid is None else cold_valid[:, start : start + count]
            old = call.heads.expand(keys[:, :, :count], values[:, :, :count])
            part = attend(query, *old, scoring.of(old_valid))
            # Not held while the next chunk is made.
            del keys, values, old
            total = merge([total, part])
            del part
    if in_place is not None:
        total = merge([total, _attend_in_place(in_place, query, scoring.of(cold_valid), past)])
    if call.sink_logits is not None:
        total = merge([total], call.sink_logits)
    return total[0].float()


def _is_read_in_place(store: Store, query: torch.Tensor) -> bool:
    """Whether the CPU library reads all rows once for all queries, without a copy of them."""
    if not query.is_cpu or query.shape[2] > _FEW or PREFERRED.get() is not None:
        return False
    return isinstance(store.host_rows(), PagedRows) and host_step.library() is not None


def _attend_in_place(
    store: Store, query: torch.Tensor, scoring: Scoring, past: int
) -> AttentionResult:
    """Attention of ``query [B, Hq, Q, Dk]`` to the tokens of ``store`` before ``past``.

    To the library its queries are heads that share a selection, so each row is read once.
    """
    rows, count = store.host_rows(), min(len(store), past)
    assert isinstance(rows, PagedRows), "see _is_read_in_place"
    batch, heads, queries, _ = query.shape
    ids = torch.arange(count, dtype=torch.int32).expand(batch, count)
    if scoring.valid is not None:
        ids = ids.masked_fill(~scoring.valid[:, :count], -1)
    ids = ids[:, None, None].expand(-1, rows.heads, -1, -1).contiguous()
    together = query.reshape(batch, heads * queries, 1, -1)
    out, lse = gather_attention(together, rows, ids, scale=scoring.scale, softcap=scoring.softcap)
    return out.reshape(batch, heads, queries, -1), lse.reshape(batch, heads, queries)


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
