"""Recall of a selection against exact top-k, on cases worked out by hand."""

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.observe.recall import Recall, measure_recall
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory

from ..cold import cold_tokens
from ..layer.driver import SCALE, Driver

SCORES = [1.0, 3.0, 0.0, 2.0, -1.0]
SHARES = torch.tensor(SCORES).softmax(0)


def recall_of(*selections: list[int], valid: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Recall:
    """Of one query of 1 in each sequence, whose product with key number n is ``SCORES[n]``."""
    batch = len(selections)
    store = PagedStore(DeviceMemory(torch.device("cpu")), page_len=4)
    keys = torch.tensor(SCORES).view(1, 1, -1, 1).expand(batch, 1, -1, 1)
    store.append(TokenBlock(keys, torch.zeros_like(keys), start=0))
    mask = torch.zeros(batch, len(SCORES), dtype=torch.bool)
    mask[:, list(valid)] = True
    ids = torch.tensor(selections, dtype=torch.int32).view(batch, 1, 1, -1)
    cold = cold_tokens(mask, 1.0, 1, store=store)
    return measure_recall(torch.ones(batch, 1, 1, 1), ids, cold)


@pytest.mark.parametrize(
    ("ids", "overlap", "read"),
    [
        *(([1, 3], 1.0, [1, 3]), ([3, 1], 1.0, [1, 3]), ([1, 4], 0.5, [1, 4])),
        *(([2, 4], 0.0, [2, 4]), ([1, -1], 0.5, [1])),
    ],
)
def test_overlap_and_mass_of_a_selection(ids: list[int], overlap: float, read: list[int]) -> None:
    """An empty place counts as missed; cold tokens alone lose what is not selected."""
    recall = recall_of(ids)
    assert recall.overlap == overlap
    assert recall.mass == pytest.approx(float(SHARES[read].sum()), rel=1e-6)
    assert recall.best_mass == pytest.approx(float(SHARES[[1, 3]].sum()), rel=1e-6)
    assert recall.lost_mass == pytest.approx(1.0 - recall.mass, rel=1e-6)


def test_tokens_that_are_not_valid_are_nobodys_best() -> None:
    assert recall_of([3, 0], valid=(0, 2, 3, 4)).overlap == 1.0
    assert recall_of([3, -1], valid=(3,))[:3] == (1.0, 1.0, 1.0)
    # No valid token gives zero and no NaN.
    assert recall_of([-1, -1], valid=())[:3] == (0.0, 0.0, 0.0)


def test_sequences_are_averaged() -> None:
    assert recall_of([1, 3], [2, 4]).overlap == 0.5


@pytest.mark.parametrize("rest", [None, "mean"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_lost_mass_is_the_share_of_all_attention(softcap: float | None, rest: str | None) -> None:
    """Of a batch with padding and sinks, by ids that a step and a draft selected."""
    driver = Driver(softcap=softcap, sinks=True, track_recall=True, rest=rest)
    driver.forward(90, padded=11)
    expected = []
    for count in (1, 3):
        driver.forward(count)
        expected.append(float(_lost_shares(driver).mean()))
    (stats,) = driver.cache.stats()["layers"]
    assert 0.05 < stats["lost_mass"] < 0.95
    assert stats["lost_mass"] == pytest.approx(sum(expected) / 2, rel=1e-4)


def _lost_shares(driver: Driver) -> torch.Tensor:
    """``[B, Hq, Q]`` fp64 of the last pass: full attention to the tokens that nothing read."""
    kv = driver.layer.kv
    assert kv is not None and driver.ids is not None and driver.sink_logits is not None
    query, keys = driver.query.double(), kv.rows(kv.length)[0].double()
    group = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(group, dim=1).mT * SCALE
    if driver.softcap is not None:
        scores = driver.softcap * torch.tanh(scores / driver.softcap)
    queries = query.shape[2]
    seen = torch.ones(queries, kv.length, dtype=torch.bool).tril(kv.length - queries)
    scores = scores.masked_fill(~(seen & driver.mask[:, None, None]), -torch.inf)
    logits = driver.sink_logits.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, logits], dim=-1).softmax(-1)[..., :-1]
    read = torch.zeros(*driver.ids.shape[:3], kv.length + 1, dtype=torch.bool)
    read.scatter_(-1, driver.ids.long().where(driver.ids >= 0, kv.length), True)
    sinks = kv.window.sink_slots[:, None, None].expand(*read.shape[:3], -1)
    read.scatter_(-1, sinks.where(sinks >= 0, kv.length), True)
    read[..., kv.cold_len :] = True
    return (shares * ~read[..., :-1].repeat_interleave(group, dim=1)).sum(-1)
