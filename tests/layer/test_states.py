"""Every state of a layer and a cache: other orders, crops, forks, saves and bytes.

Indexes and stores have suites of their own, ``test_every_index`` and ``test_every_store``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.state import State
from hf_kvret.contracts.token_buffer import TokenBuffer
from hf_kvret.layer.cold_sums import ColdSums
from hf_kvret.layer.indexed import IndexerKeys
from hf_kvret.layer.layer_kv import LayerKV, RetrievedTokens
from hf_kvret.layer.window import Window
from hf_kvret.methods.flat import FlatConfig, FlatIndex
from hf_kvret.models.kept_state import ModelState
from hf_kvret.saved.token_record import TokenRecord
from hf_kvret.stores import PagedStore, QuantizedStore
from hf_kvret.stores.memory import DeviceMemory

HEADS, DIM, TOKENS = 2, 8, 40
CONFIG = FlatConfig(sink=2, recent=5, flush=4, dense_below=0, top_k=3, max_draft=4)
KEYS, VALUES = torch.randn(2, 3, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
# The last sequence is padded on the left.
VALID = torch.arange(TOKENS) >= torch.tensor([[0], [0], [9]])


class Case(NamedTuple):
    """A kind of state.

    Attributes:
        make: an empty one, for so many sequences.
        fill: gives it tokens of some of the three sequences.
    """

    make: Callable[[int], State]
    fill: Callable[[Any, list[int]], None]


def fill_window(window: Window, rows: list[int]) -> None:
    window.append(KEYS[rows, :, :20], VALUES[rows, :, :20])
    window.take_sinks(window.pop(14, VALID[rows]))


def fill_kv(kv: LayerKV, rows: list[int]) -> None:
    for first, last in ((0, 30), (30, 40)):
        tokens = KEYS[rows, :, first:last], VALUES[rows, :, first:last]
        positions = torch.arange(first, last).expand(len(rows), -1)
        kv.on_forward(tokens[0], tokens[0], VALID[rows], positions)
        kv.take_prompt(*tokens, VALID[rows])


def fill_indexer(indexer: IndexerKeys, rows: list[int]) -> None:
    indexer.keys.put(KEYS[rows, :1], 0)
    indexer.positions = torch.arange(3 * TOKENS).view(1, 3, TOKENS)[:, rows]


def fill_buffer(buffer: TokenBuffer, rows: list[int]) -> None:
    buffer.put(KEYS[rows], 4)
    buffer.drop(9)


def fill_sums(sums: ColdSums, rows: list[int]) -> None:
    for first, last in ((0, 30), (30, TOKENS)):
        tokens = KEYS[rows, :, first:last], VALUES[rows, :, first:last]
        sums.add(TokenBlock(*tokens, first, VALID[rows, first:last]))


def make_kv(
    batch: int, store: Callable[[Any], Any] = PagedStore, positions: str = "", **options: Any
) -> LayerKV:
    like, config = KEYS[:1].expand(batch, -1, -1, -1), CONFIG.replace(**options)
    return LayerKV(config, FlatIndex(), lambda _: store(memory()), like, like, positions)


memory = partial(DeviceMemory, torch.device("cpu"))
CASES = {
    "window": Case(lambda n: Window(2, KEYS[[0] * n], VALUES[[0] * n]), fill_window),
    "layer": Case(make_kv, fill_kv),
    "positions": Case(partial(make_kv, positions="this store needs them"), fill_kv),
    "coded": Case(partial(make_kv, store=partial(QuantizedStore, bits=4)), fill_kv),
    "means": Case(partial(make_kv, rest="mean"), fill_kv),
    "sums": Case(lambda n: ColdSums(DIM, DIM), fill_sums),
    "indexer": Case(lambda n: IndexerKeys(), fill_indexer),
    "retrieved": Case(
        lambda n: RetrievedTokens(), lambda state, rows: state.add([(8, 16), (16, 30)])
    ),
    "tokens": Case(
        lambda n: TokenRecord(), lambda state, rows: state.write(100 * VALID[rows].long(), 0)
    ),
    "model": Case(
        lambda n: ModelState(),
        lambda state, rows: state.record(
            {"rope_deltas": torch.tensor(rows)[:, None]}, 0, TOKENS, len(rows), None
        ),
    ),
    "buffer": Case(lambda n: TokenBuffer(), fill_buffer),
}
# A window alone can't give back what went to a store.
CROPPED = [name for name in CASES if name != "window"]


def filled(name: str, rows: list[int]) -> Any:
    state = CASES[name].make(len(rows))
    CASES[name].fill(state, rows)
    return state


def content(state: State) -> dict[str, list[float]]:
    return {name: x.tolist() for name, x in state.state_dict().items()}


@pytest.mark.parametrize("rows", [[1, 1, 0], [1], [0, 1, 2]])
@pytest.mark.parametrize("name", [name for name in CASES if name != "coded"])
def test_reordered_is_to_hold_other_sequences(name: str, rows: list[int]) -> None:
    state = filled(name, [0, 1, 2])
    state.reorder(torch.tensor(rows))
    assert content(state) == content(filled(name, rows))


@pytest.mark.parametrize("name", CASES)
def test_forks_of_forks_share_no_change(name: str) -> None:
    state = filled(name, [0, 2])
    before, fork = content(state), state.fork()
    grandchild = fork.fork()
    fork.reorder(torch.tensor([1, 1]))
    fork.crop(3)
    state.reorder(torch.tensor([1, 0]))
    assert content(grandchild) == before
    state.reorder(torch.tensor([1, 0]))
    assert content(state) == before


@pytest.mark.parametrize("name", CROPPED)
def test_cropped_to_nothing_is_as_new(name: str) -> None:
    state = filled(name, [0, 2])
    before = content(state)
    state.crop(TOKENS - 1)
    state.crop(0)
    CASES[name].fill(state, [0, 2])
    assert content(state) == before


@pytest.mark.parametrize("name", CASES)
def test_a_saved_state_comes_back_twice_over(name: str) -> None:
    state, loaded, again = filled(name, [0, 2]), *(CASES[name].make(2) for _ in range(2))
    loaded.load_state_dict(state.state_dict(), torch.device("cpu"))
    again.load_state_dict(loaded.state_dict(), torch.device("cpu"))
    assert content(loaded) == content(again) == content(state)
    loaded.crop(3)
    assert content(again) == content(state), "not the same memory"


@pytest.mark.parametrize("name", CASES)
def test_bytes_cover_all_that_is_saved(name: str) -> None:
    state = filled(name, [0, 2])
    rows = [x for x in state.state_dict().values() if x.ndim > 2]
    assert state.nbytes() >= sum(x.nbytes for x in rows)
