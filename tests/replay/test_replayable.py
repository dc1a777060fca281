"""Types of models whose steps are replayed must give the same tokens as usual steps, on the tape.

A type gets into ``REPLAYABLE`` with a green run of
``python -m pytest -m slow tests/replay/test_replayable.py``.
"""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_kvret import DecodeGraph
from hf_kvret.replay.replayable import REPLAYABLE, untested
from hf_kvret.testing.conformance import ALL_MODELS
from hf_kvret.testing.tape import taped

from ..model_types.small import small_model

# A covering budget: what differs then is the model's own code alone.
OPTIONS: dict[str, Any] = {
    "top_k": 10**6, "sink": 2, "recent": 4, "flush": 3, "max_draft": 4, "dense_below": 0,
}  # fmt: skip
PROMPT, NEW = 8, 7
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 48,
    "long_factor": [3.0] * 48, "original_max_position_embeddings": PROMPT + 3,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
EXPERTS = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
# Few programs for Triton's interpreter.
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
# Their own are wide, and nobody calls them here.
TOWER = {
    "vision_config": {"hidden_size": 64, "embed_dim": 64, "intermediate_size": 64, "num_heads": 2}
}
# States, which transformers writes in place. Types that are not in the zoo are made small.
QUICK_WITH_STATES = "lfm2"
SMALL_WITH_STATES: dict[str, dict[str, Any]] = {
    QUICK_WITH_STATES: {**SMALL, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    **{name: {} for name in ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text")},
    **{name: {} for name in ("granitemoehybrid", "nemotron_h", "olmo_hybrid")},
}
WITH_STATES = (
    *("bailing_hybrid", "falcon_h1", "kimi_linear", "qwen3_next", "zamba2", "zaya"),
    *SMALL_WITH_STATES,
)
QUICK = "qwen3_moe"
# Types, and changes of their small configurations.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Text parts have no model of their own.
    **{
        name: (name, {})
        for name in sorted(REPLAYABLE - {*WITH_STATES})
        if not name.endswith("vl_text")
    },
    **{name: (name, TOWER) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    QUICK: (QUICK, SMALL),
    "gemma4_text with experts": ("gemma4_text", EXPERTS),
    "gemma4_text with shared keys": ("gemma4_text", {"num_kv_shared_layers": 1}),
    "phi3 with long rope": ("phi3", {"rope_parameters": LONGROPE}),
    "llama with yarn": ("llama", {"rope_parameters": YARN}),
}


def build(model_type: str, **changes: Any) -> PreTrainedModel:
    """A small model without layers that slide, whose experts run as off a CPU."""
    return with_batched_experts(small_model(model_type, full=True, **changes))


def with_batched_experts(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose experts run as off a CPU."""
    # ``generate`` does this for its decode steps where the model is not on a CPU.
    experts = model.get_experts_implementation()
    if "grouped_mm" in experts.values():
        model.set_experts_implementation(
            {key: "batched_mm" if name == "grouped_mm" else name for key, name in experts.items()}
        )
    return model


def generate(
    model: PreTrainedModel, padded: bool, graph: str | bool, new: int = NEW
) -> tuple[torch.Tensor, ...]:
    """``(tokens, logits [T, B, V])`` of a greedy continuation."""
    # The lower half of the vocabulary are marks of images and the like.
    half = model.get_input_embeddings().weight.shape[0] // 2
    tokens = torch.arange(2 * PROMPT).view(2, PROMPT) * 7 % (half - 10) + half
    tokens = tokens[: 2 if padded else 1]
    mask = torch.ones_like(tokens)
    mask[1:, :3] = 0
    padding = {"attention_mask": mask} if padded else {}
    output = model.generate(
        tokens, cache_implementation="flat", cache_config={**OPTIONS, "graph": graph},
        max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True,
        eos_token_id=None, pad_token_id=0, **padding,
    )  # fmt: skip
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


@pytest.mark.parametrize("padded", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        pytest.param(*case, id=name, marks=[] if name == QUICK else [pytest.mark.slow])
        for name, case in CASES.items()
    ],
)
def test_replayed_steps_give_the_tokens_of_usual_ones(
    model_type: str, changes: dict[str, Any], padded: bool, graphs: list[DecodeGraph]
) -> None:
    model = build(model_type, **changes)
    assert model.config.model_type == model_type
    # Two orders of summation in fp32: kernels of the tape against torch.
    assert compare(model, padded, graphs) < 3e-4


@pytest.mark.parametrize(
    "name",
    [
        name if name == QUICK_WITH_STATES else pytest.param(name, marks=pytest.mark.slow)
        for name in WITH_STATES
    ],
)
def test_layers_with_states_are_replayed_unpadded(name: str, graphs: list[DecodeGraph]) -> None:
    is_small = name in SMALL_WITH_STATES
    model = small_model(name, **SMALL_WITH_STATES[name]) if is_small else ALL_MODELS[name].build()
    model = with_batched_experts(model)
    assert compare(model, False, graphs) < 3e-4
    graphs.clear()
    with taped():
        generate(model, True, "auto", new=4)
    assert "padded, which layers that slide, or keep a state" in str(graphs[0].reason)


@pytest.mark.slow
def test_a_number_that_a_model_counts_on_the_host_is_noticed(graphs: list[DecodeGraph]) -> None:
    model = build("llama")
    rope, calls = model.model.rotary_emb.forward, 0

    def counting(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        nonlocal calls
        calls = 0 if position_ids.shape[1] > 1 else calls + 1
        return rope(x, torch.full_like(position_ids, PROMPT + calls - 1) if calls else position_ids)

    model.model.rotary_emb.forward = counting
    assert compare(model, False, graphs) > 0.1


def test_a_type_that_was_not_tested_gives_a_reason_and_the_tokens_of_usual_steps(
    graphs: list[DecodeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_kvret.replay.replayable.REPLAYABLE", REPLAYABLE - {"llama"})
    model = build("llama", **SMALL)
    with taped():
        tokens, _ = generate(model, True, "auto", new=3)
    reason = graphs[0].reason
    assert reason is not None
    assert "type llama" in reason and "graph=False" in reason and "docs/models.md" in reason
    assert graphs[0].captures == graphs[0].replays == 0
    assert torch.equal(tokens, generate(model, True, graph=False, new=3)[0])


def test_a_composite_needs_both_of_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llava")
    assert untested(model) is None
    for name in ("llava", "llama"):
        with monkeypatch.context() as patch:
            patch.setattr("hf_kvret.replay.replayable.REPLAYABLE", REPLAYABLE - {name})
            assert f"type {name} " in str(untested(model))


def test_code_from_outside_transformers_is_not_known_by_the_type_of_its_config() -> None:
    class Remote(LlamaForCausalLM):
        """As ``trust_remote_code`` would load it."""

    plain = build("llama")
    assert untested(plain) is None
    reason = untested(Remote(plain.config))
    assert reason is not None and "Remote" in reason and __name__ in reason
