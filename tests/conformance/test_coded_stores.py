"""Methods x coded stores: what is lost is what the codec loses of each row, and nothing else.

A coded store runs beside a plain one whose rows went through the codec when they were appended;
whatever the cache reads, both must give. Two runs, one with each, would not do: rounding errors of
attention reach the next layer's keys, and where one of those lies between two codes, it is rounded
to another in one of the runs. With 16 bits the outcome is that of full attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hf_kvret import FlatKVCache, RetrievalCache, TokenBlock, attach, registered_methods
from hf_kvret.contracts.state import part
from hf_kvret.contracts.store import FirstRows
from hf_kvret.stores import PagedStore, QuantizedStore, Store
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing import (
    COVERING_OPTIONS,
    LOGIT_TOLERANCE,
    MODELS,
    MODES,
    Case,
    reads_cold_rows,
)
from hf_kvret.testing.conformance import baseline_of, first_difference
from hf_kvret_kernels.higgs import HiggsCodec

from .cases import TELLING_MODES, ArtifactOptions, can_go_back, check_case

METHODS = ("flat", "paris", "lrqk", "ctkvr", "a2ats")
STORES = ("higgs", "higgs-host")
# Unlike models, and the group of each: the largest power of two that divides their heads' dim.
GROUPS = {"llama": 16, "gemma2": 16, "gpt_oss": 16, "qwen3_next": 16, "qwen3": 8}
# fp32 sums over up to 150 tokens in another order, logits up to about 10.
ERROR = 5e-5

Pair = tuple[torch.Tensor, torch.Tensor]


class CheckedStore(Store):
    """``coded``, and beside it a plain store of rows that went through ``codec``."""

    coded: QuantizedStore = part(key="")
    plain: Store = part(saved=False)

    def __init__(self, coded: QuantizedStore, plain: Store, codec: HiggsCodec) -> None:
        self.coded, self.plain, self.codec = coded, plain, codec

    def __len__(self) -> int:
        assert len(self.coded) == len(self.plain)
        return len(self.coded)

    def append(self, block: TokenBlock) -> None:
        before = self.coded.coded_rows().key_mean if len(self.coded) else None
        self.coded.append(block)
        mean = self.coded.coded_rows().key_mean
        assert mean is not None
        if before is not None and not torch.equal(before, mean):
            # The first tokens of a sequence of padding came, which now reads as something else.
            assert block.valid is not None and not before[~(before == mean).all((1, 2))].any()
            chunks, self.plain = list(self.plain.chunks()), PagedStore(DeviceMemory(mean.device))
            for start, keys, values in chunks:
                keys = keys + (mean - before)[:, :, None].to(keys.dtype)
                self.plain.append(TokenBlock(keys, values, start))
        mean = mean[:, :, None]
        keys, values = (
            self.codec.decode(*self.codec.encode(tensor))
            for tensor in (block.keys.float() - mean, block.values)
        )
        keys, values = (keys + mean).to(block.keys.dtype), values.to(block.values.dtype)
        self.plain.append(TokenBlock(keys, values, block.start, block.valid))

    def begin(self, *arguments: Any) -> Callable[[], Pair]:
        both = self.coded.begin(*arguments)(), self.plain.begin(*arguments)()
        return lambda: _same(*both)

    def scores(self, *arguments: Any) -> torch.Tensor:
        return _same((self.coded.scores(*arguments),), (self.plain.scores(*arguments),))[0]

    def gather(self, ids: torch.Tensor) -> Pair:
        return _same(self.coded.gather(ids), self.plain.gather(ids))

    def chunks(
        self, chunk_len: int = 4096, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for coded, plain in zip(
            self.coded.chunks(chunk_len, stop), self.plain.chunks(chunk_len, stop), strict=True
        ):
            assert coded[0] == plain[0]
            yield coded[0], *_same(coded[1:], plain[1:])


def _same(coded: Any, plain: Any) -> Any:
    for one, other in zip(coded, plain, strict=True):
        torch.testing.assert_close(one, other, atol=ERROR, rtol=ERROR)
    return coded


def _checked_cache(method: str, codec: HiggsCodec) -> type[RetrievalCache]:
    """The cache of ``method``, whose stores are checked."""
    cache_class: Any = registered_methods()[method]

    class CheckedCache(cache_class):
        @classmethod
        def make_store(cls, options: Any, layer: int, stores: Any, first: FirstRows) -> Store:
            coded = super().make_store(options, layer, stores, first)
            assert isinstance(coded, QuantizedStore)
            return CheckedStore(coded, PagedStore(DeviceMemory(first.device)), codec)

    return CheckedCache


@pytest.mark.allowed(when=can_go_back, meet=[("store", "bits"), ("mode", "store")])
@pytest.mark.factor("bits", [2, 4])
@pytest.mark.factor("store", STORES)
@pytest.mark.factor("method", METHODS)
@pytest.mark.factor("mode", TELLING_MODES)
@pytest.mark.factor("model", GROUPS)
def test_reads_what_went_through_the_codec(
    model: str, mode: str, method: str, store: str, bits: int, artifact_options: ArtifactOptions
) -> None:
    full = baseline_of(Case(model, mode))
    if isinstance(full, str):
        pytest.skip(full)
    built, run = MODELS[model].build(), MODES[mode]
    if run.direct:
        attach(built)
    cache_class = _checked_cache(method, HiggsCodec(bits, GROUPS[model]))
    options = {**COVERING_OPTIONS, **artifact_options(method, model), "store": store, "bits": bits}
    outcome = run.run(built, lambda: cache_class(built.config, **options))
    assert any(map(reads_cold_rows, outcome.caches))
    difference = first_difference(outcome, full, LOGIT_TOLERANCE)
    assert difference is not None, "rows of few bits that change nothing were not read"


@pytest.mark.parametrize(
    ("mode", "store"), [("beams_ragged", "higgs"), ("crop_deep", "higgs-host")]
)
def test_with_16_bits_it_is_full_attention(mode: str, store: str) -> None:
    check_case(FlatKVCache, "llama", mode, store, {"bits": 16}, ())
