"""The one patch of transformers: applied twice, undone, and asked at the right moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation import configuration_utils
from transformers.generation.continuous_batching import ContinuousBatchingManager, ContinuousMixin
from transformers.generation.utils import GenerationMixin

import hf_kvret
from hf_kvret.models.versions import CACHE_NAME, cache_of
from hf_kvret.testing.models import MODELS
from hf_kvret_model_patches import generation

METHOD = "_prepare_cache_for_generation"


@pytest.fixture(autouse=True)
def bare() -> Iterator[None]:
    """transformers without our names during the test."""
    hf_kvret.unregister()
    yield
    generation.restore()
    hf_kvret.register()


def _ignore(model: Any, generation_config: Any) -> None:
    """Lets every `generate_batch` pass."""


def _rename(arguments: dict[str, Any]) -> None:
    """Leaves every name of an argument as it is."""


def _around(model: Any, arguments: dict[str, Any]) -> AbstractContextManager[Callable[[Any], None]]:
    """Lets every `generate` pass."""
    return nullcontext(lambda result: None)


def _never(model: Any, config: Any, kwargs: dict[str, Any]) -> bool:
    return False


def test_restoring_puts_back_the_very_objects() -> None:
    names, method = configuration_utils.ALL_CACHE_IMPLEMENTATIONS, getattr(GenerationMixin, METHOD)
    generation.restore()
    generation.apply(("mine",), _never, _ignore, _around, _rename)
    assert (*names, "mine") == configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    assert generation.known_names() == (*names, "mine")
    assert getattr(GenerationMixin, METHOD) is not method
    for _ in range(2):
        generation.restore()
        assert names == configuration_utils.ALL_CACHE_IMPLEMENTATIONS
        assert getattr(GenerationMixin, METHOD) is method


def test_applying_again_replaces_names_and_hook_without_stacking() -> None:
    names, method = configuration_utils.ALL_CACHE_IMPLEMENTATIONS, getattr(GenerationMixin, METHOD)
    for name in ("first", "second"):
        generation.apply((name,), _never, _ignore, _around, _rename)
    assert (*names, "second") == configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    assert getattr(GenerationMixin, METHOD).__wrapped__ is method
    assert getattr(GenerationMixin, METHOD).__name__ == METHOD


def test_generate_runs_within_the_hook_and_is_put_back() -> None:
    whole, seen = GenerationMixin.generate, []

    @contextmanager
    def around(model: Any, arguments: dict[str, Any]) -> Iterator[Callable[[torch.Tensor], None]]:
        seen.append(sorted(arguments))
        yield lambda tokens: seen.append(tokens.shape[1])
        seen.append("done")

    generation.apply(("mine",), _never, _ignore, around, _rename)
    assert GenerationMixin.generate.__wrapped__ is whole
    model = MODELS["llama"].build()
    model.generate(torch.arange(5, 25)[None], max_new_tokens=2, do_sample=False)
    assert {"self", "inputs", "max_new_tokens", "do_sample"} <= set(seen[0])
    assert seen[1:] == [22, "done"]
    with pytest.raises(ValueError, match="unknown_argument"):
        model.generate(torch.arange(5, 25)[None], unknown_argument=1)
    assert len(seen) == 4
    generation.restore()
    assert GenerationMixin.generate is whole


def test_importing_applies_nothing() -> None:
    assert not hasattr(getattr(GenerationMixin, METHOD), "__wrapped__")
    assert "paris" not in generation.known_names()


def test_a_new_name_validates_and_the_hook_makes_its_cache() -> None:
    asked = []

    def prepare(model: Any, config: Any, kwargs: dict[str, Any]) -> bool:
        asked.append((type(model).__name__, config.cache_implementation, config.cache_config))
        if config.cache_implementation != "mine":
            return False
        kwargs[CACHE_NAME] = DynamicCache(config=model.config)
        return True

    generation.apply(("mine",), prepare, _ignore, _around, _rename)
    GenerationConfig(cache_implementation="mine").validate()
    model = MODELS["llama"].build()
    ids = torch.arange(5, 25)[None]
    run = {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **run)
    got = model.generate(ids, **run, cache_implementation="mine", cache_config={"some": [1, "x"]})
    assert torch.equal(got, expected)
    assert asked == [
        ("LlamaForCausalLM", None, None),
        ("LlamaForCausalLM", "mine", {"some": [1, "x"]}),
    ]


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_other_names_reach_transformers(name: str) -> None:
    generation.apply(("mine",), _never, _ignore, _around, _rename)
    model = MODELS["llama"].build()
    ids = torch.arange(5, 25)[None]
    run = {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **run)
    got = model.generate(ids, **run, cache_implementation=name, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected)
    wanted = "DynamicCache" if name == "dynamic" else "StaticCache"
    assert type(cache_of(got)).__name__ == wanted


def test_names_of_others_stay_and_keep_their_order() -> None:
    before = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    try:
        generation.apply(("mine",), _never, _ignore, _around, _rename)
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS += ("theirs",)
        generation.apply(("mine", "more"), _never, _ignore, _around, _rename)
        assert generation.known_names() == (*before, "mine", "theirs", "more")
        assert generation.foreign_names() == {*before, "theirs"}
        generation.apply(("more",), _never, _ignore, _around, _rename)
        assert generation.known_names() == (*before, "theirs", "more")
        # The other library puts back the tuple that it found.
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS = (*before, "mine")
        generation.apply(("mine",), _never, _ignore, _around, _rename)
        generation.restore()
        assert generation.known_names() == before
    finally:
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS = before


METHODS = [
    (GenerationMixin, "generate"),
    (GenerationMixin, METHOD),
    (ContinuousMixin, "init_continuous_batching"),
    (ContinuousBatchingManager, "start"),
]


@pytest.mark.parametrize(("owner", "name"), METHODS)
def test_what_was_wrapped_since_stays_when_applied_again_and_restored(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, vars(owner)[name])
    generation.apply(("mine",), _never, _ignore, _around, _rename)
    inner = vars(owner)[name]

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    setattr(owner, name, theirs)
    generation.apply(("mine", "more"), _never, _ignore, _around, _rename)
    assert vars(owner)[name] is theirs
    generation.restore()
    assert vars(owner)[name] is theirs


@pytest.mark.parametrize("positional", [True, False])
def test_a_wrapper_from_before_us_does_not_hide_what_generate_is_given(
    positional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = GenerationMixin.generate, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs)

    def around(
        model: Any, arguments: dict[str, Any]
    ) -> AbstractContextManager[Callable[[Any], None]]:
        seen.append(arguments)
        return nullcontext(lambda result: None)

    monkeypatch.setattr(GenerationMixin, "generate", theirs)
    generation.apply(("mine",), _never, _ignore, around, _rename)
    ids, run = torch.arange(5, 25)[None], {"max_new_tokens": 2, "do_sample": False}
    model = MODELS["llama"].build()
    model.generate(*([ids] if positional else []), **run, **({} if positional else {"inputs": ids}))
    assert seen[0]["inputs"] is ids and seen[0]["max_new_tokens"] == 2
    generation.restore()
