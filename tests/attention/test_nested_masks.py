"""Models that make their mask twice: an outer one hands it to a text model that makes it again."""

import inspect
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from hf_kvret import FlatKVCache, attach, restore
from hf_kvret.commands.models import text_class, type_names
from hf_kvret.models.versions import as_argument
from hf_kvret.testing.conformance import COVERING_OPTIONS, LOGIT_TOLERANCE

from ..model_types.small import build, generate, padded_prompt, small_config, small_model

PROMPT_LEN, PADDING_LEN = 60, 17
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


def paligemma() -> PreTrainedModel:
    """A small one whose pictures of 16 tokens fit its text."""
    config = small_config(AutoConfig.for_model("paligemma"))
    config.vision_config.image_size, config.vision_config.patch_size = 32, 8
    config.projection_dim = config.text_config.hidden_size
    config.vision_config.projection_dim = config.projection_dim
    return build(config, text_class("paligemma"))


def molmo2() -> PreTrainedModel:
    if "molmo2" not in type_names():
        pytest.skip("this transformers has no such type")
    return small_model("molmo2")


def _inputs(types: str, *, padded: bool) -> dict[str, Any]:
    """Two rows with a block of another token type, as tokens of a picture have it."""
    inputs = padded_prompt(PROMPT_LEN, PADDING_LEN * padded)
    block = torch.zeros_like(inputs["input_ids"])
    block[:, 25:35] = 1
    return inputs | ({types: block} if types else {})


def _token_types(model: PreTrainedModel) -> list[str]:
    """Names of token types that ``model`` takes; an empty one stands for a call without."""
    parameters = inspect.signature(type(model).forward).parameters
    return ["", *(name for name in TOKEN_TYPES if name in parameters)]


def _check(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Our caches, and the model's own under our attention, give the text of its own attention."""
    own = generate(model, DynamicCache(config=model.config), 3, **inputs)
    attach(model)
    caches = FlatKVCache(model.config, **COVERING_OPTIONS), DynamicCache(config=model.config)
    try:
        texts = [generate(model, cache, 3, **inputs) for cache in caches]
    finally:
        restore(model)
    expected = torch.stack(own.logits)
    tolerance = 2 * LOGIT_TOLERANCE * max(1.0, float(expected.std()))
    for text in texts:
        torch.testing.assert_close(torch.stack(text.logits), expected, rtol=0, atol=tolerance)
        assert torch.equal(text.sequences, own.sequences)


@pytest.mark.parametrize("make", [paligemma, pytest.param(molmo2, marks=pytest.mark.slow)])
def test_a_type_that_makes_masks_twice_gives_its_own_text(make: Any) -> None:
    model = make()
    for types in _token_types(model):
        _check(model, _inputs(types, padded=True))
    _check(model, _inputs(types, padded=False))


def test_prompts_with_tokens_that_see_later_ones_do_not_retrieve() -> None:
    model = paligemma()
    cache = FlatKVCache(model.config, prompt={"above": 0}, **COVERING_OPTIONS)
    inputs = _inputs(_token_types(model)[-1], padded=False)
    with pytest.raises(ValueError, match="take prompt='exact'"):
        model.generate(**inputs, **as_argument(cache), max_new_tokens=1)
    assert cache.get_seq_length() == 0


def test_a_picture_before_a_padded_text() -> None:
    """PaliGemma's prompt is attended to in both directions, pictures included."""
    model = paligemma()
    inputs = _inputs("token_type_ids", padded=True)
    inputs["input_ids"][:, 30:46] = model.config.image_token_id
    inputs["token_type_ids"].zero_()
    pixels = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
    _check(model, {**inputs, "pixel_values": pixels})
