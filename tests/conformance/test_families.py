"""Families of models beside the matrix: with a budget that covers all, what full attention gives.

Hybrids keep a linear state beside attention; Gemma-4 has relatives and images; layers with shared
keys read another's; latents are shared by all heads; some models choose by an indexer. What is
particular has files of its own.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.models import versions
from hf_kvret.testing import (
    COVERING_OPTIONS,
    GEMMA4_MODELS,
    HYBRID_MODELS,
    LATENT_MODELS,
    MODES,
    SHARED_MODELS,
)
from hf_kvret.testing.conformance import ALL_MODELS
from hf_kvret.testing.indexed_models import known_indexed
from hf_kvret.testing.scenario import NEW_TOKENS, prompt, ragged

from ..pairs import full_product, pairwise
from .cases import (
    RESTS,
    STORES,
    TELLING_MODES,
    ArtifactOptions,
    caches,
    check_case,
    is_served,
    name_of,
    named_cases,
    options_for,
)

METHODS = ("flat", "paris", "lrqk", "ctkvr", "h2o", "a2ats", "aqua")
# Coded rows at 16 bits are plain ones.
ALL_STORES = (*STORES, "higgs", "higgs-host")
# Composite models neither exit early nor take embeddings.
IMPOSSIBLE = {"early_exit", "inputs_embeds"}
# The state of a hybrid has no way back.
ONE_WAY = {
    *("assisted", "prompt_lookup", "early_exit", "crop_small", "crop_deep", "inputs_embeds"),
    *("reset_other_batch", "batch_repeat_interleave", "batch_select_indices"),
}
KNOWN = known_indexed()
LATENT = ("deepseek_v3", "glm4_moe_lite")
# Modes that transformers' own cache of a model lacks, if they aren't IMPOSSIBLE alone.
LACKING = {
    **{name: ONE_WAY for name in HYBRID_MODELS},
    **{name: {"early_exit"} for name in KNOWN},
    **{name: ONE_WAY | {"guidance"} for name in ("glm5_next", "qwen4_exp")},
    "hy_v4_vl": {"early_exit", "guidance"},
    # Those with recurrent layers can't go back, neither with transformers' own cache.
    **{name: {"early_exit", "guidance"} for name in LATENT_MODELS},
    **{name: set(MODES) for name in ("kimi_linear", "bailing_hybrid")},
    "minimax_m3": {"early_exit", "own_position_ids", "loop_positions"},
}
# Blocks of minimax_m3 lie elsewhere behind padding. qwen4_exp has NaN there before 5.23.
NO_PADDING = ("minimax_m3", *(("qwen4_exp",) if versions.RELEASE < (5, 23) else ()))
PADDED = {
    *("greedy_ragged", "return_dict", "return_sequences", "beams_ragged", "chunked_prefill"),
    *("prefill_by_token", "second_turn_ragged", "inputs_embeds", "reset", "reset_other_batch"),
    *("loop", "crop_deep", "batch_repeat_interleave", "batch_select_indices"),
}
FEW = (
    ("falcon_h1", "second_turn_ragged", "paris", "host"),
    ("falcon_h1", "reset", "ctkvr", "host"),
    ("zamba2", "chunked_prefill", "lrqk", "cpu"),
    ("zaya", "beams_ragged", "paris", "resident"),
    # A draft, a chunk, beams and a deep crop ask other things of readers.
    ("gemma3n", "prompt_lookup", "paris", "resident"),
    ("gemma4_shared", "chunked_prefill", "a2ats", "cpu"),
    ("gemma4_shared", "beams_ragged", "aqua", "host"),
    ("gemma4_shared_composite", "crop_deep", "flat", "device"),
    ("gemma4_own_values", "beams", "lrqk", "higgs"),
    ("gemma4_512", "prompt_lookup", "ctkvr", "cpu"),
    ("gemma4_unified", "crop_deep", "flat", "host"),
    ("deepseek_v32", "greedy_ragged", "native", "resident"),
    ("deepseek_v32", "prompt_lookup", "native", "host"),
    ("glm_moe_dsa", "chunked_prefill", "native", "device"),
    ("hy_v4_vl", "greedy_ragged", "native", "device"),
    ("dots3_note", "beams_ragged", "native", "cpu"),
    ("mistral_large4", "prompt_lookup", "native", "host"),
    ("glm5_next", "second_turn_ragged", "native", "resident"),
    ("qwen4_exp", "chunked_prefill", "native", "host"),
    ("minimax_m3", "crop_small", "native", "cpu"),
)


def possible(case: dict[str, Any]) -> bool:
    """Zamba-2's attention modules stand for several layers, and a tap can't tell which.

    Zaya has queries and keys of its convolution, which small random weights make all alike.
    """
    is_calibrated = case.get("model") not in ("zamba2", "zaya")
    ways = {**dict.fromkeys(NO_PADDING, PADDED), **dict.fromkeys(HYBRID_MODELS, ONE_WAY)}
    has_mode = case.get("mode") not in ways.get(case.get("model"), ())
    learns = case.get("method") in ("a2ats", "aqua")
    return is_served(case) and has_mode and (is_calibrated or not learns)


def latent_cases() -> list[dict[str, Any]]:
    """Every method, in modes that tell much; every store with every rest."""
    models = {"model": LATENT, "mode": TELLING_MODES, "method": METHODS}
    factors = {**models, "store": STORES, "rest": list(RESTS)}
    return pairwise(factors, possible, meet=[("store", "rest")])


def all_cases() -> Iterator[dict[str, Any]]:
    """Each with each; of latents, and of relatives of Gemma-4, which is in the matrix, pairs."""
    modes = {"mode": list(MODES)}
    gemma4 = {**modes, "method": METHODS, "store": ALL_STORES}
    shared = {**modes, "method": ("flat", "paris", "a2ats", "aqua"), "store": ALL_STORES[:-1]}
    latent = {**modes, "method": METHODS, "store": STORES, "rest": list(RESTS)}
    for factors in (
        {"model": list(HYBRID_MODELS), **modes, "method": METHODS, "store": STORES},
        {"model": list(SHARED_MODELS), **shared},
        {"model": ["gemma4"], **gemma4},
        {"model": KNOWN, **modes, "method": ["native"], "store": ALL_STORES[:5]},
    ):
        yield from filter(possible, full_product(factors))
    yield from pairwise({"model": list(GEMMA4_MODELS), **gemma4}, possible)
    yield from pairwise({"model": list(LATENT_MODELS), **latent}, possible)


def is_known(case: dict[str, Any]) -> bool:
    return case["method"] != "native" or (case["model"] in KNOWN and possible(case))


def learned(artifact_options: ArtifactOptions, method: str, model: str) -> dict[str, Any]:
    """What a method needs: an artifact, or the top-k of the model's own indexer."""
    return {"top_k": None} if method == "native" else artifact_options(method, model)


def check(case: dict[str, Any], artifact_options: ArtifactOptions) -> None:
    model, method = case["model"], case["method"]
    options = learned(artifact_options, method, model) | RESTS[case.get("rest", "nothing")]
    may_skip = LACKING.get(model, IMPOSSIBLE)
    check_case(caches(method)[method], model, case["mode"], case["store"], options, may_skip)


@pytest.mark.parametrize(
    "case", [*filter(is_known, named_cases(FEW)), *latent_cases()], ids=name_of
)
def test_same_as_full_attention(case: dict[str, Any], artifact_options: ArtifactOptions) -> None:
    check(case, artifact_options)


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=name_of)
def test_all_modes_and_stores(case: dict[str, Any], artifact_options: ArtifactOptions) -> None:
    check(case, artifact_options)


def talk(model: PreTrainedModel, cache: Any, folder: Path | None) -> list[torch.Tensor]:
    """Answers to a padded prompt, to 4 more tokens, then twice to 60 more.

    In ``folder`` the cache is saved, forked, and loaded again before the last turns.
    """
    ids, mask = ragged((90, 70))
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
        turn(*asked(ids, mask, 60), one)
    return answers


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("gemma4", "paris"), ("gemma4", "aqua"), ("gemma4_shared", "paris")),
        *((name, "native") for name in ("deepseek_v32",) if name in KNOWN),
        *(
            pytest.param(name, "native", marks=pytest.mark.slow)
            for name in KNOWN
            if name not in (*NO_PADDING, "deepseek_v32")
        ),
        *(
            pytest.param("gemma4", method, marks=pytest.mark.slow)
            for method in METHODS
            if method not in ("paris", "aqua")
        ),
    ],
)
def test_turns_forks_and_saved_caches(
    name: str, method: str, artifact_options: ArtifactOptions, tmp_path: Path
) -> None:
    model = ALL_MODELS[name].build()
    options = {**options_for("host"), **learned(artifact_options, method, name), "max_draft": 16}
    # Snapshots would have the end of each prompt read in a pass of its own.
    options["snapshots"] = 0
    cache = caches(method)[method](model.config, **options)
    expected = talk(model, DynamicCache(config=model.config), None)
    for answer, wanted in zip(talk(model, cache, tmp_path), expected, strict=True):
        assert torch.equal(answer, wanted)
    rows = sum(layer["exact_rows"] for layer in cache.stats()["layers"])
    assert rows == 0 or method == "native"


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
