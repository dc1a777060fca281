"""The seam in generate's loop: asked once a call, handed out once, undone with the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

import hf_kvret
from hf_kvret.models.versions import CACHE_NAME
from hf_kvret.testing.models import MODELS
from hf_kvret_model_patches import decode_graph

ASKS, GETS = "_valid_auto_compile_criteria", "get_compiled_call"


@pytest.fixture(autouse=True)
def bare() -> Iterator[None]:
    """transformers without us during the test."""
    hf_kvret.unregister()
    yield
    decode_graph.restore()
    hf_kvret.register()


def _generate(model: Any, **asked: Any) -> torch.Tensor:
    tokens = torch.arange(10)[None] + 10
    result: torch.Tensor = model.generate(
        tokens, max_new_tokens=5, min_new_tokens=5, do_sample=False, **asked
    )
    return result


def test_restoring_puts_back_the_very_methods() -> None:
    asks, gets = getattr(GenerationMixin, ASKS), getattr(PreTrainedModel, GETS)
    for _ in range(2):
        decode_graph.apply(lambda *args: None)
    assert getattr(GenerationMixin, ASKS).__wrapped__ is asks
    assert getattr(PreTrainedModel, GETS).__wrapped__ is gets
    for _ in range(2):
        decode_graph.restore()
        assert getattr(GenerationMixin, ASKS) is asks
        assert getattr(PreTrainedModel, GETS) is gets


@pytest.mark.parametrize(("owner", "name"), [(GenerationMixin, ASKS), (PreTrainedModel, GETS)])
def test_what_was_wrapped_since_stays_when_applied_again_and_restored(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, getattr(owner, name))
    asked: list[Any] = []
    decode_graph.apply(lambda *args: None)
    inner = getattr(owner, name)

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    setattr(owner, name, theirs)
    decode_graph.apply(lambda *args: asked.append(args))
    assert getattr(owner, name) is theirs
    model = MODELS["llama"].build().eval()
    expected = _generate(model)
    assert len(asked) == 1
    decode_graph.restore()
    assert getattr(owner, name) is theirs
    assert torch.equal(_generate(model), expected) and len(asked) == 1


def test_registering_applies_it_and_unregistering_undoes_it() -> None:
    before = getattr(GenerationMixin, ASKS)
    hf_kvret.register()
    assert getattr(GenerationMixin, ASKS).__wrapped__ is before
    hf_kvret.unregister()
    assert getattr(GenerationMixin, ASKS) is before


def test_the_loop_calls_what_the_hook_chose_for_every_token_but_the_first() -> None:
    model = MODELS["llama"].build().eval()
    expected = _generate(model)
    lengths = []

    def choose(asked: Any, config: Any, kwargs: dict[str, Any]) -> Any:
        assert asked is model
        assert CACHE_NAME in kwargs

        def call(**inputs: Any) -> Any:
            lengths.append(inputs["input_ids"].shape[1])
            return model(**inputs)

        return call

    decode_graph.apply(choose)
    assert torch.equal(_generate(model), expected)
    assert lengths == [1] * 4


def test_none_leaves_the_decision_to_transformers() -> None:
    model = MODELS["llama"].build().eval()
    expected, asked = _generate(model), []
    decode_graph.apply(lambda *args: asked.append(args))
    assert torch.equal(_generate(model), expected)
    assert len(asked) == 1


def test_a_choice_is_handed_out_once() -> None:
    """A later call, which did not ask, gets what transformers compiles."""
    model: Any = MODELS["llama"].build().eval()
    decode_graph.apply(lambda *args: "ours")  # type: ignore[arg-type,return-value]
    assert model._valid_auto_compile_criteria({}, model.generation_config) is True
    assert model.get_compiled_call(None) == "ours"
    assert model.get_compiled_call(None) != "ours"


def test_disable_compile_and_foreign_caches_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hf_kvret.register()
    made: list[Any] = []
    monkeypatch.setattr("hf_kvret.registry.DecodeGraph", lambda *args: made.append(args))
    model = MODELS["llama"].build().eval()
    _generate(model)
    _generate(model, cache_implementation="flat", disable_compile=True)
    assert made == []
    with pytest.raises(AttributeError, match="reason"):
        _generate(model, cache_implementation="flat")
    assert len(made) == 1
