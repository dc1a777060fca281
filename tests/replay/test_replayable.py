"""Types of models whose steps are replayed must give the same tokens as usual steps, on the tape.

A type gets into ``REPLAYABLE`` with a green run of
``python -m pytest -m slow tests/replay/test_replayable.py``. The tables below say what a small
model of it needs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from hf_kvret import DecodeGraph
from hf_kvret.replay.replayable import REPLAYABLE, untested
from hf_kvret.testing.tape import taped
from hf_kvret.testing.tiny import spread_weights

# A covering budget: what differs then is the model's own code alone.
OPTIONS: dict[str, Any] = {
    "top_k": 10**6, "sink": 2, "recent": 4, "flush": 3, "max_draft": 4, "dense_below": 0,
}  # fmt: skip
PROMPT, NEW = 8, 7
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
    "head_dim": 16, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
GPT2_NAMES: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8, "original_max_position_embeddings": PROMPT + 3,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

WITH_EXPERTS = (
    "aria_text", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "laguna", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
    "solar_open",
)  # fmt: skip
GEMMA4: dict[str, Any] = {
    **FULL, "global_head_dim": 32, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
}  # fmt: skip
PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64}
# Types that need more than SMALL: other names, or not to slide.
OTHERS: dict[str, dict[str, Any]] = {
    "cohere2": {**FULL, "logit_scale": 1.0},
    "cwm": FULL,
    "exaone4": {**FULL, "sliding_window": None},
    "gemma2": FULL,
    "gemma3_text": FULL,
    "gemma4_text": {**GEMMA4, **PER_LAYER},
    "gemma4_unified_text": GEMMA4,
    # With a pad token in its configuration it looks for it among the tokens, on the host.
    "gpt2": {**GPT2_NAMES, "pad_token_id": None},
    "gpt_bigcode": {**GPT2_NAMES, "n_inner": 48},
    "gpt_neox": {},
    "gpt_oss": {**FULL, **EXPERTS},
    "llama4_text": {
        **FULL, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
        "no_rope_layers": [1, 0],
    },
    "ministral": FULL,
    "mistral": {"sliding_window": None},
    "olmo3": FULL,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phimoe": {**EXPERTS, "sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": FULL,
}  # fmt: skip
# Latent attention. The experts of longcat_flash read numbers of the device, so it is not here.
RANKS: dict[str, Any] = {
    **EXPERTS, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
LATENT: dict[str, dict[str, Any]] = {
    "axk1": RANKS,
    "deepseek_v2": RANKS,
    "deepseek_v3": RANKS,
    "glm4_moe_lite": RANKS,
    "minicpm3": {**RANKS, "dim_model_base": 32},
    "mistral4": {
        **RANKS, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1,
        },
    },
    "youtu": RANKS,
}  # fmt: skip
# Composite types, which stand in REPLAYABLE beside those of their text parts.
# Their classes begin with the name that stands here, before the text part.
COMPOSITE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {**FULL, "model_type": "gemma3_text"}),
    "gemma4": ("Gemma4", {**GEMMA4, **PER_LAYER, "model_type": "gemma4_text"}),
    "gemma4_unified": ("Gemma4Unified", {**GEMMA4, "model_type": "gemma4_unified_text"}),
    "llava": ("Llava", {"model_type": "llama"}),
    "mistral3": ("Mistral3", {"model_type": "mistral", "sliding_window": None}),
    "qwen2_vl": ("Qwen2VL", {"rope_parameters": MROPE}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": MROPE}),
}
TEXT_PARTS = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}
NEEDS = {**dict.fromkeys(WITH_EXPERTS, EXPERTS), **OTHERS, **LATENT}
TEXT = {name: NEEDS.get(name, {}) for name in sorted(REPLAYABLE - TEXT_PARTS - {*COMPOSITE})}
# One vision part for all types, small where it is not called.
VISION: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1,
    "num_attention_heads": 2, "num_heads": 2, "image_size": 28, "patch_size": 14,
    "out_hidden_size": 32, "deepstack_visual_indexes": [0], "mlp_ratio": 1,
    "num_position_embeddings": 4,
}  # fmt: skip
MARKS = {
    "image_token_id": 4, "image_token_index": 4, "video_token_id": 5, "vision_start_token_id": 2,
    "vision_end_token_id": 3, "boi_token_index": 2, "eoi_token_index": 3,
}  # fmt: skip
GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
SHARED_KEYS = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text with experts": ("gemma4_text", {**GEMMA4, **PER_LAYER, **GEMMA4_EXPERTS}),
    "gemma4_text with shared keys": ("gemma4_text", {**GEMMA4, **PER_LAYER, **SHARED_KEYS}),
    "phi3 with long rope": ("phi3", {"rope_parameters": LONGROPE}),
    "llama with yarn": ("llama", {"rope_parameters": YARN}),
}
QUICK = "qwen3_moe"


def build(model_type: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A model of two layers whose weights make its tokens depend on all others."""
    options = {"dtype": torch.float32}
    if model_type in COMPOSITE:
        name, changes = COMPOSITE[model_type]
        parts = {"text_config": {**SMALL, **changes}, "vision_config": VISION}
        # The vision part of Gemma-4 has other names.
        parts |= {"vision_config": None} if model_type == "gemma4" else {}
        config = AutoConfig.for_model(model_type, **parts, **MARKS)
        model_class = getattr(transformers, f"{name}ForConditionalGeneration")
        model = model_class._from_config(config, **options)
    else:
        config = AutoConfig.for_model(model_type, **{**SMALL, **changes})
        # Not among those of AutoModelForCausalLM.
        own = {"mistral4": "Mistral4ForCausalLM"}.get(model_type)
        if own is None:
            model = AutoModelForCausalLM.from_config(config, **options)
        else:
            model = getattr(transformers, own)._from_config(config, **options)
    spread_weights(model, seed=3)
    model.eval()
    # ``generate`` does this for its decode steps where the model is not on a CPU.
    experts = model.get_experts_implementation()
    if "grouped_mm" in experts.values():
        model.set_experts_implementation(
            {key: "batched_mm" if name == "grouped_mm" else name for key, name in experts.items()}
        )
    return model


def generate(model: PreTrainedModel, padded: bool, graph: str | bool) -> tuple[torch.Tensor, ...]:
    """``(tokens, logits [T, B, V])`` of a greedy continuation."""
    tokens = (torch.arange(2 * PROMPT).view(2, PROMPT) * 7 % 50 + 10)[: 2 if padded else 1]
    mask = torch.ones_like(tokens)
    mask[1:, :3] = 0
    padding = {"attention_mask": mask} if padded else {}
    output = model.generate(
        tokens,
        cache_implementation="flat",
        cache_config={**OPTIONS, "graph": graph},
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
        pad_token_id=0,
        **padding,
    )
    return output.sequences, torch.stack(output.logits)


def compare(model: PreTrainedModel, padded: bool, graphs: list[DecodeGraph]) -> float:
    """The greatest difference of logits between replayed and usual steps; some were replayed."""
    with taped():
        tokens, logits = generate(model, padded, "auto")
    assert graphs[0].reason is None
    # More than one for each capture: numbers that it froze are right at the first.
    assert graphs[0].replays > graphs[0].captures > 1
    usual_tokens, usual_logits = generate(model, padded, graph=False)
    assert torch.isfinite(usual_logits).all()
    difference = float((logits - usual_logits).abs().max())
    if torch.equal(tokens, usual_tokens):
        return difference
    return float("inf")


CASES = {
    **{name: (name, changes) for name, changes in TEXT.items()},
    **{name: (name, {}) for name in COMPOSITE},
    **VARIANTS,
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        pytest.param(*case, id=name, marks=[] if name == QUICK else [pytest.mark.slow])
        for name, case in CASES.items()
    ],
)
def test_replayed_steps_give_the_tokens_of_usual_ones(
    model_type: str, changes: dict[str, Any], graphs: list[DecodeGraph]
) -> None:
    model = build(model_type, changes)
    assert model.config.model_type == model_type
    # Two orders of summation in fp32: kernels of the tape against torch.
    assert compare(model, False, graphs) < 3e-4
    graphs.clear()
    assert compare(model, True, graphs) < 3e-4


@pytest.mark.slow
def test_a_number_that_a_model_counts_on_the_host_is_noticed_by_the_comparison(
    graphs: list[DecodeGraph],
) -> None:
    model = build("llama", {})
    rope, calls = model.model.rotary_emb.forward, 0

    def counting(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        nonlocal calls
        calls = 0 if position_ids.shape[1] > 1 else calls + 1
        return rope(x, torch.full_like(position_ids, PROMPT + calls - 1) if calls else position_ids)

    model.model.rotary_emb.forward = counting
    assert compare(model, False, graphs) > 0.1


def test_every_type_of_a_table_is_replayed() -> None:
    assert {*NEEDS, *COMPOSITE, *TEXT_PARTS} <= REPLAYABLE


def test_a_type_that_was_not_tested_gives_a_reason_and_the_tokens_of_usual_steps(
    graphs: list[DecodeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_kvret.replay.replayable.REPLAYABLE", REPLAYABLE - {"llama"})
    model = build("llama", {})
    with taped():
        tokens, _ = generate(model, True, "auto")
    reason = graphs[0].reason
    assert reason is not None
    assert "type llama" in reason and "graph=False" in reason and "docs/models.md" in reason
    assert graphs[0].captures == graphs[0].replays == 0
    assert torch.equal(tokens, generate(model, True, graph=False)[0])


def test_a_composite_needs_both_of_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llava", {})
    assert untested(model) is None
    for name in ("llava", "llama"):
        with monkeypatch.context() as patch:
            patch.setattr("hf_kvret.replay.replayable.REPLAYABLE", REPLAYABLE - {name})
            assert f"type {name} " in str(untested(model))


def test_code_from_outside_transformers_is_not_known_by_the_type_of_its_config() -> None:
    class Remote(LlamaForCausalLM):
        """As ``trust_remote_code`` would load it."""

    plain = build("llama", {})
    assert untested(plain) is None
    reason = untested(Remote(plain.config))
    assert reason is not None and "Remote" in reason and __name__ in reason
