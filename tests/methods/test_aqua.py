"""AQUA-KV's options, and its stores without predictors."""

from typing import Any

import pytest
import torch

from hf_kvret.methods.aqua import AquaConfig, AquaKVCache, AquaStore
from hf_kvret.methods.aqua.config import layer_plan
from hf_kvret.methods.aqua.store import BytePages
from hf_kvret.stores.memory import DeviceMemory, HostMemory
from hf_kvret.testing import MODELS

from ..stores.rows import extend
from .aqua_caches import rows_of

CPU = torch.device("cpu")
DIMS = KEY_DIM, VALUE_DIM = 24, 16


def _plain(**changes: Any) -> AquaConfig:
    return AquaConfig(predictor="none", **changes)


def _store(**changes: Any) -> AquaStore:
    return AquaStore(layer_plan(_plain(**{"bits": 4, **changes}), 0), DeviceMemory(CPU))


def test_a_block_longer_than_a_chunk_is_coded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunks = _store(), _store()
    extend(whole, count=80, dims=DIMS)
    monkeypatch.setattr("hf_kvret.methods.aqua.store.CHUNK", 16)
    extend(chunks, count=80, dims=DIMS)
    assert all(map(torch.equal, rows_of(chunks), rows_of(whole)))


def test_codes_lie_on_the_device_unless_the_host_is_asked_for() -> None:
    for memory, on_host in ((DeviceMemory(CPU), False), (HostMemory(CPU), True)):
        store = AquaStore(layer_plan(_plain(), 0), memory)
        extend(store, count=128, dims=DIMS)
        share = store.host_nbytes() / store.nbytes()
        assert share > 0.99 if on_host else share == 0.0
        assert store.over_bus == on_host


def test_pages_are_read_alike_with_and_without_a_kernel() -> None:
    pages = BytePages(DeviceMemory(CPU), page_len=8)
    extend(pages, count=33, dims=DIMS)
    whole = [x[:, :, 3:29] for x in rows_of(pages)]
    for result in (pages.read(3, 29), pages.gathered(3, 29)):
        assert all(torch.equal(x, expected) for x, expected in zip(result, whole, strict=True))


def test_a_row_counts_its_codes_and_scales() -> None:
    plain = 4 * (KEY_DIM + VALUE_DIM)
    for kind, expected in (
        # 48 and 32 numbers in groups of 16 and 32: 3 + 1 scales of fp16 for two heads.
        ({"bits": 2}, (2 * (48 + 32) + 16 * 4) // 16),
        ({"bits": 16}, plain),
    ):
        store = _store(**kind)
        assert store.row_nbytes(plain) == plain
        extend(store, count=40, dims=DIMS)
        assert store.row_nbytes(plain) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predictor": "none", "artifact": "a"}, "artifact='a' with predictor='none'"),
        ({"store": "resident"}, "no store can keep selected rows"),
        ({"store": "cpu"}, "choose 'auto', 'device', 'host'"),
        ({"store": "higgs"}, "code them once more"),
    ],
    ids=str,
)
def test_options_that_contradict_others_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AquaConfig(**options)


def test_a_group_that_does_not_fit_the_model_is_refused_before_any_token() -> None:
    config = MODELS["llama"].build().config
    with pytest.raises(ValueError, match="group=64 does not divide the 32 numbers"):
        AquaKVCache(config, predictor="none", group=64)
    odd = MODELS["llama"].config()
    odd.num_key_value_heads, odd.head_dim = 1, 4
    with pytest.raises(ValueError, match="this model can't be coded"):
        AquaKVCache(odd, predictor="none")
    assert AquaKVCache(odd, predictor="none", bits=16).options.bits == 16
