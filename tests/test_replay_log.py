"""Who is told that steps are not replayed: only where a graph could have been expected."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import DecodeGraph, FlatKVCache
from hf_kvret.replay import graph, why_not
from hf_kvret.testing.tape import taped

from .steps import small_llama


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was told in this process yet, and all that is told is seen."""
    monkeypatch.setattr(graph, "_logged_reasons", set())
    caplog.set_level(logging.DEBUG, logger="hf_kvret.replay")


def _offloaded() -> PreTrainedModel:
    """As accelerate's ``cpu_offload`` leaves a model: hooks bring weights when they are needed."""
    model: PreTrainedModel = small_llama()
    return model.to("meta")  # type: ignore[arg-type]


@pytest.mark.parametrize(("cuda", "level"), [(False, logging.DEBUG), (True, logging.WARNING)])
def test_an_offloaded_model_is_a_warning_only_where_there_is_a_gpu(
    cuda: bool, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    model = _offloaded()
    step = DecodeGraph(model, FlatKVCache(model.config))
    assert step.reason == "the model's weights are offloaded"
    assert [record.levelno for record in caplog.records] == [level]


def test_a_model_on_the_cpu_of_a_machine_with_a_gpu_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = small_llama()
    DecodeGraph(model, FlatKVCache(model.config))
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


@pytest.mark.parametrize("whole", [True, False], ids=["compile", "forward"])
def test_a_compiled_model_is_not_captured(whole: bool) -> None:
    model: Any = small_llama()
    with taped():
        assert why_not(model, FlatKVCache(model.config)) is None
        if whole:
            model.compile(backend="eager")
        else:
            model.forward = torch.compile(model.forward, backend="eager")
        assert why_not(model, FlatKVCache(model.config)) == "the model is compiled"
