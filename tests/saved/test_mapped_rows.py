"""Rows that stay in their files: the same text, read where it is selected, and never written to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import FlatKVCache, RetrievalCache
from hf_kvret.saved import persistence, shards
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt

from .saved_files import NAME, file_at, read_saved, saved_file, write_saved

RUN: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
PROMPT = prompt(2, 150)


@pytest.fixture(autouse=True)
def small_tensors_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_LEAST_MAPPED", 1)


def _saved(
    model: Any, folder: Path, method: str = "paris", store: str = "device", **options: Any
) -> RetrievalCache:
    cls = hf_kvret.registered_methods()[method]
    cache = cls(model.config, **{**COVERING_OPTIONS, "store": store, **options})
    model.generate(PROMPT, past_key_values=cache, max_new_tokens=1)
    cache.crop(150 - cache.get_seq_length())
    cache.save_pretrained(folder, model=model)
    return cache


def _goes_on(model: Any, cache: RetrievalCache) -> torch.Tensor:
    """Tokens join the last page, which is in the file."""
    return model.generate(torch.cat([PROMPT, prompt(2, 9)], dim=1), past_key_values=cache, **RUN)


def _chunk(cache: RetrievalCache) -> torch.Tensor:
    store: Any = cache.retrieval_layers[0].kv.store
    return getattr(store, "rows", store).paged_rows().chunks[0]


@pytest.mark.parametrize(
    ("method", "store"), [("paris", "resident"), ("lrqk", "host"), ("ctkvr", "cpu")]
)
def test_a_mapped_cache_goes_on_as_one_that_was_read(
    method: str, store: str, llama: PreTrainedModel, tmp_path: Path
) -> None:
    cache = _saved(llama, tmp_path / "a", method, store)
    before = saved_file(tmp_path / "a").read_bytes()
    load = hf_kvret.registered_methods()[method].from_pretrained
    expected = _goes_on(llama, cache)
    mapped, read = (
        load(tmp_path / "a", llama.config, model=llama, mapped=mapped) for mapped in (True, False)
    )
    twin = mapped.fork()
    for one in (mapped, read, twin):
        assert torch.equal(_goes_on(llama, one), expected)
    assert saved_file(tmp_path / "a").read_bytes() == before
    # Crop, save (also over the files that are mapped) and reset work on top.
    mapped.crop(150 - mapped.get_seq_length())
    mapped.save_pretrained(tmp_path / "a", model=llama)
    again = load(tmp_path / "a", llama.config, model=llama, mapped=True)
    for one in (mapped, again):
        assert torch.equal(_goes_on(llama, one), expected)
    mapped.reset()
    assert torch.equal(_goes_on(llama, mapped), expected)


@pytest.mark.parametrize("store", ["device", "host", "cpu"])
def test_rows_are_where_the_file_is(store: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    _saved(llama, tmp_path, "flat", store)
    file = str(saved_file(tmp_path))
    mapped = FlatKVCache.from_pretrained(tmp_path, llama.config, mapped=True)
    assert file_at(_chunk(mapped).data_ptr()) == file
    assert file_at(mapped.retrieval_layers[0].kv.index._keys.rows.data_ptr()) == file
    # Tokens that join have memory of their own, and so does what an index holds of all.
    _goes_on(llama, mapped)
    assert file_at(mapped.retrieval_layers[0].kv.index._keys.rows.data_ptr()) != file
    assert file_at(_chunk(mapped).data_ptr()) == file


def test_auto_maps_what_is_large_and_no_checksum_is_asked(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(llama, tmp_path, "flat")
    content, tensors = read_saved(tmp_path)
    tensors["layers.0.store.pages"][0, 0, 0, 0, 0] += 1
    # The checksums are those of before.
    write_saved(tmp_path, {**content, "files": [NAME]})
    save_file(tensors, tmp_path / NAME)
    with pytest.raises(ValueError, match="is damaged"):
        FlatKVCache.from_pretrained(tmp_path, llama.config)
    monkeypatch.setattr(persistence, "_LEAST_MAPPED", 0)
    # On other devices all is read and compared, but for rows of store="disk".
    disk = {"store": "disk", "disk": str(tmp_path)}
    for options, error in (({"store": "cpu"}, "is damaged"), (disk, "on meta tensors")):
        with pytest.raises((ValueError, RuntimeError), match=error):
            FlatKVCache.from_pretrained(tmp_path, llama.config, "meta", **options)
    assert FlatKVCache.from_pretrained(tmp_path, llama.config).get_seq_length() == 150
    with pytest.raises(ValueError, match="is damaged"):
        FlatKVCache.from_pretrained(tmp_path, llama.config, mapped=False)
    with pytest.raises(ValueError, match="pass True, False or 'auto'"):
        FlatKVCache.from_pretrained(tmp_path, llama.config, mapped="maybe")


@pytest.mark.parametrize("change", [lambda x: x[:, :, :1], lambda x: x.double()])
def test_pages_of_another_form_are_refused(
    change: Any, llama: PreTrainedModel, tmp_path: Path
) -> None:
    _saved(llama, tmp_path, "flat")
    content, tensors = read_saved(tmp_path)
    whole = "layers.1.store.pages"
    write_saved(tmp_path, content, {**tensors, whole: change(tensors[whole]).contiguous()})
    for mapped in (True, False):
        with pytest.raises(ValueError, match="damaged, or of another model"):
            FlatKVCache.from_pretrained(tmp_path, llama.config, mapped=mapped)
