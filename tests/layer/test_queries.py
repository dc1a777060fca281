"""Query heads of a KV head that select in groups."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hf_kvret import CTkvrCache, FlatKVCache, H2OCache, LRQKCache, ParisKVCache, RetrievalCache
from hf_kvret.contracts.index import Scoring
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall, HeadGroups
from hf_kvret.layer.step import attend_step
from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret.observe.counters import LayerCounters
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.stores import STORES
from hf_kvret.testing import COVERING_OPTIONS, MODES, Case, run_case
from hf_kvret_kernels._dispatch import prefer

SCALE = 0.3
# Sums of some hundred fp32 products in another order.
ERROR = 2e-5
SINK, RECENT, COLD, BUDGET = 2, 6, 150, 20
BATCH, HEADS, OWN, DIM = 2, 2, 5, 16


def test_one_group_is_no_groups() -> None:
    assert HeadGroups.of(None, 2, 10) is None
    assert HeadGroups.of(5, 2, 10) is None
    assert HeadGroups.of(16, 1, 10) is None
    assert HeadGroups.of(4, 2, 10) == HeadGroups(2, 5, 4)


@pytest.mark.parametrize(("own", "size"), [(4, 1), (4, 2), (20, 16), (24, 16), (40, 16), (5, 4)])
@pytest.mark.parametrize("queries", [1, 3])
def test_unfolding_undoes_folding(own: int, size: int, queries: int) -> None:
    groups = HeadGroups(3, own, size)
    query = torch.randn(2, 3 * own, queries, 7)
    folded = groups.fold(query)
    assert folded.shape == (2, 3 * size, queries * groups.count, 7)
    assert torch.equal(groups.unfold(folded), query)
    assert torch.equal(groups.unfold(folded[..., 0]), query[..., 0])


def test_a_group_is_filled_up_with_its_own_heads_in_turn() -> None:
    heads = torch.arange(20.0).view(1, 20, 1, 1)
    folded = HeadGroups(1, 20, 8).fold(heads)[0, :, :, 0]
    assert folded[:, 0].tolist() == list(range(8))
    # The last group has four heads: each counts twice, so that none weighs more than another.
    assert folded[:, 2].tolist() == [16, 17, 18, 19] * 2


def test_queries_of_a_position_lie_beside_each_other() -> None:
    query = torch.arange(2.0).view(1, 1, 2, 1).expand(1, 4, 2, 1)
    assert HeadGroups(1, 4, 2).fold(query)[0, 0, :, 0].tolist() == [0, 0, 1, 1]


class Held:
    """LayerKV with random cold, recent and padded tokens, and all their rows in order."""

    def __init__(self, size: int, store: str, dtype: torch.dtype = torch.float32) -> None:
        config = RetrievalConfig(
            top_k=BUDGET, sink=SINK, recent=RECENT, flush=4, dense_below=0, select_heads=size
        )
        total = COLD + RECENT
        generator = torch.Generator().manual_seed(size)
        shape = (BATCH, HEADS, total, DIM)
        self.keys = torch.randn(shape, generator=generator).to(dtype)
        self.values = torch.randn(shape, generator=generator).to(dtype)
        self.valid = torch.ones(BATCH, total, dtype=torch.bool)
        self.valid[1, :9] = False
        device = torch.device("cpu")
        self.kv = LayerKV(
            config,
            FlatIndex(),
            lambda first: STORES[store](device, config),
            self.keys,
            self.values,
        )
        self.kv.take_prompt(self.keys, self.values, self.valid)
        assert self.kv.cold_len == COLD

    def attend(self, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        scoring = Scoring(self.valid, SCALE)
        call = AttentionCall(scoring, lambda: query, sinks)
        self.counters = LayerCounters()
        return attend_step(self.kv, query, call, [self.counters])

    def expected(self, query: torch.Tensor, sinks: torch.Tensor | None, size: int) -> torch.Tensor:
        """Head by head: the window and the tokens that matter most to any head of its group."""
        out = torch.zeros(*query.shape, dtype=torch.double)
        length = COLD + RECENT
        for b, head, q in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
            kv, place = divmod(head, OWN)
            first = place // size * size
            seen = length - (query.shape[2] - 1 - q)
            slots = torch.arange(length)
            near = (slots >= COLD) & (slots < seen)
            sink_slots = slots[self.valid[b]][:SINK]
            cold = self.valid[b] & (slots < COLD)
            cold[sink_slots] = False
            keys, values = self.keys[b, kv].double(), self.values[b, kv].double()
            members = range(kv * OWN + first, kv * OWN + min(first + size, OWN))
            shares = [
                (keys @ query[b, other, q].double() * SCALE)
                .masked_fill(~cold, -torch.inf)
                .softmax(0)
                for other in members
            ]
            chosen = torch.stack(shares).amax(0).masked_fill(~cold, -1).topk(BUDGET).indices
            used = torch.cat([sink_slots, chosen, slots[near]])
            logits = keys[used] @ query[b, head, q].double() * SCALE
            kept = values[used]
            if sinks is not None:
                logits = torch.cat([logits, sinks[head, None].double()])
                kept = torch.cat([kept, kept.new_zeros(1, DIM)])
            out[b, head, q] = logits.softmax(0) @ kept
        return out


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("queries", "store", "with_sinks", "backend"),
    [
        (1, "device", False, None),
        (3, "device", False, None),
        (1, "resident", False, None),
        (3, "cpu", True, None),
        (1, "device", False, "naive"),
        (3, "device", False, "naive"),
        (1, "device", True, "naive"),
    ],
)
def test_each_group_gets_what_matters_to_its_heads(
    size: int,
    queries: int,
    store: str,
    with_sinks: bool,
    backend: str | None,
) -> None:
    held = Held(size, store)
    query = torch.randn(BATCH, HEADS * OWN, queries, DIM) * 2
    sinks = torch.randn(HEADS * OWN) if with_sinks else None
    with nullcontext() if backend is None else prefer(backend):
        out = held.attend(query, sinks)
    expected = held.expected(query, sinks, size)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=ERROR)
    groups = -(-OWN // size)
    counts = held.counters
    assert (counts.steps, counts.queries) == (1, queries)
    assert counts.cold_rows == COLD * BATCH * HEADS * groups * queries
    assert int(held.kv.selected) == BATCH * HEADS * groups * queries * BUDGET


@pytest.mark.parametrize("mode", ["greedy_ragged", "prompt_lookup", "beams"])
@pytest.mark.parametrize("cache", [FlatKVCache, ParisKVCache, LRQKCache])
def test_a_covering_budget_is_full_attention(cache: type[RetrievalCache], mode: str) -> None:
    assert mode in MODES

    def make(built: Any) -> RetrievalCache:
        return cache(config=built.config, select_heads=1, **COVERING_OPTIONS)

    result = run_case(Case("llama", mode), make)
    assert result.status == "passed", result.detail


@pytest.mark.parametrize(
    ("cache", "options", "words"),
    [
        (CTkvrCache, {}, "past ones"),
        (H2OCache, {}, "one set of tokens"),
        (LRQKCache, {"factors": "als"}, "selects for itself"),
        (LRQKCache, {"shared": False}, "selects for itself"),
    ],
)
def test_methods_that_cannot_select_in_groups_say_so(
    cache: type[RetrievalCache], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"select_heads=2: .*{words}.*leave it out"):
        cache.Config.from_options(select_heads=2, **options)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.0, TypeError), (True, TypeError)])
def test_bad_numbers_of_heads_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="select_heads"):
        RetrievalConfig(select_heads=value)
