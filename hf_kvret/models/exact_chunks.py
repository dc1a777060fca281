"""Whether a prompt that is read in chunks gives what one pass gives.

It does where a token depends on those before it alone. Some models look at all tokens of a pass:
their rotations depend on its length, positions are counted from its padding, states start again
with it, or its tokens attend to each other in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig

# Types whose layers look at the pass. A trial of every type in chunks found them.
_TYPES = {
    "jamba": "its recurrent layers start again in every pass",
    "kosmos-2.5": "it counts positions from the padding of a pass",
    "kosmos_2_5_text_model": "it counts positions from the padding of a pass",
}
_BOTH_DIRECTIONS = "its prompts are attended to in both directions"
# Values of ``use_bidirectional_attention`` that are for all tokens, not for pictures alone.
_BIDIRECTIONAL = (True, "all")
# The rotation whose base grows with the length.
_GROWING = "dynamic"
# Attributes of configurations that hold the parameters of a rotation.
_ROTATIONS = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Span:
    """Positions of a prompt that is to be cut: what decides about rotations.

    Attributes:
        past_len: tokens that the cache holds before it.
        chunk_end: one more than the greatest position in the first chunk.
        end: one more than the greatest of all.
    """

    past_len: int = 0
    chunk_end: int = 0
    end: int = 0


def why_whole(config: PreTrainedConfig, span: Span | None = None) -> str | None:
    """Why a prompt has to go in one pass; None where chunks give what one pass gives.

    Args:
        config: of the model.
        span: of the prompt; None asks for what holds for prompts of any length.
    """
    text = config.get_text_config(decoder=True)
    for part in (config, text):
        if part.model_type in _TYPES:
            return _TYPES[part.model_type]
    bidirectional = getattr(text, "use_bidirectional_attention", None)
    if bidirectional in _BIDIRECTIONAL or getattr(text, "is_causal", None) is False:
        return _BOTH_DIRECTIONS
    return None if span is None else _rotation_changes(text, span)


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether ``why_whole`` looks at the positions of a prompt."""
    return any(True for _ in _limits(config.get_text_config(decoder=True)))


def _rotation_changes(text: PreTrainedConfig, span: Span) -> str | None:
    """Why a prompt's chunks would be rotated otherwise than the whole; None if they are not."""
    for rotation, limit in _limits(text):
        if rotation == _GROWING and span.end >= limit:
            # A pass that ends at the limit itself keeps what an earlier request grew to.
            return (
                f"its {rotation} rotation changes with the length of a pass from {limit} tokens on"
            )
        # Every chunk beyond the limit is rotated as the whole. But some models (Phi-3) read again
        # what they hold, where a text grows beyond the limit in one pass.
        is_cut = span.chunk_end <= limit or 0 < span.past_len <= limit
        if rotation != _GROWING and limit < span.end and is_cut:
            return f"its {rotation} rotation is another one beyond {limit} tokens"
    return None


def _limits(text: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """``(type, tokens)`` of rotations that are others for passes that reach beyond so many."""
    most = getattr(text, "max_position_embeddings", None) or 0
    original = getattr(text, "original_max_position_embeddings", None) or most
    rotations = (getattr(text, name, None) for name in _ROTATIONS)
    for parameters in (one for one in rotations if isinstance(one, Mapping)):
        # One rotation for all layers, or one for each type of layer.
        for one in [x for x in parameters.values() if isinstance(x, Mapping)] or [parameters]:
            rotation = one.get("rope_type", one.get("type")) or ""
            if _GROWING in rotation:
                yield _GROWING, most
            elif rotation == "longrope" or "long_mscale" in one:
                yield rotation, one.get("original_max_position_embeddings") or original
