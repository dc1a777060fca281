"""Where the C++ kernels are missing, the first cache of a process says so, and no other does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_kvret import FlatKVCache
from hf_kvret import cache as cache_module
from hf_kvret.testing import MODELS
from hf_kvret_kernels import host_library

CONFIG = MODELS["llama"].config()


@pytest.fixture(autouse=True)
def first_cache() -> Iterator[None]:
    """As in a process that has made none."""
    cache_module._log_missing_kernels.cache_clear()
    yield
    cache_module._log_missing_kernels.cache_clear()


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(host_library.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(host_library, "_places", lambda: iter([tmp_path / "none.so"]))
    host_library._open.cache_clear()
    yield
    host_library._open.cache_clear()


def warnings_of(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """What ``count`` caches log one after the other."""
    with caplog.at_level(logging.WARNING, logger="hf_kvret"):
        for _ in range(count):
            FlatKVCache(CONFIG)
    return [record.getMessage() for record in caplog.records]


def test_a_missing_compiler_is_told_once_with_its_cost_and_the_remedy(
    no_library: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    [message] = warnings_of(caplog, 3)
    assert "2 to 6 times as long" in message
    assert message.endswith("Install one (GCC or Clang) and install hf_kvret again")
    assert "\n" not in message


def test_nothing_is_told_where_a_gpu_does_the_work(
    no_library: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert warnings_of(caplog, 2) == []


def test_nothing_is_told_where_the_kernels_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cache_module.host_attention, "why_not", lambda: "")
    assert warnings_of(caplog, 2) == []
