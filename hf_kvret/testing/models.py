"""A zoo of tiny random models: every kind of standard attention, in milliseconds, no network.

The weights are drawn so that attention is peaked and logits are far apart: a model whose every
token attends to everything a little gives the same greedy text when the cache loses a token, and
a test on it proves nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

PAD_TOKEN = 0
"""Padding id; prompts of the suite never contain it."""

# Standard deviations in units of 1 / sqrt(fan in), by the end of the module's name. Queries and
# keys are drawn wide to make attention peaked, outputs wide to make it count in the residual sum.
_GAINS = {
    ("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn"): 2.0,
    ("o_proj", "out_proj", "dense", "c_proj"): 2.0,
    ("lm_head", "embed_out"): 4.0,
}


@dataclass(frozen=True)
class TinyModel:
    """How to build one model of the zoo.

    Attributes:
        name: key in the zoo.
        config: makes the configuration anew.
        full_attention: indices of the layers with full attention, which get retrieval.
        seed: of the weights; chosen so that a token lost in mid-prompt changes the greedy text.
        architecture: class in transformers; empty for the causal language model of the config.
        attention: implementation; None for the one that transformers chooses.
        embedding: standard deviation of embeddings; where a model multiplies them, less than 1
            keeps them from drowning what attention adds.
    """

    name: str
    config: Callable[[], PreTrainedConfig]
    full_attention: tuple[int, ...]
    seed: int = 0
    architecture: str = ""
    attention: str | None = None
    embedding: float = 1.0

    def build(self, device: str = "cpu") -> PreTrainedModel:
        """Return the model: fp32, in eval mode, the same weights every time.

        It never stops early: no end-of-text token is set.
        """
        # A copy takes a quarter of the time.
        return copy.deepcopy(_built(self)).to(device)


@cache
def _built(tiny: TinyModel) -> PreTrainedModel:
    config = tiny.config()
    options = {"dtype": torch.float32, "attn_implementation": tiny.attention}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if tiny.architecture:
            model = getattr(transformers, tiny.architecture)._from_config(config, **options)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, **options)
    spread_weights(model, tiny.seed, tiny.embedding)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD_TOKEN
    return model.eval()


@torch.no_grad()
def spread_weights(model: PreTrainedModel, seed: int, embedding: float = 1.0) -> None:
    """Redraw the weights of `model` in place so that attention is peaked and logits are far apart.

    Matrices get a normal distribution with standard deviation gain / sqrt(fan in), embeddings
    `embedding`, biases 0.1, attention sinks 1; scales of norms and the parameters of recurrences
    stay.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if kind == "sinks":
            std = 1.0
        elif kind == "bias" or kind.endswith("_bias"):
            std = 0.1
        elif "embed_tokens" in name or name.endswith(
            ("wte.weight", "wpe.weight", "embed_in.weight")
        ):
            std = embedding
        elif parameter.ndim == 2:
            gain = next((g for ends, g in _GAINS.items() if module.endswith(ends)), 1.0)
            std = gain / math.sqrt(_fan_in(model, module, parameter))
        elif parameter.ndim == 3 and "experts" in name:
            std = 1.0 / math.sqrt(model.config.get_text_config().hidden_size)
        else:
            continue
        parameter.normal_(0.0, std, generator=generator)


def _fan_in(model: PreTrainedModel, module: str, weight: torch.Tensor) -> int:
    """Input width of a linear map; GPT-2's Conv1D stores the matrix transposed."""
    transposed = type(model.get_submodule(module)).__name__ == "Conv1D"
    return weight.shape[0] if transposed else weight.shape[1]


VOCAB_SIZE = 128
"""Vocabulary of every model in the zoo, so that any of them can draft for any other."""

MAX_POSITION = 2048
"""Positions that every model in the zoo can represent."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": PAD_TOKEN,
}
"""Settings of every model in the zoo."""


def config_of(model_type: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """Makes the configuration of a type with ``settings``, anew at each call."""
    return lambda: AutoConfig.for_model(model_type, **copy.deepcopy(settings))


def small_config(model_type: str, **changes: Any) -> Callable[[], PreTrainedConfig]:
    """Makes the configuration of a type with ``SMALL`` and ``changes``, anew at each call."""
    return config_of(model_type, **{**SMALL, **changes})


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
"""Settings of a small model for images, beside a text model that is given none."""
_QWEN2_VL = {
    "text_config": {
        **SMALL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    },
    "vision_config": dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=1),
    # The ids that mark images must lie in the vocabulary; prompts of the suite don't contain them.
    "vision_start_token_id": 2,
    "vision_end_token_id": 3,
    "image_token_id": 4,
    "video_token_id": 5,
}
_SLIDE_AND_FULL = {
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_POSITION,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": PAD_TOKEN,
}
QWEN3_NEXT = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""Settings of a small Qwen3-Next."""
_GPT_OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA4: dict[str, Any] = {
    **SMALL,
    **_SLIDE_AND_FULL,
    # Heads and their dims differ between layers that slide and the others; there one projection
    # makes keys and values.
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    # As in models without sharing.
    "hidden_size_per_layer_input": 0,
}
"""Settings of a small Gemma-4's text."""
_GEMMA4_EMBEDDING = 0.125
"""Gemma-4 multiplies embeddings by the root of their number, here 8."""

_LFM2 = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "full_attention"],
    "block_multiple_of": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 256,
}

_ZOO = (
    TinyModel("llama", small_config("llama", rope_parameters=_LLAMA3_ROPE), (0, 1), seed=4),
    TinyModel("qwen2", small_config("qwen2"), (0, 1)),
    TinyModel("qwen3", small_config("qwen3", head_dim=24), (0, 1), seed=3),
    TinyModel("mistral", small_config("mistral", sliding_window=None, head_dim=16), (0, 1), seed=4),
    TinyModel("phi3", small_config("phi3"), (0, 1)),
    TinyModel(
        "gemma2",
        small_config("gemma2", head_dim=16, query_pre_attn_scalar=16, **_SLIDE_AND_FULL),
        (1, 2),
        seed=4,
        attention="eager",  # sdpa of transformers 5.17 leaves the soft cap out
    ),
    TinyModel(
        "gemma3",
        small_config("gemma3_text", head_dim=16, query_pre_attn_scalar=16, **_SLIDE_AND_FULL),
        (1, 2),
        seed=1,
    ),
    TinyModel(
        "gemma4", config_of("gemma4_text", **GEMMA4), (1, 2), seed=6, embedding=_GEMMA4_EMBEDDING
    ),
    TinyModel(
        "gpt_oss",
        small_config("gpt_oss", rope_parameters=_YARN, **_GPT_OSS, **_SLIDE_AND_FULL),
        (1, 2),
        seed=2,
    ),
    TinyModel(
        "gpt_neox",
        small_config(
            "gpt_neox",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        ),
        (0, 1),
    ),
    TinyModel("gpt2", config_of("gpt2", **_GPT2), (0, 1)),
    TinyModel("cohere", small_config("cohere", logit_scale=1.0), (0, 1)),
    TinyModel("glm", small_config("glm", head_dim=16), (0, 1)),
    TinyModel("olmo2", small_config("olmo2"), (0, 1), seed=1),
    TinyModel("exaone4", small_config("exaone4", **_SLIDE_AND_FULL), (1, 2), seed=2),
    TinyModel(
        "smollm3", small_config("smollm3", num_hidden_layers=3, no_rope_layers=[1, 0, 1]), (0, 1, 2)
    ),
    TinyModel(
        "mixtral", small_config("mixtral", num_local_experts=4, num_experts_per_tok=2), (0, 1)
    ),
    TinyModel("qwen3_next", small_config("qwen3_next", **QWEN3_NEXT), (1, 2), seed=5),
    TinyModel(
        "qwen2_vl",
        config_of("qwen2_vl", **_QWEN2_VL),
        (0, 1),
        architecture="Qwen2VLForConditionalGeneration",
    ),
    TinyModel("lfm2", small_config("lfm2", **_LFM2), (1, 2), seed=4),
)

MODELS: dict[str, TinyModel] = {model.name: model for model in _ZOO}
"""Models that a cache with retrieval must serve, by name."""

_T5 = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": PAD_TOKEN,
}
_MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCAB_SIZE}

_REFUSED = (
    TinyModel("falcon", small_config("falcon"), (0, 1)),
    TinyModel("t5", config_of("t5", **_T5), (), architecture="T5ForConditionalGeneration"),
    TinyModel("mamba", config_of("mamba", **_MAMBA), ()),
    TinyModel("mistral_sliding", small_config("mistral", sliding_window=16, head_dim=16), ()),
)

REFUSED: dict[str, Callable[[], PreTrainedModel]] = {m.name: m.build for m in _REFUSED}
"""Builders of models that a cache with retrieval can't serve and must refuse, by name."""

LATENT: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    # As many as a value has: a shape must not say what a tensor is.
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
}
"""Settings of every model with latent attention."""
_MISTRAL4_ROPE = {**_YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
_LONGCAT = {
    **{name: value for name, value in LATENT.items() if name != "num_hidden_layers"},
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
_BAILING = {"num_hidden_layers": 4, "layer_group_size": 2, "num_local_experts": 4, "head_dim": 16}


def _latent(model_type: str, **changes: Any) -> Callable[[], PreTrainedConfig]:
    return config_of(model_type, **{**LATENT, **changes})


_LATENT_ZOO = (
    TinyModel("deepseek_v2", _latent("deepseek_v2"), (0, 1)),
    TinyModel("deepseek_v3", _latent("deepseek_v3"), (0, 1)),
    TinyModel(
        "glm4_moe_lite", _latent("glm4_moe_lite", qk_nope_head_dim=24, v_head_dim=24), (0, 1)
    ),
    TinyModel("longcat_flash", config_of("longcat_flash", **_LONGCAT), (0, 1, 2, 3)),
    TinyModel(
        "mistral4",
        _latent("mistral4", rope_parameters=_MISTRAL4_ROPE),
        (0, 1),
        architecture="Mistral4ForCausalLM",
    ),
    TinyModel("minicpm3", _latent("minicpm3", dim_model_base=64), (0, 1)),
    TinyModel("youtu", _latent("youtu"), (0, 1)),
    TinyModel("axk1", _latent("axk1"), (0, 1)),
    TinyModel(
        "kimi_k25",
        config_of(
            "kimi_k25", text_config={**LATENT, "model_type": "deepseek_v3"}, vision_config=VISION
        ),
        (0, 1),
        architecture="Kimi_K25ForConditionalGeneration",
    ),
    TinyModel("kimi_linear", _latent("kimi_linear", **_KIMI_LINEAR), (1, 2)),
    TinyModel("bailing_hybrid", _latent("bailing_hybrid", **_BAILING), (1, 3)),
)

LONG_LATENT_MODEL = TinyModel(
    "deepseek_v3, 576 elements a row",
    _latent(
        "deepseek_v3", num_hidden_layers=1, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=24
    ),
    (0,),
)
"""A model like those of ``LATENT_MODELS``, with rows of 512 + 64 elements."""

LATENT_MODELS: dict[str, TinyModel] = {model.name: model for model in _LATENT_ZOO}
"""Models of multi-head latent attention that a cache with retrieval must serve, by name."""

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


def _gemma4(**changes: Any) -> Callable[[], PreTrainedConfig]:
    return config_of("gemma4_text", **{**GEMMA4, **changes})


_UNIFIED_TEXT = {name: x for name, x in GEMMA4.items() if name != "hidden_size_per_layer_input"}
_relative = partial(TinyModel, seed=2, embedding=_GEMMA4_EMBEDDING)

_GEMMA4_ZOO = (
    _relative("gemma4_own_values", _gemma4(attention_k_eq_v=False), (1, 2)),
    _relative(
        "gemma4_512",
        _gemma4(global_head_dim=512, num_hidden_layers=2, layer_types=GEMMA4["layer_types"][:2]),
        (1,),
    ),
    _relative(
        "gemma4_composite",
        config_of("gemma4", text_config=GEMMA4, vision_config=None, **_MARKS),
        (1, 2),
        architecture="Gemma4ForConditionalGeneration",
    ),
    _relative(
        "gemma4_unified",
        config_of(
            "gemma4_unified",
            text_config={**_UNIFIED_TEXT, "use_bidirectional_attention": "vision"},
            vision_config=_UNIFIED_VISION,
            **_MARKS,
        ),
        (1, 2),
        architecture="Gemma4UnifiedForConditionalGeneration",
    ),
)

GEMMA4_MODELS: dict[str, TinyModel] = {model.name: model for model in _GEMMA4_ZOO}
"""Relatives of ``MODELS["gemma4"]`` that a cache with retrieval must serve, by name."""

_FALCON_H1 = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_ssm": 64,
    "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip
_ZAMBA2 = {
    "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "n_mamba_heads": 4, "mamba_headdim": 32, "mamba_d_state": 16, "mamba_ngroups": 1,
    "chunk_size": 16, "num_mem_blocks": 1, "attention_head_dim": 32, "use_mem_rope": True,
}  # fmt: skip

_ZAYA = {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 16}

_HYBRID_ZOO = (
    TinyModel("falcon_h1", small_config("falcon_h1", head_dim=16, **_FALCON_H1), (0, 1), seed=1),
    TinyModel("zamba2", small_config("zamba2", **_ZAMBA2), (1, 3)),
    TinyModel("zaya", small_config("zaya", **_ZAYA), (0, 1)),
)

HYBRID_MODELS: dict[str, TinyModel] = {model.name: model for model in _HYBRID_ZOO}
"""Models whose layers of full attention keep a linear state, too, by name."""

# The last three layers read the keys of the first two, each of its own kind.
_SHARED: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "sliding_window": 16,
    "head_dim": 16,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_GEMMA3N = {
    "intermediate_size": [96] * 5,
    "activation_sparsity_pattern": [0.0] * 5,
    "laurel_rank": 8,
}
_GEMMA4_SHARED = {**GEMMA4, **_SHARED}

_SHARED_ZOO = (
    _relative("gemma3n", config_of("gemma3n_text", **{**_SHARED, **_GEMMA3N}), (1,)),
    _relative("gemma4_shared", config_of("gemma4_text", **_GEMMA4_SHARED), (1,)),
    _relative(
        "gemma4_shared_composite",
        config_of("gemma4", text_config=_GEMMA4_SHARED, vision_config=None, **_MARKS),
        (1,),
        architecture="Gemma4ForConditionalGeneration",
    ),
)

SHARED_MODELS: dict[str, TinyModel] = {model.name: model for model in _SHARED_ZOO}
"""Models some of whose layers read keys and values of another layer, by name."""
