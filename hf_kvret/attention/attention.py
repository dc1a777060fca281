"""The registered attention function: the one fork between a retrieval layer and the base."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hf_kvret.attention.base import attend_with_base, base_name
from hf_kvret.attention.masks import (
    CHOICES,
    base_mask,
    chosen_tokens,
    mask_info,
    passed_choice,
    token_validity,
    with_indices,
)
from hf_kvret.contracts.block import check_dtypes
from hf_kvret.contracts.index import Scoring
from hf_kvret.layer.exact_attention import attend_flash, fits, merge
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.layer.layer import HANDLE, RetrievalLayer
from hf_kvret.layer.queries import AttentionCall, Heads
from hf_kvret.replay.compiled_layers import NOW, Marker, attend
from hf_kvret.replay.layer_step import warming_up
from hf_kvret_kernels.prompt_attention import compiled, prompt_attention

# Keywords that models pass beside the tensors. Those in the second set do not change attention, and
# many models pass on arguments of `generate`.
_ATTENTION_KEYWORDS = {"softcap", "s_aux", "is_causal", "sliding_window", "output_attentions"}
_OTHER_KEYWORDS = {
    *("position_ids", "cache_position", "use_cache", "position_embeddings", "token_type_ids"),
    *("output_router_logits", "output_hidden_states", "logits_to_keep", "num_logits_to_keep"),
    *("return_dict", "target_dtype", "deterministic"),
    *("tokenizer", "assistant_tokenizer", "assistant_model", "streamer", "synced_gpus"),
    *("inputs_tensor", "input_ids"),
}

# Above this many elements the base implementation must not build a [q, kv] mask or score matrix.
_DENSE_ELEMENTS = 1 << 24
_PLAIN = Heads()


def retrieval_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention for layers whose keys carry a handle; the model's own attention for all others.

    Args:
        query: ``[B, Hq, Q, Dk]``; key ``[B, Hkv, n, Dk]``; value ``[B, Hkv, n, Dv]``.
        attention_mask: what ``retrieval_mask`` returned.
        dropout: 0; it stands before scaling as in transformers' sdpa and flash functions, because
            kvpress passes it by position.
        scaling: factor of the dot products; None means ``Dk ** -0.5``.

    Returns:
        ``[B, Q, Hq, Dv]`` and None for the weights, as transformers expects.

    Raises:
        ValueError: an unknown keyword, which may change attention, or two dtypes.
    """
    if isinstance(attention_mask, Marker):
        return attend(query, key, value), None
    is_traced = torch.compiler.is_compiling()
    if not is_traced and NOW.calls is not None:
        keywords = {**kwargs, "dropout": dropout, "scaling": scaling}
        NOW.calls.append((module, attention_mask, keywords))
    layer: RetrievalLayer | None = getattr(key, HANDLE, None)
    if layer is None:
        base = base_name(module, kwargs)
        mask = base_mask(attention_mask, base, query.device)
        choice = passed_choice(module, kwargs)
        for name in CHOICES:
            kwargs.pop(name, None)
        if choice is not None:
            # By KV head, or one for all.
            by_head = choice.repeat_interleave(max(1, query.shape[1] // choice.shape[1]), dim=1)
            choice = choice if choice.shape[1] == 1 else by_head
            mask = with_indices(mask, attention_mask, choice, base)
        return attend_with_base(
            base, module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
        )
    total = layer.get_seq_length() + (key.shape[2] if layer.pending_attention else 0)
    try:
        _check_keywords(kwargs, dropout, layer.follows_model)
        if not query.dtype == key.dtype == value.dtype:
            check_dtypes(queries=query, keys=key, values=value)
        valid = token_validity(
            attention_mask, query.shape[2], total, query.device, layer.follows_model
        )
        choice = chosen_tokens(module, attention_mask, kwargs) if layer.follows_model else None
    except ValueError:
        # Nothing was stored yet, so the cache can be used again once the mistake is corrected.
        layer.pending_attention = False
        raise
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sink_logits = kwargs.get("softcap"), kwargs.get("s_aux")
    heads = ModuleHeads(module) if layer.is_latent else _PLAIN
    scoring = Scoring(valid, scale, softcap)
    if not is_traced and valid is choice is sink_logits is None and heads is _PLAIN:
        again = layer.attend_again(query, key, value, scoring)
        if again is not None:
            return again, None

    def is_causal() -> bool:
        info = mask_info(attention_mask)
        sees_all = info is None or info.lets_see_as_causal
        return sees_all and getattr(module, "is_causal", True)

    def prompt() -> torch.Tensor:
        # A layer that reads another's keys may have the newest queries alone.
        older = key.shape[2] - query.shape[2]
        base = base_name(module, kwargs)
        keys, values = heads.expand_new(key, value)
        part, info = None, mask_info(attention_mask)
        plain = base in ("sdpa", "eager") and info is not None and info.causal
        plain = plain and getattr(module, "is_causal", True)
        if plain and fits(query, keys, values):
            part = attend_flash(query, keys, values, scoring, causal_offset=older)
        elif _base_builds_matrix(base, query, key, attention_mask) or (plain and compiled(query)):
            part = prompt_attention(
                query, keys, values, scale=scale, causal_offset=older, valid=valid, softcap=softcap
            )
        if part is not None:
            if sink_logits is not None:
                part = merge([part], sink_logits)
            return part[0].to(query.dtype)
        out, _ = attend_with_base(
            base,
            module,
            query,
            keys,
            values,
            base_mask(attention_mask, base, query.device),
            scaling=scaling,
            dropout=dropout,
            **kwargs,
        )
        return out.transpose(1, 2)

    positions = _positions(kwargs.get("position_ids"), query)
    call = AttentionCall(scoring, prompt, sink_logits, positions, is_causal, choice, heads)
    with warming_up(layer, query, call) if query.is_cuda else nullcontext():
        out = layer.attend(query, key, value, call)
    return out.transpose(1, 2).contiguous(), None


def _base_builds_matrix(
    base: str, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether ``base`` would build a large ``[q, kv]`` mask or score matrix."""
    info = mask_info(mask)
    if info is None or not info.causal or base.startswith("flash"):
        return False
    batch, heads, new, _ = query.shape
    if base == "eager":
        return batch * heads * new * key.shape[2] > _DENSE_ELEMENTS
    return info.padding is not None and batch * new * key.shape[2] > _DENSE_ELEMENTS


def _positions(position_ids: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """``[B, Q]`` of the queries; None if not passed, or with several parts (mrope)."""
    if position_ids is None or position_ids.ndim != 2:
        return None
    batch, _, queries, _ = query.shape
    if position_ids.shape == (batch, queries) and position_ids.device == query.device:
        return position_ids
    return position_ids[:, -queries:].to(query.device).expand(batch, queries)


def _check_keywords(kwargs: dict[str, Any], dropout: float, may_choose: bool) -> None:
    for name, value in kwargs.items():
        if value is not None and name not in _ATTENTION_KEYWORDS and name not in _OTHER_KEYWORDS:
            if name in CHOICES and may_choose:
                continue
            raise ValueError(
                f"attention was called with {name}={type(value).__name__}, which a retrieval cache "
                "does not support: use this model with its own cache "
                "(hf_kvret.restore(model)), or report the model"
            )
    if kwargs.get("is_causal") is False:
        raise ValueError(
            "is_causal=False: a retrieval cache serves causal attention only; use this model with "
            "its own cache (hf_kvret.restore(model))"
        )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: a retrieval cache never forms the attention matrix; "
            "drop the argument or use cache_implementation='dynamic'"
        )
    if kwargs.get("sliding_window") is not None:
        raise ValueError(
            f"sliding_window={kwargs['sliding_window']} on a layer that the cache holds as full "
            "attention: config.layer_types and the model disagree; pass the model's own config"
        )
    if dropout:
        raise ValueError(f"dropout={dropout}: put the model in eval mode to use a retrieval cache")
