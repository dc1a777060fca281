"""Gemma-4 without shared keys: with a budget that covers everything, what full attention gives.

Its text model is in ``MODELS`` and so in the matrix; here are its relatives, turns of a talk, saved
caches, and images.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.testing import COVERING_OPTIONS, GEMMA4_MODELS, MODELS, MODES
from hf_kvret.testing.scenario import NEW_TOKENS, prompt, ragged

from ..pairs import full_product, pairwise
from .cases import (
    RELEASE,
    STORES,
    ArtifactOptions,
    caches,
    check_case,
    is_served,
    name_of,
    named_cases,
    options_for,
)

CACHES = caches("flat", "paris", "lrqk", "ctkvr", "a2ats", "aqua", "h2o")
# Coded rows at 16 bits are plain ones.
ALL_STORES = (*STORES, "split", "higgs", "higgs-host")
# transformers' classes of them neither exit early nor take embeddings.
COMPOSITE = ("gemma4_composite", "gemma4_unified")
# Modes that transformers' own sliding layers lack in the oldest release that we support.
IMPOSSIBLE = {"5.17": {"assisted", "early_exit", "reset", "reset_other_batch", "crop_deep"}}


def few_cases() -> list[dict[str, Any]]:
    """A mode, method and store for each relative."""
    modes = ("greedy_ragged", "beams", "prompt_lookup", "chunked_prefill", "crop_deep")
    methods = ("flat", "lrqk", "ctkvr", "a2ats", "aqua")
    stores = ("split", "higgs", "cpu", "resident", "host")
    return named_cases(zip(GEMMA4_MODELS, modes, methods, stores, strict=True))


def all_cases() -> list[dict[str, Any]]:
    """Every mode with every method and store; of the relatives, pairs of these."""
    factors = {"mode": list(MODES), "method": list(CACHES), "store": list(ALL_STORES)}
    product = [{"model": "gemma4", **case} for case in full_product(factors) if is_served(case)]
    return product + pairwise({"model": list(GEMMA4_MODELS), **factors}, is_served)


def check(
    artifact_options: ArtifactOptions, model: str, mode: str, method: str, store: str
) -> None:
    may_skip = {"early_exit", "inputs_embeds"} if model in COMPOSITE else set()
    options = artifact_options(method, model)
    check_case(
        CACHES[method], model, mode, store, options, may_skip | IMPOSSIBLE.get(RELEASE, set())
    )


@pytest.mark.parametrize("case", few_cases(), ids=name_of)
def test_relatives_give_what_full_attention_gives(
    case: dict[str, Any], artifact_options: ArtifactOptions
) -> None:
    check(artifact_options, **case)


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=name_of)
def test_all_modes_methods_and_stores(
    case: dict[str, Any], artifact_options: ArtifactOptions
) -> None:
    check(artifact_options, **case)


def talk(model: PreTrainedModel, cache: Any, folder: Path | None) -> list[torch.Tensor]:
    """Answers to a padded prompt, to 4 more tokens, then twice to 100 more.

    In ``folder`` the cache is saved, forked, and loaded again before the last turns.
    """
    ids, mask = ragged((170, 140))
    answers = []

    def turn(ids: torch.Tensor, mask: torch.Tensor, cache: Any) -> tuple[torch.Tensor, ...]:
        answer = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False
        )
        answers.append(answer[:, -6:])
        return answer, torch.cat([mask, mask.new_ones(len(mask), 6)], dim=1)

    def asked(ids: torch.Tensor, mask: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
        more = prompt(2, length, salt=length)
        return torch.cat([ids, more], dim=1), torch.cat([mask, torch.ones_like(more)], dim=1)

    ids, mask = turn(ids, mask, cache)
    ids, mask = turn(*asked(ids, mask, 4), cache)
    if folder is None:
        again = copy.deepcopy(cache)
    else:
        cache.save_pretrained(folder)
        names = [name for name in ("store", "artifact") if hasattr(cache.options, name)]
        place = {name: getattr(cache.options, name) for name in names}
        again = type(cache).from_pretrained(folder, model.config, **place)
        cache = cache.fork()
    for one in (cache, again):
        turn(*asked(ids, mask, 100), one)
    return answers


@pytest.mark.parametrize(
    "method",
    [
        name if name in ("paris", "aqua") else pytest.param(name, marks=pytest.mark.slow)
        for name in CACHES
    ],
)
def test_turns_forks_and_saved_caches(
    method: str, artifact_options: ArtifactOptions, tmp_path: Path
) -> None:
    model = MODELS["gemma4"].build()
    options = {**options_for("host"), **artifact_options(method, "gemma4"), "max_draft": 16}
    cache = CACHES[method](model.config, **options)
    expected = talk(model, DynamicCache(config=model.config), None)
    for answer, wanted in zip(talk(model, cache, tmp_path), expected, strict=True):
        assert torch.equal(answer, wanted)
    assert all(layer["exact_rows"] == 0 for layer in cache.stats()["layers"])


def test_images_among_the_text() -> None:
    """Tokens of an image see each other in layers that slide; retrieval goes on behind it."""
    model = GEMMA4_MODELS["gemma4_unified"].build()
    config, patches = model.config, 6
    ids = prompt(1, 70)
    ids[0, 20 : 20 + patches] = config.image_token_id
    kinds = (ids == config.image_token_id).long()
    generator = torch.Generator().manual_seed(0)
    width = 3 * config.vision_config.model_patch_size**2
    places = torch.stack([torch.arange(patches) % 3, torch.arange(patches) // 3], dim=-1)
    given = {
        "pixel_values": torch.randn(1, patches, width, generator=generator),
        "image_position_ids": places[None],
        "mm_token_type_ids": kinds,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
    }
    expected = model.generate(ids, **given)
    cache = FlatKVCache(config, **COVERING_OPTIONS)
    assert torch.equal(model.generate(ids, past_key_values=cache, **given), expected)
    assert cache.stats()["layers"][0]["selected"] > 0
    other = {**given, "pixel_values": -given["pixel_values"]}
    assert not torch.equal(model.generate(ids, **other), expected), "the image counts"
