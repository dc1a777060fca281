"""Which model types are served: every one that generates text, by its default configuration."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from transformers import AutoConfig, PreTrainedConfig

import hf_kvret
from hf_kvret.lab.coverage.record import Record
from hf_kvret.lab.coverage.scan import scan
from hf_kvret.lab.coverage.table import BEGIN, END, Row, make_rows, markdown

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
AGAIN = "hf-kvret models --try hf_kvret/lab/coverage/trials.json --md docs/models.md"

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
        gemma4_assistant gemma4_unified_assistant
    """,
}


# No small model can be made of their default configurations; all but zamba have their own suites.
UNTRIED = {"gemma3n", "gemma3n_text", "zamba", "zamba2"}


def wrong(row: Row, reason: str) -> str:
    """What is wrong with the outcome of a type; empty if nothing is."""
    name, refusal = row.type.name, row.type.refusal
    if row.type.untold:
        return ""
    if refusal:
        right = reason and reason in refusal
        return "" if right else f"{name}: expected {reason or 'served'!r}, got {refusal!r}"
    if reason:
        return f"{name}: expected {reason!r}, it is served"
    if row.trial is None:
        return f"{name} was never tried: {AGAIN}"
    if name in UNTRIED and row.trial.outcome == "not tried":
        return ""
    if row.trial.outcome != "equal":
        return f"{name}: {row.trial.outcome}, {row.trial.detail}"
    if {heads for heads, *_ in row.trial.rows} != {row.trial.heads}:
        return f"{name} has rows {row.trial.rows}, its configuration says {row.trial.heads} heads"
    return ""


def test_every_type_is_served_as_its_trial_shows_or_refused_with_its_reason() -> None:
    """And the page says so. One test, since the scan takes seconds in every process."""
    reasons = {name: reason for reason, names in REFUSED.items() for name in names.split()}
    record = Record.read()
    rows = make_rows(scan(), record)
    assert len(rows) > 150
    releases = {setup.transformers for setup in record.setups.values()}
    if releases == {transformers.__version__}:
        assert not [fault for row in rows if (fault := wrong(row, reasons.pop(row.type.name, "")))]
        assert not reasons
        table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
        # Trials go stale with any change of the code; that is reported and no fault of the page.
        table = re.sub(r"\n\n[^\n|]*tried with another state of the code[^\n]*", "", table)
        fresh = [replace(row, stale=False) for row in rows]
        assert table.strip() == markdown(fresh, record), f"{AGAIN} makes it anew"


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
