"""No store reads a row for an id of no token, whatever was done to it before."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hf_kvret import (
    TokenBlock,
)
from hf_kvret.contracts.store import Store
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.stores import STORES
from hf_kvret_kernels._dispatch import interpreted, prefer
from hf_kvret_kernels.ids import WrongIdError

CPU = torch.device("cpu")
DIM, MOST = 16, 2**31 - 1


def grown(name: str, length: int) -> Store:
    """A store that held more tokens and was cropped, and grew since; its pages have 64 tokens."""
    store = STORES[name](CPU, FlatConfig(slots=2.0))
    extend(store, 100)
    ids = torch.arange(8, dtype=torch.int32).expand(2, 2, 1, 8).contiguous()
    store.attend(torch.randn(2, 4, 1, DIM), ids, 0.3)
    store.crop(length - 5)
    extend(store, 2)
    store.attend(torch.randn(2, 4, 1, DIM), ids, 0.3)
    extend(store, 3)
    return store


def extend(store: Store, count: int) -> None:
    rows = torch.randn(2, 2, count, DIM), torch.randn(2, 2, count, DIM)
    store.append(TokenBlock(*rows, len(store)))


def ids_with(wrong: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[2, 2, 1, 8]``, one of them wrong, and the same with -1 there."""
    ids = torch.randint(0, 40, (2, 2, 1, 8), dtype=torch.int32)
    ids[1, 0, 0, 3], holes = wrong, ids.clone()
    holes[1, 0, 0, 3] = -1
    return ids, holes


def all_reads(store: Store, ids: torch.Tensor) -> list[torch.Tensor]:
    query = torch.full((2, 4, 1, DIM), 0.1)
    return [*store.attend(query, ids, 0.3), store.scores(query, ids, 0.3), *store.gather(ids)]


@pytest.mark.factor("name", list(STORES))
@pytest.mark.factor("wrong", [0, 1, MOST, -2, -MOST - 1])
@pytest.mark.factor("length", [64, 70])
def test_it_is_refused(name: str, length: int, wrong: int) -> None:
    """The last page is full, or it is not."""
    store = grown(name, length)
    wrong = length + wrong if wrong in (0, 1) else wrong
    ids, holes = ids_with(wrong)
    query = torch.randn(2, 4, 1, DIM)
    all_reads(store, holes)
    for each in (store, store.fork()):
        for read in (
            lambda store=each: store.attend(query, ids, 0.3),
            lambda store=each: store.scores(query, ids, 0.3),
            lambda store=each: store.best(query, ids, 2, 0.3),
            lambda store=each: store.gather(ids),
        ):
            with pytest.raises(WrongIdError, match=f"id {wrong} of {length} tokens"):
                read()


@pytest.mark.skipif(not interpreted(), reason="Triton runs on the CPU in its interpreter only")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["device", "resident", "higgs"])
def test_triton_reads_nothing_for_it(name: str) -> None:
    ids, holes = ids_with(70)
    ids[0, 0, 0, 2:5], holes[0, 0, 0, 2:5] = torch.tensor([71, MOST, -2], dtype=torch.int32), -1
    store = grown(name, 70)
    with prefer("triton"):
        for got, wanted in zip(all_reads(store, ids), all_reads(store, holes), strict=True):
            assert torch.equal(got, wanted)
