"""A compiled model with a retrieval cache: the same tokens, and no storm of warnings."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import ragged

OPTIONS: dict[str, Any] = {
    "top_k": 8, "sink": 2, "recent": 6, "flush": 4, "dense_below": 0, "subspace_dim": 4,
}  # fmt: skip
HANDFUL = 3


def _tokens(model: Any) -> torch.Tensor:
    """Past two flushes, of a padded batch."""
    ids, mask = ragged((40, 31))
    tokens: torch.Tensor = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=9,
        min_new_tokens=9,
        do_sample=False,
        cache_implementation="paris",
        cache_config=OPTIONS,
    )
    return tokens


def _wrapped(model: PreTrainedModel, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def _forward(model: Any, backend: str) -> Any:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def _in_place(model: PreTrainedModel, backend: str) -> Any:
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize(
    "compiled", [_wrapped, _forward, pytest.param(_in_place, marks=pytest.mark.slow)]
)
def test_a_compiled_model_gives_the_same_tokens_and_hardly_a_warning(
    compiled: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    model = MODELS["llama"].build()
    expected = _tokens(model)
    # Loggers of torch don't propagate, so that caplog sees them only with its own handler.
    compiler = logging.getLogger("torch._dynamo")
    compiler.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokens = _tokens(compiled(model, "eager"))
    finally:
        compiler.removeHandler(caplog.handler)
    assert torch.equal(tokens, expected)
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    told = [*logged, *(str(warning.message) for warning in caught)]
    assert len(told) <= HANDFUL, told


@pytest.mark.slow
def test_the_inductor_gives_the_same_tokens() -> None:
    torch.compiler.reset()
    model = MODELS["llama"].build()
    expected = _tokens(model)
    assert torch.equal(_tokens(_forward(model, "inductor")), expected)
