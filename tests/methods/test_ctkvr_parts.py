"""CTkvr's options, its choice of queries, and its compact lists."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.methods.ctkvr import CTkvrIndex
from hf_kvret.methods.ctkvr.config import CTkvrConfig
from hf_kvret.methods.ctkvr.inverted_file import MOST_TOKENS, Centroids, InvertedLists
from hf_kvret.methods.ctkvr.sampler import CentroidSampler, MixedSampler


def test_the_numbers_of_the_paper() -> None:
    paper = CTkvrConfig.preset("paper")
    assert [paper.centroids_for(n) for n in (3, 800, 32_768, 131_072)] == [1, 50, 2048, 2048]
    assert [paper.list_len(131_072, b) for b in (512, 1024)] == [1280, 2560]
    assert (paper.nprobe, paper.update, paper.choice, paper.rerank) == (4, 1, "last", "auto")
    assert (paper.pending, paper.questions, paper.update_lists) == (0, False, "recalled")


def test_saved_caches_may_name_options_that_are_gone() -> None:
    gone = {"seed": 0, "causal": False, "coverage": 0.5}
    assert CTkvrConfig.from_saved(**gone) == CTkvrConfig()
    recalled = {"update_lists": "recalled", **gone}
    with pytest.raises(ValueError, match=r"coverage=0\.5: this version only does as coverage=0"):
        CTkvrConfig.from_saved(**recalled)
    assert CTkvrConfig.from_saved(**{**recalled, "coverage": 0.0}).update_lists == "recalled"


def _chosen(
    sampler: CentroidSampler | MixedSampler, count: int, cuts: tuple[int, ...]
) -> list[int]:
    for start, end in zip((0, *cuts), (*cuts, 1600), strict=True):
        queries = torch.arange(start, end).float().view(1, 1, -1, 1).expand(1, 2, -1, 3)
        sampler.add(queries, start, None, 2048)
    queries, slots = sampler.best(count)
    assert torch.equal(queries[0, 1, :, 2].long(), slots[0])
    return slots[0].tolist()


@pytest.mark.parametrize("cuts", [(), (100, 101, 900)])
def test_the_last_queries_are_chosen_or_some_that_are_spread_evenly(cuts: tuple[int, ...]) -> None:
    assert _chosen(CentroidSampler(), 100, cuts) == list(range(1500, 1600))
    assert _chosen(CentroidSampler(spread=True), 100, cuts) == list(range(0, 1600, 16))


@pytest.mark.parametrize("cuts", [(), (100, 101, 900)])
def test_mixed_queries_are_the_last_and_others_spread_over_the_rest(cuts: tuple[int, ...]) -> None:
    slots = _chosen(MixedSampler(), 100, cuts)
    assert slots[50:] == list(range(1550, 1600)) and max(slots[:50]) < 1550
    gaps = [after - before for before, after in pairwise([0, *slots[:50]])]
    assert max(gaps) <= 64
    assert len(set(_chosen(MixedSampler(), 101, cuts))) == 101
    assert _chosen(MixedSampler(), 1, cuts) == [1599]


def test_mixed_queries_leave_padding_out_row_by_row() -> None:
    sampler = MixedSampler()
    valid = torch.tensor([[False] * 4 + [True] * 6, [True] * 5 + [False] * 5, [False] * 10])
    sampler.add(torch.zeros(3, 2, 10, 3), 0, valid, 8)
    slots = sampler.best(4)[1]
    assert sorted(slots[0].tolist()[2:]) == [8, 9] and set(slots[0].tolist()[:2]) <= {4, 5, 6, 7}
    assert sorted(slots[1].tolist()[2:]) == [3, 4] and set(slots[1].tolist()[:2]) <= {0, 1, 2}
    assert slots[2].tolist() == [-1] * 4


def test_padding_is_never_chosen_and_takes_no_room() -> None:
    sampler = CentroidSampler()
    valid = torch.tensor([[True] * 6, [True, True, False, True, False, False]])
    sampler.add(torch.zeros(2, 2, 6, 3), 10, valid, 4)
    sampler.add(torch.zeros(2, 2, 1, 3), 16, torch.tensor([[True], [False]]), 4)
    assert sorted(sampler.best(4)[1][0].tolist()) == [13, 14, 15, 16]
    assert sorted(sampler.best(4)[1][1].tolist()) == [-1, 10, 11, 13]


def _ids(lists: InvertedLists) -> list[int]:
    return lists.ids_of(slice(None)).flatten().tolist()


def _centroid(slot: int) -> Centroids:
    return Centroids(torch.ones(1, 1, 1, 2, 4), torch.tensor([[slot]]))


@pytest.mark.parametrize(("tokens", "nbytes"), [(65_535, 2), (65_536, 3), (MOST_TOKENS, 3)])
def test_slots_take_two_bytes_as_long_as_they_can(tokens: int, nbytes: int) -> None:
    most = tokens - 1
    ids = torch.tensor([-1, 0, 1, 32_766, 32_767, 32_768, most - 1, most], dtype=torch.int32)
    lists = InvertedLists(10)
    lists.append(_centroid(7), [ids.view(1, 1, 1, -1)], tokens)
    assert _ids(lists) == [*ids.tolist(), -1, -1]
    assert lists.list_nbytes() == 10 * nbytes
    assert lists.take(torch.zeros(1, 1, 1, 3, dtype=torch.long)).shape == (1, 1, 1, 3, 10)


def test_more_tokens_than_three_bytes_can_name_are_refused() -> None:
    keys = torch.zeros(1, 1, 1, 4)
    index = CTkvrIndex(CTkvrConfig())
    index.add(TokenBlock(keys, keys, start=MOST_TOKENS - 1))
    with pytest.raises(ValueError, match=r"16777216 cold tokens: .* name 16777215 tokens at most"):
        index.add(TokenBlock(keys, keys, start=MOST_TOKENS))


def test_lists_grow_wider_when_slots_do() -> None:
    lists = InvertedLists(2)
    near, far = (torch.tensor([[[[x, -1]]]], dtype=torch.int32) for x in (65_534, 70_000))
    lists.append(_centroid(7), [near], 65_535)
    twin = lists.fork()
    twin.append(_centroid(8), [far], 70_001)
    assert _ids(twin) == [65_534, -1, 70_000, -1]
    assert _ids(lists) == [65_534, -1] and lists.list_nbytes() == 4
    again = InvertedLists(2)
    again.load_state_dict(twin.state_dict())
    assert _ids(again) == _ids(twin) and torch.equal(again.slots, twin.slots)
