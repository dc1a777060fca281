"""Chunks give what one pass gives, or the prompt is not cut: rotations, and every type."""

import logging
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.commands.models import default_type, type_names
from hf_kvret.models.exact_chunks import Span, depends_on_length, why_whole
from hf_kvret.models.versions import as_argument
from hf_kvret.testing.conformance import COVERING_OPTIONS, LOGIT_TOLERANCE
from hf_kvret.testing.models import PAD_TOKEN, spread_weights

from ..model_types.small import (
    VOCAB_SIZE,
    generate,
    image_inputs,
    padded_prompt,
    small_model,
    small_text_part,
)
from ..model_types.trial import IMPOSSIBLE

LIMIT, CHUNK = 96, 40
HEAD_DIM = 16
LONG = {
    "rope_type": "longrope",
    "factor": 8.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * (HEAD_DIM // 2),
    "long_factor": [4.0] * (HEAD_DIM // 2),
}
ROTATIONS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": LIMIT},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": LONG,
}
CHANGING = {"dynamic", "longrope"}
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": PAD_TOKEN, "tie_word_embeddings": False,
}  # fmt: skip


def _rotating(kind: str, model_type: str = "llama") -> PreTrainedModel:
    """A new model, because rotations remember how long texts were."""
    parameters = {**ROTATIONS[kind], "rope_theta": 1e4}
    most = LIMIT if kind == "dynamic" else 8 * LIMIT
    changes: dict[str, Any] = {}
    if model_type == "gemma3_text":
        plain = {"rope_type": "default", "rope_theta": 1e4}
        parameters = {"sliding_attention": plain, "full_attention": parameters}
        changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    config = AutoConfig.for_model(
        model_type, **SHAPE, **changes, rope_parameters=parameters, max_position_embeddings=most
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread_weights(model, seed=3)
    model.generation_config.eos_token_id = None
    return model.eval()


def _generate(model: PreTrainedModel, cache: Any, **inputs: Any) -> Any:
    return generate(model, cache, 5, **inputs)


def _passes(model: PreTrainedModel) -> list[int]:
    """A list that gets the tokens of each pass with more than one."""
    lengths: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            lengths.append(kwargs["input_ids"].shape[1])

    model.register_forward_pre_hook(note, with_kwargs=True)
    return lengths


def _difference(ours: Any, own: Any) -> float:
    return float((torch.stack(ours.logits) - torch.stack(own.logits)).abs().max())


def _cache(model: PreTrainedModel, chunk: int = CHUNK) -> FlatKVCache:
    options = {"prefill_chunk": chunk, "snapshots": 0}
    return FlatKVCache(model.config, **COVERING_OPTIONS, **options)


@pytest.mark.parametrize(
    ("model_type", "kind", "length"),
    [
        *(("llama", "yarn", LIMIT + 40), ("llama", "dynamic", LIMIT - 6)),
        *(("llama", "dynamic", LIMIT), ("gemma3_text", "dynamic", LIMIT + 40)),
        *(("llama", "longrope", LIMIT), ("llama", "longrope", LIMIT + 1)),
        ("gemma3_text", "longrope", LIMIT + 40),
    ],
)
def test_a_rotation_is_that_of_one_pass(model_type: str, kind: str, length: int) -> None:
    inputs = padded_prompt(length, padding=11)
    own_model, model = _rotating(kind, model_type), _rotating(kind, model_type)
    try:
        own = _generate(own_model, DynamicCache(config=own_model.config), **inputs)
    except UnboundLocalError:
        pytest.skip("this transformers has no longrope for some layers beyond its limit")
    lengths = _passes(model)
    ours = _generate(model, _cache(model), **inputs)
    assert _difference(ours, own) < 2 * LOGIT_TOLERANCE
    assert torch.equal(ours.sequences, own.sequences)
    changes = kind in CHANGING and length >= LIMIT + (kind == "longrope")
    assert (lengths == [length]) == changes


@pytest.mark.parametrize("kind", sorted(CHANGING))
def test_a_callers_chunks_are_refused_there(kind: str) -> None:
    model = _rotating(kind)
    inputs = {**padded_prompt(LIMIT + 40), "prefill_chunk_size": CHUNK}
    with pytest.raises(ValueError, match=rf"prefill_chunk_size={CHUNK} .*{kind}.*=None"):
        _generate(model, _cache(model), **inputs)
    _generate(model, _cache(model), **{**inputs, "prefill_chunk_size": LIMIT + 40})
    short = {**padded_prompt(LIMIT - 6), "prefill_chunk_size": CHUNK}
    _generate(model, _cache(model), **short)


def test_why_a_prompt_goes_in_one_pass_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_kvret"):
        model = _rotating("longrope")
        _generate(model, _cache(model), **padded_prompt(LIMIT + 40))
        model.generate(
            inputs_embeds=model.get_input_embeddings()(padded_prompt(LIMIT)["input_ids"]),
            **as_argument(_cache(model)),
            max_new_tokens=1,
        )
    lines = [(one.levelname, one.getMessage()) for one in caplog.records]
    lines = [line for line in lines if "prefill_chunk" in line[1]]
    assert len(lines) == 2 and {level for level, _ in lines} == {"WARNING"}
    assert f"longrope rotation is another one beyond {LIMIT} tokens" in lines[0][1]
    assert "inputs_embeds can't be cut" in lines[1][1]


def test_a_span_on_one_side_of_the_limit_may_be_cut() -> None:
    longrope, dynamic = _rotating("longrope").config, _rotating("dynamic").config
    assert depends_on_length(longrope) and depends_on_length(dynamic)
    assert not depends_on_length(_rotating("yarn").config)
    for held, chunk_end, end, cut in (
        *((0, 40, LIMIT, True), (0, 40, LIMIT + 1, False)),
        *((0, LIMIT, LIMIT + 1, False), (0, LIMIT + 1, LIMIT + 50, True)),
        *((LIMIT - 1, LIMIT + 30, LIMIT + 50, False), (LIMIT, LIMIT + 30, LIMIT + 50, False)),
        (LIMIT + 1, LIMIT + 30, LIMIT + 50, True),
    ):
        assert (why_whole(longrope, Span(held, chunk_end, end)) is None) == cut
    assert why_whole(dynamic, Span(0, 40, LIMIT - 1)) is None
    assert why_whole(dynamic, Span(0, 40, LIMIT)) is not None
    assert why_whole(dynamic, Span(LIMIT, LIMIT + 40, LIMIT + 50)) is not None
    assert why_whole(longrope) is None and why_whole(dynamic) is None


def test_attention_in_both_directions_is_whole() -> None:
    for model_type, value, cut in (
        ("gemma3_text", True, False),
        ("gemma3_text", False, True),
        ("gemma", True, False),
        ("gemma", None, True),
    ):
        config = AutoConfig.for_model(model_type, use_bidirectional_attention=value)
        assert (why_whole(config) is None) == cut
    config = AutoConfig.for_model("llama")
    config.is_causal = False
    assert why_whole(config) is not None


def _scale_scores(model: PreTrainedModel) -> None:
    """Scale scores down where a type does not: there rounding alone moves logits by 1e-3."""
    for module in model.modules():
        if getattr(module, "scaling", None) == 1.0 and hasattr(module, "head_dim"):
            module.scaling = module.head_dim**-0.5


def _model(name: str) -> PreTrainedModel:
    if default_type(name).refusal:
        pytest.skip("the type is refused")
    for make in (small_model, small_text_part):
        try:
            model = make(name)
            _generate(model, DynamicCache(config=model.config), **_inputs(model, 0, 8))
        except IMPOSSIBLE as error:
            reason = str(error)
            continue
        _scale_scores(model)
        return model
    pytest.skip(f"transformers can't run a small model on text: {reason}")


def _inputs(model: PreTrainedModel, padding: int, length: int = 150) -> dict[str, Any]:
    return {**padded_prompt(length, padding), **image_inputs(model.config.model_type, 2, length)}


# A mask in both directions, and states that go on.
SOME = ("paligemma", "lfm2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in type_names()],
)
def test_chunks_of_a_type_give_what_one_pass_gives(name: str) -> None:
    """Chunks by ``prefill_chunk`` give the logits of one pass with the model's own attention."""
    model = _model(name)
    inputs = _inputs(model, padding=57)
    own = _generate(model, DynamicCache(config=model.config), **inputs)
    spread = max(1.0, float(torch.stack(own.logits).std()) / 4)
    ours = _generate(model, _cache(model, 48), **inputs)
    assert _difference(ours, own) < 2 * LOGIT_TOLERANCE * spread
