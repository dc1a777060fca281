"""Names among attention functions and mask functions: a function of somebody else stays."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_kvret
from hf_kvret import FlatKVCache
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret_model_patches import mappings

MAPPINGS = [ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS]
NAME = "name_of_a_test"


def attention(*args: Any) -> None:
    """Stands for our attention function."""


def mask(*args: Any) -> None:
    """Stands for our mask function."""


def theirs(*args: Any) -> None:
    """Stands for a function of another library."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    for mapping in MAPPINGS:
        mapping._global_mapping.pop(NAME, None)
        mapping._local_mapping.pop(NAME, None)
    mappings.remove(NAME)


def test_a_name_is_added_and_removed() -> None:
    for _ in range(2):
        mappings.add(NAME, attention, mask)
        assert ALL_ATTENTION_FUNCTIONS[NAME] is attention
        assert ALL_MASK_ATTENTION_FUNCTIONS[NAME] is mask
    assert NAME not in mappings.foreign_names()
    for _ in range(2):
        mappings.remove(NAME)
        assert not any(NAME in mapping for mapping in MAPPINGS)


@pytest.mark.parametrize("replaced", [0, 1])
@pytest.mark.parametrize("local", [True, False])
def test_a_function_that_replaced_ours_stays(replaced: int, local: bool) -> None:
    mappings.add(NAME, attention, mask)
    mapping: Any = MAPPINGS[replaced]
    if local:
        mapping[NAME] = theirs
    else:
        mapping.register(NAME, theirs)
    for change in (mappings.remove, lambda name: mappings.add(name, attention, mask)):
        change(NAME)
        assert mapping[NAME] is theirs
        assert NAME not in mappings.foreign_names(), "we can be registered again"
    assert MAPPINGS[1 - replaced][NAME] is (mask, attention)[replaced]


def test_a_name_that_another_took_while_we_were_away_is_foreign() -> None:
    mappings.add(NAME, attention, mask)
    mappings.remove(NAME)
    ALL_ATTENTION_FUNCTIONS.register(NAME, theirs)
    assert NAME in mappings.foreign_names()


def test_an_attention_that_another_library_timed_serves_on() -> None:
    model, ids = MODELS["llama"].build(), torch.arange(5, 90)[None]
    run = {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **run)
    inner, calls = ALL_ATTENTION_FUNCTIONS["hf_kvret"], []

    def timed(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("hf_kvret", timed)
    try:
        for _ in range(2):
            hf_kvret.unregister()
            hf_kvret.register()
            calls.clear()
            cache = FlatKVCache(model.config, **COVERING_OPTIONS)
            assert torch.equal(model.generate(ids, past_key_values=cache, **run), expected)
            assert calls
    finally:
        ALL_ATTENTION_FUNCTIONS.register("hf_kvret", inner)
