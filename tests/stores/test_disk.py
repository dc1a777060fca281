"""store="disk": rows in files without names, asked for before they are read, and full disks."""

import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache, ParisKVCache, TokenBlock
from hf_kvret.stores import DiskStore
from hf_kvret.testing.scenario import prompt
from hf_kvret_kernels.host_library import why_not

from ..saved.saved_files import file_at
from .rows import CPU, GROUP, HEADS, draw

SMALL: dict[str, Any] = {"top_k": 24, "sink": 2, "recent": 16, "flush": 4, "dense_below": 0}
RUN: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def _page_out(store: Any) -> None:
    """Take the rows of a store out of memory, so that they have to be read from the disk."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for chunk in store.rows.paged_rows().chunks:
        # MS_SYNC writes the pages, then MADV_PAGEOUT takes them out.
        libc.msync(chunk.data_ptr(), chunk.nbytes, 4)
        if libc.madvise(chunk.data_ptr(), chunk.nbytes, 21):
            pytest.skip("the system can't page out")


@pytest.mark.skipif(bool(why_not()), reason="the library is not compiled")
def test_missing_rows_are_asked_for_before_one_is_read(tmp_path: Path) -> None:
    keys, values = draw(1, 20_000, (64, 64))
    store = DiskStore(CPU, str(tmp_path))
    store.append(TokenBlock(keys, values, start=0))
    rows: Any = store.host_rows()
    query, ids = torch.randn(1, HEADS * GROUP, 1, 64), torch.randperm(20_000)[:2000]
    ids = ids.int().sort().values.expand(1, HEADS, 1, -1).contiguous()
    expected = store.begin(query, ids, 0.1)()
    faults: dict[bool, list[int]] = {True: [], False: []}
    for asks in (True, True, False, False):
        rows.in_files = asks
        _page_out(store)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        out, lse = store.begin(query, ids, 0.1)()
        faults[asks].append(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    if not faults[False][-1]:
        pytest.skip("the folder is not on a disk")
    # The first call finds out that rows are missing.
    assert faults[True][-1] < 0.2 * faults[False][-1]


def test_files_have_no_names_and_are_host_memory(llama: PreTrainedModel, tmp_path: Path) -> None:
    cache = FlatKVCache(llama.config, **SMALL, store="disk", disk=str(tmp_path))
    llama.generate(prompt(1, 150), past_key_values=cache, **RUN)
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    memory = cache.memory()
    assert memory.store_host > 0 and memory.store_device == 0
    cache.reset()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_cache_on_a_full_disk_can_be_reset(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, full = prompt(1, 150), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    cache = ParisKVCache(llama.config, **SMALL, store="disk", disk=str(tmp_path))
    llama.generate(ids, past_key_values=cache, max_new_tokens=1)
    # A fork has no room of its own, and its next flush needs a file.
    cache, ids = cache.fork(), torch.cat([ids, prompt(1, 60)], dim=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", mock.Mock(side_effect=full))
        with pytest.raises(OSError, match=r"for rows .*: free space, or name .* cache\.reset"):
            llama.generate(ids, past_key_values=cache, **RUN)
    cache.reset()
    expected = llama.generate(ids, cache_implementation="paris", cache_config=SMALL, **RUN)
    assert torch.equal(llama.generate(ids, past_key_values=cache, **RUN), expected)


def test_a_missing_folder_is_named_at_once(llama: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none': there is no such folder, make it"):
        FlatKVCache(llama.config, store="disk", disk=str(tmp_path / "none"))


def test_a_forked_process_writes_to_no_file_of_its_parent(tmp_path: Path) -> None:
    store = DiskStore(CPU, str(tmp_path))
    store.append(TokenBlock(*draw(1, 40, (32, 32)), start=0))
    with mock.patch.object(os, "getpid", lambda: -1), pytest.raises(RuntimeError, match="child"):
        store.append(TokenBlock(*draw(1, 3, (32, 32)), start=40))


def test_a_saved_cache_names_no_folder_and_loads(llama: PreTrainedModel, tmp_path: Path) -> None:
    rows, saved = tmp_path / "rows", tmp_path / "saved"
    rows.mkdir()
    place = {"store": "disk", "disk": str(rows)}
    cache = FlatKVCache(llama.config, **SMALL, **place)
    llama.generate(prompt(1, 150), past_key_values=cache, max_new_tokens=1)
    cache.save_pretrained(saved, model=llama)
    assert str(rows) not in (saved / "cache.json").read_text()
    longer = torch.cat([cache.input_ids, prompt(1, 9)], dim=1)
    expected = llama.generate(longer, past_key_values=cache, **RUN)
    for mapped in (True, False):
        again = FlatKVCache.from_pretrained(
            saved, llama.config, model=llama, mapped=mapped, **place
        )
        assert again.options.disk == str(rows)
        chunk = again.retrieval_layers[0].kv.store.host_rows().chunks[0]
        # Rows that were read get a file of their own.
        assert file_at(chunk.data_ptr()).startswith(str(saved if mapped else rows))
        assert torch.equal(llama.generate(longer, past_key_values=again, **RUN), expected)
