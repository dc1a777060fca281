"""QuantizedStore: rows that go through the codec once, when they are appended; their bytes."""

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.stores import PagedStore, QuantizedStore
from hf_kvret.stores.memory import DeviceMemory, HostMemory
from hf_kvret_kernels.higgs import HiggsCodec

from .rows import CPU, HEADS, MakeMemory, draw
from .test_every_store import CODED, DIMS, ERROR, coded

PAGE = 64


def _filled(
    count: int = 100,
    bits: int = 4,
    memory: MakeMemory = CODED["device"],
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
) -> QuantizedStore:
    store = QuantizedStore(memory(CPU), bits)
    store.append(TokenBlock(*draw(2, count, dims, dtype), start=0))
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back_in_the_models_dtype(dtype: torch.dtype) -> None:
    codec, tokens = HiggsCodec(3, 16), draw(2, 100, (16, 16), dtype)
    store, loaded = _filled(bits=3, dtype=dtype), QuantizedStore(DeviceMemory(CPU), 3)
    loaded.load_state_dict(store.state_dict(), CPU)
    ids = torch.arange(100, dtype=torch.int32).expand(2, HEADS, 1, -1).contiguous()
    # Two decodings of the same bytes may round to neighbours.
    unit = ERROR if dtype == torch.float32 else torch.finfo(dtype).eps
    for each in (store, loaded, store.fork(), loaded.fork()):
        ((_, keys, values),) = each.chunks()
        gathered = [tensor[:, :, 0] for tensor in each.gather(ids)]
        for results in ((keys, values), gathered):
            for tensor, expected in zip(results, coded(codec, tokens), strict=True):
                torch.testing.assert_close(tensor, expected, atol=ERROR, rtol=unit)


@pytest.mark.parametrize(
    ("dims", "bits"), [(DIMS[0], 2), (DIMS[2], 3), ((128, 64, 64), 4)], ids=str
)
def test_bytes_are_codes_and_a_scale_for_each_group(dims: tuple[int, int, int], bits: int) -> None:
    elements, group = dims[0] + dims[1], dims[2]
    row = elements * bits / 8 + elements / group * 2
    # 100 tokens are two pages of 64 for each of two batch rows; then a table, and a mean key.
    rows, rest = 2 * 2 * HEADS * PAGE * row, 2 * 2 * 4 + 2 * HEADS * dims[0] * 4
    on_device = _filled(bits=bits, memory=DeviceMemory, dims=dims[:2])
    assert (on_device.nbytes(), on_device.host_nbytes()) == (rows + rest, 0)
    on_host = _filled(bits=bits, memory=HostMemory, dims=dims[:2])
    assert (on_host.nbytes(), on_host.host_nbytes()) == (rows + rest, rows)
    assert on_host.row_nbytes(elements * 4) == on_host.fork().row_nbytes(elements * 4) == row
    state = on_host.state_dict()
    assert state["codes"].nbytes + state["scales"].nbytes == 2 * HEADS * 100 * row
    assert (on_device.over_bus, on_host.over_bus) == (False, True)


def test_keys_with_an_offset_are_coded_around_their_mean() -> None:
    keys, values = draw(2, 100, (16, 16))
    offset = 100 * draw(2, 1, (16, 16), seed=1)[0]
    errors = []
    for more in (0.0, offset):
        store = QuantizedStore(DeviceMemory(CPU), 4)
        valid = torch.ones(2, 60, dtype=torch.bool)
        # Padding does not count, and later tokens are coded around the mean of the first ones.
        valid[1, :20] = False
        first = (keys + more)[:, :, :60].clone()
        first[1, :, :20] = 1e4
        store.append(TokenBlock(first, values[:, :, :60], 0, valid))
        store.append(TokenBlock((keys + more)[:, :, 60:], values[:, :, 60:], 60))
        ((_, near, _),) = store.chunks()
        error = (near - keys - more)[:, :, 20:].square().mean()
        errors.append(float(error))
    assert errors[1] == pytest.approx(errors[0], rel=1e-2) and errors[0] < 0.012


def test_a_sequence_of_padding_gets_its_mean_with_its_first_tokens() -> None:
    keys, values = draw(2, 120, (16, 16))
    offset = 100 * draw(2, 1, (16, 16), seed=1)[0]
    keys = keys + offset
    store = QuantizedStore(DeviceMemory(CPU), 4)
    valid = torch.ones(2, 120, dtype=torch.bool)
    valid[1, :50] = False
    fork = None
    for first, last in ((0, 40), (40, 80), (80, 120)):
        part = slice(first, last)
        store.append(TokenBlock(keys[:, :, part], values[:, :, part], first, valid[:, part]))
        fork = store.fork() if fork is None else fork
    ((_, near, _),) = store.chunks()
    error = (near - keys).square().mean((1, 3))
    assert error[valid].mean() < 0.02
    # What a fork shares is not changed.
    assert fork is not None
    ((_, first_rows, _),) = fork.chunks()
    assert (first_rows[0] - keys[0, :, :40]).square().mean() < 0.02


def test_a_key_with_nan_or_infinity_spoils_no_other_row() -> None:
    keys, values = draw(2, 100, (16, 16))
    keys[0, 0, 7, 3], keys[1, 1, 9, 0] = float("nan"), float("inf")
    store = QuantizedStore(DeviceMemory(CPU), 4)
    store.append(TokenBlock(keys, values, 0))
    ((_, near, _),) = store.chunks()
    bad = ~keys.isfinite().all(-1)
    assert torch.equal(~near.isfinite().all(-1), bad) and int(bad.sum()) == 2
    assert store.state_dict()["key_mean"].isfinite().all()


@pytest.mark.parametrize("dims", [(20, 16), (16, 12)])
def test_dims_that_no_group_divides_are_refused(dims: tuple[int, int]) -> None:
    words = rf"heads of {dims[0]} and {dims[1]} numbers: .* that 8 divides; use store='device'"
    with pytest.raises(ValueError, match=words):
        _filled(dims=dims)


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="saved with rows of 4 bits, not bits=2"):
        QuantizedStore(DeviceMemory(CPU), 2).load_state_dict(_filled(bits=4).state_dict(), CPU)


def test_plain_rows_are_coded_when_they_are_loaded() -> None:
    dtype = torch.bfloat16
    plain = PagedStore(DeviceMemory(CPU))
    plain.append(TokenBlock(*draw(2, 100, (16, 16), dtype), start=0))
    loaded = QuantizedStore(CODED["host"](CPU), 4)
    loaded.load_state_dict(plain.state_dict(), CPU)
    for name, tensor in _filled(dtype=dtype).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
