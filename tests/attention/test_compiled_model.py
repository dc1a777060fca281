"""A compiled model with a retrieval cache: the same tokens, and no storm of warnings."""

import logging
import warnings
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import hf_kvret
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import ragged

OPTIONS: dict[str, Any] = {
    "top_k": 8, "sink": 2, "recent": 6, "flush": 4, "dense_below": 0,
}  # fmt: skip
HANDFUL = 3


def _tokens(model: Any) -> torch.Tensor:
    """Past two flushes, of a padded batch."""
    ids, mask = ragged((40, 31))
    tokens: torch.Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=9, min_new_tokens=9, do_sample=False,
        cache_implementation="paris", cache_config=OPTIONS,
    )  # fmt: skip
    return tokens


def _layers(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(**options)
    return model


WHOLE: dict[str, Any] = {"backend": "eager", "fullgraph": True}
REMEDY = "leave out fullgraph=True: what a retrieval cache does"


def test_a_compiled_model_gives_equal_tokens(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    expected = _tokens(model)
    # Loggers of torch don't propagate, so that caplog sees them only with its own handler.
    compiler = logging.getLogger("torch._dynamo")
    compiler.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            tokens = _tokens(torch.compile(model, backend="eager"))
    finally:
        compiler.removeHandler(caplog.handler)
    assert torch.equal(tokens, expected)
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    messages = [*logged, *(str(warning.message) for warning in warned)]
    assert len(messages) <= HANDFUL, messages


@pytest.mark.parametrize("compiled", [torch.compile, _layers])
def test_fullgraph_names_the_remedy(compiled: Any) -> None:
    torch.compiler.reset()
    model, ids = MODELS["llama"].build(), torch.arange(5, 60)[None]
    hf_kvret.attach(model)
    cache = hf_kvret.FlatKVCache(model.config)
    with torch.no_grad(), pytest.raises(Exception, match=REMEDY):
        compiled(model, **WHOLE)(ids, past_key_values=cache)
    if compiled is _layers:
        with pytest.raises(Exception, match=REMEDY):
            _tokens(model)


@pytest.mark.slow
def test_a_static_cache_under_fullgraph_asks_for_restore() -> None:
    torch.compiler.reset()
    model, ids = MODELS["llama"].build(), torch.arange(5, 60)[None]
    compiling = CompileConfig(**WHOLE)
    # Without it transformers compiles on a GPU only.
    compiling._compile_all_devices = True
    run = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, **run)
    hf_kvret.attach(model)
    with pytest.raises(Exception, match=r"fullgraph=True.* hf_kvret\.restore\(model\) before"):
        model.generate(ids, compile_config=compiling, **run)
    hf_kvret.restore(model)
    assert torch.equal(model.generate(ids, compile_config=compiling, **run), expected)
