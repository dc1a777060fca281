"""The first cache on a GPU says once on a machine that there is a self-test."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from hf_kvret import FlatKVCache
from hf_kvret.observe import hints

from ..replay.steps import small_llama


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that uses a GPU, and a home without any mark; returns the folder of marks."""
    hints._suggest.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X9 80GB")
    return tmp_path / "hf_kvret"


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "selftest" in record.message]


def test_the_first_cache_of_a_machine_says_it_and_no_other(
    gpu: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    config = small_llama().config
    for _ in range(2):
        FlatKVCache(config)
    (message,) = messages(caplog)
    assert "NVIDIA X9 80GB" in message and "hf-kvret selftest --device cuda" in message
    assert [file.name for file in gpu.iterdir()] == [f"selftest-{hints.__version__}-NVIDIA-X9-80GB"]
    # Another process finds the mark.
    hints._suggest.cache_clear()
    FlatKVCache(config)
    assert len(messages(caplog)) == 1


def test_where_no_mark_can_be_written_each_process_says_it_once(
    gpu: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.write_text("a file")
    for _ in range(2):
        hints.suggest_selftest()
    assert len(messages(caplog)) == 1


def test_without_a_gpu_nothing_is_said_or_written(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    hints.suggest_selftest()
    assert not messages(caplog) and not gpu.exists()
