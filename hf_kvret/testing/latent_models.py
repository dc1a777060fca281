"""Tiny random models of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hf_kvret.testing.models import MAX_POSITION, VOCAB_SIZE
from hf_kvret.testing.tiny import PAD_TOKEN, TinyModel

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    # As many as a value has: what a tensor is must not be told by its shape.
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": PAD_TOKEN,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": MAX_POSITION // 8,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LONGCAT = {
    "num_layers": 2,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "head_dim": 8,
}
_KIMI_LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_local_experts": 4,
}
_BAILING = {
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "num_local_experts": 4,
    "head_dim": 16,
}


def _config(model_type: str, **changes: Any) -> Callable[[], PreTrainedConfig]:
    settings = {**_SMALL, **changes}
    if model_type == "longcat_flash":
        del settings["num_hidden_layers"]
    return lambda: AutoConfig.for_model(model_type, **settings)


def _kimi() -> PreTrainedConfig:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return AutoConfig.for_model(
        "kimi_k25", text_config={**_SMALL, "model_type": "deepseek_v3"}, vision_config=vision
    )


_ZOO = (
    TinyModel("deepseek_v2", _config("deepseek_v2"), (0, 1), "complex rotations"),
    TinyModel("deepseek_v3", _config("deepseek_v3"), (0, 1), "interleaved rotations"),
    TinyModel(
        "glm4_moe_lite",
        _config("glm4_moe_lite", qk_nope_head_dim=24, v_head_dim=24),
        (0, 1),
        "head dim 24, rank 16",
    ),
    TinyModel(
        "longcat_flash", _config("longcat_flash", **_LONGCAT), (0, 1, 2, 3), "two caches a layer"
    ),
    TinyModel(
        "mistral4",
        _config("mistral4", rope_parameters=_YARN),
        (0, 1),
        "yarn, queries scaled by position",
        architecture="Mistral4ForCausalLM",
    ),
    TinyModel("minicpm3", _config("minicpm3", dim_model_base=64), (0, 1), "dense"),
    TinyModel("youtu", _config("youtu"), (0, 1), "dense"),
    TinyModel("axk1", _config("axk1"), (0, 1), "mixture of experts"),
    TinyModel(
        "kimi_k25",
        _kimi,
        (0, 1),
        "DeepSeek-V3 with images; prompts without",
        architecture="Kimi_K25ForConditionalGeneration",
    ),
    TinyModel(
        "kimi_linear",
        _config("kimi_linear", **_KIMI_LINEAR),
        (1, 2),
        "linear attention between",
    ),
    TinyModel(
        "bailing_hybrid",
        _config("bailing_hybrid", **_BAILING),
        (1, 3),
        "linear attention between",
    ),
)

LONG_LATENT_MODEL = TinyModel(
    "deepseek_v3, 576 numbers a row",
    _config(
        "deepseek_v3", num_hidden_layers=1, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=24
    ),
    (0,),
    "rows as long as those of large models",
)
"""As the zoo's, with rows of 512 + 64 numbers."""

LATENT_MODELS: dict[str, TinyModel] = {model.name: model for model in _ZOO}
"""Models of multi-head latent attention that a cache with retrieval must serve, by name."""
