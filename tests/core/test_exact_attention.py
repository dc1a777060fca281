"""Exact attention over all tokens of a layer, against softmax in float64."""

from __future__ import annotations

import pytest
import torch

from hf_kvret import FlatConfig
from hf_kvret.core.call import AttentionCall
from hf_kvret.core.exact_attention import attend_cold, attend_dense, attend_exactly
from hf_kvret.core.regions import Regions
from hf_kvret.core.scoring import Scoring
from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory

BATCH, HEADS, GROUP, DIM, PAST, NEW = 2, 2, 2, 8, 60, 9
SCALE = 0.6
# fp32 sums of some tens of tokens; values are around 1.
ERROR = 2e-6


def draw(seed: int, heads: int, count: int) -> torch.Tensor:
    return torch.randn(BATCH, heads, count, DIM, generator=torch.Generator().manual_seed(seed))


def filled(valid: torch.Tensor | None) -> tuple[Regions, torch.Tensor, torch.Tensor]:
    """Regions with cold tokens, a sink among them, and recent ones; their keys and values."""
    keys, values = draw(1, HEADS, PAST), draw(2, HEADS, PAST)
    config = FlatConfig(top_k=4, sink=2, recent=8, flush=4, max_draft=4, dense_below=0)
    regions = Regions(
        config, FlatIndex(), lambda device, size: PagedStore(DeviceMemory(device)), keys, values
    )
    regions.take_prompt(keys, values, None if valid is None else valid[:, :PAST])
    assert regions.cold_len == PAST - 8
    return regions, keys, values


def expected(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the newest tokens, causal among them, in float64."""
    keys, values = (x.double().repeat_interleave(GROUP, dim=1) for x in (keys, values))
    scores = query.double() @ keys.mT * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    length, count = keys.shape[2], query.shape[2]
    hidden = torch.arange(length) > torch.arange(length - count, length)[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    if scoring.valid is not None:
        scores = scores.masked_fill(~scoring.valid[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(BATCH, -1, count, 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1)[..., :length] @ values


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_new_tokens_attend_to_all_before_them_and_to_each_other(
    softcap: float | None, sinks: torch.Tensor | None, padded: bool
) -> None:
    valid = torch.ones(BATCH, PAST + NEW, dtype=torch.bool)
    valid[1, :7] = False
    scoring = Scoring(valid if padded else None, SCALE, softcap)
    regions, keys, values = filled(scoring.valid)
    new_keys, new_values, query = draw(3, HEADS, NEW), draw(4, HEADS, NEW), draw(5, 4, NEW)
    call = AttentionCall(scoring, lambda: query, sinks)
    # As a layer does, which then attends to what was there before.
    regions.take_prompt(new_keys, new_values, scoring.valid)
    out = attend_exactly(regions, query, new_keys, new_values, PAST, call)
    wanted = expected(
        query,
        torch.cat([keys, new_keys], dim=2),
        torch.cat([values, new_values], dim=2),
        scoring,
        sinks,
    )
    assert out.dtype == torch.float32 and out.shape == wanted.shape
    assert (out - wanted).abs().max() < ERROR


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_cold_tokens_in_pieces_are_one_softmax(softcap: float | None) -> None:
    regions, keys, values = filled(None)
    cold = regions.cold(Scoring(None, SCALE, softcap))
    assert cold is not None and not cold.valid.all(), "sinks are in the window"
    query = draw(5, 4, 1)
    parts = [attend_cold(query, cold, length) for length in (1000, 64)]
    open_keys, open_values = (x[:, :, : len(cold)] for x in (keys, values))
    wanted = expected(query, open_keys, open_values, cold.scoring.of(None))
    # The only query comes after all of them; sinks are hidden by their validity.
    scores = expected(query, open_keys, open_values, cold.scoring)
    assert not torch.allclose(scores, wanted)
    for out, _ in parts:
        assert (out - scores).abs().max() < ERROR
    _, lse = attend_dense(query, open_keys, open_values, cold.scoring)
    assert (lse - parts[0][1]).abs().max() < ERROR
