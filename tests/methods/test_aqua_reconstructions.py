"""The reconstruction that a layer's store leaves to the next: one at a time, never an old one."""

from __future__ import annotations

import weakref

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.methods.aqua import AquaStore
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


def test_rows_read_stay_when_the_layer_above_is_read(model: PreTrainedModel, artifact: str) -> None:
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
