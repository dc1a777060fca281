"""Which model types are served: every one that generates text, by its default configuration."""

from __future__ import annotations

import pytest
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto

import hf_kvret
from hf_kvret.integration.compatibility import check_class, check_config, text_key

# What a message says, and the types that are refused with it. A type that transformers adds
# belongs here or below: it is not served before somebody has looked.
REFUSED = {
    "is an encoder-decoder": """
        bart bigbird_pegasus blenderbot blenderbot-small florence2 marian mbart musicgen
        musicgen_melody mvp pegasus pix2struct plbart pp_formulanet prophetnet t5gemma2 udop
        vision-encoder-decoder whisper
    """,
    "latent attention": """
        axk2 deepseek_v32 dots3_note dots3_note_text glm5_next glm_moe_dsa hy_v4
        mistral_large4
    """,
    "shares keys and values between layers": """
        gemma3n gemma3n_text
    """,
    "by diffusion": """
        diffusion_gemma
    """,
    "with is_decoder=False": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert
        rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl
        xmod
    """,
    "full attention and something else in one cache layer": """
        falcon_h1 inkling2 inkling2_text inkling_mm_model inkling_text qwen4_exp
        qwen4_exp_text zamba zamba2 zaya
    """,
    "no full-attention layer": """
        bamba falcon_mamba granitemoehybrid idefics2 kyutai_speech_to_text mamba mamba2
        ministral mistral moshi recurrent_gemma voxtral_realtime
    """,
    "nested too deep": """
        qwen2_5_omni qwen3_omni_moe
    """,
    "computes attention by itself": """
        blip bloom codegen cpmant falcon git got_ocr2 gpt_neo gpt_neox_japanese gptj
        granite_speech granite_speech_plus mpt openai-gpt pp_chart2table trocr xglm xlm
    """,
    "keeps its own kind of cache": """
        minimax reformer xlnet
    """,
    "splits its text into patches and keeps several caches": """
        blt
    """,
    "merges the keys and values of several tokens into entries of its own": """
        deepseek_v4
    """,
    "splits its values after the cache and attends to them in halves": """
        diffllama
    """,
    "builds a mask of its own on top of the causal one, from the values of all tokens": """
        doge
    """,
    "repeats its keys after the cache, where no handle survives": """
        jetmoe
    """,
    "chooses blocks of tokens with an indexer of its own beside the cache": """
        minimax_m3_vl minimax_m3_vl_text
    """,
    "keeps the keys of images in layers of the same cache (cross-attention)": """
        mllama
    """,
    "generates actions, not text, and hands its cache to a second model": """
        pi0
    """,
    "is recurrent": """
        rwkv xlstm
    """,
    "slides over its text around reference tokens, in layers of its own kind": """
        unlimited_ocr
    """,
    "drafts for another model, whose cache it reads": """
        gemma4_assistant gemma4_unified_assistant
    """,
}

SERVED = """
    afmoe apertus arcee aria aria_text axk1 aya_vision bailing_hybrid beam biogpt bitnet
    blip-2 chameleon cohere cohere2 cohere2_moe cohere2_vision cohere_compass
    cohere_compass_text cosmos3_edge cosmos3_omni ctrl cwm dbrx deepseek_ocr2
    deepseek_v2 deepseek_v3 deepseek_vl deepseek_vl_hybrid dots1 emu3 ernie4_5
    ernie4_5_moe ernie4_5_vl_moe evolla exaone4 exaone4_5 exaone_moe fast_vlm flex_olmo
    flint fun_asr_nano fuyu gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm46v glm4_moe
    glm4_moe_lite glm4v glm4v_moe glm_ocr glmasr glmga gpt-sw3 gpt2 gpt_bigcode gpt_neox
    gpt_oss granite granite4_vision granite_docling granite_swa granitemoe
    granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe
    hunyuan_vl hy_v3 hyperclovax hyperclovax_vision_v2 idefics idefics3 instructblip
    instructblipvideo internlm3 internvl iquestcoder jais2 jamba janus kimi_k25
    kimi_linear kolibri1 kosmos-2 kosmos-2.5 laguna lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl
    lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video
    llava_onevision longcat_flash mellum mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6
    minicpmv4_7 minimax_m2 ministral3 mistral3 mistral4 mixtral modernbert-decoder
    molmo2 moss_transcribe_diarize muse_glimmer muse_spark nanochat nemo_speechlm
    nemotron nemotron_h nemotron_h_omni olmo olmo2 olmo3 olmo_hybrid olmoe opt ovis2
    paddleocr_vl paligemma perception_lm persimmon phi phi3 phi4_multimodal phimoe
    qianfan_ocr qwen2 qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl
    qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe
    qwen3_next qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe seed_oss shieldgemma2
    smollm3 smolvlm solar_open stablelm starcoder2 step3p7 vaultgemma vibevoice_asr
    video_llama_3 video_llava vipllava voxtral youtu
"""

# Types that transformers itself can't make a configuration of without being told more.
UNTOLD = {"gemma4_assistant", "musicgen", "musicgen_melody", "vision-encoder-decoder"}

_MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")


def text_models() -> dict[str, type]:
    """Class of the model that generates text, by model type."""
    classes: dict[str, type] = {}
    for mapping in _MAPPINGS:
        named = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
        for model_type, name in named.items():
            first = name if isinstance(name, str) else name[0]
            classes.setdefault(model_type, getattr(transformers, first))
    return classes


def expected() -> dict[str, str]:
    """Part of the message by refused type, empty for types that are served."""
    reasons = {name: reason for reason, names in REFUSED.items() for name in names.split()}
    return reasons | {name: "" for name in SERVED.split()}


def outcome(model_type: str, model_class: type) -> str:
    """The message with which the type is refused; empty where it is served."""
    config = AutoConfig.for_model(model_type)
    try:
        check_config(config)
        if config.get_text_config(decoder=True) is not config:
            text_key(config)
        check_class(model_class)
        hf_kvret.FlatKVCache(config)
    except ValueError as error:
        return str(error)
    return ""


def test_no_type_is_named_twice() -> None:
    named = [name for names in (*REFUSED.values(), SERVED) for name in names.split()]
    assert len(named) == len(set(named))


def test_every_type_is_served_or_refused_with_its_reason() -> None:
    table, wrong = expected(), []
    for model_type, model_class in text_models().items():
        if model_type in UNTOLD:
            continue
        reason = table.get(model_type)
        message = outcome(model_type, model_class)
        if reason is None:
            wrong.append(f"{model_type} is not in the table: {message or 'served'}")
        elif bool(reason) != bool(message) or reason not in message:
            wrong.append(
                f"{model_type}: expected {reason or 'served'!r}, got {message or 'served'!r}"
            )
    assert not wrong


def test_a_refusal_names_the_type_and_the_way_out() -> None:
    for model_type in ("diffusion_gemma", "gemma3n", "falcon_h1", "doge", "mllama", "rwkv", "bert"):
        with pytest.raises(ValueError, match=model_type) as refusal:
            hf_kvret.ParisKVCache(AutoConfig.for_model(model_type))
        assert "cache_implementation" in str(refusal.value) or "is_decoder" in str(refusal.value)


class Bare(PreTrainedConfig):
    """A configuration that says nothing of layers or heads."""

    model_type = "bare"


def test_a_configuration_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="standard cache from a configuration of bare"):
        hf_kvret.FlatKVCache(Bare())
