"""A layer's step in one call of the CPU library does what it does step by step."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from hf_kvret import FlatKVCache, ParisKVCache
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.layer import step
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.methods.flat import FlatIndex
from hf_kvret.observe.recall import RecallMeter
from hf_kvret_kernels import host_step
from hf_kvret_kernels.host_step import FlatSearch

from .driver import ERROR, HEADS, METHODS, SCALE, Driver, step_by_step

pytestmark = pytest.mark.skipif(bool(host_step.why_not()), reason="the library is not compiled")


@pytest.mark.allowed(meet=[("store", "softcap"), ("store", "sinks"), ("softcap", "sinks")])
@pytest.mark.factor("method", list(METHODS))
@pytest.mark.factor("store", ["device", "cpu"])
@pytest.mark.factor("softcap", [None, 4.0])
@pytest.mark.factor("sinks", [False, True])
def test_one_call_is_all_the_steps(
    method: str, store: str, softcap: float | None, sinks: bool
) -> None:
    kind, options = METHODS[method]
    options = {"store": store, "track_recall": True, **options}
    drivers = [Driver(kind, softcap, sinks, **options) for _ in range(2)]
    got = list(drivers[0].life())
    with step_by_step():
        torch.testing.assert_close(got, list(drivers[1].life()), rtol=1e-5, atol=ERROR)
    one, other = (driver.cache.stats()["layers"][0] for driver in drivers)
    assert one["selected"] > 0
    assert "recall_mass" in one
    assert one.keys() == other.keys()
    for name, value in one.items():
        close = pytest.approx(other[name], rel=1e-5) if isinstance(value, float) else other[name]
        assert value == close, name


@pytest.mark.parametrize("padded", [0, 11])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("method", list(METHODS))
def test_a_step_like_the_one_before_is_a_step(
    method: str, softcap: float | None, padded: int
) -> None:
    kind, options = METHODS[method]
    drivers = [Driver(kind, softcap, repeats=repeats, **options) for repeats in (True, False)]
    lives = [list(driver.life(padded)) for driver in drivers]
    assert all(map(torch.equal, *lives))
    one, other = drivers
    assert one.cache.stats()["layers"] == other.cache.stats()["layers"]
    assert all(map(torch.equal, one.kv.rows(one.kv.length), other.kv.rows(other.kv.length)))
    assert one.repeated == (5 if method.startswith("paris") and not padded else 0)


CHANGES: dict[str, Callable[[Driver, pytest.MonkeyPatch], object]] = {
    "nothing": lambda driver, patch: None,
    "crop": lambda driver, patch: driver.crop(1),
    "scale": lambda driver, patch: setattr(driver, "scale", 0.7),
    "soft cap": lambda driver, patch: setattr(driver, "softcap", 3.0),
    "options": lambda driver, patch: driver.layer.set_options(
        driver.cache.options.replace(top_k=9), lambda: None
    ),
    "rows": lambda driver, patch: driver.reorder([1, 0]),
    "fewer rows": lambda driver, patch: driver.reorder([1]),
    "deep crop": lambda driver, patch: driver.crop(30),
    "flush": lambda driver, patch: driver.kv.flush(None),
    "observer": lambda driver, patch: setattr(
        driver.layer, "subscribers", (*driver.layer.subscribers, RecallMeter())
    ),
    "index": lambda driver, patch: setattr(driver.kv, "index", driver.kv.index.fork()),
    "search": lambda driver, patch: patch.setattr(
        driver.kv.index, "search", driver.kv.index.search
    ),
    "drafts": lambda driver, patch: setattr(driver.kv, "drafts", True),
    "backend": lambda driver, patch: patch.setattr(step, "PREFERRED", ContextVar("", default="x")),
    "threads": lambda driver, patch: patch.setattr(torch, "get_num_threads", lambda: 2),
    "count": lambda driver, patch: setattr(driver.kv, "selected", driver.kv.selected.clone()),
    "copy": lambda driver, patch: setattr(driver.layer, "kv", copy.deepcopy(driver.kv)),
    "fork": lambda driver, patch: vars(driver).update(vars(driver.fork())),
    "loaded": lambda driver, patch: driver.layer.load_state_dict(
        driver.layer.state_dict(), torch.device("cpu")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_steps_is_noticed(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Driver(ParisKVCache, repeats=repeats, flush=40) for repeats in (True, False))
    for driver in (one, other):
        driver.forward(150)
        for _ in range(3):
            driver.forward(1)
    assert one.repeated == 1
    with monkeypatch.context() as patch:
        for driver in (one, other):
            CHANGES[change](driver, patch)
        assert torch.equal(one.forward(1), other.forward(1))
    assert one.repeated == 1 + (change in ("nothing", "crop"))
    assert torch.equal(one.forward(1), other.forward(1))


def test_a_failed_step_counts_nothing_and_can_be_cropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room for the work space")

    driver = Driver(ParisKVCache)
    driver.forward(100)
    driver.forward(1)
    before = driver.cache.stats()
    monkeypatch.setattr(host_step, "run_unchecked", no_room)
    with pytest.raises(MemoryError, match="no room"):
        driver.forward(1)
    assert driver.cache.stats() == before
    with pytest.raises(RuntimeError, match="has not attended yet"):
        driver.cache.fork()
    driver.crop(1)
    assert driver.cache.get_seq_length() == 100


def test_a_step_that_breaks_off_can_be_cropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come once its token is taken in."""
    driver = Driver(ParisKVCache, repeats=True, flush=40)
    for count in (100, 1, 1):
        driver.forward(count)
    monkeypatch.setattr(step.LayerCounters, "count_again", None)
    with pytest.raises(TypeError):
        driver.forward(1)
    driver.cache.crop(0)
    assert driver.cache.get_seq_length() == 102


@pytest.mark.parametrize("method", [name for name in METHODS if name != "h2o"])
def test_nothing_is_left_to_torchs_search(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options = METHODS[method]
    driver = Driver(kind, **options)
    driver.forward(150)
    index = driver.kv.index

    def search(*args: object) -> None:
        raise AssertionError("the library can do this search")

    monkeypatch.setattr(type(index), "search", search)
    for count in (1, 1, 3):
        driver.forward(count)
    assert driver.cache.stats()["layers"][0]["selected"] > 0


def test_other_options_take_effect_at_the_next_step() -> None:
    """What an index and the counters keep from step to step is for the options they had."""
    changed, fresh = (Driver(ParisKVCache, per_selected=1.0) for _ in range(2))
    for driver in (changed, fresh):
        driver.forward(150)
        driver.forward(1)
        driver.cache = driver.cache.fork(top_k=130)
    got = changed.forward(1)
    with step_by_step():
        torch.testing.assert_close(got, fresh.forward(1), rtol=1e-5, atol=ERROR)
    searches = 2 * HEADS
    assert changed.cache.stats()["layers"][0]["candidates"] == 130 * searches
    # Of the same layer, too.
    changed.layer.set_options(changed.cache.options.replace(top_k=140), lambda: None)
    changed.forward(1)
    assert changed.cache.stats()["layers"][0]["candidates"] == (130 + 140) * searches


class NewestIndex(FlatIndex):
    """Another search, and the description that it inherits."""

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        newest = torch.arange(len(cold) - cold.budget, len(cold), dtype=torch.int32)
        return newest.expand(len(query), HEADS, query.shape[2], -1).contiguous()


def test_an_index_that_replaces_its_search_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatKVCache, "make_index", lambda *args: NewestIndex())
    searches: list[int] = []
    drivers = [Driver() for _ in range(2)]
    for driver in drivers:
        driver.forward(60)
    got = drivers[0].forward(1)
    with step_by_step():
        torch.testing.assert_close(got, drivers[1].forward(1), rtol=1e-5, atol=ERROR)
    index = drivers[0].kv.index
    own = index.search
    # So is one object's.
    monkeypatch.setattr(index, "search", lambda *args: searches.append(1) or own(*args))
    drivers[0].forward(1)
    assert searches == [1]


def test_a_description_may_change_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, kept = Driver(), FlatSearch(torch.empty(0))
    monkeypatch.setattr(FlatIndex, "host_search", lambda *args: kept)
    driver.forward(60)
    for sign in (1, -1, 1):
        index, cold = driver.kv.index, driver.kv.cold(Scoring(None, SCALE))
        kept.keys = sign * index._keys.rows
        driver.forward(1)
        expected = index.search(sign * driver.query, cold)
        assert driver.ids is not None and torch.equal(driver.ids.sort()[0], expected.sort()[0])


@contextmanager
def torch_default(default: torch.dtype | str) -> Iterator[None]:
    """Another default dtype or default device of torch."""
    if isinstance(default, str):
        with torch.device(default):
            yield
        return
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.allowed(meet=[("default", "whole")])
@pytest.mark.factor("method", ["paris", "lrqk", "ctkvr", "h2o"])
@pytest.mark.factor("default", [torch.float64, "meta"])
@pytest.mark.factor("whole", [True, False])
def test_defaults_of_torch_do_not_matter(
    method: str, default: torch.dtype | str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = METHODS[method]
    attend = RetrievalLayer.attend

    def attend_with_default(layer: RetrievalLayer, *args: Any) -> torch.Tensor:
        with torch_default(default):
            return attend(layer, *args)

    def steps() -> list[torch.Tensor]:
        driver = Driver(kind, 4.0, True, **options)
        driver.forward(60, padded=3)
        results = [driver.forward(count) for count in (1, 1, 3, 1)]
        driver.crop(20)
        return [*results, driver.forward(1)]

    with nullcontext() if whole else step_by_step():
        expected = steps()
        monkeypatch.setattr(RetrievalLayer, "attend", attend_with_default)
        got = steps()
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
