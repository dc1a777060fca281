"""What ``store="auto"`` chooses, and the host memory that is free, by files of the system."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.methods.aqua import AquaConfig
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.stores import placement
from hf_kvret.stores.placement import choose, free_host_bytes
from hf_kvret.testing.scenario import prompt

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SMALL: dict[str, Any] = {"top_k": 20, "sink": 2, "recent": 8, "flush": 4, "dense_below": 0}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
# Keys and values of 2 layers, 2 heads and 16 numbers, in fp32.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets how many KiB of host memory are free, and how many bytes of the GPU's."""
    monkeypatch.setattr(placement, "ROOT", tmp_path)
    (tmp_path / "proc").mkdir()

    def set_free(host_kib: int, gpu: int = 0) -> None:
        lines = f"MemTotal: 9999999 kB\nMemAvailable: {host_kib} kB\n"
        (tmp_path / "proc" / "meminfo").write_text(lines)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu, 10**12))

    return set_free


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [each for each in caplog.records if each.name == "hf_kvret.stores.placement"]
    assert all(each.levelno == logging.WARNING for each in records)
    return [each.getMessage() for each in records]


@pytest.mark.parametrize(
    ("device", "rows", "store", "fits"),
    [
        *((CPU, 1 << 19, "device", True), (CPU, (1 << 19) + 1, "device", False)),
        *((GPU, 250, "device", True), (GPU, 251, "host", True)),
        *((GPU, 800 * 1024, "host", True), (GPU, 900 * 1024, "host", False)),
    ],
)
def test_rows_go_to_the_first_memory_with_room(
    free: Any, caplog: Any, device: torch.device, rows: int, store: str, fits: bool
) -> None:
    free(1000 if device == GPU else 1024, 1000)
    assert choose(device, rows, ParisConfig())[0] == store
    assert len(warnings_of(caplog)) == (not fits)


@pytest.mark.parametrize(
    ("device", "options", "coded"),
    [
        (CPU, FlatConfig(), "pass store='higgs'"),
        (GPU, FlatConfig(), "pass store='higgs-host'"),
        (CPU, AquaConfig(predictor="none"), ""),
    ],
)
def test_rows_without_room_are_told_with_remedies(
    free: Any, caplog: pytest.LogCaptureFixture, device: torch.device, options: Any, coded: str
) -> None:
    free(1024)
    choose(device, 2**30, options)
    (message,) = warnings_of(caplog)
    for words in ("too little memory", "shorter prompt", "batch", "max_new_tokens", coded):
        assert words in message
    assert ("higgs" in message) == bool(coded)


def test_where_free_memory_is_unknown_rows_go_to_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "ROOT", tmp_path)
    assert free_host_bytes() is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9999999 kB\n")
    assert free_host_bytes() is None
    chosen = choose(CPU, 2**60, FlatConfig())
    assert chosen == ("device", "device: how much memory is free is unknown here")
    assert choose(torch.device("mps"), 2**60, FlatConfig())[0] == "device"
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("line", "group", "limit", "used", "cached"),
    [
        ("0::/", "", "max", "current", "inactive_file"),
        ("0::/slurm/job", "slurm", "max", "current", "inactive_file"),
        (
            "4:cpu,memory:/ab",
            "cpu,memory",
            "limit_in_bytes",
            "usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_the_limit_of_a_container_counts(
    free: Any, tmp_path: Path, line: str, group: str, limit: str, used: str, cached: str
) -> None:
    """A container's own group is the root that it sees; page cache that is idle is free."""
    free(10_000)
    (tmp_path / "proc" / "self").mkdir()
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"3:cpuset:/\n{line}\n")
    folder = tmp_path / "sys" / "fs" / "cgroup" / group
    folder.mkdir(parents=True)
    (folder / "memory.stat").write_text(f"anon 1\nactive_file 3000\n{cached} 2000\n")
    (folder / f"memory.{used}").write_text("65000\n")
    left = {"100000": 40_000, "60001": 1, "50000": 0, "max": 10_240_000, f"{2**63}": 10_240_000}
    for written, bytes_left in left.items():
        (folder / f"memory.{limit}").write_text(f"{written}\n")
        assert free_host_bytes() == bytes_left
    free(1)
    assert free_host_bytes() == 1024


def test_a_cache_decides_once_for_all_rows_to_come(
    llama: PreTrainedModel, free: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte of the rows decides; 12 tokens are generated, 8 stay recent."""
    ids = prompt(1, 396)
    rows = (396 + 12 - 8) * TOKEN_BYTES
    for kib, warnings in ((2 * rows // 1024, 0), (2 * rows // 1024 - 1, 1)):
        free(kib)
        cache = FlatKVCache(llama.config, **SMALL)
        llama.generate(ids, past_key_values=cache, **GREEDY)
        stats = cache.stats()
        assert stats["store"] == "device"
        assert stats["store_reason"].startswith("device: 0.205 MB of rows")
        assert "of free memory" in stats["store_reason"]
        assert len(warnings_of(caplog)) == warnings
    named = FlatKVCache(llama.config, store="device", **SMALL)
    llama.generate(ids, past_key_values=named, **GREEDY)
    assert named.stats()["store_reason"] is None
