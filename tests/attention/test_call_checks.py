"""Prompts and masks: each is served right, or the message says what it is and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

LEN = 120
RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
EMPTY = r"row 1 of the prompt has no token, only padding: give it .*bos_token_id"
RIGHT = r"padded on the right in row 1.*padding_side = 'left'"
SHAPE = r"attention_mask is of shape .*the prompt has 2 rows of 120 tokens"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return MODELS["llama"].build()


def masked(row: int, start: int, stop: int) -> torch.Tensor:
    mask = torch.ones(2, LEN, dtype=torch.long)
    mask[row, start:stop] = 0
    return mask


LEFT, HOLE = masked(1, 0, 20), masked(1, 50, 70)


def cached(model: PreTrainedModel, ids: torch.Tensor, mask: Any, **more: Any) -> torch.Tensor:
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    tokens: torch.Tensor = model.generate(
        ids, attention_mask=mask, past_key_values=cache, **RUN, **more
    )
    return tokens


@pytest.mark.parametrize(
    "mask",
    [LEFT, HOLE, LEFT & HOLE, LEFT.bool(), HOLE.float(), LEFT * 0.5, LEFT * 3, masked(1, 0, 119)],
)
def test_padding_on_the_left_and_holes_are_served_in_any_dtype(
    mask: torch.Tensor, model: PreTrainedModel
) -> None:
    ids = prompt(2, LEN)
    expected = model.generate(ids, attention_mask=mask, **RUN)
    assert torch.equal(cached(model, ids, mask), expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masked(1, 0, LEN), EMPTY),
        (masked(1, 0, LEN).bool(), EMPTY),
        (masked(1, 0, LEN).float(), EMPTY),
        (masked(1, 0, LEN) & masked(0, 110, LEN), EMPTY),
        (torch.zeros(2, LEN), "row 0 of the prompt has no token"),
        (masked(1, 110, LEN), RIGHT),
        (masked(1, 110, LEN) & HOLE, RIGHT),
        (masked(1, 119, LEN).bool(), RIGHT),
        ((LEFT - 1) * 1e9, "negative numbers or NaN, as one that is added to scores"),
        (LEFT / 0.0, "negative numbers or NaN"),
        (LEFT[:, 5:], SHAPE),
        (LEFT[1:], SHAPE),
        (torch.cat([LEFT, LEFT]), SHAPE),
        (LEFT[1], "custom 4D masks and others are not supported"),
        (LEFT[:, None], "custom 4D masks and others are not supported"),
        (torch.ones(2, 1, LEN, LEN).tril(), "custom 4D masks and others are not supported"),
    ],
)
def test_other_masks_are_refused_by_what_they_are(
    mask: torch.Tensor, message: str, model: PreTrainedModel
) -> None:
    by_name = {"cache_implementation": "flat", "cache_config": COVERING_OPTIONS}
    for call in (
        lambda: cached(model, prompt(2, LEN), mask),
        lambda: model.generate(prompt(2, LEN), attention_mask=mask, **by_name, **RUN),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_mask_that_is_no_tensor_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="attention_mask is a list: pass a tensor"):
        cached(model, prompt(2, LEN), LEFT.tolist())


@pytest.mark.parametrize("shape", [(1, 0), (2, 0), (0, 5)])
@pytest.mark.parametrize("masked_too", [True, False])
def test_a_prompt_without_tokens_is_refused(
    shape: tuple[int, int], masked_too: bool, model: PreTrainedModel
) -> None:
    ids = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=r"has no token: give each row at least one"):
        cached(model, ids, torch.ones_like(ids) if masked_too else None)


def test_the_row_of_a_mask_that_pad_tokens_made_is_told_with_beams(model: PreTrainedModel) -> None:
    ids = prompt(3, LEN)
    ids[1] = 0
    with pytest.raises(ValueError, match="row 1 of the prompt has no token"):
        cached(model, ids, None, num_beams=3, pad_token_id=0)


def test_embeddings_are_checked_by_their_own_length(model: PreTrainedModel) -> None:
    embeds = model.get_input_embeddings()(prompt(2, LEN))
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    run = {"inputs_embeds": embeds, **RUN}
    expected = model.generate(attention_mask=LEFT, **run)
    got = model.generate(attention_mask=LEFT, past_key_values=cache, **run)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match=EMPTY):
        model.generate(
            attention_mask=masked(1, 0, LEN),
            past_key_values=FlatKVCache(model.config),
            **run,
        )


def test_a_row_without_a_new_token_is_told_in_a_second_turn(model: PreTrainedModel) -> None:
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    first = model.generate(prompt(2, LEN), attention_mask=LEFT, past_key_values=cache, **RUN)
    ids = torch.cat([first, prompt(2, 9)], dim=1)
    mask = torch.cat([LEFT, torch.ones(2, ids.shape[1] - LEN, dtype=torch.long)], dim=1)
    mask[1, cache.get_seq_length() :] = 0
    with pytest.raises(ValueError, match="row 1 of the prompt has no token behind those that"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, **RUN)
    mask[1, -1] = 1
    expected = model.generate(ids, attention_mask=mask, **RUN)
    assert torch.equal(
        model.generate(ids, attention_mask=mask, past_key_values=cache, **RUN), expected
    )
