"""layer.keys and layer.values: tensors that are made when they are used."""

import copy
import io
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt, ragged


def _read(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> Any:
    """``cache`` behind a prompt and a step."""
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    return cache


def _filled(
    model: PreTrainedModel, ids: torch.Tensor, method: str = "flat", store: str = "device"
) -> hf_kvret.RetrievalCache:
    hf_kvret.attach(model)
    options = {**COVERING_OPTIONS, "store": store}
    return _read(model, ids, hf_kvret.registered_methods()[method](model.config, **options))


def _dynamic(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    return _read(model, ids, DynamicCache(config=model.config))


@pytest.mark.parametrize(("method", "store"), [("paris", "device"), ("h2o", "cpu")])
def test_rows_are_those_of_a_dynamic_cache(llama: PreTrainedModel, method: str, store: str) -> None:
    """Which a loop over the layers gives, too."""
    ids = prompt(2, 70)
    ours, theirs = _filled(llama, ids, method, store), _dynamic(llama, ids)
    for layer, mine, other in zip(ours.layers, ours, theirs, strict=True):
        assert layer.cold_len > 0, "some rows lie in the store"
        assert len(mine) == len(other) and mine[2] is None
        assert torch.equal(mine[0].clone(), layer.keys.clone())
        for got, want in zip(mine[:2], other[:2], strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            # The second layer's inputs went through attention in another order of summation.
            torch.testing.assert_close(got.clone(), want, atol=1e-4, rtol=0)
            torch.testing.assert_close(got[:, :, 3:9], want[:, :, 3:9], atol=1e-4, rtol=0)
            torch.testing.assert_close(got.norm(dim=-1), want.norm(dim=-1), atol=1e-4, rtol=0)


def test_an_empty_cache_has_no_rows(llama: PreTrainedModel) -> None:
    empty = hf_kvret.FlatKVCache(llama.config)
    assert [layer[:2] for layer in empty] == [(None, None), (None, None)]


def test_a_shape_reads_nothing(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = _filled(llama, prompt(2, 60))

    def reads(*arguments: object, **keywords: object) -> None:
        raise AssertionError("rows were read")

    for layer in cache.retrieval_layers:
        monkeypatch.setattr(layer.kv, "rows", reads)
    keys = cache.layers[0].keys
    assert keys.shape == (2, 2, 61, 16) and keys.ndim == 4 and keys.numel() == 2 * 2 * 61 * 16
    assert keys.dtype == torch.float32 and keys.device.type == "cpu" and "61" in repr(keys)
    with pytest.raises(AssertionError, match="rows were read"):
        keys.sum()


@pytest.mark.parametrize(
    "write",
    [
        lambda keys: keys.mul_(2),
        lambda keys: keys.__setitem__((slice(None), 0), 1.0),
        lambda keys: torch.add(keys, 1, out=keys),
        lambda keys: operator.iadd(keys, 1),
        lambda keys: torch._foreach_add_([keys], 1),
    ],
)
def test_nothing_is_written_through_them(
    llama: PreTrainedModel, write: Callable[[torch.Tensor], object]
) -> None:
    with pytest.raises(TypeError, match=r"change a copy \(layer.keys.clone\(\)\)"):
        write(_filled(llama, prompt(1, 30)).layers[0].keys)


def test_rows_become_arrays_lists_files_and_copies(llama: PreTrainedModel) -> None:
    keys = _filled(llama, prompt(1, 30)).layers[0].keys
    plain, target, file = keys.clone(), torch.empty(keys.shape), io.BytesIO()
    assert keys.numpy().tolist() == keys.cpu().numpy().tolist() == plain.tolist() == keys.tolist()
    target.copy_(keys)
    torch.save([(keys, keys)], file)
    file.seek(0)
    ((one, other),) = torch.load(file)
    for twin in (one, other, copy.deepcopy(keys), target):
        assert type(twin) is torch.Tensor and torch.equal(twin, plain)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-10),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
        lambda cache: cache.reset(),
    ],
)
def test_rows_of_what_was_dropped_are_refused(
    llama: PreTrainedModel, change: Callable[[hf_kvret.RetrievalCache], None]
) -> None:
    cache = _filled(llama, prompt(2, 30))
    keys = cache.layers[0].keys
    change(cache)
    with pytest.raises(RuntimeError, match=r"has dropped some of these 31 keys since"):
        keys.clone()


def test_sinks_are_as_they_came_where_a_store_codes_rows(llama: PreTrainedModel) -> None:
    ids, mask = ragged((70, 61))
    caches = []
    hf_kvret.attach(llama)
    for store in ("device", "higgs"):
        cache = hf_kvret.ParisKVCache(llama.config, **COVERING_OPTIONS | {"store": store})
        with torch.no_grad():
            llama(ids, attention_mask=mask, past_key_values=cache)
        caches.append(cache)
    plain, coded = (cache.layers[0] for cache in caches)
    for got, want in ((coded.keys[:], plain.keys[:]), (coded.values[:], plain.values[:])):
        for row, first in enumerate((0, 9)):
            sinks = slice(first, first + COVERING_OPTIONS["sink"])
            assert torch.equal(got[row, :, sinks], want[row, :, sinks])
        assert not torch.equal(got, want)
