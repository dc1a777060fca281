"""``cache.json``: what is damaged or of another format is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.saved.description import is_of_cache
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt

from .saved_files import read_saved, write_saved


@pytest.fixture
def saved(llama: PreTrainedModel, tmp_path: Path) -> Path:
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    llama.generate(prompt(1, 40), past_key_values=cache, max_new_tokens=1, do_sample=False)
    cache.save_pretrained(tmp_path, model=llama)
    return tmp_path


@pytest.mark.parametrize("version", [0, 1, 2, 99, -1, 10**18])
def test_another_format_is_refused_with_the_remedy(
    llama: PreTrainedModel, saved: Path, version: int
) -> None:
    content, _ = read_saved(saved)
    write_saved(saved, {**content, "format_version": version})
    words = rf"has format version {version}, this hf_kvret reads 3: save the cache again"
    with pytest.raises(ValueError, match=words):
        FlatKVCache.from_pretrained(saved, llama.config)
    # The remedy works there, too.
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    cache.save_pretrained(saved, overwrite=True)
    assert FlatKVCache.from_pretrained(saved, llama.config).get_seq_length() == 0
    assert len(list(saved.iterdir())) == 2


def test_only_a_cache_is_taken_for_one(saved: Path) -> None:
    assert is_of_cache(saved)
    content, _ = read_saved(saved)
    del content["format_version"]
    write_saved(saved, content)
    assert not is_of_cache(saved)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "cache-.safetensors", "cache.json", "cache-0123456789ab.x"]
)
def test_no_file_is_read_but_one_of_a_caches_names(
    llama: PreTrainedModel, saved: Path, name: str
) -> None:
    content, _ = read_saved(saved)
    write_saved(saved, {**content, "files": [name]})
    with pytest.raises(ValueError, match="names files that are not of tensors"):
        FlatKVCache.from_pretrained(saved, llama.config)
