"""ParisIndex: its selection apart from the output, and the faults of the published code."""

import math

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.contracts.index import Index
from hf_kvret.contracts.state import Schema
from hf_kvret.methods.flat import FlatIndex
from hf_kvret.methods.paris import ParisConfig, ParisIndex

from ..cold import cold_tokens
from .index_runs import overlap

HEADS, GROUP = 2, 2
OURS, PAPER = ParisConfig(), ParisConfig.preset("paper")


def _counted(keys: torch.Tensor, valid: torch.Tensor, cut: int = 0) -> ParisIndex:
    """An index with ``keys`` in two blocks, the first of ``cut`` tokens."""
    index = ParisIndex(OURS.replace(center=False))
    for start, end in ((0, cut), (cut, keys.shape[2])):
        if end > start:
            block = keys[:, :, start:end]
            index.add(TokenBlock(block, block, start, valid[:, start:end]))
    return index


def _select(
    index: Index, keys: torch.Tensor, query: torch.Tensor, budget: int, softcap: float | None = None
) -> torch.Tensor:
    """The selection of an empty ``index`` that gets ``keys``, all of them valid."""
    index.add(TokenBlock(keys, keys, 0))
    valid = torch.ones(len(keys), keys.shape[2], dtype=torch.bool)
    return index.search(query, cold_tokens(valid, 2 / math.sqrt(keys.shape[3]), budget, softcap))


def _peaked(
    length: int, dim: int, batch: int = 2, common: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a few topics, and queries that ask for one of them: attention as models have it.

    ``common`` is the length of a part that all keys share, as the keys of real models do.
    """
    generator = torch.Generator().manual_seed(length + dim)
    topics = torch.randn(batch, HEADS, 16, dim, generator=generator)
    which = torch.randint(0, 16, (batch, HEADS, length, 1), generator=generator)
    own = torch.randn(batch, HEADS, length, dim, generator=generator)
    keys = topics.gather(2, which.expand(-1, -1, -1, dim)) + 0.7 * own
    keys = keys + common * torch.randn(batch, HEADS, 1, dim, generator=generator)
    noise = torch.randn(batch, HEADS * GROUP, 2, dim, generator=generator)
    query = topics[:, :, :2].repeat_interleave(GROUP, dim=1) + 0.5 * noise
    return keys, query


def _quality(
    options: ParisConfig, keys: torch.Tensor, query: torch.Tensor, budget: int
) -> tuple[float, float]:
    """Overlap with exact top-k, and the attention mass held relative to what top-k holds."""
    ids, best = (_select(one, keys, query, budget) for one in (ParisIndex(options), FlatIndex()))
    scores = query @ keys.repeat_interleave(GROUP, dim=1).mT * 2 / math.sqrt(keys.shape[3])
    shares = scores.softmax(-1)

    def mass(chosen: torch.Tensor) -> torch.Tensor:
        return shares.gather(-1, chosen.repeat_interleave(GROUP, dim=1).long()).sum(-1).mean()

    return overlap(ids, best), float(mass(ids) / mass(best))


@pytest.mark.parametrize("dim", [40, 128, 256, 320, 576])
@pytest.mark.parametrize("options", [OURS, PAPER], ids=["ours", "paper"])
def test_the_selection_finds_what_exact_top_k_finds(options: ParisConfig, dim: int) -> None:
    """Not only at a head dim of 128, for which the published kernels are written."""
    overlap, mass = _quality(options, *_peaked(2000, dim), budget=100)
    # A random selection overlaps by 0.05; what is missed are tokens near the threshold.
    assert overlap > 0.93 and mass > 0.995


def test_the_part_of_a_row_that_decides_may_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents and rotated keys of other scales, which blocks have to mix."""
    latents, latent_query = _peaked(2000, 256, batch=1)
    keys, query = _peaked(2000, 32, batch=1, common=1.0)
    keys, query = (
        torch.cat([latents, 4 * keys], dim=-1),
        torch.cat([latent_query, 4 * query], dim=-1),
    )
    monkeypatch.setattr(ParisConfig, "ratios", lambda self, length: (0.25, 0.3))
    overlap, mass = _quality(OURS, keys, query, budget=100)
    # Measured: 0.99; without the mixing 0.77.
    assert overlap > 0.96 and mass > 0.999


@pytest.mark.parametrize("dim", [40, 64])
def test_a_large_part_of_keys_that_queries_hardly_ask_for_hides_nothing(dim: int) -> None:
    """A bias of each head, which turns with positions, so that the mean is no part of it."""
    (keys, query), angles = _peaked(2000, dim), 0.3 * torch.arange(2000)
    for head in range(HEADS):
        for column, turn in ((5 * head, angles.cos()), (5 * head + dim // 2, angles.sin())):
            keys[:, head, :, column] += 60 * turn
            query[:, GROUP * head : GROUP * (head + 1), :, column] *= 0.02
    best = _select(FlatIndex(), keys, query, 100)

    def found(index: ParisIndex) -> float:
        return overlap(_select(index, keys, query, 100), best)

    shown = ParisIndex(OURS)
    shown.on_prompt(query.repeat(1, 1, 4, 1), None)
    without = found(ParisIndex(OURS.replace(center=False)))
    # Measured: 0.97, 0.93 and 0.67 at most; keys alone tell nearly as much.
    assert found(shown) > 0.96 and found(ParisIndex(OURS)) > 0.9 and without < 0.75


@pytest.mark.parametrize(("dim", "least", "most"), [(64, 0.95, 0.9), (320, 0.98, 0.97)])
def test_a_bias_that_drifts_with_positions_counts(
    dim: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 320 numbers points go by rank."""
    keys, query = _peaked(3000, dim, batch=1)
    for pair in range(6):
        angles, size = torch.arange(3000) / 2**pair / 1000, 400 * math.cos(pair)
        for column, turn in ((pair, angles.cos()), (pair + dim // 2, angles.sin())):
            keys[..., column] += size * turn
            query[..., column] *= 0.3
    best = _select(FlatIndex(), keys, query, 100)

    def found() -> float:
        return overlap(_select(ParisIndex(OURS), keys, query, 100), best)

    # Measured: 0.98 and 0.99; with one mean key 0.86 and 0.96.
    assert found() > least
    monkeypatch.setattr("hf_kvret.methods.paris.index._BLOCK", 1 << 12)
    assert found() < most


def test_heads_of_all_lengths_find_what_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few candidates for four heads of a group, whose logits deviate by a half to four."""
    monkeypatch.setattr(ParisIndex, "_candidates", lambda self, n, budget: 2 * budget)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, HEADS, 3000, 64, generator=generator)
    query = torch.randn(1, 4 * HEADS, 1, 64, generator=generator)
    query *= (
        torch.tensor([0.5, 1, 2, 4]).repeat(HEADS).view(-1, 1, 1) / query.norm(dim=-1)[..., None]
    )
    cold = cold_tokens(torch.ones(1, 3000, dtype=torch.bool), 1.0, 100)
    best, index = FlatIndex(), ParisIndex(OURS)
    for each in (best, index):
        each.add(TokenBlock(keys, keys, 0))
    wanted = best.search(query, cold)
    found = overlap(index.search(query, cold), wanted)
    index._samples = None
    without = overlap(index.search(query, cold), wanted)
    # Measured: 0.45 and 0.38. Noise of the estimates is what is lost.
    assert found > without + 0.03


def test_there_are_as_many_tiers_as_a_byte_holds_the_points_of() -> None:
    most = [(6, 42), (3, 84), (2, 127), (1, 254)]
    assert [len(OURS.tiers_for(subspaces)) for _, subspaces in most] == [count for count, _ in most]
    assert [len(OURS.tiers_for(subspaces + 1)) for _, subspaces in most[:-1]] == [3, 2, 1]
    with pytest.raises(ValueError, match="exist up to 1024"):
        OURS.check_head_dim(1025)
    OURS.check_head_dim(1024)


def test_a_crop_takes_exactly_the_dropped_tokens_out_of_the_counts() -> None:
    """The counts are those of an index that was built from the tokens that are left."""
    keys, query = _peaked(200, 32)
    valid = torch.ones(2, 200, dtype=torch.bool)
    valid[1, :150] = False
    first, cold, whole = 50, cold_tokens(valid, 0.2, 20), _counted(keys, valid)
    for left in (199, 160, 100, first, 0):
        index = _counted(keys, valid, first)
        index.crop(left)
        if left:
            fresh = _counted(keys[:, :, :left], valid[:, :left], first)
            assert torch.equal(index._counts, fresh._counts)
        else:
            assert index._counts is None
        index.add(TokenBlock(keys[:, :, left:], keys[:, :, left:], left, valid[:, left:]))
        assert torch.equal(index._counts, whole._counts)
        assert torch.equal(index.search(query, cold), whole.search(query, cold))


def test_candidates_are_a_share_that_covers_the_budget() -> None:
    index = ParisIndex(OURS)
    assert index.cost(2_000, 100).candidates == 1_000
    assert index.cost(20_000, 100).candidates == 5_000
    assert index.cost(100_000, 100).candidates == 8_000
    assert index.cost(100_000, 5_000).candidates == 25_000, "five for each selected token"
    assert index.cost(100_000, 50_000).candidates == 100_000
    assert index.cost(50, 50).candidates == 50


def test_the_library_searches_for_the_budget_of_the_step() -> None:
    (keys, query), valid = _peaked(200, 32), torch.ones(2, 200, dtype=torch.bool)
    index = _counted(keys, valid)
    searches = [index.host_search(query, cold_tokens(valid, 0.2, count)) for count in (20, 40)]
    assert [search.candidates for search in searches] == [100, 200]


def test_a_soft_cap_bends_the_whole_score_not_the_centered_one() -> None:
    """All keys share a large part; where the cap saturates depends on it."""
    keys, query = _peaked(256, 64, common=2.0)
    best = _select(FlatIndex(), keys, query, 24, 8.0)
    capped = overlap(_select(ParisIndex(OURS), keys, query, 24, 8.0), best)
    uncapped = overlap(_select(ParisIndex(OURS), keys, query, 24), best)
    assert capped > 0.85 and capped > uncapped


def test_codes_load_with_their_padding_and_records_of_another_width_do_not() -> None:
    (keys, _), valid = _peaked(40, 32), torch.arange(80).view(2, 40) >= 7
    loaded, state = ParisIndex(OURS), _counted(keys, valid).state_dict()
    # A cache of 0.1.0 had no blocks.
    loaded.load_state_dict({name: x for name, x in state.items() if name != "block_len"})
    assert torch.equal(loaded._codes().is_valid(), valid) and not valid.all()
    schema = Schema(torch.float32, {"B": 2, "H": HEADS, "N": 40, "D": 32})
    loaded.check_saved(state, schema)
    with pytest.raises(ValueError, match="record is"):
        loaded.check_saved(state | {"record": state["record"][..., 1:]}, schema)
    state |= {"means": torch.zeros(2, HEADS, 1, 32), "block_len": torch.tensor(256)}
    with pytest.raises(ValueError, match="means come with factors"):
        loaded.check_saved(state, schema)
    state["factors"] = torch.ones(2, HEADS, 32)
    for wrong in (torch.zeros(2, HEADS, 2, 32), torch.zeros(2, 1, 1, 32)):
        with pytest.raises(ValueError, match="means is"):
            loaded.check_saved(state | {"means": wrong}, schema)
    del state["means"]
    with pytest.raises(ValueError, match="means is"):
        loaded.check_saved(state | {"mean": torch.zeros(2, 1, 32)}, schema)
    for wrong in (torch.zeros(()), torch.zeros(32)):
        with pytest.raises(ValueError, match=r"(means|factors) is"):
            loaded.check_saved(state | {"mean": wrong}, schema)
    state["means"] = torch.zeros(2, HEADS, 1, 32)
    for length in (0, 128, 600):
        with pytest.raises(ValueError, match=f"block_len is {length}"):
            loaded.check_saved(state | {"block_len": torch.tensor(length)}, schema)
