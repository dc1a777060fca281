"""Models with an indexer of their own, which chooses the tokens that a query attends to."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from hf_kvret.models.compatibility import index_budget
from hf_kvret.testing.models import LATENT, QWEN3_NEXT, SMALL, VISION, TinyModel, config_of

_INDEXED: dict[str, Any] = {
    **LATENT,
    "num_hidden_layers": 3,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 12,
}
# Prompts of the suite don't contain these ids.
_MARKS = {
    "image_token_id": 4,
    "video_token_id": 5,
    "vision_start_token_id": 2,
    "vision_end_token_id": 3,
    "image_start_token_id": 2,
    "image_end_token_id": 3,
}
_DOTS3 = {
    **_INDEXED,
    "num_hidden_layers": 4,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "sliding_window": 16,
    "head_dim": 24,
    "shared_experts_intermediate_size": 32,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_QWEN4 = {
    **SMALL,
    **QWEN3_NEXT,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_count": 2,
    "hc_lowrank": 8,
}
_MINIMAX_M3 = {
    **SMALL,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "head_dim": 16,
    "rotary_dim": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": SMALL["max_position_embeddings"] // 8,
    "attention_factor": 1.0,
}
_MISTRAL_LARGE4 = {
    **_INDEXED,
    "num_hidden_layers": 4,
    "rope_parameters": _YARN,
    "no_rope_layers": [1, 0, 1, 1],
    "kv_source_layers": [0, 1, 2, 0],
    "indexer_types": ["full", "full", "full", "shared"],
}
_GLM5_NEXT = {
    **_INDEXED,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", *["indexed_attention"] * 3],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "qk_rope_head_dim": 0,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "index_kpool": 4,
    "hc_mult": 2,
}


# Their indexers read a mask, which sdpa may leave out.
_indexed = partial(TinyModel, seed=3, attention="eager")


def _latent(name: str, model_type: str = "", **changes: Any) -> TinyModel:
    config = config_of(model_type or name, **{**_INDEXED, **changes})
    return _indexed(name, config, (0, 1, 2))


_ZOO = (
    _latent("deepseek_v32"),
    # It chooses more tokens than there are.
    _latent("deepseek_v32_wide", "deepseek_v32", index_topk=512),
    _latent("glm_moe_dsa", indexer_types=["full", "shared", "full"]),
    _latent("axk2"),
    _latent("hy_v4"),
    _indexed(
        "hy_v4_vl",
        config_of(
            "hy_v4_vl",
            text_config={
                **_INDEXED,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
            },
            vision_config={**VISION, "out_hidden_size": 64},
            **_MARKS,
        ),
        (0, 1, 2),
        architecture="HYV4VLForConditionalGeneration",
    ),
    _indexed("dots3_note", config_of("dots3_note_text", **_DOTS3), (0, 2)),
    _indexed(
        "mistral_large4",
        config_of(
            "mistral_large4",
            text_config=_MISTRAL_LARGE4,
            vision_config={
                **VISION,
                **{"model_type": "pixtral", "patch_size": 14, "image_size": 56, "head_dim": 16},
            },
            image_token_index=4,
        ),
        (0, 1, 2),
        architecture="MistralLarge4ForConditionalGeneration",
    ),
    _indexed(
        "glm5_next",
        config_of(
            "glm5_next",
            text_config=_GLM5_NEXT,
            vision_config={**VISION, "out_hidden_size": 64},
            **_MARKS,
        ),
        (1, 2, 3),
        architecture="Glm5NextForConditionalGeneration",
    ),
    _indexed("qwen4_exp", config_of("qwen4_exp_text", **_QWEN4), (1, 2)),
    _indexed("minimax_m3", config_of("minimax_m3_vl_text", **_MINIMAX_M3), (0, 1, 2)),
)

INDEXED_MODELS: dict[str, TinyModel] = {model.name: model for model in _ZOO}
"""Models with an indexer of their own, which the method ``native`` follows, by name."""


def known_indexed() -> list[str]:
    """The ``INDEXED_MODELS`` that this transformers has and `native` serves in it, by name."""
    known = []
    for name, model in INDEXED_MODELS.items():
        # A type, or a kind of layer, that it lacks.
        with suppress(ValueError, StrictDataclassError):
            known += [name] if index_budget(model.config()) else []
    return known
