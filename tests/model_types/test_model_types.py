"""Which model types are served: every one that generates text, by its default configuration."""

from __future__ import annotations

import pytest
import transformers
from transformers import AutoConfig, PreTrainedConfig

import hf_kvret
from hf_kvret.commands.models import ModelType, scan

from .page import PAGE, markdown, read_trials, table_in
from .trial import Trial

# What a message says, and the types that are refused with it. A type that transformers adds
# belongs here, or among the trials: it is not served before somebody has looked.
REFUSED = {
    "is an encoder-decoder": """
        bart bigbird_pegasus blenderbot blenderbot-small florence2 marian mbart musicgen
        musicgen_melody mvp pegasus pix2struct plbart pp_formulanet prophetnet t5gemma2 udop
        vision-encoder-decoder whisper
    """,
    "by diffusion": """
        diffusion_gemma
    """,
    "adds a learned bias to the scores": """
        inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text
    """,
    "no full-attention layer": """
        bamba falcon_mamba granitemoehybrid idefics2 kyutai_speech_to_text mamba mamba2
        ministral mistral moshi recurrent_gemma voxtral_realtime
    """,
    "is several models": """
        qwen2_5_omni qwen3_omni_moe
    """,
    "computes attention by itself": """
        big_bird blip bloom cpmant falcon git got_ocr2 gpt_neo gpt_neox_japanese granite_speech
        granite_speech_plus megatron-bert mpt openai-gpt pp_chart2table rembert roformer trocr xglm
        xlm
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
    "adds copies of its layers to the cache while it runs": """
        dory
    """,
    "reads all tokens anew at every step": """
        evolla
    """,
    "hands masks of its own making": """
        kosmos-2
    """,
    "repeats its keys after the cache, where no handle survives": """
        jetmoe
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
        gemma4_unified_assistant
    """,
    "transformers can't make a default configuration": """
        gemma4_assistant
    """,
}


# No small model can be made of their default configurations; all but zamba have their own suites.
UNTRIED = {"gemma3n", "gemma3n_text", "zamba", "zamba2"}


def wrong(one: ModelType, tried: Trial | None, reason: str) -> str:
    """What is wrong with the outcome of a type; empty if nothing is."""
    if one.refusal:
        right = reason and reason in one.refusal
        return "" if right else f"{one.name}: expected {reason or 'served'!r}, got {one.refusal!r}"
    if reason:
        return f"{one.name}: expected {reason!r}, it is served"
    if tried is None:
        return f"{one.name} was never tried"
    if tried.outcome == "equal" or (one.name in UNTRIED and tried.outcome == "not tried"):
        return ""
    return f"{one.name}: {tried.outcome}, {tried.detail}"


def test_every_type_is_served_as_its_trial_shows_or_refused_with_its_reason() -> None:
    """And the page says so. One test, since the scan takes seconds in every process."""
    reasons = {name: reason for reason, names in REFUSED.items() for name in names.split()}
    (release, trials), types = read_trials(), scan()
    assert len(types) > 150
    if release == transformers.__version__:
        faults = [wrong(one, trials.get(one.name), reasons.pop(one.name, "")) for one in types]
        assert not [*filter(None, faults)] and not reasons
        # ``python -m tests.model_types.page`` makes it anew.
        assert table_in(PAGE.read_text(encoding="utf-8")) == markdown(types, trials)


def test_no_type_is_named_twice() -> None:
    named = [name for names in REFUSED.values() for name in names.split()]
    assert len(named) == len(set(named))


def test_a_refusal_names_the_type_and_the_way_out() -> None:
    types = ("diffusion_gemma", "inkling2", "qwen2_5_omni", "doge", "mllama", "rwkv", "bert")
    for model_type in types:
        with pytest.raises(ValueError, match=model_type) as refusal:
            hf_kvret.ParisKVCache(AutoConfig.for_model(model_type))
        assert "cache_implementation" in str(refusal.value) or "is_decoder" in str(refusal.value)


class Bare(PreTrainedConfig):
    """A configuration that says nothing of layers or heads."""

    model_type = "bare"


def test_a_configuration_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="standard cache from a configuration of bare"):
        hf_kvret.FlatKVCache(Bare())
