"""A carrier that is made into a mask again is what the base's own mask would have been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, PreTrainedConfig
from transformers import masking_utils as masks
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_kvret.attention import mask_form
from hf_kvret.attention.base_attention import record_base
from hf_kvret.attention.mask_form import base_form
from hf_kvret.attention.masks import base_mask
from hf_kvret.models.versions import as_argument
from hf_kvret.registry import ATTENTION_NAME

CPU = torch.device("cpu")
BATCH, TOTAL, WINDOW = 2, 24, 5
FLASH = "flash_attention_2"
BASES = ["sdpa", "eager", FLASH]
FUNCTIONS = {
    "causal": masks.create_causal_mask,
    "sliding": masks.create_sliding_window_causal_mask,
    "chunked": masks.create_chunked_causal_mask,
    "bidirectional": masks.create_bidirectional_mask,
    "sliding to both sides": masks.create_bidirectional_sliding_window_mask,
    "recurrent": masks.create_recurrent_attention_mask,
}
CAUSAL = ["causal", "sliding", "chunked"]


def _past(_batch: int, _head: int, _query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key < TOTAL - 2


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks": {"block_sequence_ids": torch.arange(TOTAL).expand(BATCH, -1) // 7},
    "function": {"or_mask_function": _past},
}


def _configs(base: str) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """One that has the base's attention, one that was switched from it to ours."""
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes = {"sliding_window": WINDOW, "attention_chunk_size": WINDOW}
    own, ours = (LlamaConfig(**shape, **sizes) for _ in range(2))
    own._attn_implementation = base
    ours._attn_implementation = ATTENTION_NAME
    record_base(ours, base)
    return own, ours


def _padding(kind: str) -> torch.Tensor | None:
    padding = torch.ones(BATCH, TOTAL, dtype=torch.int64)
    padding[1, :8] = 0 if kind == "padded" else 1
    return None if kind == "none" else padding


def _make(name: str, config: PreTrainedConfig, mask: Any, new: int, **changes: Any) -> Any:
    """The mask that a function of transformers makes for ``new`` tokens behind others."""
    cache = DynamicCache()
    if new < TOTAL:
        past = torch.zeros(BATCH, 2, TOTAL - new, 8)
        cache.update(past, past, 0)
    return FUNCTIONS[name](
        config=config,
        inputs_embeds=torch.zeros(BATCH, new, 16),
        attention_mask=mask,
        **as_argument(cache),
        **changes,
    )


def _possible(case: dict[str, Any]) -> bool:
    """transformers has no chunked attention by flash, and its chunks take no blocks of tokens."""
    chunked = "chunked" in (case.get("outer"), case.get("inner"))
    return not (chunked and (case.get("base") == FLASH or case.get("change") == "blocks"))


@pytest.mark.factor("base", BASES)
@pytest.mark.factor("outer", CAUSAL)
@pytest.mark.factor("inner", list(FUNCTIONS))
@pytest.mark.factor("change", list(CHANGES))
@pytest.mark.factor("padding", ["none", "ones", "padded"])
@pytest.mark.factor("new", [1, 3, TOTAL])
@pytest.mark.allowed(when=_possible)
def test_a_mask_made_twice_is_that_of_the_base(
    base: str, outer: str, inner: str, change: str, padding: str, new: int
) -> None:
    own, ours = _configs(base)
    first = _make(outer, own, _padding(padding), new, **CHANGES[change])
    carrier = _make(outer, ours, _padding(padding), new, **CHANGES[change])
    expected = _make(inner, own, first, new)
    finished = first is not None and first.ndim == 4
    if finished:
        assert carrier.shape == first.shape
    if not finished and (inner == "chunked" or (inner == "recurrent" and new > 1)):
        # These compute with padding, so they say that they can't.
        with pytest.raises(ValueError, match=r"restore\(model\)"):
            _make(inner, ours, carrier, new)
        return
    again = _make(inner, ours, carrier, new)
    assert again is carrier or not finished or expected is None
    found = base_mask(again, base, CPU)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert torch.equal(found, expected)


@pytest.fixture
def built_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of mask functions that were called with another function than the one that stops."""
    names: list[str] = []

    def watched(name: str, make: Callable) -> Callable:
        def function(*args: Any, **kwargs: Any) -> Any:
            if kwargs["mask_function"] is not mask_form._stop:
                names.append(name)
            return make(*args, **kwargs)

        return function

    mapping = dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping)
    for name in BASES:
        monkeypatch.setitem(mapping, name, watched(name, mapping[name]))
    monkeypatch.setattr(type(ALL_MASK_ATTENTION_FUNCTIONS), "_global_mapping", mapping)
    yield names


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("padding", ["none", "padded"])
def test_no_mask_is_built_to_learn_its_form(
    base: str, padding: str, built_masks: list[str]
) -> None:
    carrier = _make("causal", _configs(base)[1], _padding(padding), TOTAL)
    assert carrier.ndim == (4 if base == "eager" or (base, padding) == ("sdpa", "padded") else 2)
    assert not built_masks
    base_mask(carrier, base, CPU)
    assert built_masks == [base], "the watch sees a mask that is built"


def test_padding_is_not_looked_at_where_nobody_asks_for_the_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU that would wait for the device."""

    def forbidden(arguments: dict[str, Any]) -> None:
        raise AssertionError("the form was asked for")

    monkeypatch.setattr("hf_kvret.attention.masks.base_form", forbidden)
    carrier = _make("causal", _configs("sdpa")[1], _padding("padded"), 1)
    assert base_mask(carrier, "sdpa", CPU) is not None
    with pytest.raises(AssertionError, match="the form was asked for"):
        _ = carrier.shape


def test_a_base_without_masks_has_none() -> None:
    _, ours = _configs("an attention that makes no masks")
    arguments = {"config": ours, "batch_size": 2, "q_length": 3, "kv_length": 9}
    assert base_form(arguments) == mask_form.MaskForm()


def test_a_block_mask_is_finished() -> None:
    _, ours = _configs("flex_attention")
    arguments = {"config": ours, "batch_size": 2, "q_length": 3, "kv_length": 9}
    assert base_form(arguments).shape == (2, 1, 3, 9)
