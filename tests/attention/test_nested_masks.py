"""Models that make their mask twice: an outer one hands it to a text model that makes it again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, PreTrainedModel, masking_utils
from transformers.cache_utils import Cache

from hf_kvret import FlatKVCache, attach, restore
from hf_kvret.commands.models import default_type, text_class, type_names
from hf_kvret.models.versions import as_argument
from hf_kvret.testing.conformance import COVERING_OPTIONS, LOGIT_TOLERANCE
from hf_kvret.testing.tiny import PAD_TOKEN, spread_weights

from ..model_types.small import VOCAB_SIZE, image_inputs, small_config, small_model
from ..model_types.trial import IMPOSSIBLE

PROMPT_LEN, PADDING_LEN = 120, 31
TOLERANCE = 2 * LOGIT_TOLERANCE
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Types that hand a finished mask to a text model which makes it again.
NESTED = ("paligemma", pytest.param("molmo2", marks=pytest.mark.slow))


@contextmanager
def finished_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Mask functions of transformers that were called with a finished mask."""
    names: list[str] = []
    prepare = masking_utils._preprocess_mask_arguments

    def watched(config: Any, inputs_embeds: Any, attention_mask: Any, *rest: Any) -> Any:
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4:
            names.append(type(config).__name__)
        return prepare(config, inputs_embeds, attention_mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(masking_utils, "_preprocess_mask_arguments", watched)
        yield names


def _model(name: str) -> PreTrainedModel:
    try:
        return small_model(name)
    except IMPOSSIBLE as error:
        pytest.skip(f"transformers can't build a small model: {error}")


def _inputs(model: PreTrainedModel, types: str, *, padded: bool) -> dict[str, Any]:
    """Two rows with a block of another token type, as tokens of a picture have it."""
    shape = (2, PROMPT_LEN)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB_SIZE // 2, VOCAB_SIZE, shape, generator=generator)
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :PADDING_LEN] = 0
    block = torch.zeros_like(tokens)
    block[:, 50:70] = 1
    return {
        "input_ids": tokens.masked_fill(mask == 0, PAD_TOKEN),
        "attention_mask": mask,
        **({types: block} if types else {}),
        **image_inputs(model.config.model_type, *shape),
    }


def _token_types(model: PreTrainedModel) -> list[str]:
    """Names of token types that ``model`` takes; an empty one stands for a call without."""
    parameters = inspect.signature(type(model).forward).parameters
    return ["", *(name for name in TOKEN_TYPES if name in parameters)]


def _generate(model: PreTrainedModel, inputs: dict[str, Any], cache: Cache) -> Any:
    return model.generate(
        **inputs,
        **as_argument(cache),
        max_new_tokens=3,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def _nests(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a forward pass with padding makes a mask out of a finished one."""
    inputs = _inputs(model, _token_types(model)[-1], padded=True)
    with finished_masks(monkeypatch) as names, torch.no_grad():
        model(**inputs)
    return bool(names)


def _check(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Our caches, and the model's own under our attention, give the text of its own attention."""
    own = _generate(model, inputs, DynamicCache(config=model.config))
    attach(model)
    caches = {
        "flat": FlatKVCache(model.config, **COVERING_OPTIONS),
        "its own": DynamicCache(config=model.config),
    }
    try:
        texts = {name: _generate(model, inputs, cache) for name, cache in caches.items()}
    finally:
        restore(model)
    expected = torch.stack(own.logits)
    tolerance = TOLERANCE * max(1.0, float(expected.std()))
    for name, text in texts.items():
        difference = float((torch.stack(text.logits) - expected).abs().max())
        assert difference <= tolerance, f"{name}: logits differ by {difference:.1e}"
        assert torch.equal(text.sequences, own.sequences), name


@pytest.mark.parametrize("name", NESTED)
def test_a_type_that_makes_masks_twice_gives_its_own_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in type_names():
        pytest.skip("this transformers has no such type")
    model = _model(name)
    assert _nests(model, monkeypatch)
    for types in _token_types(model):
        _check(model, _inputs(model, types, padded=True))
    _check(model, _inputs(model, _token_types(model)[-1], padded=False))


def test_prompts_with_tokens_that_see_later_ones_do_not_retrieve() -> None:
    model = _model("paligemma")
    cache = FlatKVCache(model.config, prompt={"above": 0}, **COVERING_OPTIONS)
    inputs = _inputs(model, _token_types(model)[-1], padded=False)
    with pytest.raises(ValueError, match="take prompt='exact'"):
        model.generate(**inputs, **as_argument(cache), max_new_tokens=1)
    assert cache.get_seq_length() == 0


def _with_pictures() -> PreTrainedModel:
    """A small PaliGemma whose pictures of 16 tokens fit its text."""
    model_class = text_class("paligemma")
    config = small_config(AutoConfig.for_model("paligemma"))
    config.vision_config.image_size, config.vision_config.patch_size = 32, 8
    config.projection_dim = config.text_config.hidden_size
    config.vision_config.projection_dim = config.projection_dim
    model = model_class._from_config(config, dtype=torch.float32)
    spread_weights(model, seed=5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD_TOKEN
    return model.eval()


def test_a_picture_before_a_padded_text() -> None:
    """PaliGemma's prompt is attended to in both directions, pictures included."""
    model = _with_pictures()
    inputs = _inputs(model, "token_type_ids", padded=True)
    inputs["input_ids"][:, 80:96] = model.config.image_token_id
    inputs["token_type_ids"].zero_()
    pixels = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
    _check(model, {**inputs, "pixel_values": pixels})


@pytest.mark.slow
@pytest.mark.parametrize("name", type_names())
def test_no_other_type_makes_masks_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if default_type(name).refusal:
        pytest.skip("the type is refused")
    model = _model(name)
    try:
        nests = _nests(model, monkeypatch)
    except IMPOSSIBLE as error:
        pytest.skip(f"the model does not run on text alone: {error}")
    assert not nests or name in ("paligemma", "molmo2")
