"""The reconstruction that a layer's store leaves to the next: one at a time, never an old one."""

from __future__ import annotations

import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret.contracts.block import UNKNOWN_POSITION
from hf_kvret.methods.aqua import AquaKVCache, AquaStore
from hf_kvret.methods.aqua.coder import Rows
from hf_kvret.testing.scenario import prompt

from .aqua_caches import (
    DIM,
    HEADS,
    LAYERS,
    decode,
    deep_model,
    learn,
    make_cache,
    read,
    rows_of,
    stores_of,
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return deep_model()


@pytest.fixture(scope="module")
def artifact(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return learn(model, tmp_path_factory.mktemp("aqua-left"))


def test_one_layer_is_reconstructed_at_a_time(
    model: PreTrainedModel, artifact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = [0, 0]
    make = Rows.empty_like.__func__

    def made(cls: type[Rows], other: Rows, count: int) -> Rows:
        rows = make(cls, other, count)
        size = rows.nbytes
        alive[0] += size
        alive[1] = max(alive)
        weakref.finalize(rows.keys, lambda: alive.__setitem__(0, alive[0] - size))
        return rows

    monkeypatch.setattr(Rows, "empty_like", classmethod(made))
    token_bytes = 2 * HEADS * DIM * 4
    cache = make_cache(model, artifact)
    read(model, cache, prompt(1, 200))
    assert alive == [0, 192 * token_bytes]
    before = cache.memory().store_device
    decode(model, cache, prompt(1, 3, salt=1))
    read(model, cache, prompt(1, 30, salt=2))
    decode(model, cache, prompt(1, 9, salt=1))
    assert alive[0] == 0
    assert alive[1] <= len(stores_of(cache)[0]) * token_bytes
    assert all(store.reconstruction is None for store in stores_of(cache))
    assert cache.memory().store_device >= before


def test_each_layer_is_decoded_once_a_step(
    model: PreTrainedModel, artifact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    plain = AquaStore._decode

    def counted(self: AquaStore, first: int, last: int, below: Rows | None) -> Rows:
        decoded.append(last - first)
        return plain(self, first, last, below)

    monkeypatch.setattr(AquaStore, "_decode", counted)
    cache = make_cache(model, artifact)
    read(model, cache, prompt(1, 60))
    assert not decoded
    decode(model, cache, prompt(1, 1))
    assert decoded == LAYERS * [52]
    decoded.clear()
    decode(model, cache, prompt(1, 9, salt=1))
    assert sum(decoded) == LAYERS * (3 * 52 + 4 * 56 + 2 * 60)
    top = stores_of(cache)[-1]
    decoded.clear()
    top.gather(torch.tensor([[[[3, 7]]] * 2], dtype=torch.int32))
    assert decoded == LAYERS * [5]


def test_a_reconstruction_is_never_out_of_date(
    model: PreTrainedModel, artifact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same passes, once with everything made of codes alone."""

    def played() -> list[torch.Tensor]:
        cache = make_cache(model, artifact)
        seen = [read(model, cache, prompt(2, 60))]
        # Breaks off in the middle, as an error in attention would.
        stores = stores_of(cache)
        for store in stores[:2]:
            next(store.chunks(chunk_len=64))
        next(stores[3].chunks(chunk_len=64))
        list(stores[2].chunks())
        seen.append(decode(model, cache, prompt(2, 6, salt=1)))
        list(stores[1].chunks())
        cache.reorder_cache(torch.tensor([1, 0]))
        seen.append(decode(model, cache, prompt(2, 2, salt=2)))
        list(stores[0].chunks())
        cache.crop(-25)
        seen.append(decode(model, cache, prompt(2, 9, salt=3)))
        list(stores[1].chunks())
        seen.append(read(model, cache, prompt(2, 30, salt=4)))
        list(stores[2].chunks())
        seen.append(decode(model, cache.fork(), prompt(2, 7, salt=5)))
        return seen

    result = played()
    keep = AquaStore.__setattr__
    monkeypatch.setattr(
        AquaStore,
        "__setattr__",
        lambda self, name, x: keep(self, name, None if name == "_reconstruction" else x),
    )
    for x, expected in zip(result, played(), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-3)


def test_bytes_are_those_of_packed_codes_and_of_one_scale_a_group(
    model: PreTrainedModel, artifact: str
) -> None:
    """2 + 16 / group + 2 / L bits a value; nothing is unpacked, or padded to 1024 numbers."""
    cache = make_cache(model, artifact, bits=2)
    read(model, cache, prompt(1, 200))
    stores, group, tokens = stores_of(cache), HEADS * DIM, 192
    pages = [store._pages.nbytes() - store._pages._table.nbytes for store in stores]
    values = LAYERS * tokens * 2 * HEADS * DIM
    assert 8 * sum(pages) / values == 2 + 16 / group + 2 / LAYERS
    report = cache.memory()
    positions = stores[0]._positions.nbytes()
    assert positions == 4 * (tokens + 256)
    assert not any(store._positions.nbytes() for store in stores[1:])
    assert report.store_host == 0
    assert report.store_device == sum(pages) + 4 * LAYERS * tokens // 64 + positions
    kv = cache.retrieval_layers[0].kv
    assert kv.index is None and report.index == 0
    assert len(kv.positions) == 8 and kv.positions.nbytes() < 4 * 512
    # Two matrices a layer but in the first, in fp32 as the model is, their biases, frequencies.
    width = HEADS * DIM
    learned = (LAYERS - 1) * (3 * width * width * 4 + 2 * width * 4) + LAYERS * DIM // 2 * 4
    assert report.shared == learned


def test_a_reconstruction_is_counted_while_it_lives(model: PreTrainedModel, artifact: str) -> None:
    cache = make_cache(model, artifact)
    read(model, cache, prompt(1, 60))
    before = cache.memory().store_device
    list(stores_of(cache)[1].chunks())
    assert cache.memory().store_device == before + 52 * 2 * HEADS * DIM * 4
    cache.crop(-20)
    assert cache.memory().store_device <= before


def test_on_the_host_codes_are_there_and_positions_here(
    model: PreTrainedModel, artifact: str
) -> None:
    cache = make_cache(model, artifact, store="host")
    read(model, cache, prompt(1, 200))
    report = cache.memory()
    tables = sum(store._pages._table.nbytes for store in stores_of(cache))
    assert report.store_device == stores_of(cache)[0]._positions.nbytes() + tables
    values = LAYERS * 192 * 2 * HEADS * DIM
    assert report.store_host == values * (4 + 16 / (HEADS * DIM)) / 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_as_its_codes(
    dtype: torch.dtype, model: PreTrainedModel, artifact: str
) -> None:
    caches = [make_cache(model, artifact, first_bits=bits, bits=bits) for bits in (4, 16)]
    other = AutoModelForCausalLM.from_config(model.config, dtype=dtype).eval()
    other.load_state_dict(model.state_dict())
    hf_kvret.attach(other)
    for cache in caches:
        read(other, cache, prompt(2, 60))
        decode(other, cache, prompt(2, 9, salt=1))
    for coded, full in zip(*map(stores_of, caches), strict=True):
        for x, expected in zip(rows_of(coded), rows_of(full), strict=True):
            assert x.dtype == dtype
            missed = (x - expected).float().square().sum() / expected.float().square().sum()
            assert missed < 0.02


class _Positions:
    """A cache, and the positions that were given with its tokens; compared after each change."""

    def __init__(self, model: PreTrainedModel, cache: AquaKVCache, given: torch.Tensor) -> None:
        self.model, self.cache, self.given = model, cache, given

    def read(self, count: int, first: int) -> None:
        # Rows apart, and a jump between parts.
        places = first + torch.arange(count) + torch.tensor([[0], [100]])
        read(self.model, self.cache, prompt(2, count, salt=first), position_ids=places)
        self.given = torch.cat([self.given, places], dim=1)
        self.check()

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.given = self.given[:, :-count]
        self.check()

    def fork(self) -> _Positions:
        return _Positions(self.model, self.cache.fork(), self.given)

    def check(self) -> None:
        """The store has those of cold tokens, and beyond them knows what the window does not."""
        store, kv = stores_of(self.cache)[0], self.cache.retrieval_layers[0].kv
        cold, end, start = len(store), self.given.shape[1], kv.positions.first
        assert torch.equal(store._positions.rows[:, 0, :cold], self.given[:, :cold].int())
        # Those of tokens that a crop dropped stay until others come in their place.
        pending = kv.positions.rows[:, 0, max(0, cold - start) : max(0, end - start)]
        missing = end - cold - pending.shape[1]
        pending = torch.nn.functional.pad(pending, (missing, 0), value=UNKNOWN_POSITION)
        known = store._positions.rows[:, 0, cold:end]
        known = torch.nn.functional.pad(known, (0, pending.shape[1] - known.shape[1]))
        whole = torch.where(pending == UNKNOWN_POSITION, known, pending)
        assert torch.equal(whole, self.given[:, cold:].int())


def test_positions_stay_with_their_tokens(model: PreTrainedModel, artifact: str) -> None:
    """The store knows those of tokens that a crop brought back, the layer those of later ones."""
    one = _Positions(model, make_cache(model, artifact), torch.empty(2, 0, dtype=torch.int64))
    one.read(60, 0)
    for step in range(9):
        one.read(1, 200 + step)
    one.crop(30)
    one.crop(3)
    # Fewer tokens than were brought back leave the window at first.
    for step in range(14):
        one.read(1, 300 + step)
    one.cache.reorder_cache(torch.tensor([1, 0]))
    one.given = one.given[[1, 0]]
    twin = one.fork()
    one.read(40, 500)
    one.crop(2)
    one.read(1, 700)
    one.crop(1)
    one.read(12, 800)
    twin.check()
    twin.read(30, 900)
    one.check()


def test_what_was_read_stays_when_the_layer_above_is_read(
    model: PreTrainedModel, artifact: str
) -> None:
    cache = make_cache(model, artifact)
    read(model, cache, prompt(1, 60))
    store, above = stores_of(cache)[1:3]
    list(store.chunks())
    assert store.reconstruction is not None
    _, keys, values = next(store.chunks())
    before = keys.clone(), values.clone()
    list(above.chunks())
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])
    assert store.reconstruction is None and above.reconstruction is not None


def test_an_exact_first_layer_predicts_too(model: PreTrainedModel, artifact: str) -> None:
    cache = make_cache(model, artifact, first_bits=16)
    exact = make_cache(model, artifact, bits=16)
    for each in (cache, exact):
        read(model, each, prompt(1, 60))
    # Layers are made of the codes in any order: nothing was left for the second.
    pairs = zip(stores_of(cache)[::-1], stores_of(exact)[::-1], strict=True)
    for store, other in pairs:
        for x, expected in zip(rows_of(store), rows_of(other), strict=True):
            missed = (x - expected).square().sum() / expected.square().sum()
            assert missed < 0.02 and (missed == 0) == (store.plan.layer == 0)
    assert stores_of(cache)[0].stats() == {"bits": 16}
