"""With ``select_every`` one layer selects for several, through all that may happen to a cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_kvret
import hf_kvret.cache
from hf_kvret import FlatKVCache, RetrievalCache, registered_methods
from hf_kvret.models.compatibility import AttentionShape
from hf_kvret.testing import INDEXED_MODELS, LATENT_MODELS, MODELS, SHARED_MODELS

from ..replay.steps import DecodeLoop, compare, small_cache, small_llama

METHODS = ("flat", "paris", "lrqk", "ctkvr")


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama(layers=5)


def loop_of(model: Any, method: str = "flat", every: int = 2, **options: Any) -> DecodeLoop:
    """A loop behind a padded prompt."""
    return DecodeLoop(model, small_cache(model, method, select_every=every, **options), padded=True)


def selections(loop: DecodeLoop, steps: int = 1) -> list[torch.Tensor | None]:
    """What each layer attends to in some steps."""
    seen: list[Any] = []
    with hf_kvret.observe(loop.cache, seen.append):
        loop.run(steps)
    return [selection.ids for selection in seen]


def lenders(cache: RetrievalCache) -> list[int | None]:
    """For each layer the number of the one that selects for it."""
    return [layer.lender and layer.lender.number for layer in cache.retrieval_layers]


@pytest.mark.parametrize("method", METHODS)
def test_layers_attend_to_what_the_first_of_their_group_selected(model: Any, method: str) -> None:
    first, second, third, fourth, last = selections(loop_of(model, method))
    assert first is not None and torch.equal(first, second)
    assert third is not None and torch.equal(third, fourth)
    assert not torch.equal(first, third) and not torch.equal(third, last)
    alone = selections(loop_of(model, method, every=1))
    assert torch.equal(alone[0], first) and not torch.equal(alone[1], first)


def test_layers_that_borrow_hold_no_index_and_count_what_they_borrow(model: Any) -> None:
    caches = [loop_of(model, every=every, rest=None).cache for every in (1, 2, 9)]
    assert [lenders(cache) for cache in caches] == [
        [None] * 5, [None, 0, None, 2, None], [None, 0, 0, 0, 0]
    ]  # fmt: skip
    whole, some, one = (cache.memory().index for cache in caches)
    assert (some, one) == (whole * 3 // 5, whole // 5)
    loop = loop_of(model)
    loop.run(3)
    layers = loop.cache.stats()["layers"]
    assert [layer["steps"] for layer in layers] == [3] * 5
    assert [layer["borrowed"] for layer in layers] == [0, 3, 0, 3, 0]
    assert [layer["candidates"] > 0 for layer in layers] == [True, False, True, False, True]
    assert len({layer["selected"] for layer in layers}) == 1
    assert layers[3]["selected_by"] == 2 and "selected_by" not in layers[2]


def test_a_group_ends_at_layers_of_other_heads(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, other = AttentionShape(2, 1, 16), AttentionShape(4, 2, 16)
    shapes = {number: other if number == 2 else usual for number in range(5)}
    monkeypatch.setattr(hf_kvret.cache, "retrieval_shapes", lambda config: shapes)
    assert lenders(small_cache(model, select_every=3)) == [None, 0, None, None, 3]


def forked(loop: DecodeLoop, folder: Path) -> DecodeLoop:
    cache = loop.cache.fork()
    # The original goes on, and selects other tokens.
    loop.copy().run(3)
    return loop.copy(cache=cache)


def loaded(loop: DecodeLoop, folder: Path) -> DecodeLoop:
    loop.cache.save_pretrained(folder)
    kind: Any = type(loop.cache)
    return loop.copy(cache=kind.from_pretrained(folder, loop.call.config))


@pytest.mark.parametrize("method", ["flat", "lrqk"])
@pytest.mark.parametrize("copied", [forked, loaded])
def test_forks_and_loaded_caches_go_on_as_the_original(
    model: Any, method: str, copied: Callable[..., DecodeLoop], tmp_path: Path
) -> None:
    expected = loop_of(model, method).run(8)
    loop = loop_of(model, method)
    first = loop.run(3)
    twin = copied(loop, tmp_path)
    assert lenders(twin.cache) == lenders(loop.cache)
    assert torch.equal(torch.cat([first, twin.run(5)]), expected)


def test_crops_chosen_sequences_drafts_and_resets_keep_the_groups(model: Any) -> None:
    loop = loop_of(model)
    loop.run(6)
    loop.cache.crop(-4)
    loop.cache.batch_select_indices(torch.tensor([1, 1, 0]))
    loop.mask = loop.mask[:, :-4][[1, 1, 0]]
    loop.logits = loop.logits[[1, 1, 0]]
    pairs = [selections(loop, 5)[5 * step : 5 * step + 2] for step in range(5)]
    draft = torch.arange(9).view(3, 3) + 20
    loop.mask = torch.cat([loop.mask, torch.ones_like(draft)], dim=1)
    seen: list[Any] = []
    with hf_kvret.observe(loop.cache, seen.append):
        loop.feed(draft)
    pairs.append([each.ids for each in seen[:2]])
    for lent, borrowed in pairs:
        assert torch.equal(lent, borrowed)
    loop.cache.reset()
    fresh = DecodeLoop(model, loop.cache, padded=True)
    assert torch.equal(fresh.run(3), loop_of(model).run(3))


def test_replayed_steps_borrow_anew_in_each_step() -> None:
    graph = compare(lambda loop: loop.run(4), model=small_llama(), select_every=2, flush=7)
    assert graph.captures == 1 and graph.replays == 2


REFUSED: dict[str, tuple[Any, str]] = {
    "h2o": (MODELS["llama"], "h2o keeps tokens for each layer"),
    "aqua": (MODELS["llama"], "aqua attends to all tokens"),
    "latent": (LATENT_MODELS["deepseek_v3"], "it has no meaning"),
    "native": (INDEXED_MODELS["deepseek_v32"], "it has no meaning"),
    "flat": (SHARED_MODELS["gemma4_shared"], "read the keys of another layer"),
}


@pytest.mark.parametrize("method", REFUSED)
def test_caches_whose_layers_can_not_borrow_refuse(method: str) -> None:
    tiny, reason = REFUSED[method]
    with pytest.raises(ValueError, match=rf"^select_every=2: .*{reason}"):
        registered_methods()[method](tiny.config(), select_every=2)


def test_a_filled_cache_keeps_its_groups() -> None:
    cache = FlatKVCache(small_llama().config)
    with pytest.raises(ValueError, match="select_every: not an option that a filled cache"):
        cache.fork(select_every=2)
