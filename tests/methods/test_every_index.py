"""What every index must do: padding, neighbours, forks, saves, new orders and crops."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_kvret.contracts.index import Index
from hf_kvret.methods.a2ats import A2ATSConfig, A2ATSIndex
from hf_kvret.methods.ctkvr import CTkvrConfig, CTkvrIndex
from hf_kvret.methods.flat import FlatIndex
from hf_kvret.methods.lrqk import LRQKConfig, LRQKIndex, PaperLRQKIndex
from hf_kvret.methods.paris import ParisConfig, ParisIndex

from ..kernels.draws import best_places, best_share
from .codebooks import DIM, GROUP, HEADS, write_book
from .index_runs import BUDGET, PROMPT, SEQUENCES, IndexRun, draw, ragged, slot_sets, slot_sets_of

Make = Callable[[], Index]


def _ctkvr(**options: Any) -> Make:
    few = {"tokens_per_centroid": 8, "max_draft": 4, **options}
    return lambda: CTkvrIndex(CTkvrConfig.from_options(**few))


def _lrqk(**options: Any) -> Make:
    return lambda: LRQKIndex(LRQKConfig.from_options(rank=12, **options))


def _als() -> Index:
    sizes = {"rank": 6, "fit_recent": 5, "max_draft": 4}
    return PaperLRQKIndex(LRQKConfig.preset("paper", **sizes))


INDEXES: dict[str, Make] = {
    **{"flat": FlatIndex, "paris": lambda: ParisIndex(ParisConfig())},
    **{"lrqk": _lrqk(), "lrqk, bf16": _lrqk(proxy_dtype="bfloat16"), "lrqk, als": _als},
    "ctkvr": _ctkvr(),
    "ctkvr, at once": _ctkvr(update=1, update_lists="recalled"),
    "ctkvr, few pending": _ctkvr(pending=6),
}
NAMES = [*INDEXES, "a2ats", "a2ats, union"]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_book(tmp_path_factory.mktemp("book")).folder


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, book: str) -> Make:
    """What makes an empty index of each method."""
    if request.param in INDEXES:
        return INDEXES[request.param]
    budget_of = "union" if request.param.endswith("union") else "head"
    return lambda: A2ATSIndex(A2ATSConfig(artifact=book, budget_of=budget_of), 0)


def _same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, results, expected))


def _after_steps(make: Make, steps: int = 4) -> IndexRun:
    """A prompt that came in two chunks, and some steps."""
    run = IndexRun(make).prompt(cuts=(90,))
    for number in range(steps):
        run.step(number, flush=2 * (number == 2))
    return run


@pytest.mark.parametrize("length", [1, PROMPT])
def test_a_budget_for_all_selects_exactly_the_valid_tokens(length: int, make: Make) -> None:
    valid = ragged(SEQUENCES, length + 2)
    valid[1, :length] = False
    valid[1, length - 1] = True
    run = IndexRun(make, range(SEQUENCES)).prompt(draw(0, length + 2), valid, recent=2)
    queries, keys = draw(9, 2)
    run.see(queries, keys)
    ids = run.select(queries, budget=length)
    assert ids.dtype == torch.int32 and ids.shape[-1] == length
    expected = slot_sets_of(valid[:, :length])
    heads = ids.shape[1] * ids.shape[2]
    assert slot_sets(ids) == [slots for slots in expected for _ in range(heads)]


def test_sinks_padding_and_holes_are_never_selected(make: Make) -> None:
    """They get the largest keys of all, so that any leak would pick them first."""
    queries, keys = draw(0, PROMPT)
    valid = ragged(SEQUENCES, PROMPT)
    hidden = ~valid | (torch.arange(PROMPT) < 4)
    leak = 100 * queries[:, ::GROUP, -1:]
    keys = torch.where(hidden[:, None, :, None], leak, keys)
    run = IndexRun(make, range(SEQUENCES)).prompt((queries, keys), valid)
    for _ in range(2):
        run.see(queries[:, :, -1:], keys[:, :, -1:])
        ids = run.select(queries[:, :, -1:], sinks=4)
        for slots, allowed in zip(ids.flatten(1, 2), ~hidden, strict=True):
            slots = slots[slots >= 0].long()
            assert len(slots) and allowed[slots].all()


@pytest.mark.parametrize("make", NAMES, indirect=True)
def test_contents_of_padding_do_not_matter(make: Make) -> None:
    tokens, valid = draw(0, PROMPT), ragged(SEQUENCES, PROMPT)
    other = [torch.where(valid[:, None, :, None], x, math.nan) for x in tokens]
    results = [
        IndexRun(make, range(SEQUENCES)).prompt((queries, keys), valid, (90,)).go_on()
        for queries, keys in (tokens, other)
    ]
    assert _same(*results)


def test_a_sequence_does_not_change_with_its_neighbours(make: Make) -> None:
    tokens, valid = draw(0, PROMPT), ragged(SEQUENCES, PROMPT)
    runs = [IndexRun(make, pair).prompt(tokens, valid, (90,)) for pair in ([0, 1], [0, 2])]
    assert _same(*([ids[0] for ids in run.go_on()] for run in runs))


def test_forks_and_loaded_indexes_go_on_like_one_that_was_left_alone(make: Make) -> None:
    run = _after_steps(make)
    early, twin, other, loaded = IndexRun(make).fork(), run.fork(), run.fork(), run.load()
    # A fork does not see what another one does.
    other.go_on(300)
    other.crop(20)
    other.reorder([0, 0])
    expected = _after_steps(make).go_on()
    for one in (twin, run, loaded):
        assert _same(one.go_on(), expected)
    assert _same(early.prompt(cuts=(90,)).go_on(200), IndexRun(make).prompt(cuts=(90,)).go_on(200))


def test_sequences_in_another_order_select_as_before(make: Make) -> None:
    run, still = _after_steps(make), _after_steps(make)
    run.reorder([1, 0, 0])
    assert _same(run.go_on(), [ids[[1, 0, 0]] for ids in still.go_on()])
    run.reorder([2])
    assert run.step(50).shape[0] == 1


@pytest.mark.parametrize("left", [100, 1])
def test_cropped_tokens_are_forgotten_and_others_take_their_slots(left: int, make: Make) -> None:
    run = _after_steps(make)
    run.crop(left)
    assert run.step(20).max() < left
    for number in range(4):
        run.step(30 + number, 3, flush=3 if number else 1)
    length = len(run.store)
    whole = run.select(draw(0, 1)[0][run.sequences], budget=length)
    assert torch.equal(whole, torch.arange(length, dtype=torch.int32).expand_as(whole))


def test_a_crop_to_nothing_begins_anew(make: Make) -> None:
    run = _after_steps(make)
    run.crop(0)
    other = tuple(x.flip(2) * 3 for x in draw(0, PROMPT))
    assert _same(run.prompt(other).go_on(), IndexRun(make).prompt(other).go_on())


def test_fewer_valid_tokens_than_the_budget_leave_the_other_slots_empty(make: Make) -> None:
    valid = torch.ones(SEQUENCES, PROMPT, dtype=torch.bool)
    valid[1, : PROMPT - 8 - 3] = valid[2] = False
    run = IndexRun(make, range(SEQUENCES)).prompt(valid=valid)
    _, three, none = run.step(0)
    assert three.shape[-1] >= BUDGET and ((three >= 0).sum(-1) == 3).all()
    assert (three[..., -3:] == torch.tensor([139, 140, 141])).all() and (none == -1).all()


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        ("flat", 4 * DIM),
        # Signs, 3 bits of each magnitude, and weights of a byte.
        ("paris", DIM // 8 + 3 * DIM // 8 + DIM // 8),
        ("lrqk", 12),
        ("lrqk, bf16", 2 * 12),
        ("lrqk, als", GROUP * 2 * 6),
        ("a2ats", 2),
    ],
    indirect=["make"],
)
def test_a_cold_token_takes_so_many_bytes_for_each_kv_head(make: Make, nbytes: int) -> None:
    run = _after_steps(make, 1)
    run.flush(run.length - len(run.store))
    state, length = run.index.state_dict(), len(run.store)
    rows = [x for x in state.values() if x.ndim > 2 and x.shape[2] == length]
    assert sum(x.nbytes for x in rows) == 2 * HEADS * length * nbytes


@pytest.mark.factor("budget", [1, 7, 50])
@pytest.mark.factor("cuts", [(), (1, 2, 33)])
@pytest.mark.factor("softcap", [None, 1.0])
# The kernel that scores keys as they are takes 256 elements at most.
@pytest.mark.factor("dim", [DIM, 264])
def test_flat_selects_the_exact_top_k(
    dim: int, budget: int, cuts: tuple[int, ...], softcap: float | None
) -> None:
    """Heads of a group compete by shares, which the scale and the cap of scores change."""
    valid = ragged(SEQUENCES, 50)
    run = IndexRun(FlatIndex, range(SEQUENCES), dim=dim, softcap=softcap)
    run.prompt(draw(0, 50, dim), valid, cuts, recent=0)
    query, keys = draw(9, 3, dim)
    run.see(query, keys)
    ids = run.select(query, budget)
    assert ids.shape == (SEQUENCES, HEADS, 3, budget) and ids.dtype == torch.int32
    cold_keys = run.keys[:, :, :50].double().repeat_interleave(GROUP, dim=1)
    scores = query.double() @ cold_keys.mT * run.scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    shares = best_share(scores.masked_fill(~valid[:, None, None], -math.inf), HEADS)
    assert slot_sets(ids) == slot_sets(best_places(shares, budget))
