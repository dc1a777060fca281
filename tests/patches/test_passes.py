"""Looks at each pass of generate: before its inputs are prepared, and behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.generation.utils import GenerationMixin

import hf_kvret
from hf_kvret.models.versions import CACHE_NAME
from hf_kvret.testing import MODELS
from hf_kvret_model_patches import passes

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
NAMES = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    hf_kvret.unregister()
    yield
    passes.restore()
    hf_kvret.register()


def test_both_hooks_see_every_pass_and_no_other() -> None:
    model = MODELS["llama"].build()
    lengths: list[int] = []
    outputs: list[Any] = []
    passes.apply(
        lambda model, input_ids, arguments: lengths.append(input_ids.shape[1]),
        lambda model, output: outputs.append(output),
    )
    ids = torch.arange(5, 25)[None]
    model.generate(ids, **RUN)
    assert lengths == [20, 21, 22, 23]
    assert [output.logits.shape[1] for output in outputs] == [1, 1, 1, 1]
    with torch.no_grad():
        model(ids)
    assert len(outputs) == 4


def test_the_first_hook_may_change_what_inputs_are_made_of() -> None:
    model = MODELS["llama"].build()
    seen = []

    def before(model: Any, input_ids: torch.Tensor, arguments: dict[str, Any]) -> None:
        arguments["logits_to_keep"] = 3

    def after(model: Any, output: Any) -> None:
        seen.append(output.logits.shape[1])

    passes.apply(before, after)
    model.generate(torch.arange(5, 25)[None], **RUN)
    assert seen[0] == 3


def test_an_error_of_a_hook_ends_the_call() -> None:
    model = MODELS["llama"].build()

    def after(model: Any, output: Any) -> None:
        raise ValueError("not this output")

    passes.apply(lambda *_: None, after)
    with pytest.raises(ValueError, match="not this output"):
        model.generate(torch.arange(5, 25)[None], **RUN)


def test_the_cache_is_among_the_keywords_of_each_pass() -> None:
    """``prepare_inputs_for_generation`` gets it by name, also from models that override it."""
    for name in ("llama", "qwen2_vl", "gemma3"):
        if name not in MODELS:
            continue
        model = MODELS[name].build()
        caches: list[Any] = []
        passes.apply(
            lambda model, ids, arguments, caches=caches: caches.append(arguments.get(CACHE_NAME)),
            lambda model, output: None,
        )
        model.generate(torch.arange(5, 25)[None], **RUN)
        assert len(caches) == 4 and all(cache is caches[0] for cache in caches)
        assert caches[0] is not None


def test_restoring_puts_back_the_very_functions() -> None:
    functions = [getattr(GenerationMixin, name) for name in NAMES]
    passes.apply(lambda *_: None, lambda *_: None)
    assert all(
        getattr(GenerationMixin, name) is not f for name, f in zip(NAMES, functions, strict=True)
    )
    for _ in range(2):
        passes.restore()
        assert [getattr(GenerationMixin, name) for name in NAMES] == functions
