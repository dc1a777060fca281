"""The drift comparison's opponent: sound by itself, and it does drift."""

from __future__ import annotations

import pytest
import torch
from prefill_clusters import (
    ClusterConfig,
    PrefillClusterIndex,
    RefittedClusterIndex,
    k_means,
    nearest,
)

from hf_kvret import TokenBlock
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing import all_valid
from hf_kvret.testing.cold import cold_tokens

HEADS, GROUP, DIM = 2, 2, 16


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _index(kind: type[PrefillClusterIndex], *parts: torch.Tensor) -> PrefillClusterIndex:
    """The first part is the prompt, the others come later."""
    index = kind(ClusterConfig(clusters=32, candidate_ratio=0.1))
    index.add(TokenBlock(parts[0], parts[0], 0))
    index.build(all_valid(PagedStore(DeviceMemory(torch.device("cpu"))), 1))
    start = parts[0].shape[2]
    for part in parts[1:]:
        index.add(TokenBlock(part, part, start))
        start += part.shape[2]
    return index


def _recall(index: PrefillClusterIndex, keys: torch.Tensor, query: torch.Tensor) -> float:
    best = (query @ keys.transpose(-1, -2)).topk(20, dim=-1).indices
    valid = torch.ones(len(keys), keys.shape[2], dtype=torch.bool)
    ids = index.search(query, cold_tokens(valid, 0.25, 20))
    return (ids.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean().item()


def test_k_means_finds_clusters_that_are_there() -> None:
    centers = 10 * _draw(0, 2, HEADS, 8, DIM)
    which = torch.arange(8).repeat_interleave(30)
    keys = centers[:, :, which] + 0.1 * _draw(1, 2, HEADS, 240, DIM)
    found = k_means(keys, 8)
    # Ten rounds of noise 0.1 / sqrt(30) leave them next to the true ones.
    assert (found - centers).abs().max() < 0.1
    member = nearest(keys, found)
    assert member.dtype == torch.int32
    assert torch.equal(member, which.int().expand(2, HEADS, -1))
    # Started in the wrong places it still ends with the mean of each cluster's keys.
    mixed = _draw(2, 1, 1, 240, DIM)
    found = k_means(mixed, 8)
    member = nearest(mixed, k_means(mixed, 8)).flatten()
    sizes = torch.bincount(member.long(), minlength=8)
    assert (sizes > 0).all()
    errors = (mixed[0, 0] - found[0, 0, member.long()]).square().sum(-1).mean()
    assert errors < (mixed - mixed.mean(2, keepdim=True)).square().sum(-1).mean()
    assert k_means(keys[:, :, :5], 8).shape == (2, HEADS, 5, DIM)


def test_keys_of_another_kind_are_lost_by_clusters_of_the_prompt_only() -> None:
    """The prompt's keys don't vary where the later ones do, so they say nothing about them."""
    prompt, later = _draw(0, 1, 1, 1000, DIM), _draw(1, 1, 1, 1000, DIM)
    prompt[..., DIM // 2 :] *= 0.02
    later[..., : DIM // 2] *= 0.02
    query = _draw(2, 1, 1, 16, DIM)
    query[..., : DIM // 2] *= 0.02
    keys = torch.cat([prompt, later], dim=2)
    pieces = later.split(250, dim=2)
    drifted = _recall(_index(PrefillClusterIndex, prompt, *pieces), keys, query)
    refitted = _recall(_index(RefittedClusterIndex, prompt, *pieces), keys, query)
    assert refitted > 0.6 and drifted < refitted - 0.2


@pytest.mark.parametrize("kind", [PrefillClusterIndex, RefittedClusterIndex])
def test_a_budget_for_all_selects_exactly_the_valid_tokens(kind: type[PrefillClusterIndex]) -> None:
    keys, query = _draw(0, 2, HEADS, 90, DIM), _draw(1, 2, HEADS * GROUP, 3, DIM)
    valid = torch.ones(2, 90, dtype=torch.bool)
    valid[:, :4] = False
    ids = _index(kind, keys[:, :, :60], keys[:, :, 60:]).search(query, cold_tokens(valid, 0.2, 90))
    assert ids.shape == (2, HEADS, 3, 90) and ids.dtype == torch.int32
    for chosen in ids.flatten(0, 2):
        assert sorted(chosen[chosen >= 0].tolist()) == list(range(4, 90))


def test_fork_and_crop_keep_the_selection() -> None:
    keys, query = _draw(0, 2, HEADS, 90, DIM), _draw(1, 2, HEADS * GROUP, 1, DIM)
    index = _index(PrefillClusterIndex, keys[:, :, :60], keys[:, :, 60:])
    valid = torch.ones(2, 90, dtype=torch.bool)
    expected = index.search(query, cold_tokens(valid, 0.2, 12))
    fork = index.fork()
    assert torch.equal(fork.search(query, cold_tokens(valid, 0.2, 12)), expected)
    more = _draw(3, 2, HEADS, 30, DIM)
    fork.add(TokenBlock(more, more, 90))
    fork.crop(90)
    assert torch.equal(fork.search(query, cold_tokens(valid, 0.2, 12)), expected)
    rows = torch.tensor([1, 0])
    fork.reorder(rows)
    reordered = fork.search(query[rows], cold_tokens(valid, 0.2, 12))
    assert torch.equal(reordered, expected[rows])


def test_candidates_cover_the_budget() -> None:
    index = PrefillClusterIndex(ClusterConfig(candidate_ratio=0.1))
    assert [index.cost(1000, k).candidates for k in (10, 300)] == [100, 300]
    assert index.cost(50, 100).candidates == 50


def test_mistakes_are_refused() -> None:
    keys = _draw(0, 1, HEADS, 4, DIM)
    index = PrefillClusterIndex(ClusterConfig())
    with pytest.raises(ValueError, match="without padding"):
        index.add(TokenBlock(keys, keys, 0, torch.tensor([[False, True, True, True]])))
    index.add(TokenBlock(keys, keys, 0))
    with pytest.raises(AssertionError, match="build the index first"):
        index.search(keys, cold_tokens(torch.ones(1, 4, dtype=torch.bool), 1.0, 1))
