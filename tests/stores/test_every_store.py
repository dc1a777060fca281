"""Every store against dense rows: appends, page edges, crops, reorders, forks, loads and reads."""

import random
from collections.abc import Callable
from functools import partial
from tempfile import gettempdir
from typing import NamedTuple

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.methods.aqua import AquaConfig, AquaStore
from hf_kvret.methods.aqua.config import layer_plan
from hf_kvret.stores import CpuStore, DiskStore, PagedStore, QuantizedStore, ResidentStore, Store
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_kernels.ids import WrongIdError

from .rows import CPU, GROUP, HEADS, SCALE, Rows, attention, draw, draw_ids, gathered, poisoned

# fp32 sums of some tens of products, in another order; also of rows that are decoded one by one.
ERROR = 2e-5


class Case(NamedTuple):
    """A store, and what is done to it.

    Attributes:
        make: an empty one.
        dims: of keys and values.
        code: ``(rows, mean key of the first block)`` to rows that went through its codec, once;
            None: rows are plain.
        most: tokens of an append.
        steps: of the test.
        most_ids: of a query.
        value_in_key: elements of a key that are its value; 0: values are apart.
    """

    make: Callable[[], Store]
    dims: tuple[int, int] = (4, 6)
    code: Callable[[Rows, torch.Tensor], Rows] | None = None
    most: int = 9
    steps: int = 160
    most_ids: int = 10**6
    value_in_key: int = 0


PLAIN = {"device": poisoned(DeviceMemory, float("nan")), "host": poisoned(HostMemory, float("nan"))}
# Bytes of codes whose scales are NaN.
CODED = {"device": poisoned(DeviceMemory, 255), "host": poisoned(HostMemory, 255)}
# (key dim, value dim, group): powers of two, other dims, dims that only 8 divides.
DIMS = [(16, 16, 16), (32, 48, 16), (24, 40, 8)]


def coded(codec: HiggsCodec, rows: Rows, mean: torch.Tensor | None = None) -> Rows:
    """Rows that went through the codec, keys around a ``mean``; None: around their own."""
    keys, values = rows
    mean = keys.mean(2, keepdim=True, dtype=torch.float32) if mean is None else mean
    near = codec.decode(*codec.encode(keys.float() - mean)) + mean
    return near.to(keys.dtype), codec.decode(*codec.encode(values), values.dtype)


def coded_together(rows: Rows, mean: torch.Tensor) -> Rows:
    """Rows in 3 bits, all heads of a token together, in groups as large as may be; no mean."""
    flat = [x.transpose(1, 2).flatten(2) for x in rows]
    codecs = [HiggsCodec(3, x.shape[-1] & -x.shape[-1]) for x in flat]
    decoded = [codec.decode(*codec.encode(x)) for codec, x in zip(codecs, flat, strict=True)]
    keys, values = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in decoded)
    return keys, values


def aqua(bits: int, memory: PageMemory) -> AquaStore:
    """A store of AQUA-KV without predictors."""
    return AquaStore(layer_plan(AquaConfig(predictor="none", bits=bits), 0), memory)


CASES = {
    **{name: Case(lambda make=make: PagedStore(make(CPU), 4)) for name, make in PLAIN.items()},
    "cpu": Case(lambda: CpuStore(CPU), (12, 20), most=80),
    "disk": Case(lambda: DiskStore(CPU, gettempdir()), (12, 20), most=80),
    **{
        f"resident-{slots}": Case(lambda slots=slots: ResidentStore(CPU, slots), most_ids=16)
        for slots in (1.0, 17)
    },
    **{
        f"higgs-{bits}-{name}-{group}": Case(
            lambda bits=bits, name=name: QuantizedStore(CODED[name](CPU), bits),
            dims,
            partial(coded, HiggsCodec(bits, group)),
            most=70,
            steps=40,
        )
        for (bits, name), (*dims, group) in zip(
            ((4, "device"), (2, "host"), (3, "device")), DIMS, strict=True
        )
    },
    "latent": Case(lambda: PagedStore(PLAIN["device"](CPU), 4), (12, 8), value_in_key=8),
    "latent-resident": Case(lambda: ResidentStore(CPU, 17), (12, 8), most_ids=16, value_in_key=8),
    "aqua-16": Case(lambda: aqua(16, PLAIN["host"](CPU)), most=70, steps=40),
    "aqua-3": Case(lambda: aqua(3, CODED["device"](CPU)), (24, 16), coded_together, 70, 40),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_operation_changes_what_another_sequence_or_fork_reads(name: str, seed: int) -> None:
    case, choose = CASES[name], random.Random(seed)
    pairs: list[tuple[Store, Rows]] = [(case.make(), draw(2, 0, case.dims))]
    means = [torch.zeros(0)]
    operations = ["append"] * 4 + ["crop", "reorder", "fork", "load"]
    for step in range(case.steps):
        index = choose.randrange(len(pairs))
        store, (keys, values) = pairs[index]
        operation = choose.choice(operations) if step else "append"
        if operation == "append":
            more = draw(len(keys), choose.randint(0, case.most), case.dims, seed=step)
            if case.value_in_key:
                more = more[0], more[0][..., : case.value_in_key]
            store.append(TokenBlock(*more, len(store), value_in_key=case.value_in_key))
            if case.code is not None and more[0].shape[2]:
                if not keys.shape[2]:
                    means[index] = more[0].mean(2, keepdim=True)
                more = case.code(more, means[index])
            keys, values = torch.cat([keys, more[0]], dim=2), torch.cat([values, more[1]], dim=2)
        elif operation == "crop":
            length = choose.randint(max(0, len(store) - case.most), len(store))
            store.crop(length)
            keys, values = keys[:, :, :length], values[:, :, :length]
        elif operation == "reorder":
            order = torch.tensor([choose.randrange(len(keys)) for _ in range(choose.randint(1, 3))])
            # An empty store has no rows to reorder; the cache gives it a batch with its tokens.
            store.reorder(order)
            keys, values = keys[order], values[order]
            means[index] = means[index][order] if len(means[index]) else means[index]
        elif operation == "load":
            state, store = store.state_dict(), case.make()
            store.load_state_dict(state, CPU)
        elif len(pairs) < 4:
            pairs.append((store.fork(), (keys, values)))
            means.append(means[index])
        else:
            pairs.pop(index)
            means.pop(index)
            continue
        pairs[index] = store, (keys, values)
        for each, rows in pairs:
            # A store may keep what it read: so some operations follow each other without a read.
            if choose.random() < 0.2:
                check_reads(each, rows, case, choose)


def check_reads(store: Store, rows: Rows, case: Case, choose: random.Random) -> None:
    """All reads of ``store`` give what ``rows`` give, plain ones to the bit."""
    error = 0.0 if case.code is None else ERROR
    batch, _, length, key_dim = rows[0].shape
    assert len(store) == length
    # A store that makes all rows anyway may give those behind ``stop``, too.
    stops = (None,) if case.code is coded_together else (None, choose.randint(0, length + 9))
    for stop in stops:
        end = 0
        for start, *chunk in store.chunks(choose.choice([1, 4, 9, 64, 100, 4096]), stop):
            assert start == end
            end += chunk[0].shape[2]
            for tensor, expected in zip(chunk, rows, strict=True):
                assert_close(tensor, expected[:, :, start:end], error)
        assert end == (length if stop is None else min(stop, length))
    if not length:
        return
    share, queries = choose.choice([1, GROUP]), choose.randint(1, 3)
    count = choose.randint(1, min(length, case.most_ids))
    seed = choose.randrange(10**6)
    ids = draw_ids(length, count, batch, HEADS * share, queries, seed)
    for tensor, expected in zip(store.gather(ids), gathered(rows, ids), strict=True):
        assert_close(tensor, expected, error)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, HEADS * GROUP, queries, key_dim, generator=generator)
    softcap = choose.choice([None, 5.0])
    finish = store.begin(query, ids, SCALE, softcap)
    out, lse, logits = attention(query, rows, ids, softcap)
    results = finish()
    for tensor, expected in zip(results, (out, lse), strict=True):
        assert tensor.dtype == torch.float32
        assert_close(tensor, expected, ERROR)
    assert_close(store.scores(query, ids, SCALE, softcap), logits, ERROR)
    assert_close(Store.scores(store, query, ids, SCALE, softcap), logits, ERROR)
    if share == 1:
        best = store.best(query, ids, count, SCALE, softcap)
        assert torch.equal(best, Store.best(store, query, ids, count, SCALE, softcap))
        assert torch.equal(best.sort(-1).values, ids.sort(-1).values), "all of them, best first"
    # Pages have rows behind the last token.
    wrong = choose.choice([length, 2**31 - 1, -2])
    ids[-1, -1, -1, choose.randrange(count)] = wrong
    for read in (
        lambda: store.begin(query, ids, SCALE)(),
        lambda: store.scores(query, ids, SCALE),
        lambda: store.gather(ids),
        lambda: store.best(query, ids, 1, SCALE),
    )[: 4 if share == 1 else 3]:
        with pytest.raises(WrongIdError, match=f"id {wrong} of {length} tokens"):
            read()


def assert_close(tensor: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    torch.testing.assert_close(tensor, expected, atol=error, rtol=error)


@pytest.mark.parametrize("name", ["device", "cpu", "higgs-4-device-16"])
def test_an_empty_store_and_a_block_out_of_order_are_refused(name: str) -> None:
    case = CASES[name]
    store = case.make()
    store.append(TokenBlock(*draw(2, 0, case.dims), start=0))
    assert len(store) == 0 and list(store.chunks()) == [] and store.state_dict() == {}
    assert store.nbytes() == store.host_nbytes() == 0
    ids = torch.zeros(1, HEADS, 1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="the store is empty: append first"):
        store.gather(ids)
    store.append(TokenBlock(*draw(2, 5, case.dims), start=0))
    with pytest.raises(ValueError, match="block starts at slot 6, the store ends at 5"):
        store.append(TokenBlock(*draw(2, 1, case.dims), start=6))
    store.reset()
    assert len(store) == 0 and store.row_nbytes(7) == 7, "it may take rows of other dims"
