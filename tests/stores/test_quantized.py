"""QuantizedStore against plain rows that went through the codec once, when they were appended."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.stores import CpuStore, PagedStore, QuantizedStore, ResidentStore, Store
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory, SplitMemory
from hf_kvret_kernels.higgs import HiggsCodec

CPU = torch.device("cpu")
HEADS, GROUP, PAGE = 2, 2, 64
# Of a split memory: two to six pages of coded rows.
BUDGET = 16_000
SCALE = 0.7
# fp32 sums of some tens of products, in another order, where one batch of rows is decoded and the
# other a single row.
ERROR = 2e-5

Rows = tuple[torch.Tensor, torch.Tensor]

# (key dim, value dim, group): powers of two, other dims, dims that only 8 divides.
DIMS = [(16, 16, 16), (32, 48, 16), (24, 40, 8)]


class PoisonedDevice(DeviceMemory):
    """New pages hold bytes whose scales are NaN: whoever reads spare capacity shows it."""

    def allocate(self, *options: Any) -> torch.Tensor:
        return super().allocate(*options).fill_(255)


class PoisonedSplit(SplitMemory):
    """The same, with room for a few pages on the device and the others on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, budget=BUDGET)

    def allocate(self, *options: Any) -> torch.Tensor:
        return super().allocate(*options).fill_(255)


class PoisonedHost(HostMemory):
    """The same in host memory."""

    def allocate(self, *options: Any) -> torch.Tensor:
        return super().allocate(*options).fill_(255)


PLACES: list[tuple[int, Callable[[torch.device], PageMemory]]] = [
    (2, PoisonedDevice),
    (3, PoisonedHost),
    (4, PoisonedDevice),
    (4, PoisonedHost),
    (3, PoisonedSplit),
]


def _tokens(
    batch: int,
    count: int,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Rows:
    """Keys with a large constant offset, as real ones have, and values."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, HEADS, count, dim, generator=generator) for dim in dims)
    return (keys + 3.0).to(dtype), values.to(dtype)


def _through_codec(tokens: Rows, codec: HiggsCodec) -> Rows:
    keys, values = (codec.decode(*codec.encode(part), part.dtype) for part in tokens)
    return keys, values


def _filled(
    count: int = 100,
    bits: int = 4,
    memory: Callable[[torch.device], PageMemory] = PoisonedDevice,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
) -> QuantizedStore:
    store = QuantizedStore(memory(CPU), bits)
    store.append(TokenBlock(*_tokens(2, count, dims, dtype), start=0))
    return store


def _same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=ERROR, rtol=ERROR)


def _attention(
    query: torch.Tensor, rows: Rows, ids: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Out and lse of attention to the rows that ids name, and their logits, all in float64."""
    share = query.shape[1] // ids.shape[1]
    chosen = ids.repeat_interleave(share, dim=1)
    keys, values = (
        part.double().repeat_interleave(query.shape[1] // HEADS, dim=1).unsqueeze(2)
        for part in rows
    )
    logits = (query.double().unsqueeze(3) * keys).sum(-1) * SCALE
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    marks = torch.zeros(*logits.shape[:-1], logits.shape[-1] + 1, dtype=torch.bool)
    places = chosen.long().masked_fill(chosen < 0, logits.shape[-1])
    marks = marks.scatter(-1, places, True)[..., :-1]
    scores = logits.masked_fill(~marks, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1)).exp()
    found = torch.cat([logits, torch.full_like(logits[..., :1], float("-inf"))], dim=-1)
    return (weights.unsqueeze(-1) * values).sum(3), lse, found.gather(-1, places)


def _check_reads(store: Store, rows: Rows, choose: random.Random) -> None:
    """``chunks``, ``gather``, ``scores`` and ``attend`` give what ``rows`` give."""
    batch, _, held, key_dim = rows[0].shape
    assert len(store) == held
    end = 0
    for start, keys, values in store.chunks(choose.choice([1, 64, 100, 4096])):
        assert start == end
        end += keys.shape[2]
        _same(keys, rows[0][:, :, start:end])
        _same(values, rows[1][:, :, start:end])
    assert end == held
    if not held:
        return
    share, queries = choose.choice([1, GROUP]), choose.randint(1, 3)
    generator = torch.Generator().manual_seed(choose.randrange(10**6))
    order = torch.rand(batch, HEADS * share, queries, held, generator=generator).argsort(-1)
    ids = order[..., : choose.randint(1, held)].int()
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    for got, wanted in zip(store.gather(ids), rows, strict=True):
        spread = wanted.repeat_interleave(share, dim=1).unsqueeze(2)
        spread = spread.expand(-1, -1, queries, -1, -1)
        places = ids.clamp_min(0).long().unsqueeze(-1).expand(*ids.shape, wanted.shape[-1])
        _same(got, spread.gather(3, places).masked_fill((ids < 0).unsqueeze(-1), 0.0))
    query = torch.randn(batch, HEADS * GROUP, queries, key_dim, generator=generator)
    softcap = choose.choice([None, 5.0])
    out, lse, logits = _attention(query, rows, ids, softcap)
    got_out, got_lse = store.attend(query, ids, SCALE, softcap)
    assert got_out.dtype == got_lse.dtype == torch.float32
    _same(got_out, out.float())
    _same(got_lse, lse.float())
    _same(store.scores(query, ids, SCALE, softcap), logits.float())


@pytest.mark.parametrize(("bits", "make_memory"), PLACES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_no_operation_changes_what_was_coded(
    bits: int, make_memory: Callable[[torch.device], PageMemory], dims: tuple[int, int, int]
) -> None:
    choose, codec = random.Random(bits), HiggsCodec(bits, dims[2])
    blank = _tokens(2, 0, dims[:2])
    pairs: list[tuple[QuantizedStore, Rows]] = [(QuantizedStore(make_memory(CPU), bits), blank)]
    kinds = ["append"] * 4 + ["crop", "reorder", "fork", "load"]
    for step in range(18):
        place = choose.randrange(len(pairs))
        store, (keys, values) = pairs[place]
        kind = choose.choice(kinds) if step else "append"
        if kind == "append":
            more = _tokens(len(keys), choose.choice([0, 1, 5, 40, 70]), dims[:2], seed=step)
            store.append(TokenBlock(*more, start=len(store)))
            more = _through_codec(more, codec)
            keys, values = torch.cat([keys, more[0]], dim=2), torch.cat([values, more[1]], dim=2)
        elif kind == "crop":
            length = choose.randint(max(0, len(store) - 70), len(store))
            store.crop(length)
            keys, values = keys[:, :, :length], values[:, :, :length]
        elif kind == "reorder":
            rows = [choose.randrange(len(keys)) for _ in range(choose.randint(1, 3))]
            store.reorder(torch.tensor(rows))
            # An empty store has no rows to reorder; the cache gives it a batch with its tokens.
            keys, values = keys[rows], values[rows]
        elif kind == "load":
            state, store = store.state_dict(), QuantizedStore(make_memory(CPU), bits)
            store.load_state_dict(state, CPU)
        elif len(pairs) < 4:
            pairs.append((store.fork(), (keys, values)))
        else:
            pairs.pop(choose.randrange(len(pairs)))
            continue
        pairs[place] = store, (keys, values)
        for held, wanted in pairs:
            _check_reads(held, wanted, choose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back_in_the_models_dtype(dtype: torch.dtype) -> None:
    codec, tokens = HiggsCodec(3, 16), _tokens(2, 100, dtype=dtype)
    store, loaded = _filled(bits=3, dtype=dtype), QuantizedStore(DeviceMemory(CPU), 3)
    loaded.load_state_dict(store.state_dict(), CPU)
    ids = torch.arange(100, dtype=torch.int32).expand(2, HEADS, 1, -1).contiguous()
    # Two decodings of the same bytes may round to neighbours.
    unit = ERROR if dtype == torch.float32 else torch.finfo(dtype).eps
    for held in (store, loaded, store.fork(), loaded.fork()):
        ((_, keys, values),) = held.chunks()
        gathered = [part[:, :, 0] for part in held.gather(ids)]
        for got in ((keys, values), gathered):
            for part, wanted in zip(got, _through_codec(tokens, codec), strict=True):
                torch.testing.assert_close(part, wanted, atol=ERROR, rtol=unit)


def test_the_more_bits_the_nearer_to_the_keys() -> None:
    tokens = _tokens(2, 100)
    errors = []
    for bits in (2, 3, 4):
        ((_, keys, values),) = _filled(bits=bits).chunks()
        got, wanted = torch.cat([keys, values]), torch.cat(tokens)
        errors.append(float((got - wanted).square().sum() / wanted.square().sum()))
    # What the grids lose on normal numbers, roughly: groups of 16 are few to look normal.
    assert errors == pytest.approx([0.1075, 0.0296, 0.0077], rel=0.25)


@pytest.mark.parametrize("bits", [2, 4])
def test_no_ids_and_ids_of_nothing_give_no_attention(bits: int) -> None:
    store = _filled(bits=bits)
    query = torch.randn(2, HEADS * GROUP, 3, 16)
    for count in (0, 4):
        ids = torch.full((2, HEADS, 3, count), -1, dtype=torch.int32)
        out, lse = store.attend(query, ids, SCALE)
        assert torch.equal(out, torch.zeros(2, HEADS * GROUP, 3, 16))
        assert torch.equal(lse, torch.full((2, HEADS * GROUP, 3), float("-inf")))
        for part in store.gather(ids):
            assert part.shape == (2, HEADS, 3, count, 16) and not part.any()


@pytest.mark.parametrize("dims", [*DIMS, (128, 128, 128), (128, 64, 64)], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_are_codes_and_a_scale_for_each_group(dims: tuple[int, int, int], bits: int) -> None:
    numbers, group = dims[0] + dims[1], dims[2]
    row = numbers * bits / 8 + numbers / group * 2
    # 100 tokens are two pages of 64 for each of two batch rows.
    rows, table = 2 * 2 * HEADS * PAGE * row, 2 * 2 * 4
    on_device = _filled(bits=bits, memory=DeviceMemory, dims=dims[:2])
    assert (on_device.nbytes(), on_device.host_nbytes()) == (rows + table, 0)
    on_host = _filled(bits=bits, memory=HostMemory, dims=dims[:2])
    assert (on_host.nbytes(), on_host.host_nbytes()) == (rows + table, rows)
    assert on_host.row_nbytes(numbers * 4) == on_host.fork().row_nbytes(numbers * 4) == row
    held = on_host.state_dict()
    assert held["codes"].nbytes + held["scales"].nbytes == 2 * HEADS * 100 * row
    assert (on_device.bus_share, on_host.bus_share) == (0.0, 1.0)


def test_dims_that_no_group_divides_are_refused() -> None:
    for dims in ((20, 16), (16, 12), (4, 4)):
        store = QuantizedStore(DeviceMemory(CPU), 4)
        words = rf"heads of {dims[0]} and {dims[1]} numbers: .* that 8 divides; use store='device'"
        with pytest.raises(ValueError, match=words):
            store.append(TokenBlock(*_tokens(1, 3, dims), start=0))


def test_coded_rows_are_loaded_as_they_are_on_the_device_and_on_the_host() -> None:
    for saved, fresh in ((PoisonedDevice, PoisonedHost), (PoisonedHost, PoisonedDevice)):
        state, loaded = _filled(memory=saved).state_dict(), QuantizedStore(fresh(CPU), 4)
        loaded.load_state_dict(state, CPU)
        again = loaded.state_dict()
        assert again.keys() == state.keys()
        for name, part in state.items():
            assert again[name].dtype == part.dtype and torch.equal(again[name], part)


def test_coded_rows_of_other_bits_are_refused() -> None:
    state = _filled(bits=4).state_dict()
    with pytest.raises(ValueError, match="saved with rows of 4 bits, not bits=2"):
        QuantizedStore(DeviceMemory(CPU), 2).load_state_dict(state, CPU)


def test_other_stores_refuse_coded_rows() -> None:
    state = _filled().state_dict()
    for store in (PagedStore(DeviceMemory(CPU)), ResidentStore(CPU, 1.0), CpuStore(CPU)):
        with pytest.raises(ValueError, match="saved with coded rows, which other stores can't"):
            store.load_state_dict(state, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rows_are_coded_when_they_are_loaded(dtype: torch.dtype) -> None:
    plain = PagedStore(DeviceMemory(CPU))
    plain.append(TokenBlock(*_tokens(2, 100, dtype=dtype), start=0))
    loaded = QuantizedStore(PoisonedHost(CPU), 4)
    loaded.load_state_dict(plain.state_dict(), CPU)
    for name, part in _filled(dtype=dtype).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], part)


def test_a_block_out_of_order_is_refused() -> None:
    store = _filled(5)
    with pytest.raises(ValueError, match="block starts at slot 6, the store ends at 5"):
        store.append(TokenBlock(*_tokens(2, 1), start=6))


def test_an_empty_store_says_so() -> None:
    store = QuantizedStore(DeviceMemory(CPU), 4)
    store.append(TokenBlock(*_tokens(2, 0), start=0))
    assert len(store) == 0 and list(store.chunks()) == [] and store.state_dict() == {}
    assert store.nbytes() == store.host_nbytes() == 0 and store.row_nbytes(128) == 128
    with pytest.raises(RuntimeError, match="append first"):
        store.gather(torch.zeros(1, 1, 1, 1, dtype=torch.int32))


def test_an_empty_store_cannot_be_attended_to() -> None:
    store = QuantizedStore(DeviceMemory(torch.device("cpu")), 4)
    ids = torch.full((1, 1, 1, 2), -1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="the store is empty: append first"):
        store.attend(torch.zeros(1, 1, 1, 16), ids, 1.0)
