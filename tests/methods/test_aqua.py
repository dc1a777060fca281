"""AQUA-KV's options, and its stores without predictors: plain codecs and KIVI's grouping."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache, AquaStore
from hf_kvret.methods.aqua.config import layer_plan
from hf_kvret.methods.aqua.decoded import BytePages
from hf_kvret.methods.aqua.kivi import KiviStore
from hf_kvret.stores import PagedStore, Store
from hf_kvret.stores.memory import DeviceMemory, HostMemory
from hf_kvret.testing import COVERING_OPTIONS, MODELS, Case, conformance_cases, run_case
from hf_kvret_kernels.higgs import HiggsCodec, MinMaxCodec

CPU = torch.device("cpu")
BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 24, 16


def _plain(**changes: Any) -> AquaConfig:
    return AquaConfig(predictor="none", **changes)


def _store(**changes: Any) -> Store:
    options = _plain(**{"bits": 4, **changes})
    if options.backbone == "kivi":
        return KiviStore(options, DeviceMemory(CPU))
    return AquaStore(layer_plan(options, 0), DeviceMemory(CPU))


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


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"bits": 2},
    {"bits": 3, "group": 16},
    {"backbone": "minmax"},
    {"backbone": "absmax"},
    {"backbone": "kivi", "group": 8},
    {"backbone": "kivi", "bits": 2},
    {"keep": "rows"},
    {"bits": 16},
)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@every_kind
def test_rows_come_back_as_near_as_their_codec_allows(kind: dict[str, Any]) -> None:
    store = _store(**kind)
    exact = _fill(store, 70, 1, 30)
    allowed = {2: 0.25, 3: 0.06, 4: 0.012, 16: 0.0}[kind.get("bits", 4)]
    for x, expected in zip(_read(store), exact, strict=True):
        assert _share(x, expected) <= allowed
    assert store.stats() == {"bits": kind.get("bits", 4)}


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
        (store.attend(query, ids, 0.2, 30.0), dense.attend(query, ids, 0.2, 30.0)),
        ((store.scores(query, ids, 0.2),), (dense.scores(query, ids, 0.2),)),
    ):
        torch.testing.assert_close(list(result), list(expected), rtol=1e-5, atol=1e-5)
    nothing = torch.full_like(ids, -1)
    assert not any(x.any() for x in store.gather(nothing))


@every_kind
def test_moves_leave_the_rows_as_they_were(kind: dict[str, Any]) -> None:
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
        # KIVI codes the group that was cut once more.
        assert torch.equal(x[:, :, :64], expected[[1, 0, 1], :, :64])
    for x, expected in zip(_read(twin), before, strict=True):
        assert torch.equal(x, expected)
    _fill(twin, 9)
    assert len(twin) == 124 and len(store) == 97


@every_kind
def test_a_saved_store_is_the_same_and_goes_on(kind: dict[str, Any]) -> None:
    store, loaded = _store(**kind), _store(**kind)
    assert store.state_dict() == {}
    loaded.load_state_dict({}, CPU)
    _fill(store, 70, 7)
    loaded.load_state_dict(store.state_dict(), CPU)
    for each in (store, loaded):
        _fill(each, 30, salt=3)
    for x, expected in zip(_read(loaded), _read(store), strict=True):
        assert torch.equal(x, expected)


def test_blocks_come_in_order() -> None:
    for store in (_store(), _store(backbone="kivi")):
        with pytest.raises(ValueError, match="starts at slot 3, the store ends at 0"):
            store.append(TokenBlock(*_tokens(2), 3))
        store.append(TokenBlock(*_tokens(0), 0))
        assert len(store) == 0 and store.nbytes() == 0


def test_a_plain_store_is_the_codec_over_all_heads_of_a_token() -> None:
    store = _store(bits=2)
    for x, expected in zip(_fill(store, 50), _read(store), strict=True):
        rows = x.transpose(1, 2).flatten(2)
        codec = HiggsCodec(2, rows.shape[-1] & -rows.shape[-1])
        coded = codec.decode(*codec.encode(rows)).unflatten(2, (HEADS, -1)).transpose(1, 2)
        assert torch.equal(coded, expected)


def test_kivi_groups_keys_along_tokens_and_values_along_numbers() -> None:
    store = _store(backbone="kivi", bits=2, group=8)
    keys, values = _fill(store, 13, 30)
    result = _read(store)
    codec = MinMaxCodec(2, 8)
    along = keys[:, :, :40].transpose(2, 3)
    assert torch.equal(result[0][:, :, :40], codec.decode(*codec.encode(along)).transpose(2, 3))
    assert torch.equal(result[0][:, :, 40:], keys[:, :, 40:])
    assert torch.equal(result[1], codec.decode(*codec.encode(values)))
    # A channel with an offset of its own costs nothing more.
    offset = torch.zeros(KEY_DIM).index_fill(0, torch.tensor([3, 7]), 30.0)
    plain, shifted = (_store(backbone="kivi", bits=2, group=8) for _ in range(2))
    for each, x in ((plain, keys), (shifted, keys + offset)):
        each.append(TokenBlock(x, values, 0))
    missed = [
        (_read(each)[0] - x).square().mean()
        for each, x in ((plain, keys), (shifted, keys + offset))
    ]
    assert missed[1] < 1.05 * missed[0]


def test_a_constant_offset_costs_no_more_than_its_square() -> None:
    """Signs are random: without them an offset of three deviations costs eight times as much."""
    keys = torch.randn(1, 8, 500, 128, generator=torch.Generator().manual_seed(0)) + 3.0
    store = _store(bits=2)
    store.append(TokenBlock(keys, keys.flip(2), 0))
    assert all(
        _share(x, y) < 0.115 for x, y in zip(_read(store), (keys, keys.flip(2)), strict=True)
    )


def test_codes_lie_on_the_device_unless_the_host_is_asked_for() -> None:
    for memory, on_host in ((DeviceMemory(CPU), False), (HostMemory(CPU), True)):
        for store in (
            AquaStore(layer_plan(_plain(), 0), memory),
            KiviStore(_plain(backbone="kivi", bits=2), memory),
        ):
            _fill(store, 128)
            share = store.host_nbytes() / store.nbytes()
            assert share > 0.99 if on_host else share == 0.0
            assert store.bus_share == on_host


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
        ({"bits": 4, "backbone": "kivi", "group": 8}, int(4 + 32 / 8) * (KEY_DIM + VALUE_DIM) // 8),
        ({"keep": "rows"}, plain),
        ({"bits": 16}, plain),
    ):
        store = _store(**kind)
        assert store.row_nbytes(plain) == plain
        _fill(store, 40)
        assert store.row_nbytes(plain) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", [{}, {"bits": 2}, {"backbone": "kivi"}], ids=str)
def test_on_a_gpu_nothing_goes_through_the_cpu(kind: dict[str, Any]) -> None:
    options = _plain(**{"bits": 4, **kind})
    memory = DeviceMemory(torch.device("cuda", torch.cuda.current_device()))
    store = (
        KiviStore(options, memory)
        if options.backbone == "kivi"
        else AquaStore(layer_plan(options, 0), memory)
    )
    other = _store(**kind)
    exact = _fill(other, 70)
    store.append(TokenBlock(*(x.cuda() for x in exact), 0))
    pages = store._values if isinstance(store, KiviStore) else store._pages
    assert all(chunk.is_cuda and chunk.dtype == torch.uint8 for chunk in pages._chunks)
    for x, expected in zip(_read(store), _read(other), strict=True):
        assert x.is_cuda and _share(x.cpu(), expected) < 1e-3


def test_first_bits_are_those_of_the_lowest_layer() -> None:
    lowest, above = (_store(bits=2, first_bits=4) for _ in range(2))
    above.below = lambda: lowest
    for store in (lowest, above):
        _fill(store, 50)
    assert [store.stats()["bits"] for store in (lowest, above)] == [4, 2]
    assert lowest.nbytes() > 1.5 * above.nbytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits=5: choose 2, 3, 4 or 16"),
        ({"first_bits": 8}, "first_bits=8: choose one of None, 2, 3, 4, 16"),
        ({"group": 48}, "group=48: choose one of None, 8, 16"),
        (
            {"backbone": "quanto"},
            "backbone='quanto': choose one of None, 'higgs', 'minmax'",
        ),
        ({"predictor": "mlp"}, "predictor='mlp': choose one of 'artifact', 'none'"),
        ({"keep": "both"}, "keep='both': choose one of 'codes', 'rows'"),
        ({"store": "resident"}, "no store can keep selected rows"),
        ({"store": "cpu"}, "choose 'auto', 'device', 'host'"),
        ({"store": "higgs"}, "code them once more"),
        ({"anchor_every": 0}, "anchor_every=0: 1 or more"),
        ({"anchor_every": 4, "predictor": "none"}, "no chain to bound"),
        ({"backbone": "kivi"}, "give predictor='none'"),
        ({"backbone": "kivi", "predictor": "none", "first_bits": 4}, "has neither"),
        ({"backbone": "kivi", "predictor": "none", "keep": "rows"}, "has neither"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_with_the_way_out(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AquaConfig(**options)


def test_options_of_a_wrong_type_are_refused() -> None:
    for options in ({"artifact": ""}, {"revision": 3}, {"anchor_every": 2.0}):
        with pytest.raises(TypeError):
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


UNLIKE_MODELS = ("llama", "gemma2", "gpt_oss", "qwen3_next", "qwen2_vl")
TELLING_MODES = ("greedy_ragged", "second_turn_ragged", "crop_deep")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.mode in TELLING_MODES else pytest.mark.slow)
        for case in conformance_cases(UNLIKE_MODELS)
    ],
    ids=str,
)
def test_sixteen_bits_are_full_attention(case: Case) -> None:
    options = {**COVERING_OPTIONS, "bits": 16, "predictor": "none"}
    result = run_case(case, lambda model: AquaKVCache(model.config, **options))
    if result.status == "skipped":
        pytest.skip(result.detail)
    assert result.status == "passed", result.detail
