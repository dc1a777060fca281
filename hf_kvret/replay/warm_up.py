"""Kernels are warmed up: the first decode step of a layer compiles what later steps will launch.

Triton compiles a kernel again where an argument that it is compiled for changes, which takes
seconds, and would break a capture. Some of these arguments follow the number of tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall
from hf_kvret_kernels._dispatch import Growth, Window, growing


def warming_up(
    layer: RetrievalLayer, query: torch.Tensor, call: AttentionCall
) -> AbstractContextManager[None]:
    """Context of ``layer.attend(query, ...)``: kernels are compiled for later steps, too.

    For those up to the length that was announced, or to twice as many tokens as there are where
    fewer were announced. Once for each shape of ``query [B, Hq, Q, *]`` and as many tokens; never
    within a capture, and not in a step that flushes, after which the next one does it.
    """
    kv = layer.kv
    if kv is None or not kv.cold_len or query.shape[2] > layer.config.max_draft:
        return nullcontext()
    length = kv.length + (query.shape[2] if layer.pending_attention else 0)
    lengths = kv.compiled_len
    if length <= lengths.get(query.shape, 0) or kv.step_flushes():
        return nullcontext()
    if torch.cuda.is_current_stream_capturing():
        return nullcontext()
    final_len = layer.final_len if layer.final_len > length else 2 * length
    lengths[query.shape] = final_len
    return growing(_growth(kv, query.shape[2], call.scoring.valid is not None, final_len))


def _growth(kv: LayerKV, queries: int, padded: bool, final_len: int) -> Growth:
    """The sizes that steps of ``queries`` queries will have, up to ``final_len`` tokens."""
    config, window, cold_len = kv.config, kv.window, kv.cold_len
    last = max(cold_len, final_len - config.recent)
    lengths = [cold_len]
    while lengths[-1] < last:
        lengths.append(min(2 * lengths[-1], last))
    counts = tuple(sorted({config.budget(length) for length in lengths}))
    # A flush leaves the shortest window. What is captured reads all of it, and goes by a mask.
    shortest, longest = window.sink + config.recent + queries, window.sink + kv.most_recent
    masked = padded or not window.sinks_full
    windows = [Window(tokens, masked) for tokens in range(shortest, longest + 1)]
    if config.graph is not False and queries == 1:
        windows.append(Window(longest, masked=True, appends=True))
    return Growth(last - cold_len, counts, tuple(windows))
