"""Forks: cheap, independent in both directions, and what ``copy.deepcopy`` makes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import CTkvrCache, FlatKVCache, H2OCache, LRQKCache, ParisKVCache, RetrievalCache
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.methods.ctkvr import CTkvrConfig, CTkvrIndex
from hf_kvret.methods.lrqk import LRQKConfig
from hf_kvret.testing import COVERING_OPTIONS, LOGIT_TOLERANCE
from hf_kvret.testing.scenario import prompt

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 1.0}
RUN = {"max_new_tokens": 6, "do_sample": False}
METHODS = [FlatKVCache, ParisKVCache]


def _prefilled(model: PreTrainedModel, cls: type[RetrievalCache], **changes: Any) -> RetrievalCache:
    cache = cls(model.config, **{**SMALL, **changes})
    model.generate(prompt(1, 50), past_key_values=cache, max_new_tokens=1)
    return cache


def _ask(model: PreTrainedModel, cache: RetrievalCache | None, question: int) -> torch.Tensor:
    ids = torch.cat([prompt(1, 50), prompt(1, 5, salt=question)], dim=1)
    return model.generate(ids, past_key_values=cache, **RUN)


@pytest.mark.parametrize(("cls", "store"), zip(METHODS, ["device", "host"], strict=True))
def test_forks_and_original_never_see_each_others_tokens(
    llama: PreTrainedModel, cls: type[RetrievalCache], store: str
) -> None:
    expected = [_ask(llama, None, question) for question in range(4)]
    cache = _prefilled(llama, cls, store=store)
    twins = [cache.fork() for _ in range(3)]
    grandchild = twins[0].fork()
    for question in (2, 0, 1):
        assert torch.equal(_ask(llama, twins[question], question), expected[question])
        assert cache.get_seq_length() == 50
    assert torch.equal(_ask(llama, cache, 3), expected[3])
    assert torch.equal(_ask(llama, grandchild, 1), expected[1])
    twins[1].crop(-40)
    twins[2].reorder_cache(torch.tensor([0, 0]))
    cache.crop(-16)
    assert torch.equal(_ask(llama, cache, 2), expected[2])


class _CountedCTkvr(CTkvrCache):
    """Counts the indexes that were built from a prompt."""

    builds = 0

    @classmethod
    def make_index(cls, options: Any, layer: int) -> CTkvrIndex:
        class Counted(CTkvrIndex):
            def build(self, cold: ColdTokens) -> None:
                cls.builds += 1
                super().build(cold)

        return Counted(options)


@pytest.mark.parametrize("copied", ["fork", "saved"])
def test_copies_share_what_the_end_of_a_prompt_left_to_build(
    llama: PreTrainedModel, copied: str, tmp_path: Path
) -> None:
    _CountedCTkvr.builds = 0
    cache = _prefilled(llama, _CountedCTkvr, top_k=4)
    assert _CountedCTkvr.builds == 0
    if copied == "fork":
        twins = [cache.fork() for _ in range(3)]
    else:
        cache.save_pretrained(tmp_path)
        twins = [_CountedCTkvr.from_pretrained(tmp_path, llama.config) for _ in range(3)]
    answers = [_ask(llama, one, 1) for one in (*twins, cache)]
    assert _CountedCTkvr.builds == len(cache.retrieval_layers)
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_a_fork_counts_anew_and_the_original_keeps_its_counts(llama: PreTrainedModel) -> None:
    cache = _prefilled(llama, FlatKVCache)
    _ask(llama, cache, 0)
    before = cache.stats()
    twin = cache.fork()
    assert [layer["steps"] for layer in twin.stats()["layers"]] == [0, 0]
    assert twin.stats()["store"] == before["store"] == "device"
    with torch.no_grad():
        llama(prompt(1, 1), past_key_values=twin)
    assert [layer["steps"] for layer in twin.stats()["layers"]] == [1, 1]
    assert cache.stats() == before


def test_options_that_leave_the_tokens_alone_can_change(llama: PreTrainedModel) -> None:
    cache = _prefilled(llama, FlatKVCache)
    twin = cache.fork(top_k=3, track_recall=True)
    _ask(llama, twin, 0)
    layer = twin.stats()["layers"][0]
    assert layer["selected"] == layer["queries"] * 2 * 3, "3 tokens for each of 2 heads"
    assert layer["recall_overlap"] == 1.0
    assert cache.options.top_k == 1.0 and cache.retrieval_layers[0].config.top_k == 1.0
    assert FlatKVCache(llama.config, **SMALL).fork(top_k=3).options.top_k == 3, "an empty one, too"
    for bound in ({"store": "host"}, {"sink": 1}, {"recent": 3}, {"tok_k": 3}):
        with pytest.raises(ValueError, match="not an option that a filled cache can change"):
            cache.fork(**bound)


def test_a_forks_options_reach_its_index_also_after_a_reset(llama: PreTrainedModel) -> None:
    cache = _prefilled(llama, H2OCache, max_draft=4)
    fork = cache.fork(max_draft=9)
    for _ in range(2):
        assert [one.kv.index.options.max_draft for one in fork.retrieval_layers] == [9, 9]
        fork.reset()
        _ask(llama, fork, 0)
    assert [one.kv.index.options.max_draft for one in cache.retrieval_layers] == [4, 4]


# Options that a filled cache may change reach every part of it, by a fork or by a load.

CACHES: dict[str, Callable[..., RetrievalCache]] = {
    "flat": FlatKVCache,
    "lrqk_paper": partial(LRQKCache, options=LRQKConfig.preset("paper")),
    "ctkvr_paper": partial(CTkvrCache, options=CTkvrConfig.preset("paper")),
    "h2o_observed": partial(H2OCache, observed=8),
}
COVERING = {
    **COVERING_OPTIONS, "prefill_chunk": None, "track_recall": False, "graph": "auto",
    "compile": "auto",
}  # fmt: skip
LARGE: dict[str, Any] = {
    "top_k": 1.0, "max_draft": 20, "flush": 11, "prefill_chunk": 30, "track_recall": True,
    "graph": False, "compile": False,
}  # fmt: skip
FREE = set(LARGE)
# Single tokens, a small and a large draft, a second prompt, and a draft after it.
PASSES = (1, 5, 18, 1, 40, 16, 1)


def _read(model: Any, cache: RetrievalCache, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def _go_on(model: Any, cache: RetrievalCache, first: int) -> torch.Tensor:
    """Logits of ``PASSES`` over the tokens from ``first`` on."""
    chunks = prompt(1, first + sum(PASSES))[:, first:].split(PASSES, dim=1)
    return torch.cat([_read(model, cache, chunk) for chunk in chunks], dim=1)


# Nothing is cold; or a prompt made tokens cold, and some steps came after it.
@pytest.mark.allowed(meet=[("towards", "passes")])
@pytest.mark.factor("passes", [(12,), (60, 1, 6, 1)], ids=str)
@pytest.mark.factor("towards", ["large", "small"])
@pytest.mark.factor("name", list(CACHES))
def test_a_cache_goes_on_like_one_that_always_had_the_options(
    llama: PreTrainedModel, name: str, towards: str, passes: tuple[int, ...], tmp_path: Path
) -> None:
    hf_kvret.attach(llama)
    before, after = (COVERING, {**COVERING, **LARGE})[:: 1 if towards == "large" else -1]
    changes = {option: after[option] for option in FREE}
    caches = [CACHES[name](config=llama.config, **options) for options in (before, after)]
    ids = prompt(1, sum(passes))
    for cache in caches:
        for chunk in ids.split(passes, dim=1):
            _read(llama, cache, chunk)
    caches[0].save_pretrained(tmp_path)
    fork = caches[0].fork(**changes)
    loaded = type(caches[0]).from_pretrained(tmp_path, llama.config, **changes)
    expected = _go_on(llama, caches[1], len(ids[0]))
    for cache in (fork, loaded):
        logits = _go_on(llama, cache, len(ids[0]))
        torch.testing.assert_close(logits, expected, rtol=0, atol=LOGIT_TOLERANCE)
        assert cache.stats()["layers"][0]["cold_tokens"] > 0
