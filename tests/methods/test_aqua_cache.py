"""AquaKVCache on models: codes and their chain follow the tokens wherever these go.

A layer's store leaves its reconstruction to the next, and never one out of date.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.artifacts.shared import shared_artifact
from hf_kvret.methods.aqua import AquaKVCache, AquaStore
from hf_kvret.methods.aqua.coder import split
from hf_kvret.testing.scenario import prompt, ragged
from hf_kvret_model_patches.rope import Rope

from .aqua_caches import (
    DIM,
    HEADS,
    LAYERS,
    decode,
    deep_model,
    learn,
    make_cache,
    read,
    reference,
    rows_of,
    stores_of,
)

# A whole row in another place, or turned by another angle, is off by about 2 of its square; codes
# of 4 bits by 0.0077.
FARTHEST = 0.15


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return deep_model()


@pytest.fixture(scope="module")
def artifact(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return learn(model, tmp_path_factory.mktemp("aqua-deep"))


def _rope(artifact: str, layer: int) -> Rope:
    whole = shared_artifact(artifact, None, "aqua")
    settings = whole.options["layers"][str(layer)]
    assert settings["attention_factor"] > 1.1
    frequencies = whole.tensors[f"layers.{layer}.inv_freq"]
    return Rope(frequencies, settings["attention_factor"], settings["layout"])


def _assert_as_reference(cache: AquaKVCache, artifact: str) -> None:
    lowest = stores_of(cache)[0]
    for store, rows in zip(stores_of(cache), reference(cache, artifact), strict=True):
        keys, values = (split(x, HEADS) for x in rows)
        positions = lowest._positions.rows[:, 0, : len(store)]
        expected = _rope(artifact, store.plan.layer).rotate(keys, positions), values
        torch.testing.assert_close(rows_of(store), expected, rtol=1e-5, atol=1e-5)


def _padded(model: PreTrainedModel, cache: AquaKVCache) -> None:
    ids, mask = ragged((60, 41))
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    read(model, cache, ids, attention_mask=mask, position_ids=places)
    for step in range(6):
        mask = torch.cat([mask, torch.ones(2, 1).long()], dim=1)
        places = mask.sum(-1, keepdim=True) - 1
        token = prompt(2, 1, salt=step)
        read(model, cache, token, attention_mask=mask, position_ids=places)


def _chunks(model: PreTrainedModel, cache: AquaKVCache) -> None:
    for part in prompt(1, 130).split(50, dim=1):
        read(model, cache, part)


def _reordered(model: PreTrainedModel, cache: AquaKVCache) -> None:
    read(model, cache, prompt(2, 60))
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    decode(model, cache, prompt(3, 14, salt=1))


def _cropped(model: PreTrainedModel, cache: AquaKVCache) -> None:
    read(model, cache, prompt(1, 60))
    decode(model, cache, prompt(1, 9, salt=1))
    cache.crop(-30)
    decode(model, cache, prompt(1, 9, salt=2))
    cache.crop(-16)
    read(model, cache, prompt(1, 40, salt=3), position_ids=torch.arange(500, 540)[None])
    decode(model, cache, prompt(1, 3, salt=4))


@pytest.mark.parametrize(
    ("fill", "store"),
    [(_padded, "device"), (_chunks, "host"), (_reordered, "device"), (_cropped, "host")],
)
def test_rows_are_near_those_stored_and_those_of_the_codes_decoded_layer_by_layer(
    fill: Callable[..., None], store: str, model: PreTrainedModel, artifact: str, tmp_path: Path
) -> None:
    cache, exact = (make_cache(model, artifact, store=store, bits=bits) for bits in (4, 16))
    for each in (cache, exact):
        fill(model, each)
    _assert_as_reference(cache, artifact)
    for coded, plain in zip(stores_of(cache), stores_of(exact), strict=True):
        for x, expected in zip(rows_of(coded), rows_of(plain), strict=True):
            missed, size = (y.square().sum((1, 3)) for y in (x - expected, expected))
            # Padding may be all zeros.
            assert (missed < FARTHEST * size.clamp(min=float(size.mean()))).all()
    rows = len(stores_of(cache)[0]._pages.dense_state()["keys"])
    token = prompt(rows, 1, salt=9)
    twin = cache.fork()
    cache.save_pretrained(tmp_path)
    loaded = AquaKVCache.from_pretrained(tmp_path, model.config, artifact=artifact)
    for other in (twin, loaded):
        _assert_as_reference(other, artifact)
    answers = [read(model, each, token) for each in (cache, twin, loaded)]
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    decode(model, twin, prompt(rows, 8, salt=10))
    for each in (cache, twin):
        _assert_as_reference(each, artifact)


def test_a_reconstruction_is_dropped_once_read(model: PreTrainedModel, artifact: str) -> None:
    cache = make_cache(model, artifact)
    for count in (200, 1, 30, 9):
        read(model, cache, prompt(1, count, salt=count))
        assert all(store.reconstruction is None for store in stores_of(cache))
    store, above = stores_of(cache)[:2]
    list(store.chunks())
    assert store.reconstruction is not None
    list(above.chunks())
    assert store.reconstruction is None and above.reconstruction is not None


def test_each_layer_is_decoded_once_a_step(
    model: PreTrainedModel, artifact: str, watch: Any
) -> None:
    decoded = watch(AquaStore, "_decode", lambda self, first, last, below: last - first)
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


def test_bytes_are_those_of_codes_and_their_scales(model: PreTrainedModel, artifact: str) -> None:
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


def test_no_reconstruction_outlives_crop_or_reorder(model: PreTrainedModel, artifact: str) -> None:
    """One is left where a pass breaks off, as an error in attention does it."""
    for change in (lambda store: store.crop(30), lambda store: store.reorder(torch.tensor([0]))):
        cache = make_cache(model, artifact)
        read(model, cache, prompt(1, 60))
        store = stores_of(cache)[1]
        list(store.chunks())
        before = store.nbytes()
        change(store)
        assert store.reconstruction is None and store.nbytes() < before


def test_positions_stay_with_their_tokens(model: PreTrainedModel, artifact: str) -> None:
    """Also those of tokens that a crop brought back, fewer of which then leave the window first."""
    cache, given = make_cache(model, artifact), torch.empty(2, 0, dtype=torch.int64)
    for count, first, drop in (
        (60, 0, 0),
        *((1, 200 + step, 30 if step == 8 else 0) for step in range(9)),
        *((1, 300 + step, 0) for step in range(14)),
        (40, 500, 2),
        (12, 800, 0),
    ):
        # Rows lie apart, and positions jump.
        places = first + torch.arange(count) + torch.tensor([[0], [100]])
        read(model, cache, prompt(2, count, salt=first), position_ids=places)
        cache.crop(-drop)
        given = torch.cat([given, places], dim=1)
        given = given[:, : given.shape[1] - drop]
        store = stores_of(cache)[0]
        result = store._positions.rows[:, 0, : len(store)]
        assert torch.equal(result, given[:, : len(store)].int())


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
