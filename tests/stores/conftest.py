"""A model, and host memory that tests set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.stores import free_memory
from hf_kvret.testing import MODELS


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return MODELS["llama"].build()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets how many KiB of host memory are free, and how many bytes of the GPU's."""
    folder = tmp_path / "proc"
    folder.mkdir()
    monkeypatch.setattr(free_memory, "PROC", folder)
    monkeypatch.setattr(free_memory, "CGROUPS", folder / "none")

    def set_free(host_kib: int, gpu: int = 0) -> None:
        (folder / "meminfo").write_text(f"MemAvailable: {host_kib} kB\n")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu, 10**12))

    return set_free
