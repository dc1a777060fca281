"""The patch of ``generate``: applied twice, undone, beside other libraries, and its hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import configuration_utils
from transformers.generation.continuous_batching import ContinuousBatchingManager, ContinuousMixin
from transformers.generation.utils import GenerationMixin

import hf_kvret
from hf_kvret.models.versions import CACHE_NAME
from hf_kvret.testing.models import MODELS
from hf_kvret_model_patches import generation
from hf_kvret_model_patches.generation import Hooks

METHODS = [
    (GenerationMixin, "generate"),
    (GenerationMixin, "_prepare_cache_for_generation"),
    (ContinuousMixin, "init_continuous_batching"),
    (ContinuousBatchingManager, "start"),
    (GenerationMixin, "prepare_inputs_for_generation"),
    (GenerationMixin, "_update_model_kwargs_for_generation"),
    (GenerationMixin, "_valid_auto_compile_criteria"),
    (PreTrainedModel, "get_compiled_call"),
]
IDS = torch.arange(5, 25)[None]


@pytest.fixture(autouse=True)
def bare() -> Iterator[None]:
    """transformers without us during the test."""
    hf_kvret.unregister()
    yield
    generation.restore()
    hf_kvret.register()


def generate(model: Any, ids: torch.Tensor = IDS, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options)


def test_restoring_puts_back_the_very_objects() -> None:
    names = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    functions = [getattr(owner, name) for owner, name in METHODS]
    generation.restore()
    for added in ("first", "second"):
        generation.apply((added,), Hooks())
        assert (*names, added) == configuration_utils.ALL_CACHE_IMPLEMENTATIONS
        assert (*names, added) == generation.known_names()
        # Applying again does not stack wrappers.
        for (owner, name), function in zip(METHODS, functions, strict=True):
            assert getattr(owner, name).__wrapped__ is function
            assert getattr(owner, name).__name__ == name
    for _ in range(2):
        generation.restore()
        assert names == configuration_utils.ALL_CACHE_IMPLEMENTATIONS
        assert [getattr(owner, name) for owner, name in METHODS] == functions


def test_registering_applies_it_and_importing_does_not() -> None:
    functions = [getattr(owner, name) for owner, name in METHODS]
    assert not hasattr(functions[1], "__wrapped__")
    assert "paris" not in generation.known_names()
    hf_kvret.register()
    wrapped = [getattr(owner, name).__wrapped__ for owner, name in METHODS]
    assert wrapped == functions and "paris" in generation.known_names()
    hf_kvret.unregister()
    assert [getattr(owner, name) for owner, name in METHODS] == functions


def test_generate_runs_within_the_hook_and_is_put_back(model: Any) -> None:
    calls: list[Any] = []

    @contextmanager
    def around(model: Any, arguments: dict[str, Any]) -> Iterator[None]:
        calls.append(sorted(arguments))
        yield
        calls.append("done")

    generation.apply((), Hooks(around=around))
    generate(model)
    assert {"self", "inputs", "max_new_tokens", "do_sample"} <= set(calls[0])
    assert calls[1:] == ["done"]
    with pytest.raises(ValueError, match="unknown_argument"):
        generate(model, unknown_argument=1)
    assert len(calls) == 3


def test_a_new_name_validates_and_the_hook_makes_its_cache(model: Any) -> None:
    calls = []

    def prepare(model: Any, config: Any, kwargs: dict[str, Any]) -> bool:
        calls.append((type(model).__name__, config.cache_implementation, config.cache_config))
        if config.cache_implementation != "mine":
            return False
        kwargs[CACHE_NAME] = DynamicCache(config=model.config)
        return True

    generation.apply(("mine",), Hooks(prepare_cache=prepare))
    GenerationConfig(cache_implementation="mine").validate()
    expected = generate(model)
    result = generate(model, cache_implementation="mine", cache_config={"some": [1, "x"]})
    assert torch.equal(result, expected)
    name = "LlamaForCausalLM"
    assert calls == [(name, None, None), (name, "mine", {"some": [1, "x"]})]
    # Kyutai's model passes both by their names.
    named = {"generation_config": GenerationConfig(cache_implementation="mine"), "model_kwargs": {}}
    model._prepare_cache_for_generation(**named)
    assert CACHE_NAME in named["model_kwargs"]


def test_names_of_others_stay_and_keep_their_order() -> None:
    before = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    try:
        generation.apply(("mine",), Hooks())
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS += ("theirs",)
        generation.apply(("mine", "more"), Hooks())
        assert generation.known_names() == (*before, "mine", "theirs", "more")
        assert generation.foreign_names() == {*before, "theirs"}
        generation.apply(("more",), Hooks())
        assert generation.known_names() == (*before, "theirs", "more")
        # The other library puts back the tuple that it found.
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS = (*before, "mine")
        generation.apply(("mine",), Hooks())
        generation.restore()
        assert generation.known_names() == before
    finally:
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS = before


def test_the_hooks_of_passes_see_every_pass_and_no_other(model: Any) -> None:
    lengths: list[int] = []
    outputs: list[Any] = []
    hooks = Hooks(
        before_pass=lambda model, ids, arguments: lengths.append(ids.shape[1]),
        after_pass=lambda model, output: outputs.append(output),
    )
    generation.apply((), hooks)
    generate(model)
    assert lengths == [20, 21, 22, 23]
    assert [output.logits.shape[1] for output in outputs] == [1, 1, 1, 1]
    with torch.no_grad():
        model(IDS)
    assert len(outputs) == 4


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_the_cache_is_among_the_keywords_of_each_pass(name: str) -> None:
    """``prepare_inputs_for_generation`` gets it by name, also from models that override it."""
    caches: list[Any] = []
    hooks = Hooks(before_pass=lambda model, ids, values: caches.append(values.get(CACHE_NAME)))
    generation.apply((), hooks)
    generate(MODELS[name].build())
    assert len(caches) == 4 and all(cache is caches[0] for cache in caches)
    assert caches[0] is not None


def test_the_loop_calls_what_the_hook_chose_for_every_token_but_the_first(model: Any) -> None:
    expected, lengths = generate(model), []

    def choose(asking: Any, config: Any, kwargs: dict[str, Any]) -> Any:
        assert asking is model
        assert CACHE_NAME in kwargs

        def call(**inputs: Any) -> Any:
            lengths.append(inputs["input_ids"].shape[1])
            return model(**inputs)

        return call

    generation.apply((), Hooks(choose_call=choose))
    assert torch.equal(generate(model), expected)
    assert lengths == [1] * 3


def test_a_choice_is_handed_out_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call, which did not ask, gets what transformers compiles."""
    monkeypatch.setattr(torch, "compile", lambda *args, **options: "theirs")
    generation.apply((), Hooks(choose_call=lambda *args: "ours"))  # type: ignore[arg-type,return-value]
    arguments = {"model_kwargs": {}, "generation_config": model.generation_config}
    assert model._valid_auto_compile_criteria(**arguments) is True
    assert [model.get_compiled_call(None) for _ in range(2)] == ["ours", "theirs"]


def test_what_is_not_ours_is_left_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_kvret.register()
    graphs: list[Any] = []
    monkeypatch.setattr("hf_kvret.generate.call.DecodeGraph", lambda *args: graphs.append(args))
    generate(model)
    generate(model, cache_implementation="flat", disable_compile=True)
    assert graphs == []
    with pytest.raises(AttributeError, match="reason"):
        generate(model, cache_implementation="flat")
    assert len(graphs) == 1
