"""Exact attention over all tokens of a layer, against softmax in float64."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from hf_kvret.contracts.index import Scoring
from hf_kvret.contracts.store import RowChunks
from hf_kvret.layer import exact_attention
from hf_kvret.layer.exact_attention import attend_cold, attend_dense, attend_exactly
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall, Heads
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory

from .driver import full_attention

BATCH, HEADS, GROUP, DIM, PAST, NEW = 2, 2, 2, 8, 60, 9
SCALE = 0.6
# fp32 sums of some tens of tokens; values are around 1.
ERROR = 2e-6


def draw(seed: int, heads: int, count: int) -> torch.Tensor:
    return torch.randn(BATCH, heads, count, DIM, generator=torch.Generator().manual_seed(seed))


def filled(
    valid: torch.Tensor | None, kind: Callable[..., PagedStore] = PagedStore
) -> tuple[LayerKV, torch.Tensor, torch.Tensor]:
    """LayerKV with cold tokens, a sink among them, and recent ones; their keys and values."""
    keys, values = draw(1, HEADS, PAST), draw(2, HEADS, PAST)
    config = FlatConfig(top_k=4, sink=2, recent=8, flush=4, max_draft=4, dense_below=0)
    kv = LayerKV(config, FlatIndex(), lambda first: kind(DeviceMemory(first.device)), keys, values)
    kv.take_prompt(keys, values, None if valid is None else valid[:, :PAST])
    assert kv.cold_len == PAST - 8
    return kv, keys, values


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_new_tokens_attend_to_all_before_them_and_to_each_other(
    softcap: float | None, sinks: torch.Tensor | None, padded: bool
) -> None:
    valid = torch.ones(BATCH, PAST + NEW, dtype=torch.bool)
    valid[1, :7] = False
    scoring = Scoring(valid if padded else None, SCALE, softcap)
    kv, keys, values = filled(scoring.valid)
    new_keys, new_values, query = draw(3, HEADS, NEW), draw(4, HEADS, NEW), draw(5, 4, NEW)
    call = AttentionCall(scoring, lambda: query, sinks)
    # As a layer does, which then attends to what was there before.
    kv.take_prompt(new_keys, new_values, scoring.valid)
    out = attend_exactly(kv, query, new_keys, new_values, PAST, call)
    wanted = full_attention(
        query,
        torch.cat([keys, new_keys], dim=2),
        torch.cat([values, new_values], dim=2),
        scoring,
        sinks,
    )
    assert out.dtype == torch.float32 and out.shape == wanted.shape
    assert (out - wanted).abs().max() < ERROR


class Making(Heads):
    """Makes keys and values of rows, as latent attention does, and notes of how many at once."""

    makes_rows = True
    lengths: list[int]

    def expand(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.lengths.append(keys.shape[2])
        return 2 * keys, 3 * values


@pytest.mark.parametrize("padded", [False, True])
def test_a_long_window_is_made_in_chunks(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dense cache, whose window holds all tokens; a chunk is hidden as a whole."""
    monkeypatch.setattr(exact_attention, "chunk_len", lambda *_: 16)
    valid = torch.ones(BATCH, PAST + NEW, dtype=torch.bool)
    valid[1, :20] = False
    scoring = Scoring(valid if padded else None, SCALE)
    keys, values = draw(1, HEADS, PAST), draw(2, HEADS, PAST)
    config = FlatConfig(sink=2, recent=8, flush=4, dense_below=10_000)
    kv = LayerKV(config, None, pytest.fail, keys, values)
    kv.take_prompt(keys, values, None if scoring.valid is None else valid[:, :PAST])
    new_keys, new_values, query = draw(3, HEADS, NEW), draw(4, HEADS, NEW), draw(5, 4, NEW)
    kv.take_prompt(new_keys, new_values, scoring.valid)
    heads = Making()
    heads.lengths = []
    call = AttentionCall(scoring, lambda: query, heads=heads)
    out = attend_exactly(kv, query, new_keys, new_values, PAST, call)
    # The new tokens' own, then those of the window, sinks included.
    assert heads.lengths[0] == NEW and max(heads.lengths[1:]) == 16
    assert sum(heads.lengths[1:]) >= PAST
    made = 2 * torch.cat([keys, new_keys], dim=2), 3 * torch.cat([values, new_values], dim=2)
    assert (out - full_attention(query, *made, scoring)).abs().max() < 3 * ERROR


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_cold_tokens_in_chunks_are_one_softmax(softcap: float | None) -> None:
    kv, keys, values = filled(None, partial(Faulty, ""))
    cold = kv.cold(Scoring(None, SCALE, softcap))
    assert cold is not None and not cold.valid.all(), "sinks are in the window"
    query, rows = draw(5, 4, 1), [x[:, :, : len(cold)] for x in (keys, values)]
    out, lse = attend_cold(query, cold, 1000)
    # The only query comes after all of them; sinks are hidden by their validity.
    assert (out - full_attention(query, *rows, cold.scoring)).abs().max() < ERROR
    assert (lse - attend_dense(query, *rows, cold.scoring)[1]).abs().max() < ERROR


class Faulty(PagedStore):
    """A store of a user's own with short ``chunks``, which may give other tokens than it holds."""

    def __init__(self, fault: str, memory: DeviceMemory) -> None:
        super().__init__(memory)
        self.fault = fault

    def host_rows(self) -> None:
        """None: its rows are read in chunks, also by few queries."""

    def chunks(self, chunk_len: int = 4096, stop: int | None = None) -> RowChunks:
        for start, keys, values in super().chunks(chunk_len, stop):
            chunks = [
                (start + at, keys[:, :, at:][:, :, :16], values[:, :, at:][:, :, :16])
                for at in range(0, keys.shape[2], 16)
            ]
            if self.fault:
                kept = {"none": [], "no end": chunks[:-1], "a gap": [chunks[0], *chunks[2:]]}
                chunks = kept[self.fault]
            yield from chunks


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("none", "0 of 52 tokens"),
        ("no end", "48 of 52 tokens"),
        ("a gap", "slot 32 where slot 16 was next"),
    ],
)
def test_a_store_that_gives_other_tokens_than_it_holds_is_named(fault: str, said: str) -> None:
    kv, _, _ = filled(None, partial(Faulty, fault))
    cold = kv.cold(Scoring(None, SCALE))
    assert cold is not None
    query, new = draw(3, HEADS * GROUP, NEW), draw(4, HEADS, NEW)
    call = AttentionCall(Scoring(None, SCALE), lambda: query)
    for read in (
        lambda: attend_cold(query, cold, 16),
        lambda: attend_exactly(kv, query, new, new, PAST, call),
        lambda: kv.rows(PAST),
    ):
        with pytest.raises(
            RuntimeError, match=rf"Faulty\.chunks\(\) gave {said}: it must give all"
        ):
            read()
