"""PaperLRQKIndex against a literal algorithm 2, and the faults of the published code."""

from typing import Any

import pytest
import torch

from hf_kvret.methods.lrqk import LRQKConfig, PaperLRQKIndex

from .codebooks import DIM, GROUP, HEADS, normal
from .index_runs import IndexRun, draw

BATCH, RANK, PROMPT, RECENT, BUDGET = 2, 6, 60, 4, 8
BF16 = 2.0**-8


def _run(sequences: tuple[int, ...] = (0, 1), **changes: Any) -> IndexRun:
    sizes = {"rank": RANK, "fit_recent": 5, "max_draft": 4, "top_k": BUDGET, **changes}
    options = LRQKConfig.preset("paper", **sizes)
    return IndexRun(lambda: PaperLRQKIndex(options), sequences, BUDGET)


def _prompted(
    valid: torch.Tensor | None = None, cuts: tuple[int, ...] = (), **options: Any
) -> IndexRun:
    """After a prompt, all but ``RECENT`` tokens of it cold."""
    return _run(**options).prompt(draw(0, PROMPT), valid, cuts, RECENT)


def _drop(run: IndexRun, count: int) -> None:
    """Forget the newest tokens, which are in the window."""
    run.keys, run.valid = run.keys[:, :, :-count], run.valid[:, :-count]


def _pairs(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of two heads for each KV head, and keys, whose systems are well conditioned."""
    slope = torch.logspace(0.3, -0.6, DIM)
    queries = normal(seed, BATCH, 2 * HEADS, count, DIM) * slope
    return queries, normal(seed + 1, BATCH, HEADS, count, DIM) * slope


class Literal:
    """Algorithm 2 for one query head of one row, as it is written, in fp64."""

    def __init__(self, run: IndexRun, row: int, head: int) -> None:
        """Begin with what the index made of the prompt."""
        index, options = run.index, run.index.options
        bases, recent = index._bases, index._recent
        assert bases is not None and recent.proxies.is_allocated
        self.row, self.head, self.run, self.options = row, head, run, options
        self.b_q, self.b_k = bases.query[row, head].double(), bases.key[row, head].double()
        self.a_k: dict[int, torch.Tensor] = {}
        for slot, proxy in enumerate(index._proxies.rows[row, head].double()):
            self.a_k[slot] = proxy
        first = recent.end - len(recent.proxies)
        for slot, proxy in enumerate(recent.proxies.rows[row, head].double(), first):
            if slot >= len(run.store):
                self.a_k[slot] = proxy
        self.omega: list[int] = []

    def key(self, slot: int) -> torch.Tensor:
        return self.run.keys[self.row, self.head // 2, slot].double()

    def fit(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lines 1 to 7: eq. 9, then eq. 10 with the step size of eq. 11 and 12."""
        d1 = d2 = self.options.penalty
        b_q, b_k, inv = self.b_q, self.b_k, torch.linalg.inv
        k_hat = (k @ b_k.T) @ inv(b_k @ b_k.T)
        q_hat = torch.zeros_like(k_hat)
        for _ in range(self.options.iterations):
            left = q @ b_q.T + d1 * (q @ k) * k_hat
            right = b_q @ b_q.T + d1 * k_hat.outer(k_hat)
            for slot in self.omega:
                left = left + d2 * (q @ self.key(slot)) * self.a_k[slot]
                right = right + d2 * self.a_k[slot].outer(self.a_k[slot])
            q_hat = left @ inv(right)
            k_hat = (k @ b_k.T + d1 * (q @ k) * q_hat) @ inv(b_k @ b_k.T + d1 * q_hat.outer(q_hat))
        self.b_q, self.b_k = self.moved(b_q, q_hat, q), self.moved(b_k, k_hat, k)
        return q_hat, k_hat

    @staticmethod
    def moved(basis: torch.Tensor, proxy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        gradient = proxy.outer(proxy @ basis - target)
        along = proxy @ gradient
        return basis - ((proxy @ basis - target) @ along) / (along @ along) * gradient

    def step(self, query: torch.Tensor, budget: int) -> list[set[int]]:
        """Slots for each query of the newest pass."""
        run, count = self.run, query.shape[2]
        start = run.length - count
        answers = []
        for number in range(count):
            slot = start + number
            if not run.valid[self.row, slot]:
                answers.append(set())
                continue
            q = query[self.row, self.head, number].double()
            q_hat, self.a_k[slot] = self.fit(q, self.key(slot))
            open_slots = [j for j in range(len(run.store)) if run.valid[self.row, j]]
            open_slots.sort(key=lambda j: -float(q_hat @ self.a_k[j]))
            answers.append(set(open_slots[:budget]))
        self.chosen = answers[-1]
        return answers

    def next_omega(self) -> None:
        """Of the tokens on the device before the next pass: selected ones and the newest."""
        newest = range(
            max(len(self.run.store), self.run.length - self.options.fit_recent), self.run.length
        )
        self.omega = [*self.chosen, *(j for j in newest if self.run.valid[self.row, j])]

    def settle(self, first: int) -> None:
        """Tokens from ``first`` on went cold: the index holds their proxies in bf16."""
        rows = self.run.index._proxies.rows[self.row, self.head].double()
        assert len(rows) == len(self.run.store)
        for slot in range(first, len(self.run.store)):
            if self.run.valid[self.row, slot]:
                if slot not in self.a_k:  # it came with the prompt and was not kept for Omega
                    gram = torch.linalg.inv(self.b_k @ self.b_k.T)
                    self.a_k[slot] = self.key(slot) @ self.b_k.T @ gram
                off = (rows[slot] - self.a_k[slot]).abs().max() / self.a_k[slot].abs().max()
                assert off < BF16, f"slot {slot}"
                self.a_k[slot] = rows[slot]


def _close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """fp32 solves: 1e-7 and a ridge of 1e-6, times the condition of r x r systems, some 100."""
    assert float((result.double() - expected).norm() / expected.norm()) < 2e-3


# Tokens of a pass, tokens that leave the window in it, tokens that are dropped after it.
PASSES = [(1, 0, 0), (1, 0, 0), (3, 0, 2), (1, 4, 0), (2, 0, 0), (1, 5, 0), (4, 0, 4), (1, 1, 0)]


@pytest.mark.parametrize(
    "changes", [{}, {"penalty": 4.0, "iterations": 3}, {"fit_recent": 0}], ids=str
)
def test_decode_steps_are_those_of_algorithm_2(changes: dict[str, Any]) -> None:
    valid = torch.ones(BATCH, PROMPT, dtype=torch.bool)
    # Fewer cold tokens are left than the budget.
    valid[1, :50] = False
    run = _run(**changes).prompt(_pairs(PROMPT, 0), valid, (), RECENT)
    heads: list[Literal] = []
    for number, (count, flush_len, drop_len) in enumerate(PASSES):
        queries, keys = _pairs(count, 1000 + 10 * number)
        for each in heads:
            each.next_omega()
        mask = torch.ones(BATCH, count, dtype=torch.bool)
        mask[0, : count - 1] = number != 4  # a hole in a pass
        run.see(queries, keys, mask)
        cold = len(run.store)
        # Omega is what is on the device when the step begins: the flush comes first.
        run.flush(flush_len)
        for each in heads:
            each.omega = [j for j in each.omega if j < cold or j >= len(run.store)]
        run.ready()
        if not heads:
            heads = [Literal(run, b, h) for b in range(BATCH) for h in range(2 * HEADS)]
        for each in heads:
            each.settle(cold)
        ids = run.search(queries)
        assert ids.shape == (BATCH, 2 * HEADS, count, BUDGET) and ids.dtype == torch.int32
        assert run.index._bases is not None and run.index._recent.proxies.is_allocated
        for each in heads:
            position = each.row, each.head
            expected = each.step(queries, BUDGET)
            for slots, best, real in zip(ids[position], expected, mask[each.row], strict=True):
                assert not real or set(slots.tolist()) - {-1} == best
            _close(run.index._bases.query[position], each.b_q)
            _close(run.index._bases.key[position], each.b_k)
            recent = run.index._recent.proxies.rows[position]
            for slot in range(run.length - count, run.length):
                if run.valid[each.row, slot]:
                    _close(recent[slot - run.length], each.a_k[slot])
        if drop_len:
            _drop(run, drop_len)


@pytest.mark.parametrize("left", [54, 52, 20])
def test_tokens_that_a_deep_crop_brought_back_get_proxies_of_their_own(left: int) -> None:
    """More tokens are dropped than the window held; what it held belongs to none that are left."""
    run = _prompted()
    run.step(0)
    run.index.crop(left - 6)
    run.store.crop(left - 6)
    run.keys, run.valid = run.keys[:, :, :left], run.valid[:, :left]
    run.step(1)
    newest = run.index._recent.proxies.rows[:, :, -1].clone()
    bases = run.index._bases
    assert bases is not None
    keys = run.keys[:, :, left - 6 : left].repeat_interleave(GROUP, dim=1)
    guessed = bases.guess(keys).bfloat16()
    run.step(2, flush=7)
    rows = run.index._proxies.rows
    assert rows.shape[2] == left + 1
    torch.testing.assert_close(rows[:, :, left - 6 : left], guessed, rtol=BF16, atol=1e-3)
    assert torch.equal(rows[:, :, left], newest.bfloat16())


def test_a_draft_that_is_longer_than_those_before_has_its_keys() -> None:
    """The factors are not made yet, so only the newest keys are kept."""
    run = _prompted()
    run.index.set_options(run.index.options.replace(max_draft=9))
    assert run.step(0, count=9).shape[2] == 9
