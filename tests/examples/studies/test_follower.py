"""Recall told apart by place: counted token by token, by an index that changes no answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from follower import SplitCounts, SplitCTkvrCache, SplitIndex, split_counts
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvret
from hf_kvret import CTkvrCache, FlatKVCache
from hf_kvret.core.block import TokenBlock
from hf_kvret.core.first_rows import FirstRows
from hf_kvret.core.index import ColdTokens
from hf_kvret.core.scoring import Scoring
from hf_kvret.stores import StoreChoice

HEADS, GROUP, DIM = 2, 2, 16
OPTIONS: dict[str, Any] = {
    "top_k": 9,
    "dense_below": 0,
    "recent": 8,
    "flush": 8,
    "tokens_per_centroid": 4,
    "nprobe": 2,
    "track_recall": True,
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    made = LlamaForCausalLM(config).eval()
    hf_kvret.attach(made)
    return made


def _cold(tokens: int, valid: torch.Tensor, softcap: float | None) -> ColdTokens:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, HEADS, tokens, DIM, generator=generator)
    options = FlatKVCache.config_class(store="device")
    store = StoreChoice(options, 1, DIM).make(FirstRows(keys.device, 2 * keys.nbytes, keys))
    store.append(TokenBlock(keys, keys, 0, None))
    return ColdTokens(store, Scoring(valid, 0.7, softcap), 6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_counts_are_those_of_sets_of_tokens(softcap: float | None) -> None:
    """In plain Python: a token's worth is its best softmax weight among the group's heads."""
    tokens, count, place = 40, 6, 23
    generator = torch.Generator().manual_seed(2)
    valid = torch.rand(2, tokens, generator=generator) > 0.2
    # A row with fewer tokens than are selected.
    valid[1, 4:] = False
    cold = _cold(tokens, valid, softcap)
    query = torch.randn(2, HEADS * GROUP, 3, DIM, generator=generator)
    ids = torch.stack([torch.randperm(tokens, generator=generator)[:count] for _ in range(12)])
    ids = ids.view(2, HEADS, 3, count).int()
    ids[..., -2:] = -1
    keys = next(iter(cold.store.chunks()))[1]
    expected = dict.fromkeys(SplitCounts._fields, 0)
    for row, head, number in torch.cartesian_prod(
        torch.arange(2), torch.arange(HEADS), torch.arange(3)
    ).tolist():
        asked = query[row, head * GROUP : (head + 1) * GROUP, number]
        scores = asked @ keys[row, head].T * cold.scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        worth = scores.masked_fill(~valid[row], float("-inf")).softmax(-1).amax(0)
        order = worth.argsort(descending=True).tolist()
        best = {token for token in order[:count] if valid[row, token]}
        chosen = set(ids[row, head, number].tolist()) - {-1}
        expected["prompt"] += sum(token < place for token in best)
        expected["generated"] += sum(token >= place for token in best)
        expected["prompt_found"] += sum(token < place for token in best & chosen)
        expected["generated_found"] += sum(token >= place for token in best & chosen)
    found = split_counts(query, ids, cold, place)
    assert found._asdict() == expected
    assert 0 < found.prompt_found < found.prompt and 0 < found.generated_found < found.generated


def test_shares_of_nothing_are_none() -> None:
    assert SplitCounts().shares() == {
        "prompt_recall": None,
        "generated_recall": None,
        "generated_share": None,
    }
    counts = SplitCounts.total([SplitCounts(4, 0, 1, 0), SplitCounts(4, 8, 2, 2)])
    assert counts == SplitCounts(8, 8, 3, 2)
    assert counts.shares() == {
        "prompt_recall": 3 / 8,
        "generated_recall": 2 / 8,
        "generated_share": 0.5,
    }


def _follow(model: LlamaForCausalLM, cache: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    with torch.inference_mode():
        model(tokens[None, :prompt], past_key_values=cache)
        steps = [
            model(step[None], past_key_values=cache).logits for step in tokens[prompt:].split(1)
        ]
    return torch.cat(steps, dim=1)


def test_it_answers_as_the_index_inside_and_its_counts_are_those_of_recall(
    model: LlamaForCausalLM,
) -> None:
    tokens = torch.randint(64, (140,), generator=torch.Generator().manual_seed(3))
    plain = CTkvrCache(config=model.config, **OPTIONS)
    split = SplitCTkvrCache(config=model.config, **OPTIONS)
    expected, found = (_follow(model, cache, tokens, 80) for cache in (plain, split))
    # One of them attends in one call of the CPU library, the other part by part.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    layers = zip(plain.stats()["layers"], split.stats()["layers"], strict=True)
    for number, (one, other) in enumerate(layers):
        assert one.keys() == other.keys()
        for name, value in one.items():
            is_number = isinstance(value, float)
            assert value == (pytest.approx(other[name], rel=1e-5) if is_number else other[name])
        regions = split.retrieval_layers[number].regions
        assert regions is not None
        index = regions.index
        assert isinstance(index, SplitIndex) and index.prompt_len == 80
        counts = index.counts
        overlap = (counts.prompt_found + counts.generated_found) / (
            counts.prompt + counts.generated
        )
        # Every selection has 9 tokens to find, so the mean of shares is the share of sums.
        assert overlap == pytest.approx(one["recall_overlap"], rel=1e-6)
    assert split.memory() == plain.memory()


def test_forks_know_the_prompt_and_count_anew(model: LlamaForCausalLM) -> None:
    tokens = torch.randint(64, (120,), generator=torch.Generator().manual_seed(4))
    split = SplitCTkvrCache(config=model.config, **OPTIONS)
    _follow(model, split, tokens, 70)
    assert split.split_shares()["generated_recall"] is not None
    twin = split.fork()
    assert twin.split_shares()["prompt_recall"] is None
    with torch.inference_mode():
        model(tokens[None, :1], past_key_values=twin)
    generated = twin.split_shares()["generated_share"]
    assert generated is not None and 0 < generated < 1
    with pytest.raises(NotImplementedError):
        split.retrieval_layers[0].regions.index.state_dict()
