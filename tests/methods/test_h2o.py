"""H2OIndex in the regions of a layer, against a simulation in fp64, and H2OCache on models."""

from __future__ import annotations

import copy
import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from hf_kvret.contracts.index import Scoring
from hf_kvret.contracts.store import FirstRows
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.methods.h2o import H2OConfig, H2OIndex, index as h2o
from hf_kvret.stores.memory import DeviceMemory

from .codebooks import normal
from .index_runs import WatchedStore, slot_sets

HEADS, GROUP, DIM = 2, 3, 16
SCALE = 3 / math.sqrt(DIM)
OPTIONS: dict[str, Any] = {
    "top_k": 0.25, "sink": 2, "recent": 6, "flush": 4, "max_draft": 5, "dense_below": 0,
}  # fmt: skip
Tokens = tuple[torch.Tensor, torch.Tensor]


def _tokens(seed: int, count: int = 1) -> Tokens:
    """Queries and keys, some of which all queries like."""
    queries = normal(seed, 2, HEADS * GROUP, count, DIM) + 0.3
    return queries, normal(seed + 10_000, 2, HEADS, count, DIM)


def _ragged(count: int) -> torch.Tensor:
    valid = torch.ones(2, count, dtype=torch.bool)
    valid[0, : count // 3] = False
    valid[1, count // 2 : count // 2 + 3] = False
    return valid


def _store(first: FirstRows) -> WatchedStore:
    return WatchedStore(DeviceMemory(first.device))


class Run:
    """An index in the regions of a layer, asked as the layer asks."""

    def __init__(self, softcap: float | None = None, **changes: Any) -> None:
        self.options = H2OConfig.from_options(**{**OPTIONS, **changes})
        keys = torch.empty(2, HEADS, 0, DIM)
        self.softcap = softcap
        self.valid = torch.empty(2, 0, dtype=torch.bool)
        self.kv = LayerKV(self.options, H2OIndex(self.options), _store, keys, keys)

    @property
    def index(self) -> Any:
        return self.kv.index

    @property
    def scores(self) -> torch.Tensor:
        return self.index.state_dict()["scores"].clone()

    @property
    def cold(self) -> Any:
        return self.kv.cold(Scoring(self.valid, SCALE, self.softcap))

    def prompt(self, tokens: Tokens, valid: torch.Tensor | None = None) -> None:
        """A pass that is attended exactly."""
        self.watch(tokens, valid)
        self.kv.take_prompt(tokens[1], tokens[1], self.valid)

    def watch(self, tokens: Tokens, valid: torch.Tensor | None = None) -> None:
        queries, keys = tokens
        new = torch.ones(len(keys), keys.shape[2], dtype=torch.bool) if valid is None else valid
        self.valid = torch.cat([self.valid, new], dim=1)
        self.kv.on_forward(queries, keys, self.valid)

    def build(self) -> None:
        if (cold := self.cold) is not None:
            self.kv.build_index(cold)

    def step(self, tokens: Tokens) -> torch.Tensor:
        """The slots that a pass selects."""
        queries, keys = tokens
        self.build()
        self.watch(tokens)
        self.kv.take_step(keys, keys, self.valid)
        cold = self.cold
        index = self.kv.ready_index(cold)
        ids = index.search(queries, cold)
        index.after_search(ids)
        return ids

    def steps(self, seeds: range) -> list[torch.Tensor]:
        """The selections of one query a seed."""
        return [self.step(_tokens(seed)) for seed in seeds]

    def fork(self) -> Run:
        self.build()
        twin = copy.copy(self)
        twin.kv = self.kv.fork()
        return twin

    def crop(self, count: int) -> None:
        """Drop the newest ``count`` tokens."""
        self.kv.crop(self.kv.length - count)
        self.valid = self.valid[:, :-count]


class Simulation(Run):
    """Beside an index, H2O as its paper tells it: one query after the other, in fp64."""

    def __init__(self, softcap: float | None = None, **changes: Any) -> None:
        super().__init__(softcap, **changes)
        self.queries = torch.zeros(2, HEADS * GROUP, 0, DIM, dtype=torch.float64)
        self.keys = torch.zeros(2, HEADS, 0, DIM, dtype=torch.float64)
        self.gathered = torch.zeros(2, HEADS, 0, dtype=torch.float64)
        self.evicted = torch.zeros(2, HEADS, 0, dtype=torch.bool)
        self.counted = 0

    def watch(self, tokens: Tokens, valid: torch.Tensor | None = None) -> None:
        super().watch(tokens, valid)
        queries, keys = (x.nan_to_num().double() for x in tokens)
        more = torch.zeros(*keys.shape[:3], dtype=torch.float64)
        self.queries = torch.cat([self.queries, queries], dim=2)
        self.keys = torch.cat([self.keys, keys], dim=2)
        self.gathered = torch.cat([self.gathered, more], dim=2)
        self.evicted = torch.cat([self.evicted, more.bool()], dim=2)

    def crop(self, count: int) -> None:
        super().crop(count)
        for name in ("queries", "keys", "gathered", "evicted"):
            setattr(self, name, getattr(self, name)[:, :, :-count])
        self.counted = min(self.counted, self.kv.length)

    def count(self, end: int) -> None:
        """Add what the queries up to slot ``end`` give to the tokens that are left."""
        for slot, b, h in product(range(self.counted, end), range(2), range(HEADS)):
            if not self.valid[b, slot]:
                continue
            left = self.valid[b, : slot + 1] & ~self.evicted[b, h, : slot + 1]
            heads = self.queries[b, h * GROUP : (h + 1) * GROUP, slot]
            logits = heads @ self.keys[b, h, : slot + 1].T * SCALE
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            logits = logits.masked_fill(~left, float("-inf"))
            self.gathered[b, h, : slot + 1] += logits.softmax(-1).sum(0)
        self.counted = max(end, self.counted)

    def choose(self) -> list[set[int]]:
        """Evict what the budget has no room for; the kept tokens of each row and head."""
        cold_len, kept = self.kv.cold_len, []
        budget = self.options.budget(cold_len)
        for b in range(2):
            slots = self.valid[b, :cold_len].nonzero().flatten().tolist()[self.options.sink :]
            for h in range(HEADS):
                left = [slot for slot in slots if not self.evicted[b, h, slot]]
                left.sort(key=lambda slot: -float(self.gathered[b, h, slot]))
                self.evicted[b, h, left[budget:]] = True
                kept.append(set(left[:budget]))
        return kept

    def check_step(self, tokens: Tokens) -> None:
        """A pass of the index selects what is kept here, and knows what is gathered here."""
        ids, drafts = self.step(tokens), tokens[0].shape[2]
        assert ids.dtype == torch.int32
        assert ids.shape == (2, HEADS, drafts, self.options.budget(self.kv.cold_len))
        self.count(self.kv.length - drafts)
        kept = self.choose()
        for query in range(drafts):
            assert slot_sets(ids[:, :, query]) == kept
        expected = self.gathered.masked_fill(self.evicted, float("-inf"))
        # Sums of at most some hundred weights, each good to fp32.
        torch.testing.assert_close(self.scores.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("cuts", "softcap"), [((), None), ((17,), 2.0), ((20, 40), None)])
def test_tokens_kept_and_evicted_are_those_of_the_simulation(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], softcap: float | None
) -> None:
    """A padded prompt, drafts of which some are rejected, flushes, and a long second prompt."""
    # Queries then come in several blocks.
    monkeypatch.setattr(h2o, "_LOGITS", 2 * HEADS * GROUP * 60 * 7)
    run = Simulation(softcap)
    (queries, keys), valid = _tokens(0, 60), _ragged(60)
    # Contents of padding never matter.
    for x in (queries, keys):
        x[:1].masked_fill_(~valid[:1, None, :, None], float("nan"))
    for start, end in pairwise((0, *cuts, 60)):
        run.prompt((queries[:, :, start:end], keys[:, :, start:end]), valid[:, start:end])
    for number in range(30):
        if number == 17:
            run.prompt(_tokens(99, 14))
        drafts, rejected = (1, 0) if number % 3 else (5, 4 - number % 5)
        run.check_step(_tokens(100 + number, drafts))
        if rejected:
            run.crop(rejected)
    assert int(run.evicted.sum()) == run.index.stats()["evicted"] > 150


def test_queries_of_a_cropped_question_and_of_two_short_ones_count_once() -> None:
    """Some of the keys that wait to be counted are cold by the next selection."""
    cropped = Simulation()
    cropped.prompt(_tokens(0, 60))
    for number in range(2):
        cropped.check_step(_tokens(10 + number))
    cold_len = cropped.kv.cold_len
    cropped.prompt(_tokens(20, 14))
    assert cropped.kv.cold_len > cold_len
    cropped.crop(5)
    cropped.check_step(_tokens(30))
    # Other tokens take the places of some that were selected.
    cropped.crop(30)
    cropped.prompt(_tokens(40, 30))
    cropped.check_step(_tokens(50))
    short = Simulation(flush=8)
    for number, count in enumerate((60, 1, 1, 1, 1, 1, 1, 1, 1, 6, 7)):
        pass_ = short.check_step if count == 1 else short.prompt
        pass_(_tokens(10 + number, count))
    # The last question is in the window, where the first one was not long enough to stay.
    assert short.index.state_dict()["keys.rows"].shape[2] > short.kv.length - 68 == 13
    short.check_step(_tokens(30))


def test_only_the_observed_queries_of_a_prompt_count() -> None:
    run = Simulation(observed=8)
    run.prompt(_tokens(0, 60))
    assert run.index.state_dict()["queries.rows"].shape[2] == 8 + OPTIONS["max_draft"]
    run.counted = 52
    run.check_step(_tokens(1))


def _read(length: int = 60, **changes: Any) -> Run:
    """A run that has read a prompt."""
    run = Run(**changes)
    run.prompt(_tokens(0, length))
    return run


@pytest.mark.parametrize("steps", [0, 9])
def test_forks_loaded_and_reordered_indexes_go_on_like_one_that_was_left_alone(steps: int) -> None:
    one, alone = _read(), _read()
    for run in (one, alone):
        run.steps(range(10, 10 + steps))
    twin, other, loaded, moved = (one.fork() for _ in range(4))
    other.steps(range(300, 320))
    loaded.kv.index = H2OIndex(one.options)
    loaded.index.load_state_dict({name: x.clone() for name, x in one.index.state_dict().items()})
    moved.kv.reorder(torch.tensor([1, 0]))
    expected = alone.steps(range(40, 60))
    for run in (one, twin, loaded):
        assert all(map(torch.equal, run.steps(range(40, 60)), expected))
        assert torch.equal(run.scores, alone.scores)
    for seed, ids in zip(range(40, 60), expected, strict=True):
        queries, keys = _tokens(seed)
        assert torch.equal(moved.step((queries[[1, 0]], keys[[1, 0]])), ids[[1, 0]])


def test_a_crop_to_nothing_starts_a_new_text() -> None:
    run, fresh = _read(), Run()
    run.steps(range(10, 20))
    run.crop(run.kv.length)
    for each in (run, fresh):
        each.prompt(_tokens(77, 60))
    assert torch.equal(run.step(_tokens(50)), fresh.step(_tokens(50)))
    assert torch.equal(run.scores, fresh.scores)


def test_the_first_pass_is_a_prompt_however_short() -> None:
    run = Run()
    run.prompt(_tokens(0, 4))
    assert run.index._tentative == 0


def test_numbers_for_reports() -> None:
    empty = H2OIndex(H2OConfig())
    assert empty.state_dict() == {} and empty.nbytes() == empty.cost(100, 10).nbytes == 0
    run = _read()
    assert run.step(_tokens(1)).shape == (2, HEADS, 1, 14) and run.kv.cold_len == 54
    assert run.index.stats() == {"evicted": 2 * HEADS * (54 - 2 - 14)}
    assert run.index.cost(54, 14).candidates == 14 and run.index.cost(54, 14).keys_read == 16
    assert run.index.cost(100, 10).nbytes == 2 * HEADS * (14 * 4 + 7 * DIM * 4)
