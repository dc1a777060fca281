"""What small models of some types need beyond fewer of everything.

Most of the settings are in place of defaults with which transformers can't build or run the model
either: a number of heads left open, sections of rotations that are not those of the head's dim.
"""

from __future__ import annotations

from typing import Any

import torch


def _rope(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}


_COMPASS = {"rope_parameters": {"full_attention": _rope(24, 20, 20)}}
_GLM4V = {"text_config": {"rope_parameters": _rope(16, 24, 24)}}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_OPEN_IDS = {"vocabulary_map": {"<image>": 8}}

CHANGES: dict[str, dict[str, Any]] = {
    # Codes of images and sounds are a part of the vocabulary.
    "apertus1p5": {
        "image_token_offset": 16,
        "audio_token_offset": 48,
        "vision_config": {"codebook_size": 32},
        "audio_config": {"codebook_size": 64},
    },
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "chameleon": _OPEN_IDS,
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts_per_tok": 2,
            **_ONE_GROUP,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 96,
    },
    "emu3": _OPEN_IDS,
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 512, "intermediate_size": 128}},
    "glm46v": _GLM4V,
    "glm4v": _GLM4V,
    "glm4v_moe": {"text_config": {"head_dim": 128, "rope_parameters": _rope(8, 12, 12)}},
    "glmga": _GLM4V,
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "granite_docling": {"vision_config": {"out_hidden_size": 256}},
    # By default scores are not scaled down, and fp32 rounding alone moves logits by 1e-3.
    "granite_swa": {"attention_multiplier": 1 / 128},
    # Two cycles of one layer and of three times another: a cache layer for each.
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": _rope(16, 24, 24)}},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "muse_spark": {"audio_config": {"out_hidden_size": 256}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 2},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 2, "text_config": {"head_dim": 128}},
    "step3p7": {"text_config": {"sliding_window": 32}},
}
"""By type, settings of the small configuration, nested as in it."""


def image_inputs(name: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    """What ``generate`` needs beside ``[batch, length]`` tokens, by type; empty for most.

    Images, for a type that doesn't run on text alone: fp32 ``[batch, 1, 3, 224, 224]`` and an int64
    mask ``[batch, length, 1]``, on the CPU.
    """
    if name != "idefics":
        return {}
    pixels = torch.linspace(0, 1, 3 * 224 * 224).view(1, 1, 3, 224, 224)
    seen = torch.ones(batch, length, 1, dtype=torch.int64)
    return {"pixel_values": pixels.expand(batch, -1, -1, -1, -1), "image_attention_mask": seen}
