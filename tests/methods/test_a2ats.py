"""A2ATSIndex by itself: codes and selection against sums worked out by hand, recall, bytes."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.methods.a2ats import A2ATSIndex, learned as learned_module

from ..cold import cold_tokens
from .codebooks import (
    DIM,
    GROUP,
    HEADS,
    PLAIN,
    SCALE,
    WINDOW,
    Book,
    Prompt,
    Turn,
    filled,
    normal,
    write_book,
)
from .index_runs import ragged, slot_sets

YARN = Turn(factor=1.37)
PARTIAL_YARN = Turn(pairs=3, factor=1.37)
INTERLEAVED = Turn(pairs=5, layout="interleaved")
NO_ROPE = Turn(pairs=0, layout="none")
TURNS = [PLAIN, YARN, PARTIAL_YARN, INTERLEAVED, NO_ROPE]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Book]:
    """``write_book`` in a new folder each time."""
    numbers = itertools.count()
    return lambda *args, **options: write_book(tmp_path / str(next(numbers)), *args, **options)


def _prompt(turn: Turn = PLAIN, count: int = 150, batch: int = 2, group: int = GROUP) -> Prompt:
    positions = torch.arange(count).expand(batch, count)
    queries = normal(3, batch, HEADS * group, count, DIM)
    return Prompt(turn, queries, normal(4, batch, HEADS, count, DIM), positions)


def _nearest(book: Book, keys: torch.Tensor) -> torch.Tensor:
    """``argmin_c |k L - c|`` in float64, of keys before RoPE."""
    away = torch.cdist(keys.double() @ book.metric.double(), book.words.double())
    return away.argmin(-1)


def _scores(book: Book, prompt: Prompt, query: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """``[B, Hq, Q, n]``: keys decoded, attended to from the fixed distance, as attention would."""
    decoded = book.words.double() @ torch.linalg.inv(book.metric.double())
    codes = _nearest(book, prompt.keys)
    places = codes.unsqueeze(-1).expand(*codes.shape, DIM)
    near = decoded.expand(len(codes), -1, -1, -1).gather(2, places)
    turn, (batch, _, count, _) = prompt.turn, query.shape
    far = turn(query, torch.full((batch, count), WINDOW))
    near = turn(near, torch.zeros(batch, near.shape[2], dtype=torch.long))
    group = query.shape[1] // HEADS
    scores = SCALE * far @ near.repeat_interleave(group, dim=1).mT
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _check_best(ids: torch.Tensor, scores: torch.Tensor) -> None:
    """The ids are of the 20 largest softmax weights in any head of the group."""
    weights = scores.softmax(-1).unflatten(1, (HEADS, -1)).amax(2)
    assert all(len(slots) == 20 for slots in slot_sets(ids))
    result = weights.gather(-1, ids.long()).sort(descending=True).values
    # Tokens of one code weigh the same: which of them is taken doesn't matter.
    torch.testing.assert_close(result, weights.topk(20).values, rtol=1e-4, atol=0)


def _select(
    index: A2ATSIndex, book: Book, prompt: Prompt, budget: int, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What two drafted queries at the end of the prompt select, and their scores."""
    heads, count = prompt.queries.shape[1:3]
    query, positions = 2 * normal(5, 2, heads, 2, DIM), torch.tensor([[150, 151]] * 2)
    seen = prompt.turn(query, positions).float()
    index.on_forward(seen, torch.zeros(2, HEADS, 2, DIM), count, None, positions)
    ids = index.search(seen, cold_tokens(ragged(2, count), SCALE, budget, softcap))
    assert ids.shape == (2, HEADS, 2, budget) and ids.dtype == torch.int32
    hidden = ~ragged(2, count)[:, None, None]
    return ids, _scores(book, prompt, query, softcap).masked_fill(hidden, float("-inf"))


@pytest.mark.factor("softcap", [None, 1.5])
@pytest.mark.factor("group", [1, GROUP])
@pytest.mark.factor("turn", TURNS, ids=str)
def test_the_tokens_whose_nearest_codewords_weigh_most_are_selected(
    turn: Turn, group: int, softcap: float | None, write: Callable[..., Book]
) -> None:
    book, prompt = write(turn), _prompt(turn, group=group)
    index = filled(book.index(), prompt)
    codes = index.state_dict()["codes"]
    assert codes.dtype == torch.int16 and codes.shape == (2, HEADS, 150)
    assert torch.equal(codes.long(), _nearest(book, prompt.keys))
    _check_best(*_select(index, book, prompt, 20, softcap))


@pytest.mark.factor("softcap", [None, 1.5])
@pytest.mark.factor("group", [1, GROUP])
@pytest.mark.factor("budget", [2, 20])
def test_a_union_holds_the_best_of_each_query_head_and_nothing_else(
    budget: int, group: int, softcap: float | None, write: Callable[..., Book]
) -> None:
    book, prompt = write(), _prompt(group=group)
    index = filled(book.index(budget_of="union"), prompt)
    ids, scores = _select(index, book, prompt, budget, softcap)
    each, serving = max(1, budget // group), min(group, budget)
    places = itertools.product(*map(range, ids.shape[:3]))
    for (b, h, q), slots in zip(places, map(list, slot_sets(ids)), strict=True):
        heads = scores[b, h * group : h * group + serving, q]
        least = heads.topk(each).values[:, -1:] - 1e-5
        good = heads[:, slots] >= least
        assert good.any(0).all(), "a slot that no head wants"
        assert (good.sum(1) >= each).all(), "a head that lacks some of its best"
        assert len(slots) <= each * serving


def test_an_unrotated_space_takes_queries_and_keys_as_they_are(write: Callable[..., Book]) -> None:
    book, prompt = write(YARN, space="rotated"), _prompt(YARN)
    index = book.index()
    queries, keys = prompt.seen
    index.on_forward(queries, keys, 0, None, None)
    index.add(TokenBlock(keys, keys, 0))
    assert torch.equal(index.state_dict()["codes"].long(), _nearest(book, keys))
    query, valid = queries[:, :, -1:], torch.ones(2, 150, dtype=torch.bool)
    ids = index.search(query, cold_tokens(valid, SCALE, 20))
    seen = Prompt(NO_ROPE, queries, keys, prompt.positions)
    _check_best(ids, _scores(book, seen, query, None))


def test_a_prompt_in_chunks_has_the_codes_of_a_whole_one(
    write: Callable[..., Book], monkeypatch: pytest.MonkeyPatch
) -> None:
    book, prompt = write(), _prompt()
    whole = filled(book.index(), prompt).state_dict()["codes"]
    chunks = filled(book.index(), prompt, (1, 64, 65))
    assert torch.equal(chunks.state_dict()["codes"], whole)
    # Long prompts are encoded in chunks too.
    monkeypatch.setattr(learned_module, "_CHUNK_NUMBERS", 7 * 2 * HEADS * DIM)
    assert torch.equal(filled(book.index(), prompt).state_dict()["codes"], whole)
    before = chunks.cost(150, 10).nbytes
    chunks.crop(100)
    assert before - chunks.cost(100, 10).nbytes == 2 * HEADS * 50 * 2, "two bytes a dropped token"
