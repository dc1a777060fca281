"""Taps: they see exactly what the layers made, change nothing, and leave nothing behind."""

from __future__ import annotations

import functools
import importlib
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    StaticCache,
)

import hf_kvret
from hf_kvret.testing import INDEXED_MODELS, MODELS, REFUSED, SHARED_MODELS
from hf_kvret_model_patches import taps
from hf_kvret_model_patches.taps import LayerTokens, tap_attention

# Layers that have attention without RoPE.
WITHOUT_ROPE = {"gpt2": {0, 1}, "exaone4": {1, 2}, "smollm3": {1}}
ATTENTION = {key: {0, 1, 2} for key in ("gemma2", "gemma3", "gemma4", "gpt_oss", "exaone4")}


def prompt() -> dict[str, torch.Tensor]:
    """Two rows, the second padded on the left."""
    ids = torch.arange(10, 24).view(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Seen:
    """A callback that keeps copies."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, LayerTokens]] = []

    def __call__(self, layer: int, tokens: LayerTokens) -> None:
        self.calls.append((layer, tokens))

    def of(self, layer: int) -> list[LayerTokens]:
        return [tokens for number, tokens in self.calls if number == layer]

    @property
    def layers(self) -> set[int]:
        return {layer for layer, _ in self.calls}


def patched(model: Any) -> list[Any]:
    """Everything that a tap on `model` replaces while it is open."""
    home = importlib.import_module(type(model).__module__)
    hooks = [
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    ]
    rotation = getattr(home, "apply_rotary_pos_emb", None)
    return [Cache.update, AttentionInterface.get_interface, rotation, sum(hooks)]


@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_the_same_and_each_layer_is_reported_once(name: str) -> None:
    model, seen = MODELS[name].build(), Seen()
    wanted = ATTENTION.get(name, set(MODELS[name].full_attention))
    with torch.no_grad():
        expected = model(**prompt(), use_cache=False).logits
        with tap_attention(model, seen):
            got = model(**prompt(), use_cache=False).logits
        after = model(**prompt(), use_cache=False).logits
    assert torch.equal(got, expected) and torch.equal(after, expected)
    assert [layer for layer, _ in seen.calls] == sorted(wanted)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_seen_is_what_the_cache_holds_and_what_rope_was_given(name: str) -> None:
    model, seen = MODELS[name].build(), Seen()
    run = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    with tap_attention(model, seen):
        cache = model.generate(**prompt(), **run).past_key_values
    module = importlib.import_module(type(model).__module__)
    for layer in MODELS[name].full_attention:
        steps = seen.of(layer)
        assert [tokens.query.shape[2] for tokens in steps] == [7, 1, 1, 1]
        assert torch.equal(torch.cat([t.key for t in steps], 2), cache.layers[layer].keys)
        assert torch.equal(torch.cat([t.value for t in steps], 2), cache.layers[layer].values)
        for t in steps:
            assert t.query_before.shape == t.query.shape and t.key_before.shape == t.key.shape
            assert t.hidden is not None and t.hidden.shape[:2] == t.query.shape[::2]
            if layer in WITHOUT_ROPE.get(name, ()):
                assert t.cos is None and t.sin is None
                assert torch.equal(t.key_before, t.key) and torch.equal(t.query_before, t.query)
            else:
                rotate, tables = module.apply_rotary_pos_emb, (t.cos, t.sin)
                if name == "gemma4":
                    made = rotate(t.query_before, *tables), rotate(t.key_before, *tables)
                else:
                    made = rotate(t.query_before, t.key_before, *tables)
                assert torch.equal(made[0], t.query) and torch.equal(made[1], t.key)
                assert not torch.equal(t.key_before, t.key)


def test_keys_and_queries_are_taken_after_their_norms_and_hidden_is_the_layers_input() -> None:
    model, seen = MODELS["qwen3"].build(), Seen()
    with torch.no_grad(), tap_attention(model, seen):
        model(**prompt(), use_cache=False)
        for layer, t in seen.calls:
            attention = model.model.layers[layer].self_attn
            shape = (2, 7, -1, attention.head_dim)
            for norm, projection, found in (
                (attention.q_norm, attention.q_proj, t.query_before),
                (attention.k_norm, attention.k_proj, t.key_before),
            ):
                made = norm(projection(t.hidden).view(shape)).transpose(1, 2)
                assert torch.equal(made, found)
            assert torch.equal(attention.v_proj(t.hidden).view(shape).transpose(1, 2), t.value)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gpt2"}))
def test_the_attention_function_is_told_the_positions_that_rope_uses(name: str) -> None:
    """In a prompt padded on the left, and in the steps after it."""
    model, seen = MODELS[name].build(), Seen()
    with tap_attention(model, seen):
        model.generate(**prompt(), max_new_tokens=3, do_sample=False)
    layer = next(i for i in seen.layers if i not in WITHOUT_ROPE.get(name, ()))
    positions = torch.cat([t.position_ids for t in seen.of(layer)], dim=1)
    tables = torch.cat([t.cos for t in seen.of(layer)], dim=1)
    rows = [list(range(9)), [0, 1, 2, 3, 4, 5]]
    assert [positions[0].tolist(), positions[1, 3:].tolist()] == rows
    for step in range(6):
        assert torch.equal(tables[0, step], tables[1, step + 3])
    assert not torch.equal(tables[0, 8], tables[1, 8])


@pytest.mark.parametrize("name", ["llama", "smollm3", "gpt2"])
def test_a_static_cache_is_as_good(name: str) -> None:
    """Its keys are longer than the text, so new tokens can't be found by counting from the end."""
    model, dynamic, static = MODELS[name].build(), Seen(), Seen()
    for seen, cache in (
        (dynamic, DynamicCache(config=model.config)),
        (static, StaticCache(config=model.config, max_cache_len=32)),
    ):
        with torch.no_grad(), tap_attention(model, seen):
            model(torch.arange(10, 17)[None], past_key_values=cache)
            model(torch.arange(17, 19)[None], past_key_values=cache)
    for (layer, a), (other, b) in zip(dynamic.calls, static.calls, strict=True):
        assert layer == other
        assert a.key_before.shape == b.key_before.shape
        # The two masks lead sdpa to different summations.
        torch.testing.assert_close(a.key_before, b.key_before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.value, b.value, rtol=1e-4, atol=1e-5)


def test_a_retrieval_cache_works_under_a_tap() -> None:
    model, seen = MODELS["llama"].build(), Seen()
    run = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "flat"}
    try:
        expected = model.generate(**prompt(), **run)
        with tap_attention(model, seen):
            assert torch.equal(model.generate(**prompt(), **run), expected)
    finally:
        hf_kvret.restore(model)
    assert [t.key_before.shape[2] for t in seen.of(1)] == [7, 1, 1, 1]


def test_a_tap_works_in_inference_mode_and_hands_out_no_graph() -> None:
    model, seen = MODELS["llama"].build(), Seen()
    with tap_attention(model, seen):
        with torch.inference_mode():
            model(**prompt())
        model(**prompt()).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad is not None
    assert len(seen.calls) == 4
    given = [getattr(t, field.name) for _, t in seen.calls for field in fields(LayerTokens)]
    assert not any(x.requires_grad for x in given if isinstance(x, torch.Tensor))


def test_a_model_with_accelerates_hooks_is_seen_too() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain, offloaded = Seen(), Seen()
    for seen, model in (
        (plain, MODELS["llama"].build()),
        (offloaded, accelerate.cpu_offload(MODELS["llama"].build(), torch.device("cpu"))),
    ):
        with torch.no_grad(), tap_attention(model, seen):
            model(**prompt(), use_cache=False)
    assert [layer for layer, _ in offloaded.calls] == [0, 1]
    for (_, a), (_, b) in zip(plain.calls, offloaded.calls, strict=True):
        assert torch.equal(a.key_before, b.key_before) and torch.equal(a.hidden, b.hidden)


def test_the_very_objects_are_back_also_after_errors() -> None:
    model = MODELS["llama"].build()
    before = patched(model)

    def fail(layer: int, tokens: LayerTokens) -> None:
        raise KeyError("mine")

    with tap_attention(model, Seen()):
        assert not any(a is b for a, b in zip(patched(model)[:3], before[:3], strict=True))
    assert patched(model) == before
    with pytest.raises(KeyError, match="mine"), tap_attention(model, fail):
        model(**prompt())
    assert patched(model) == before
    with pytest.raises(IndexError), tap_attention(model, Seen()):
        model(torch.tensor([[5, 1000]]))
    assert patched(model) == before
    with torch.no_grad():
        model(**prompt())


def test_a_broken_pass_is_forgotten() -> None:
    """What it left halfway must not be mixed up with another model, nor with the next pass."""
    model, other, seen = MODELS["llama"].build(), MODELS["llama"].build(), Seen()
    projection = model.model.layers[0].self_attn.o_proj
    projection.bias = torch.nn.Parameter(torch.zeros(3))
    with torch.no_grad(), tap_attention(model, seen):
        with pytest.raises(RuntimeError):
            model(**prompt())
        other(**prompt())
        projection.bias = None
        model(**prompt())
    assert [layer for layer, _ in seen.calls] == [0, 0, 1]


def test_only_the_tapped_model_is_seen() -> None:
    model, other, seen = MODELS["llama"].build(), MODELS["llama"].build(), Seen()
    with torch.no_grad(), tap_attention(model, seen):
        other(**prompt())
        MODELS["qwen2"].build()(**prompt())
    assert not seen.calls


def test_a_second_tap_is_refused_and_the_first_goes_on() -> None:
    model, other, seen = MODELS["llama"].build(), MODELS["qwen2"].build(), Seen()
    with torch.no_grad(), tap_attention(model, seen):
        for tapped in (model, other):
            with pytest.raises(RuntimeError, match="another tap is open"):
                tap_attention(tapped, seen).__enter__()
        model(**prompt())
    assert [layer for layer, _ in seen.calls] == [0, 1]
    with torch.no_grad(), tap_attention(other, seen):
        other(**prompt())
    assert len(seen.calls) == 4


UNSEEN = {name: REFUSED[name] for name in ("falcon", "bloom", "mamba")}
UNSEEN["deepseek_v32"] = INDEXED_MODELS["deepseek_v32"].build


@pytest.mark.parametrize("name", UNSEEN)
def test_models_that_cant_be_seen_are_refused_before_anything_is_patched(name: str) -> None:
    model = UNSEEN[name]()
    before = patched(model)
    with pytest.raises(ValueError, match=r"rotates by|registered attention functions"):
        tap_attention(model, Seen()).__enter__()
    assert patched(model) == before


def test_a_model_that_changes_keys_after_rope_is_refused() -> None:
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "phi", vocab_size=128, num_hidden_layers=1, intermediate_size=64, **small
    )
    model = AutoModelForCausalLM.from_config(config)
    with (
        pytest.raises(ValueError, match=r"layer 0 \(PhiAttention\) changes queries or keys"),
        tap_attention(model, Seen()),
    ):
        model(**prompt())


def test_attention_past_the_registered_function_is_refused() -> None:
    config = MODELS["gpt2"].config()
    config.reorder_and_upcast_attn = True
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with (
        pytest.raises(ValueError, match="without the registered function"),
        tap_attention(model, Seen()),
    ):
        model(**prompt())


def test_a_rotation_in_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"].build()
    home = importlib.import_module(type(model).__module__)

    def in_place(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return q.detach().mul_(2.0), k.detach().mul_(2.0)

    monkeypatch.setattr(home, "apply_rotary_pos_emb", in_place)
    with pytest.raises(ValueError, match="rotates in place"), tap_attention(model, Seen()):
        model(**prompt())


@pytest.mark.parametrize(
    ("name", "past", "message"),
    [
        ("llama", 0, r"a cache of its own: try use_cache=False"),
        ("llama", 7, r"attends to 9 keys with 2 queries .* use_cache=False"),
        ("gpt2", 7, r"attends to 9 keys with 2 queries .* use_cache=False"),
    ],
)
def test_a_cache_that_hides_the_new_tokens_is_refused(name: str, past: int, message: str) -> None:
    class Hiding(DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *a: Any, **k: Any):
            return self.layers[layer_idx].update(key_states, value_states)

    model = MODELS[name].build()
    cache = Hiding(config=model.config)
    if past:
        model(torch.arange(10, 10 + past)[None], past_key_values=cache)
    with pytest.raises(ValueError, match=message), tap_attention(model, Seen()):
        model(torch.arange(17, 19)[None], past_key_values=cache)


@pytest.mark.parametrize(
    ("name", "message"), [("llama", "rotates twice"), ("gpt2", "attends twice")]
)
def test_a_layer_that_works_twice_is_refused(name: str, message: str) -> None:
    model = MODELS[name].build()
    attention = model.transformer.h[0].attn if name == "gpt2" else model.model.layers[0].self_attn
    once = attention.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        once(*args, **kwargs)
        return once(*args, **kwargs)

    attention.forward = twice
    with pytest.raises(ValueError, match=message), tap_attention(model, Seen()):
        model(**prompt(), use_cache=False)


def test_a_rotation_with_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"].build()
    home = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda x, table: x)
    with pytest.raises(ValueError, match="takes x, table, not q, k, cos, sin"):
        tap_attention(model, Seen()).__enter__()


def test_layers_with_keys_of_another_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = SHARED_MODELS["gemma4_shared"].build(), Seen()
    with tap_attention(model, seen):
        model(**prompt(), use_cache=False)
    assert seen.layers == {0, 1}
    monkeypatch.setattr(taps, "_reads_another", lambda module: False)
    with (
        pytest.raises(ValueError, match=r"layer 2 \(Gemma4TextAttention\) rotates queries and no"),
        tap_attention(model, Seen()),
    ):
        model(**prompt(), use_cache=False)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="model is a Linear"):
        tap_attention(torch.nn.Linear(2, 2), Seen()).__enter__()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callback is a int"):
        tap_attention(MODELS["llama"].build(), 3).__enter__()  # type: ignore[arg-type]


def test_what_others_wrap_while_a_tap_is_open_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"].build()
    home: Any = importlib.import_module(type(model).__module__)
    places = [(Cache, "update"), (AttentionInterface, "get_interface")]
    places.append((home, "apply_rotary_pos_emb"))
    for owner, name in places:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    calls: list[str] = []

    def wrapped(name: str, inner: Any) -> Any:
        @functools.wraps(inner)
        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*args, **kwargs)

        return theirs

    with tap_attention(model, Seen()):
        wrappers = [wrapped(name, getattr(owner, name)) for owner, name in places]
        for (owner, name), theirs in zip(places, wrappers, strict=True):
            setattr(owner, name, theirs)
    run = {"max_new_tokens": 2, "do_sample": False}
    for _ in range(2):
        seen = Seen()
        with tap_attention(model, seen):
            model.generate(**prompt(), **run)
        assert len(seen.of(0)) == 2, "each pass is seen once"
        assert [getattr(owner, name) for owner, name in places] == wrappers
        model.generate(**prompt(), **run)
        assert len(seen.of(0)) == 2
    assert set(calls) == {name for _, name in places}
