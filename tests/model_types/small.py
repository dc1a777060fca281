"""Small random models of any type, with rows like those of its default configuration.

Layers, heads, experts, widths and vocabulary become few; what shapes a head stays: its dims, ranks
of latents, rotations, norms, biases.
"""

from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.commands.models import default_config, text_class
from hf_kvret.models.compatibility import by_layer, text_key
from hf_kvret.models.versions import as_argument
from hf_kvret.testing.models import PAD_TOKEN, spread_weights

VOCAB_SIZE = 256
"""Vocabulary of every small model; the lower half are marks of images, ends and the like."""

_SEED = 5
_MOST_LAYERS = 6
_MOST_KV_HEADS = 2
_MOST_GROUP = 2

# Names of these sizes in configurations.
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth", "encoder_layers",
    "num_blocks", "resampler_depth", "aligner_num_add_layers",
)  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim_model_base")
_INNER = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim",
    "n_inner", "ffn_hidden_size", "expert_ffn_hidden_size", "dff", "intermediate_size_mlp",
    "prefix_dense_intermediate_size", "dense_intermediate_size", "shared_intermediate_size",
    "share_expert_dim", "moe_shared_expert_intermediate_size", "block_ff_dim", "moe_hidden_size",
    "alignment_intermediate_size", "encoder_ffn_dim", "mlp_dim",
)  # fmt: skip
_SMALLER = {
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), 32),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    "q_lora_rank": 64,
    "index_topk": 16,
    "indexer_budget": 16,
    "mamba_chunk_size": 32,
    "zero_expert_num": 2,
    "vocab_size": VOCAB_SIZE,
}  # fmt: skip


def small_model(model_type: str, full: bool = False, **changes: Any) -> PreTrainedModel:
    """A random model: fp32, on the CPU, in eval mode, the same weights every time.

    Args:
        model_type: of the default configuration that is made small.
        full: keep two layers of full attention, and none that slide.
        **changes: of the small configuration, nested as in it.

    Raises:
        Exception: of any kind, where a configuration of this type can't be made small like that.
    """
    config = small_config(default_config(model_type)[0], full, **changes)
    cls = text_class(model_type)
    text = config.get_text_config(decoder=True)
    if not isinstance(config, cls.config_class) and isinstance(text, cls.config_class):
        config = text
    return build(config, cls)


def small_text_part(model_type: str) -> PreTrainedModel:
    """The text part of ``small_model`` as a model of its own.

    Raises:
        ValueError: it has no text part that transformers generates with alone; else as
            ``small_model``.
    """
    config = small_config(default_config(model_type)[0])
    text = config.get_text_config(decoder=True)
    if text is config:
        raise ValueError("there is none")
    return build(text, MODEL_FOR_CAUSAL_LM_MAPPING[type(text)])


def build(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedModel:
    """A random model of ``config``: fp32, on the CPU, in eval mode, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls._from_config(config, dtype=torch.float32)
    spread_weights(model, _SEED)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD_TOKEN
    return model.eval()


def small_config(config: PreTrainedConfig, full: bool = False, **changes: Any) -> PreTrainedConfig:
    """A configuration like ``config``, with few of everything; arguments as of ``small_model``.

    Raises:
        Exception: as ``small_model``.
    """
    text = config.get_text_config(decoder=True)
    settings = config.to_diff_dict()
    if text is config:
        _shrink_text(settings, text, full)
    else:
        _shrink_text(settings[text_key(config)], text, full)
        _shrink_towers(settings, text_key(config))
    _lower_marks(settings)
    for each in (CHANGES.get(config.model_type, {}), changes):
        _update(settings, each)
    settings.pop("transformers_version", None)
    settings.pop("model_type", None)
    return type(config).from_dict(settings)


def _shrink_text(settings: dict[str, Any], text: PreTrainedConfig, full: bool) -> None:
    for name, value in list(settings.items()):
        if isinstance(value, dict):
            settings[name] = {k: _less(k, v) for k, v in value.items()}
        else:
            settings[name] = _less(name, value)
    heads = next((_count(text, name) for name in _HEADS if _count(text, name)), 0)
    kv_heads = _count(text, "num_key_value_heads") or heads
    few = min(kv_heads, _MOST_KV_HEADS)
    group = min(heads // max(kv_heads, 1), _MOST_GROUP)
    hidden = next((_count(text, name) for name in _HIDDEN if _count(text, name)), 0)
    dim = _count(text, "head_dim") or hidden // max(heads, 1)
    for names, size in (
        (_HEADS, few * group),
        (("num_key_value_heads", "kv_n_heads"), few),
        (_HIDDEN, few * group * dim),
    ):
        for name in names:
            if isinstance(settings.get(name), int):
                settings[name] = size
    _keep_layers(settings, text, full)
    settings |= {"tie_word_embeddings": False}


def _keep_layers(settings: dict[str, Any], text: PreTrainedConfig, full: bool) -> None:
    """Keep one layer of each type, and the last two layers; of ``full`` attention alone two."""
    count = next((getattr(text, name) for name in _LAYERS if _count(text, name)), 0)
    lists = {
        name: value
        for name, value in settings.items()
        if isinstance(value, list) and len(value) == count
    }
    types = [tuple(map(str, type_)) for type_ in zip(*lists.values(), strict=True)] or [()] * count
    first = {type_: layer for layer, type_ in reversed(list(enumerate(types)))}
    layers = sorted({*list(first.values())[-_MOST_LAYERS:], count - 1, count - 2})
    if full and "layer_types" not in lists:
        settings["sliding_window"] = None
    elif full:
        whole = [n for n, type_ in enumerate(lists["layer_types"]) if type_ == "full_attention"]
        layers = whole[-2:] or layers[-2:]
    for name, value in lists.items():
        settings[name] = [value[layer] for layer in layers]
    if full and "layer_types" in lists:
        settings["layer_types"] = ["full_attention"] * len(layers)
    own = {int(layer): config for layer, config in (settings.get("per_layer_config") or {}).items()}
    if own:
        settings["per_layer_config"] = {
            new: own[layer] for new, layer in enumerate(layers) if layer in own
        }
    for name in _LAYERS:
        if isinstance(settings.get(name), int):
            settings[name] = len(layers)


def _shrink_towers(settings: dict[str, Any], but: str = "") -> None:
    """Towers for images and sounds, which prompts of text never call: two layers each."""
    for name, tower in settings.items():
        if not isinstance(tower, dict) or name == but:
            continue
        counts = {tower[own] for own in _LAYERS if isinstance(tower.get(own), int)}
        for own, value in tower.items():
            if own in _LAYERS and isinstance(value, int):
                tower[own] = min(value, 2)
            elif own in _INNER and isinstance(value, int):
                tower[own] = min(value, _SMALLER[own])
            elif isinstance(value, list) and len(value) in counts:
                tower[own] = value[:2]
            elif own == "per_layer_config" and value:
                tower[own] = {layer: one for layer, one in value.items() if int(layer) < 2}
            elif isinstance(value, list) and "index" in str(own):
                tower[own] = [0, 1][: len(value)]
        _shrink_towers(tower)


def _lower_marks(settings: dict[str, Any]) -> None:
    """Ids of special tokens, into the lower half of the vocabulary, each its own."""
    ids: dict[int, int] = {}

    def low(value: Any) -> Any:
        if isinstance(value, list):
            return [low(element) for element in value]
        return ids.setdefault(value, len(ids) + 3) if type(value) is int else value

    def walk(part: dict[str, Any]) -> None:
        for name, value in part.items():
            if not isinstance(name, str):
                continue
            if isinstance(value, dict):
                walk(value)
            elif name == "pad_token_id":
                part[name] = None if value is None else PAD_TOKEN
            elif name.endswith(("_token_id", "_token_index", "_token_ids", "_id")):
                part[name] = low(value)

    walk(settings)


def _less(name: str, value: Any) -> Any:
    if isinstance(value, bool) or name not in _SMALLER:
        return value
    if isinstance(value, list):
        return [_less(name, element) for element in value]
    return min(value, _SMALLER[name]) if isinstance(value, int) else value


def _count(config: PreTrainedConfig, name: str) -> int:
    value = by_layer(config, name)[0]
    return value if isinstance(value, int) else 0


def _update(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            _update(settings[name], value)
        else:
            settings[name] = value


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
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 96,
    },
    "dots3_note": {
        "vision_config": {"adapter_out_dim": 512},
        "audio_config": {"adapter_out_dim": 512},
    },
    "emu3": _OPEN_IDS,
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 512, "intermediate_size": 128}},
    "glm46v": _GLM4V,
    "glm4v": _GLM4V,
    "glm4v_moe": {"text_config": {"head_dim": 128, "rope_parameters": _rope(8, 12, 12)}},
    "glmga": _GLM4V,
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "granite_docling": {"vision_config": {"out_hidden_size": 256}},
    "granitemoehybrid": {
        **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "num_hidden_layers": 4},
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    # By default scores are not scaled down, and fp32 rounding alone moves logits by 1e-3.
    "granite_swa": {"attention_multiplier": 1 / 128},
    # Two cycles of one layer and of three times another: a cache layer for each.
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": _rope(16, 24, 24)}},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "ministral": {"head_dim": 128},
    "mistral_large4": {"text_config": {"kv_source_layers": None}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "muse_spark": {"audio_config": {"out_hidden_size": 256}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 2},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 2, "text_config": {"head_dim": 128}},
    "step3p7": {"text_config": {"sliding_window": 32}},
    "xmod": {"default_language": "en_XX"},
}
"""By type, settings of the small configuration, nested as in it."""


def image_inputs(name: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs of ``generate`` beside ``[batch, length]`` tokens; empty for most types.

    A type that doesn't run on text alone gets images, fp32 ``[batch, 1, 3, 224, 224]``, and an
    int64 mask ``[batch, length, 1]``, on the CPU.
    """
    if name != "idefics":
        return {}
    pixels = torch.linspace(0, 1, 3 * 224 * 224).view(1, 1, 3, 224, 224)
    seen = torch.ones(batch, length, 1, dtype=torch.int64)
    return {"pixel_values": pixels.expand(batch, -1, -1, -1, -1), "image_attention_mask": seen}


def padded_prompt(length: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of two sequences; the second is padded at its left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB_SIZE // 2, VOCAB_SIZE, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD_TOKEN), "attention_mask": mask}


def generate(model: PreTrainedModel, cache: Cache, new_tokens: int, **inputs: Any) -> Any:
    """``generate``'s output with ``logits``, greedy and without an end."""
    return model.generate(
        **inputs, **as_argument(cache), max_new_tokens=new_tokens, do_sample=False,
        eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
