"""The captured dense step: no mask, in versions of transformers that build one in a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import masking_utils

from hf_kvret.lab.bench.filling import feed, random_tokens
from hf_kvret.lab.bench.opponents import PreallocatedCache
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.bench.stepping import DenseGraphSteps, unmasked

LENGTH = 24


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """A stream that captures, as transformers 5.17 asks for it: also where nothing is padded."""

    def is_tracing(tensor: torch.Tensor | None = None) -> bool:
        return True

    skips = masking_utils._ignore_causal_mask_sdpa

    def as_before(padding_mask: torch.Tensor | None, *sizes: Any, **more: Any) -> bool:
        return not masking_utils.is_tracing(padding_mask) and skips(padding_mask, *sizes, **more)

    monkeypatch.setattr(masking_utils, "is_tracing", is_tracing)
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", as_before)
    return is_tracing


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each call of sdpa: whether it has a mask, and whether heads share keys and values."""
    found: list[tuple[bool, bool]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def noting(*tensors: torch.Tensor, **more: Any) -> torch.Tensor:
        found.append((more.get("attn_mask") is not None, bool(more.get("enable_gqa"))))
        return sdpa(*tensors, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    return found


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and graphs that do nothing: what is captured runs as usual."""
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda what: contextlib.nullcontext())


@torch.inference_mode()
def filled() -> tuple[Any, PreallocatedCache, torch.Tensor]:
    """Model of the tiny shape, a cache of ``LENGTH`` tokens with room for one, the next token."""
    model = random_model(load_shape("tiny").config, torch.float32, "cpu", seed=0)
    cache = PreallocatedCache(model.config, LENGTH + 1)
    with unmasked():
        logits = feed(model, cache, random_tokens(model, 2, LENGTH, seed=1), 0)
    return model, cache, logits.argmax(-1)


def test_a_dense_step_is_captured_without_a_mask(
    asked: Callable[..., bool], cuda: None, calls: list[tuple[bool, bool]]
) -> None:
    model, cache, token = filled()
    calls.clear()
    logits, taken = DenseGraphSteps(model, cache, LENGTH).take(token)
    assert set(calls) == {(False, True)} and cache.get_seq_length() == LENGTH
    assert taken.kind == "capture"
    assert masking_utils.is_tracing is asked
    # Without the context this version gives a mask, and the logits are the same.
    calls.clear()
    expected = feed(model, cache, token, LENGTH)
    assert {masked for masked, _ in calls} == {True}
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_a_padded_step_is_asked_for_as_before(asked: Callable[..., bool]) -> None:
    with unmasked():
        assert masking_utils.is_tracing(torch.ones(1, 4)) and not masking_utils.is_tracing(None)
    with pytest.raises(KeyError), unmasked():
        raise KeyError
    assert masking_utils.is_tracing is asked
