"""AQUA-KV's options, and its stores without predictors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache, AquaStore
from hf_kvret.methods.aqua.config import layer_plan
from hf_kvret.methods.aqua.store import BytePages
from hf_kvret.stores import PagedStore, Store
from hf_kvret.stores.memory import DeviceMemory, HostMemory
from hf_kvret.testing import MODELS
from hf_kvret_kernels.higgs import HiggsCodec

CPU = torch.device("cpu")
BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 24, 16


def _plain(**changes: Any) -> AquaConfig:
    return AquaConfig(predictor="none", **changes)


def _store(**changes: Any) -> AquaStore:
    return AquaStore(layer_plan(_plain(**{"bits": 4, **changes}), 0), DeviceMemory(CPU))


def _tokens(count: int, salt: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(salt)
    shapes = ((BATCH, HEADS, count, dim) for dim in (KEY_DIM, VALUE_DIM))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _fill(store: Store, *counts: int, salt: int = 0) -> list[torch.Tensor]:
    """What was put into the store, block after block."""
    parts = []
    for number, count in enumerate(counts):
        block = _tokens(count, salt + 100 * number)
        store.append(TokenBlock(*block, len(store)))
        parts.append(block)
    return [torch.cat(side, dim=2) for side in zip(*parts, strict=True)]


def _read(store: Store, chunk_len: int = 64) -> list[torch.Tensor]:
    starts, keys, values = zip(*store.chunks(chunk_len), strict=True)
    assert list(starts) == sorted(starts) and starts[0] == 0
    return [torch.cat(side, dim=2) for side in (keys, values)]


def _share(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Squared error over the square."""
    assert x.shape == expected.shape and x.dtype == expected.dtype
    return float((x - expected).float().square().sum() / expected.float().square().sum())


KINDS: tuple[dict[str, Any], ...] = ({"bits": 2}, {"bits": 3, "group": 16}, {"bits": 16})
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@every_kind
def test_rows_come_back_as_near_as_their_codec_allows(kind: dict[str, Any]) -> None:
    store = _store(**kind)
    exact = _fill(store, 70, 1, 30)
    allowed = {2: 0.25, 3: 0.06, 4: 0.012, 16: 0.0}[kind.get("bits", 4)]
    for x, expected in zip(_read(store), exact, strict=True):
        assert _share(x, expected) <= allowed
    assert store.stats() == {"bits": kind.get("bits", 4)}


def test_a_block_longer_than_a_chunk_is_coded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunks = _store(), _store()
    _fill(whole, 10, 70)
    monkeypatch.setattr("hf_kvret.methods.aqua.store.CHUNK", 16)
    _fill(chunks, 10, 70)
    assert all(map(torch.equal, _read(chunks), _read(whole)))


@every_kind
def test_gather_and_attend_read_the_same_rows_as_chunks(kind: dict[str, Any]) -> None:
    store = _store(**kind)
    _fill(store, 70, 45)
    keys, values = _read(store)
    dense = PagedStore(DeviceMemory(CPU))
    dense.append(TokenBlock(keys, values, 0))
    ids = torch.randint(20, 115, (BATCH, HEADS, 3, 9), generator=torch.Generator().manual_seed(1))
    ids = ids.int().masked_fill(ids % 5 == 0, -1)
    query = torch.randn(BATCH, 2 * HEADS, 3, KEY_DIM, generator=torch.Generator().manual_seed(2))
    for result, expected in (
        (store.gather(ids), dense.gather(ids)),
        (store.begin(query, ids, 0.2, 30.0)(), dense.begin(query, ids, 0.2, 30.0)()),
        ((store.scores(query, ids, 0.2),), (dense.scores(query, ids, 0.2),)),
    ):
        torch.testing.assert_close(list(result), list(expected), rtol=1e-5, atol=1e-5)
    nothing = torch.full_like(ids, -1)
    assert not any(x.any() for x in store.gather(nothing))


@every_kind
def test_moves_and_saves_leave_the_rows_as_they_were(kind: dict[str, Any]) -> None:
    store = _store(**kind)
    _fill(store, 70, 45)
    before = _read(store)
    twin = store.fork()
    store.reorder(torch.tensor([1, 0, 1]))
    for x, expected in zip(_read(store), before, strict=True):
        assert torch.equal(x, expected[[1, 0, 1]])
    store.crop(77)
    assert len(store) == 77
    for x, expected in zip(_read(store), before, strict=True):
        assert torch.equal(x, expected[[1, 0, 1], :, :77])
    block = [x[[0, 1, 0]] for x in _tokens(20, salt=5)]
    store.append(TokenBlock(*block, 77))
    for x, expected in zip(_read(store), before, strict=True):
        assert torch.equal(x[:, :, :77], expected[[1, 0, 1], :, :77])
    for x, expected in zip(_read(twin), before, strict=True):
        assert torch.equal(x, expected)
    loaded = _store(**kind)
    loaded.load_state_dict(twin.state_dict(), CPU)
    for each in (twin, loaded):
        _fill(each, 9)
    assert len(twin) == len(loaded) == 124 and len(store) == 97
    assert all(map(torch.equal, _read(twin), _read(loaded)))


def test_a_plain_store_is_the_codec_over_all_heads_of_a_token() -> None:
    store = _store(bits=2)
    for x, expected in zip(_fill(store, 50), _read(store), strict=True):
        rows = x.transpose(1, 2).flatten(2)
        codec = HiggsCodec(2, rows.shape[-1] & -rows.shape[-1])
        coded = codec.decode(*codec.encode(rows)).unflatten(2, (HEADS, -1)).transpose(1, 2)
        assert torch.equal(coded, expected)


def test_codes_lie_on_the_device_unless_the_host_is_asked_for() -> None:
    for memory, on_host in ((DeviceMemory(CPU), False), (HostMemory(CPU), True)):
        store = AquaStore(layer_plan(_plain(), 0), memory)
        _fill(store, 128)
        share = store.host_nbytes() / store.nbytes()
        assert share > 0.99 if on_host else share == 0.0
        assert store.over_bus == on_host


def test_pages_are_read_alike_with_and_without_a_kernel() -> None:
    pages = BytePages(DeviceMemory(CPU), page_len=8)
    _fill(pages, 20, 13)
    whole = [x[:, :, 3:29] for x in _read(pages)]
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
        _fill(store, 40)
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
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], message: str
) -> None:
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


def test_a_saved_cache_may_name_the_codec_that_is_left() -> None:
    """As caches of 0.1.0 do."""
    saved = {"backbone": "higgs", "anchor_every": None, "keep": "codes", "predictor": "none"}
    assert AquaConfig.from_saved(**saved) == _plain()
    for name, value in (("backbone", "kivi"), ("anchor_every", 2), ("keep", "rows")):
        with pytest.raises(ValueError, match=f"{name}={value!r}: this version only does as"):
            AquaConfig.from_saved(**{**saved, name: value})
