"""H2OIndex against a simulation in fp64, token by token, on the regions of a cache."""

from __future__ import annotations

import pytest
import torch

from hf_kvret.methods.h2o import index as h2o

from .h2o_runs import DIM, GROUP, HEADS, OPTIONS, SCALE, Run, Tokens, random_tokens
from .watched_stores import slot_sets, slot_sets_of


class Simulation:
    """H2O as its paper tells it, one query after the other, over all tokens, in fp64."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.queries = self.keys = torch.empty(0)
        self.gathered = torch.zeros(len(run.valid), HEADS, 0, dtype=torch.float64)
        self.evicted = torch.zeros(len(run.valid), HEADS, 0, dtype=torch.bool)
        self.counted = 0

    def take(self, tokens: Tokens) -> None:
        queries, keys = (x.double() for x in tokens)
        have = self.gathered.shape[2]
        self.queries = torch.cat([self.queries, queries], dim=2) if have else queries
        self.keys = torch.cat([self.keys, keys], dim=2) if have else keys
        more = torch.zeros(*keys.shape[:3], dtype=torch.float64)
        self.gathered = torch.cat([self.gathered, more], dim=2)
        self.evicted = torch.cat([self.evicted, more.bool()], dim=2)

    def count(self, end: int) -> None:
        """Add what the queries up to slot ``end`` give to the tokens that are left."""
        for slot in range(self.counted, end):
            for b in range(len(self.keys)):
                if not self.run.valid[b, slot]:
                    continue
                for h in range(HEADS):
                    left = self.run.valid[b, : slot + 1] & ~self.evicted[b, h, : slot + 1]
                    heads = self.queries[b, h * GROUP : (h + 1) * GROUP, slot]
                    logits = heads @ self.keys[b, h, : slot + 1].T * SCALE
                    if self.run.softcap is not None:
                        logits = self.run.softcap * torch.tanh(logits / self.run.softcap)
                    logits = logits.masked_fill(~left, float("-inf"))
                    self.gathered[b, h, : slot + 1] += logits.softmax(-1).sum(0)
        self.counted = max(end, self.counted)

    def choose(self) -> list[set[int]]:
        """Evict what the budget has no room for; the kept tokens of each row and head."""
        cold_len, kept = self.run.cold_len, []
        budget = self.run.options.budget(cold_len)
        for b in range(len(self.keys)):
            valid = self.run.valid[b, :cold_len]
            slots = valid.nonzero().flatten().tolist()[self.run.options.sink :]
            for h in range(HEADS):
                left = [slot for slot in slots if not self.evicted[b, h, slot]]
                left.sort(key=lambda slot: -float(self.gathered[b, h, slot]))
                self.evicted[b, h, left[budget:]] = True
                kept.append(set(left[:budget]))
        return kept

    def check(self, ids: torch.Tensor) -> None:
        """The index selects what is kept here, and knows what is gathered here."""
        kept = self.choose()
        for query in range(ids.shape[2]):
            assert slot_sets(ids[:, :, query]) == kept
        assert torch.equal(self.run.evicted, self.evicted)
        expected = self.gathered.masked_fill(self.evicted, float("-inf"))
        # Sums of at most some hundred weights, each good to fp32.
        torch.testing.assert_close(self.run.scores.double(), expected, rtol=1e-4, atol=1e-5)


def _ragged(count: int) -> torch.Tensor:
    valid = torch.ones(2, count, dtype=torch.bool)
    valid[0, : count // 3] = False
    valid[1, count // 2 : count // 2 + 3] = False
    return valid


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("cuts", [(), (17,), (20, 40)])
def test_it_keeps_and_evicts_what_the_simulation_does(
    monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], softcap: float | None
) -> None:
    """A padded prompt, drafts of which some are rejected, flushes, and a long second prompt."""
    # So that there are several blocks of queries.
    monkeypatch.setattr(h2o, "_LOGITS", 2 * HEADS * GROUP * 60 * 7)
    run = Run(softcap)
    simulation = Simulation(run)
    (queries, keys), valid = random_tokens(0, 60), _ragged(60)
    # What stands in padding never matters.
    hidden = ~valid[:1, None, :, None]
    for x in (queries, keys):
        x[:1].masked_fill_(hidden, float("nan"))
    for start, end in zip((0, *cuts), (*cuts, 60), strict=True):
        run.prompt((queries[:, :, start:end], keys[:, :, start:end]), valid[:, start:end])
    simulation.take((queries.nan_to_num(), keys.nan_to_num()))
    for number in range(30):
        length = run.length
        if number == 17:
            long = random_tokens(99, 14)
            run.prompt(long)
            simulation.take(long)
            length += 14
        drafts, accepted = (1, 1) if number % 3 else (5, 1 + number % 5)
        tokens = random_tokens(100 + number, drafts)
        ids = run.step(tokens)
        assert ids.dtype == torch.int32
        assert ids.shape == (2, HEADS, drafts, run.options.budget(run.cold_len))
        simulation.count(length)
        simulation.take(tokens)
        simulation.check(ids)
        rejected = drafts - accepted
        if rejected:
            run.crop(rejected)
            for name in ("queries", "keys", "gathered", "evicted"):
                setattr(simulation, name, getattr(simulation, name)[:, :, :-rejected])
    assert int(run.evicted.sum()) == run.index.stats()["evicted"] > 150


def test_no_more_scores_than_allowed_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    plain = h2o.soft_cap_

    def measured(logits: torch.Tensor, softcap: float | None) -> None:
        nonlocal largest
        plain(logits, softcap)
        largest = max(largest, logits.numel())

    monkeypatch.setattr(h2o, "soft_cap_", measured)
    monkeypatch.setattr(h2o, "_LOGITS", 2 * HEADS * GROUP * 200 * 7)
    run = Run()
    run.prompt(random_tokens(0, 200))
    run.build()
    assert 0 < largest <= 2 * HEADS * GROUP * 200 * 7


@pytest.mark.parametrize("top_k", [1.0, 10**6])
def test_a_covering_budget_keeps_every_valid_token(top_k: int | float) -> None:
    run, valid = Run(top_k=top_k), _ragged(50)
    run.prompt(random_tokens(0, 50), valid)
    for number in range(12):
        ids = run.step(random_tokens(10 + number, 1))
        cold_len = run.cold_len
        slots = [run.valid[b, :cold_len].nonzero().flatten().tolist()[2:] for b in range(2)]
        assert slot_sets(ids[:, :, 0]) == [set(slots[b]) for b in range(2) for _ in range(HEADS)]
    assert run.index.stats() == {"evicted": 0}


def test_heads_of_a_group_are_summed() -> None:
    """Three heads like token 1 somewhat, one likes token 2 more: the sum is what counts."""
    run = Run(top_k=1, sink=1, recent=1, batch=1)
    keys = torch.zeros(1, HEADS, 12, DIM)
    keys[:, :, 1, 0], keys[:, :, 2, 1] = 1.0, 1.0
    queries = torch.zeros(1, HEADS * GROUP, 12, DIM)
    queries[..., 0] = 4.0
    queries[:, ::GROUP, :, 0], queries[:, ::GROUP, :, 1] = 0.0, 6.0
    run.prompt((queries, keys))
    ids = run.step(random_tokens(1, 1, batch=1))
    assert ids.flatten().tolist() == [1] * HEADS


def test_an_evicted_token_never_comes_back_however_well_it_would_fit() -> None:
    run = Run()
    queries, keys = random_tokens(0, 60)
    run.prompt((queries, keys))
    run.step(random_tokens(1, 1))
    evicted = slot_sets_of(run.evicted)
    assert all(len(row) >= 35 for row in evicted)
    slot = min(evicted[0])
    # From now on every query asks for one of the evicted tokens.
    query = 5 * keys[:, :, slot : slot + 1].repeat_interleave(GROUP, dim=1)
    for number in range(30):
        ids = run.step((query, random_tokens(10 + number, 1)[1]))
        assert not any(a & b for a, b in zip(slot_sets(ids[:, :, 0]), evicted, strict=True))
    assert run.cold_len == 60 - 6 + 28


def test_a_larger_budget_does_not_bring_evicted_tokens_back() -> None:
    run = Run()
    run.prompt(random_tokens(0, 60))
    before = run.step(random_tokens(1, 1))
    run.options = run.options.replace(top_k=1.0)
    run.kv.set_options(run.options)
    after = run.step(random_tokens(2, 1))
    assert after.shape[-1] == 54
    assert slot_sets(after[:, :, 0]) == slot_sets(before[:, :, 0])


def test_only_the_observed_queries_of_a_prompt_count() -> None:
    """The same as if the earlier queries had been padding that is attended."""
    tokens = random_tokens(0, 60)
    run = Run(observed=8)
    run.prompt(tokens)
    assert run.index.state_dict()["queries.rows"].shape[2] == 8 + OPTIONS["max_draft"]
    run.build()
    queries, keys = tokens[0][:, :, 52:].double(), tokens[1].double()
    logits = queries @ keys.repeat_interleave(GROUP, dim=1).mT * SCALE
    later = torch.arange(60) > torch.arange(52, 60)[:, None]
    weights = logits.masked_fill(later, float("-inf")).softmax(-1)
    expected = weights.unflatten(1, (HEADS, GROUP)).sum((2, 3))
    scores = run.scores.double()
    left = ~run.evicted
    torch.testing.assert_close(scores[left], expected[left], rtol=1e-4, atol=1e-5)
    order = expected[:, :, 2:54].topk(run.options.budget(54)).indices + 2
    ids = run.step(random_tokens(1, 1))
    assert slot_sets(ids[:, :, 0]) == slot_sets(order)


def test_the_rest_of_a_cropped_question_counts_as_if_it_was_never_longer() -> None:
    """So few are left that the kept tokens alone would do, but for those that are cold since."""
    run = Run()
    simulation = Simulation(run)
    text = random_tokens(0, 60)
    run.prompt(text)
    simulation.take(text)
    for number in range(2):
        tokens = random_tokens(10 + number, 1)
        ids = run.step(tokens)
        simulation.count(run.length - 1)
        simulation.take(tokens)
        simulation.check(ids)
    (queries, keys), cold_len = random_tokens(20, 14), run.cold_len
    run.prompt((queries, keys))
    assert run.cold_len > cold_len
    run.crop(5)
    simulation.take((queries[:, :, :9], keys[:, :, :9]))
    tokens = random_tokens(30, 1)
    ids = run.step(tokens)
    simulation.count(run.length - 1)
    simulation.take(tokens)
    simulation.check(ids)


def test_keys_that_wait_and_are_cold_already_count_once() -> None:
    """The first of two questions flushes and is short, and both together are long."""
    run = Run(flush=8)
    simulation = Simulation(run)
    for number, count in enumerate((60, 1, 1, 1, 1, 1, 1, 1, 1, 6, 7)):
        tokens = random_tokens(10 + number, count)
        simulation.take(tokens)
        if count > 1:
            run.prompt(tokens)
        else:
            ids = run.step(tokens)
            simulation.count(run.length - 1)
            simulation.check(ids)
    # The last question is in the window, where the first one was not long enough to stay.
    assert run.cold_len == 68 and run.length == 81
    assert run.index.state_dict()["keys.rows"].shape[2] > 13
    tokens = random_tokens(30, 1)
    ids = run.step(tokens)
    simulation.count(run.length - 1)
    simulation.take(tokens)
    simulation.check(ids)
