"""A prompt in groups, against the same choice made with whole matrices of attention."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret.contracts.index import Scoring
from hf_kvret.lab.evaluate.bundled import load_bundled_model
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.needles import NeedleLanguage
from hf_kvret.lab.tune.variants import make_variants
from hf_kvret.layer.layer_kv import RetrievedTokens
from hf_kvret.layer.prompt_groups import BLOCK, GROUP, PromptPass
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.options.config import PromptRecipe

TOKENS = 1100
SCALE = 0.3
NOTHING_KEPT: dict[str, Any] = {"top_k": 0.125, "floor": 0, "above": 0, "exact": 0}


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    recipe: PromptRecipe,
    softcap: float | None,
    sinks: torch.Tensor | None,
    fewest: int,
) -> torch.Tensor:
    """``[Hq, T, D]`` of one sequence, whose prompt is all of its tokens.

    The batch has at least ``fewest`` of padding in each row.
    """
    per_head, tokens = len(query) // len(keys), keys.shape[1]
    scores = torch.stack(
        [
            _capped(SCALE * query[h] @ keys[h // per_head].T, softcap).masked_fill(
                ~(torch.ones(tokens, tokens).tril().bool() & valid), float("-inf")
            )
            for h in range(len(query))
        ]
    )
    seen = torch.ones(len(keys), tokens, tokens, dtype=torch.bool)
    weights = _weights(scores, sinks)
    for first in range(0, tokens, GROUP):
        last, near = min(first + GROUP, tokens), max(0, first - GROUP) // BLOCK * BLOCK
        count = -(-recipe.budget(max(0, first - fewest)) // BLOCK)
        # The other sequence of the batch has as many blocks with tokens, or fewer.
        blocks = near // BLOCK - fewest // BLOCK
        if last > tokens - recipe.exact or count >= blocks:
            continue
        queries = (first + valid[first:last].nonzero().flatten()).tolist()
        wanted = len(range(first, last)) if recipe.probes == "all" else recipe.probes
        wanted = min(wanted, last - first)
        ranks = {max(1, math.ceil((i + 1) * len(queries) / wanted)) - 1 for i in range(wanted)}
        probes = [queries[rank] for rank in sorted(ranks)] if queries else [last - 1]
        for head in range(len(keys)):
            own = weights[head * per_head : (head + 1) * per_head, probes, :near]
            share = own.unflatten(2, (-1, BLOCK)).sum(3).amax((0, 1))
            share[min(int(valid.int().argmax()), near - 1) // BLOCK] = 2.0
            left_out = torch.ones(near // BLOCK, dtype=torch.bool)
            left_out[share.topk(count + 1).indices] = False
            seen[head, first:last, :near] &= ~left_out.repeat_interleave(BLOCK)
    scores = scores.masked_fill(~seen.repeat_interleave(per_head, 0), float("-inf"))
    return _weights(scores, sinks) @ values.repeat_interleave(per_head, 0)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention of ``scores [Hq, T, T]``, of which a learned sink takes a part."""
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(scores[0]), 1)], dim=2)
    return scores.softmax(-1).nan_to_num(0.0)[:, :, : scores.shape[1]]


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * (scores / softcap).tanh()


@pytest.mark.factor("sinks", [None, 4.0])
@pytest.mark.factor("softcap", [None, 3.0])
@pytest.mark.factor("past", [0, 700])
@pytest.mark.factor("probes", [16, "all"])
@pytest.mark.factor("padding", [(0, 0), (0, 350), (200, 350)])
def test_groups_attend_to_near_tokens_and_what_probes_choose(
    padding: tuple[int, int], probes: Any, past: int, softcap: float | None, sinks: float | None
) -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(2, 4, TOKENS, 16), torch.randn(2, 2, TOKENS, 16)
    values = torch.randn(2, 2, TOKENS, 16)
    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    for row, count in enumerate(padding):
        valid[row, :count] = False
    recipe = PromptRecipe(**NOTHING_KEPT | {"probes": probes})
    scoring = Scoring(valid if any(padding) else None, SCALE, softcap)
    # A pass that begins within a group chooses by the queries that it has.
    past = past // GROUP * GROUP
    new = query[:, :, past:]
    logits = None if sinks is None else sinks + torch.randn(4)
    call = AttentionCall(scoring, lambda: new, logits)
    groups = PromptPass(new, keys, values, call, recipe, TOKENS)
    out = groups.attend()
    read = RetrievedTokens()
    read.add(groups.retrieved)
    assert read.spans == [(max(past, 2 * GROUP), TOKENS)]
    for row in range(2):
        rows = query[row], keys[row], values[row], valid[row]
        want = reference(*rows, recipe, softcap, logits, min(padding))[:, past:]
        seen = valid[row, past:]
        torch.testing.assert_close(out[row][:, seen], want[:, seen], rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_bundled_model()


@pytest.fixture(scope="module")
def document() -> tuple[torch.Tensor, torch.Tensor]:
    """A text of 2,900 tokens that ends with a question, and its answer."""
    language, rng = NeedleLanguage(), np.random.default_rng(0)
    keys, values = language.pairs(rng, 8)
    tokens, _ = language.document(rng, 2_896, keys, values)
    text = np.concatenate([tokens, language.questions(keys)[0]])
    return torch.from_numpy(text)[None], torch.from_numpy(values[0])


RECIPE = {"above": 0, "floor": 0}


@pytest.fixture(scope="module")
def read(model: PreTrainedModel, document: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """A cache that has read the text by retrieval and answered, and its answer."""
    return answer(model, document[0], prompt=RECIPE)


def answer(model: PreTrainedModel, text: torch.Tensor, **options: Any) -> Any:
    cache = hf_kvret.ParisKVCache(config=model.config, top_k=64, **options)
    out = model.generate(text, past_key_values=cache, max_new_tokens=2, do_sample=False)
    return cache, out[0, text.shape[1] :]


# The last 512 tokens attend to everything, with the group, or the part of it in a pass, that they
# begin in; so do the first, which have no choice.
@pytest.mark.parametrize(("chunk", "stop"), [(None, 2048), (700, 2100)])
def test_a_needle_is_found_behind_a_prompt_that_retrieved(
    model: PreTrainedModel, document: Any, read: Any, chunk: int | None, stop: int
) -> None:
    text, value = document
    cache, out = read if chunk is None else answer(model, text, prompt=RECIPE, prefill_chunk=chunk)
    assert out.tolist() == value.tolist()
    for layer in cache.retrieval_layers:
        assert layer.kv.retrieved.spans == [(2 * GROUP, stop)]
    assert cache.stats()["layers"][0]["prompt_retrieved"] == stop - 2 * GROUP


def test_short_prompts_and_large_shares_attend_to_everything(
    model: PreTrainedModel, document: tuple[torch.Tensor, torch.Tensor]
) -> None:
    text = document[0][:, -1400:]
    plain, _ = answer(model, text)
    for recipe in ("retrieve", {"above": 0, "floor": 0, "top_k": 1.0}):
        cache, _ = answer(model, text, prompt=recipe)
        assert not cache.retrieval_layers[0].kv.retrieved.spans
        for layer, other in zip(cache.retrieval_layers, plain.retrieval_layers, strict=True):
            torch.testing.assert_close(layer.keys[:], other.keys[:], rtol=0, atol=1e-4)


def test_spans_follow_their_tokens(model: PreTrainedModel, read: Any, tmp_path: Path) -> None:
    cache, _ = read
    fork = cache.fork()
    fork.crop(1500 - fork.get_seq_length())
    assert fork.retrieval_layers[0].kv.retrieved.spans == [(2 * GROUP, 1500)]
    assert cache.retrieval_layers[0].kv.retrieved.spans == [(2 * GROUP, 2048)]
    cache.save_pretrained(tmp_path)
    loaded = hf_kvret.ParisKVCache.from_pretrained(tmp_path, config=model.config)
    assert loaded.retrieval_layers[0].kv.retrieved.spans == [(2 * GROUP, 2048)]
    with pytest.raises(ValueError, match="1,024 tokens of this cache were read with prompt="):
        hf_kvret.ParisKVCache.from_pretrained(tmp_path, config=model.config, prompt="exact")
    with pytest.raises(ValueError, match="read the text again"):
        cache.fork(prompt="exact")


def test_what_was_announced_ends_with_a_crop_and_with_another_prompt(
    model: PreTrainedModel, document: tuple[torch.Tensor, torch.Tensor], read: Any
) -> None:
    """The last 512 tokens of a pass that nobody announced attend to everything."""
    cache = read[0].fork()
    cache.crop(1500 - cache.get_seq_length())
    with torch.no_grad():
        model(document[0][:, 1500:2200], past_key_values=cache)
    assert cache.retrieval_layers[0].kv.retrieved.spans == [(2 * GROUP, 1536)]
    fresh = hf_kvret.ParisKVCache(model.config, prompt=RECIPE)
    fresh.expect(2400, 2400)
    with torch.no_grad():
        for start, stop in ((0, 2400), (0, 700)):
            model(document[0][:, start:stop], past_key_values=fresh)
    assert fresh.retrieval_layers[0].kv.retrieved.spans == [(2 * GROUP, 1536), (2400, 2560)]


def test_padding_alone_is_no_reason_to_retrieve() -> None:
    """All tokens before the last groups fit the budget, but for padding."""
    query, keys = torch.randn(1, 2, 2048, 16), torch.randn(1, 2, 2048, 16)
    valid = torch.ones(1, 2048, dtype=torch.bool)
    valid[:, :1500] = False
    recipe = PromptRecipe(**NOTHING_KEPT | {"floor": 512})
    call = AttentionCall(Scoring(valid, SCALE), lambda: query)
    groups = PromptPass(query, keys, keys, call, recipe, 2048)
    groups.attend()
    assert not groups.retrieved


def test_a_dot_names_an_entry_of_the_recipe() -> None:
    options = choose_cache("paris:prompt.above=0:prompt.probes=all:top_k=64").options
    assert options is not None and options.prompt_recipe == PromptRecipe(above=0, probes="all")
    assert options == options.replace(prompt={"above": 0, "probes": "all"})
    for words in ("prompt.above=0:prompt=retrieve", "prompt=retrieve:prompt.above=0"):
        with pytest.raises(ValueError, match="prompt has a value and entries"):
            choose_cache(f"paris:{words}")


def test_a_tuned_prompt_is_measured_with_its_own_rows() -> None:
    """Variants that read the prompt in another way share no filled cache."""
    budgets = ("top_k=64", "prompt.above=0:top_k=64", "prompt.above=0:top_k=32")
    names = [f"paris:rest=none:{budget}" for budget in budgets]
    first, second, third = make_variants(names, [], 4096).values()
    assert first.base is not second.base and second.base is third.base
    assert all("prompt" not in variant.changes for variant in (first, second, third))
    json.dumps([variant.cache_config for variant in (first, second, third)])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("sparse", "choose 'exact' or 'retrieve'"),
        (True, "prompt=True: choose 'exact' or 'retrieve', or give a dictionary"),
        ({"share": 0.1}, "no 'share': choose among top_k, floor"),
        ({"top_k": 0.0}, "prompt: top_k=0.0 must be above 0 and at most 1"),
    ],
)
def test_what_is_no_recipe_is_refused(option: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_kvret.ParisKVCache.Config(prompt=option)
