"""store="disk": rows in files without names, asked for before they are read, and full disks."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import FlatKVCache, ParisKVCache, TokenBlock
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.stores import DiskStore, disk
from hf_kvret.stores.host_memory import MEMORY_PAGE
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt

from .rows import CPU, draw

SMALL: dict[str, Any] = {"top_k": 24, "sink": 2, "recent": 16, "flush": 16, "dense_below": 0}
RUN: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def llama() -> PreTrainedModel:
    return MODELS["llama"].build()


@pytest.fixture
def cold_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look finds that the process has read much."""
    blocks = count(10_000, 10_000)
    monkeypatch.setattr(disk, "_blocks_read", lambda: next(blocks))


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may have more than a page."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("method", ["flat", "paris", "lrqk", "ctkvr", "h2o"])
def test_rows_in_files_give_the_tokens_of_rows_in_memory(
    method: str, llama: PreTrainedModel, tmp_path: Path
) -> None:
    ids = prompt(2, 150)
    options = SMALL | {"store": "disk", "disk": str(tmp_path)}
    asked = {"cache_implementation": method, **RUN}
    expected = llama.generate(ids, cache_config=SMALL, **asked)
    assert torch.equal(llama.generate(ids, cache_config=options, **asked), expected)


@pytest.mark.usefixtures("cold_disk")
@pytest.mark.parametrize("method", ["paris", "ctkvr"])
def test_rows_that_are_asked_for_first_give_the_same_tokens(
    method: str, llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, calls = prompt(2, 150), []
    ask_for = disk.ask_for

    def asked_for(rows: Any, ids: torch.Tensor) -> None:
        calls.append(ids.shape)
        ask_for(rows, ids)

    monkeypatch.setattr(disk, "ask_for", asked_for)
    options = SMALL | {"store": "disk", "disk": str(tmp_path)}
    asked = {"cache_implementation": method, **RUN}
    expected = llama.generate(ids, cache_config=SMALL, **asked)
    assert torch.equal(llama.generate(ids, cache_config=options, **asked), expected)
    # Steps of two layers at least.
    assert len(calls) >= 2 * (RUN["max_new_tokens"] - 1)


def test_a_step_asks_for_the_pages_of_its_rows_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(CPU, str(tmp_path))
    for start, length in ((0, 900), (900, 300)):
        keys, values = draw(2, length, (64, 64))
        store.append(TokenBlock(keys, values, start=start))
    spans: list[tuple[int, int]] = []

    class Libc:
        class madvise:
            argtypes: Any = None

            def __new__(cls, start: int, size: int, advice: int) -> int:  # type: ignore[misc]
                assert advice == disk.mmap.MADV_WILLNEED
                spans.append((start, start + size))
                return 0

    monkeypatch.setattr(disk.ctypes, "CDLL", lambda name: Libc)
    rows = store.rows.paged_rows()
    heads = rows.heads
    ids = torch.tensor([3, 64, 65, 899, 900, 1199, -1, 5000], dtype=torch.int32)
    ids = ids.expand(2, heads, 1, -1).contiguous()
    # Other rows in each of the heads.
    ids[1, 0] = torch.tensor([7, 7, 7, 7, -1, -1, -1, -1])
    disk.ask_for(rows, ids)
    wanted = set()
    row_bytes = rows.width * 4
    for batch in range(2):
        for head in range(heads):
            for token in ids[batch, head, 0].tolist():
                if 0 <= token < 1200:
                    page = int(rows.table[batch, token // 64])
                    first = int(rows.addresses()[page]) + (head * 64 + token % 64) * row_bytes
                    wanted |= {first // MEMORY_PAGE, (first + row_bytes - 1) // MEMORY_PAGE}
    pages = [page for first, last in spans for page in range(first // 4096, last // 4096)]
    assert len(pages) == len(set(pages)) and set(pages) == wanted


def test_files_have_no_names_and_count_as_host_memory(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    cache = FlatKVCache(llama.config, **SMALL, store="disk", disk=str(tmp_path))
    llama.generate(prompt(1, 150), past_key_values=cache, **RUN)
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    memory = cache.memory()
    assert memory.store_host > 0 and memory.store_device == 0
    cache.reset()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_full_disk_leaves_the_cache_as_it_was(
    tokens: int, llama: PreTrainedModel, tmp_path: Path
) -> None:
    ids, more = prompt(1, 200), prompt(1, tokens + 1)
    caches = [
        ParisKVCache(llama.config, **SMALL, store="disk", disk=str(tmp_path)) for _ in range(2)
    ]
    for cache in caches:
        # A fork has no room of its own, and its next flush needs a file.
        llama.generate(ids, past_key_values=cache, max_new_tokens=1)
    broken, whole = (cache.fork() for cache in caches)
    length = broken.get_seq_length()
    hf_kvret.attach(llama)
    with full_disk(), pytest.raises(OSError, match=r"for rows .*: free space, or name a folder"):
        for _ in range(40):
            llama(more[:, :tokens], past_key_values=broken)
            length += tokens
    broken.crop(0)
    assert broken.get_seq_length() == length
    for _ in range((length - whole.get_seq_length()) // tokens):
        llama(more[:, :tokens], past_key_values=whole)
    for _ in range(3):
        logits = [
            llama(more[:, :tokens], past_key_values=cache).logits for cache in (broken, whole)
        ]
        assert torch.equal(*logits)
    hf_kvret.restore(llama)


def test_a_full_disk_at_the_first_rows_leaves_a_cache_that_can_be_reset(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    ids = prompt(1, 150)
    cache = ParisKVCache(llama.config, **SMALL, store="disk", disk=str(tmp_path))
    with full_disk(), pytest.raises(OSError, match=r"cache\.reset\(\) a first one"):
        llama.generate(ids, past_key_values=cache, **RUN)
    cache.reset()
    expected = llama.generate(ids, cache_implementation="paris", cache_config=SMALL, **RUN)
    assert torch.equal(llama.generate(ids, past_key_values=cache, **RUN), expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"store": "disk"}, ValueError, "disk=None with store='disk'"),
        ({"store": "disk", "disk": ""}, ValueError, "disk='' with store='disk'"),
        ({"disk": "/tmp"}, ValueError, "disk='/tmp' with store='auto'"),
        ({"store": "disk", "disk": 3}, TypeError, "disk must be a folder"),
    ],
)
def test_a_folder_and_its_store_belong_together(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FlatConfig(**options)


def test_a_missing_folder_is_named(llama: PreTrainedModel, tmp_path: Path) -> None:
    options = SMALL | {"store": "disk", "disk": str(tmp_path / "none")}
    with pytest.raises(ValueError, match="none': there is no such folder, make it"):
        llama.generate(prompt(1, 90), cache_implementation="flat", cache_config=options, **RUN)


def test_a_saved_cache_names_no_folder_and_loads_into_one(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    rows, saved = tmp_path / "rows", tmp_path / "saved"
    rows.mkdir()
    place = {"store": "disk", "disk": str(rows)}
    cache = FlatKVCache(llama.config, **SMALL, **place)
    ids = prompt(1, 150)
    llama.generate(ids, past_key_values=cache, max_new_tokens=1)
    cache.save_pretrained(saved, model=llama)
    assert str(rows) not in (saved / "cache.json").read_text()
    longer = torch.cat([cache.input_ids, prompt(1, 9)], dim=1)
    expected = llama.generate(longer, past_key_values=cache, **RUN)
    for mapped in (True, False):
        again = FlatKVCache.from_pretrained(
            saved, llama.config, model=llama, mapped=mapped, **place
        )
        assert again.options.disk == str(rows)
        assert torch.equal(llama.generate(longer, past_key_values=again, **RUN), expected)
