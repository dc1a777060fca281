"""Tiny random models of Gemma-4 and its kind, without keys that layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hf_kvret.testing.models import GEMMA4, GEMMA4_EMBEDDING
from hf_kvret.testing.tiny import TinyModel

_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
# Tokens that mark images and sounds; prompts of the suite don't contain them.
_MARKS = {
    "boi_token_id": 2,
    "eoi_token_id": 3,
    "image_token_id": 4,
    "video_token_id": 5,
    "audio_token_id": 6,
    "boa_token_id": 7,
    "eoa_token_index": 7,
    "tie_word_embeddings": False,
}
_UNIFIED_VISION = {
    "patch_size": 2,
    "pooling_kernel_size": 1,
    "mm_embed_dim": 64,
    "mm_posemb_size": 16,
    "output_proj_dims": 64,
}


def _text(**changes: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: AutoConfig.for_model("gemma4_text", **{**GEMMA4, **changes})


def _composite() -> PreTrainedConfig:
    return AutoConfig.for_model("gemma4", text_config=GEMMA4, vision_config=None, **_MARKS)


def _unified() -> PreTrainedConfig:
    text = {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"}
    return AutoConfig.for_model(
        "gemma4_unified",
        text_config={**text, "use_bidirectional_attention": "vision"},
        vision_config=_UNIFIED_VISION,
        **_MARKS,
    )


def _tiny(
    name: str,
    config: Callable[[], PreTrainedConfig],
    note: str,
    full_attention: tuple[int, ...] = (1, 2),
    seed: int = 2,
    architecture: str = "",
) -> TinyModel:
    return TinyModel(
        name,
        config,
        full_attention,
        note,
        seed=seed,
        architecture=architecture,
        embedding=GEMMA4_EMBEDDING,
    )


_ZOO = (
    _tiny("gemma4_experts", _text(**_EXPERTS), "experts, as in the 26B"),
    _tiny("gemma4_own_values", _text(attention_k_eq_v=False), "keys and values of two projections"),
    _tiny(
        "gemma4_512",
        _text(global_head_dim=512, num_hidden_layers=2, layer_types=GEMMA4["layer_types"][:2]),
        "the head dim of the real ones",
        full_attention=(1,),
    ),
    _tiny(
        "gemma4_composite",
        _composite,
        "text in a model for images",
        architecture="Gemma4ForConditionalGeneration",
    ),
    _tiny(
        "gemma4_unified",
        _unified,
        "tokens of an image see each other in layers that slide",
        architecture="Gemma4UnifiedForConditionalGeneration",
    ),
)

GEMMA4_MODELS: dict[str, TinyModel] = {model.name: model for model in _ZOO}
"""Relatives of ``MODELS["gemma4"]`` that a cache with retrieval must serve, by name."""
