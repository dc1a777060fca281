"""What ``store="auto"`` chooses, by the memory that is free."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.methods.aqua import AquaConfig
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.stores import STORES, free_memory
from hf_kvret.stores.placement import CODED, PLACEMENTS, Choice, choose
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL: dict[str, Any] = {"top_k": 20, "sink": 2, "recent": 8, "flush": 4, "dense_below": 0}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
# Keys and values of 2 layers, 2 heads and 16 numbers, in fp32.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return MODELS["llama"].build()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [each for each in caplog.records if each.name == "hf_kvret.stores.placement"]
    assert all(each.levelno == logging.WARNING for each in records)
    return [each.getMessage() for each in records]


def test_places_name_stores_and_the_best_first() -> None:
    for placements in PLACEMENTS.values():
        assert {placement.store for placement in placements} <= STORES.keys()
        assert all(0 < placement.share <= 1 for placement in placements)
        coded = [placement.is_coded for placement in placements]
        assert coded == sorted(coded), "what changes no answer comes first"
    with_bits = FlatConfig(store="device")
    assert {name for name in STORES if with_bits.replace(store=name).row_bits < 16} == set(CODED)


@pytest.mark.parametrize(
    ("rows", "store"), [(1 << 19, "device"), ((1 << 19) + 1, "higgs"), (9 << 20, "higgs")]
)
def test_rows_on_a_cpu_take_half_of_the_free_memory_or_are_coded(
    free: Any, caplog: pytest.LogCaptureFixture, rows: int, store: str
) -> None:
    free(1024)
    chosen = choose(CPU, rows, ParisConfig(), 64)
    assert chosen.store == store
    assert ("higgs" in chosen.reason) == (store == "higgs")
    assert len(warnings_of(caplog)) == (store == "higgs")


@pytest.mark.parametrize(
    ("rows", "store"),
    [(250, "device"), (251, "host"), (800 * 1024, "host"), (900 * 1024, "higgs-host")],
)
def test_a_gpu_has_both_memories(free: Any, rows: int, store: str) -> None:
    free(1000, 1000)
    assert choose(GPU, rows, ParisConfig(), 64).store == store


@pytest.mark.parametrize(("bits", "most"), [(2, 2 / 16 + 1 / 64), (4, 4 / 16 + 1 / 64)])
def test_coded_rows_that_do_not_fit_are_told_with_remedies(
    free: Any, caplog: pytest.LogCaptureFixture, bits: int, most: float
) -> None:
    free(1024)
    rows, options = int(512 * 1024 / most), FlatConfig(bits=bits)
    assert choose(CPU, rows - 10, options, 64).store == "higgs"
    (message,) = warnings_of(caplog)
    assert f"rows in {bits} bits" in message and "store='device'" in message
    caplog.clear()
    assert choose(CPU, rows + 10, options, 64).store == "higgs"
    (message,) = warnings_of(caplog)
    for words in ("too little memory", "'higgs'", "shorter prompt", "batch", "fewer bits"):
        assert words in message


@pytest.mark.parametrize(
    ("options", "head_dim"),
    [(FlatConfig(bits=16), 64), (FlatConfig(), 60), (AquaConfig(predictor="none"), 64)],
)
def test_rows_that_cannot_be_coded_stay_on_the_device_with_a_warning(
    free: Any, caplog: pytest.LogCaptureFixture, options: Any, head_dim: int
) -> None:
    free(1024)
    assert choose(CPU, 2**30, options, head_dim).store == "device"
    (message,) = warnings_of(caplog)
    assert "too little memory" in message and "fewer bits" not in message


def test_options_may_take_few_stores_or_none(
    free: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free(1000)
    monkeypatch.setattr(FlatConfig, "takes_store", lambda self, store: False)
    with pytest.raises(ValueError, match="store='auto' knows no store on cpu"):
        choose(CPU, 1, FlatConfig(), 16)
    monkeypatch.setattr(FlatConfig, "takes_store", lambda self, store: store == "higgs")
    for number, size in enumerate((1, 1 << 30)):
        assert choose(CPU, size, FlatConfig(), 16).store == "higgs"
        assert "changes answers a little" in warnings_of(caplog)[number]


def test_where_free_memory_is_unknown_rows_stay_as_they_are(
    free: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(free_memory.os, "sysconf_names", {})
    chosen = choose(CPU, 2**60, FlatConfig(), 64)
    assert chosen == Choice("device", "device: how much memory is free is unknown here")
    assert choose(torch.device("mps"), 2**60, FlatConfig(), 64).store == "device"
    assert warnings_of(caplog) == []


def test_a_cache_codes_its_rows_where_memory_is_short(
    llama: PreTrainedModel, free: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte of the rows decides; 12 tokens are generated, 8 stay recent."""
    ids = prompt(1, 396)
    rows = (396 + 12 - 8) * TOKEN_BYTES
    texts, sizes = [], []
    for kib, store in ((2 * rows // 1024, "device"), (2 * rows // 1024 - 1, "higgs")):
        free(kib)
        cache = FlatKVCache(llama.config, **SMALL)
        texts.append(llama.generate(ids, past_key_values=cache, **GREEDY))
        stats = cache.stats()
        assert stats["store"] == store
        assert "of free memory" in stats["store_reason"]
        assert stats["store_reason"].startswith("device: 0.205 MB of rows")
        sizes.append(cache.memory().store_device)
        named = FlatKVCache(llama.config, store=store, **SMALL)
        assert torch.equal(llama.generate(ids, past_key_values=named, **GREEDY), texts[-1])
        assert named.stats()["store_reason"] is None
    # fp32: 4 bits and a scale of 16 bits for 16 numbers in place of 32 bits.
    assert sizes[1] < sizes[0] / 5
    assert len(warnings_of(caplog)) == 1


def test_rows_that_auto_coded_are_loaded_where_memory_is_not_short(
    llama: PreTrainedModel, free: Any, tmp_path: Path
) -> None:
    ids = prompt(1, 300)
    free(1)
    cache = FlatKVCache(llama.config, bits=3, **SMALL)
    llama.generate(ids[:, :250], past_key_values=cache, **GREEDY | {"max_new_tokens": 1})
    assert cache.stats()["store"] == "higgs" and cache.options.store == "auto"
    cache.save_pretrained(tmp_path / "saved")
    free(10**6)
    loaded = FlatKVCache.from_pretrained(tmp_path / "saved", config=llama.config)
    assert loaded.options == cache.options.replace(store="higgs")
    texts = [llama.generate(ids, past_key_values=past, **GREEDY) for past in (cache, loaded)]
    assert torch.equal(*texts)
    host = FlatKVCache.from_pretrained(tmp_path / "saved", llama.config, store="higgs-host")
    assert host.memory().store_host > 0
