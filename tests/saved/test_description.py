"""``cache.json``: what is damaged, crafted or of another format is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize(
    "value", ["NaN", "[NaN]", "1" + "0" * 400, "9" * 5000, "[" * 100_000 + "]" * 100_000, "{"]
)
def test_json_that_is_made_to_do_damage_is_refused(
    llama: PreTrainedModel, saved: Path, value: str
) -> None:
    path = saved / "cache.json"
    text = path.read_text()
    path.write_text(text.replace('"top_k": 1000000', f'"top_k": {value}'))
    assert path.read_text() != text
    with pytest.raises(ValueError, match=r"cache\.json is corrupt .*save the cache again"):
        FlatKVCache.from_pretrained(saved, llama.config)


def test_a_description_of_more_than_64_mib_is_refused(llama: PreTrainedModel, saved: Path) -> None:
    with (saved / "cache.json").open("r+b") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ValueError, match="of more than 64 MiB"):
        FlatKVCache.from_pretrained(saved, llama.config)


def test_an_infinite_option_comes_back(llama: PreTrainedModel, saved: Path) -> None:
    content, _ = read_saved(saved)
    content["options"]["slots"] = math.inf
    write_saved(saved, content)
    try:
        loaded = FlatKVCache.from_pretrained(saved, llama.config)
    except ValueError as error:
        assert "slots" in str(error)
    else:
        assert loaded.options.slots == math.inf


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


def test_a_format_that_is_no_whole_number_is_of_no_cache(saved: Path) -> None:
    assert is_of_cache(saved)
    content, _ = read_saved(saved)
    for value in (None, "1", 1.0, True):
        write_saved(saved, {**content, "format_version": value})
        assert not is_of_cache(saved)


@pytest.mark.parametrize("name", ["layers.0.evil", "layers.1.window.keys.x", "layers.0."])
def test_a_tensor_that_a_layer_does_not_have_is_refused(
    llama: PreTrainedModel, saved: Path, name: str
) -> None:
    content, tensors = read_saved(saved)
    write_saved(saved, content, {**tensors, name: torch.zeros(3)})
    with pytest.raises(ValueError, match=r"there is an unknown .*save the cache again"):
        FlatKVCache.from_pretrained(saved, llama.config)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "cache-.safetensors", "cache.json", "cache-0123456789ab.x", 3]
)
def test_no_file_is_read_but_one_of_a_caches_names(
    llama: PreTrainedModel, saved: Path, name: object
) -> None:
    content, _ = read_saved(saved)
    write_saved(saved, {**content, "files": [name]})
    with pytest.raises(ValueError, match="files has a name that is not of tensors"):
        FlatKVCache.from_pretrained(saved, llama.config)


@pytest.mark.parametrize(
    "edit",
    [
        lambda x: x["tokens"].update(passes=[[float("inf"), 1, "x"]]),
        lambda x: x["tokens"].update(passes=[[0, 1]]),
        lambda x: x["tokens"].update(passes=5),
        lambda x: x["tokens"].update(passes=None),
        lambda x: x["tokens"].pop("passes"),
        lambda x: x["identity"].update(facts=1),
        lambda x: x["identity"].update(weights=[3]),
        lambda x: x["identity"].update(weights={}, name=None, facts=[["a"]]),
    ],
)
def test_an_origin_that_no_save_writes_is_refused(
    edit: Callable[[dict[str, Any]], None], saved: Path, llama: PreTrainedModel
) -> None:
    content, _ = read_saved(saved)
    edit(content)
    write_saved(saved, content)
    with pytest.raises(ValueError, match=r"is (damaged|corrupt) \(.*save (it|the cache) again"):
        FlatKVCache.from_pretrained(saved, llama.config)


@pytest.mark.parametrize("rows", [0, 1])
def test_ids_of_no_token_are_refused(rows: int, saved: Path, llama: PreTrainedModel) -> None:
    content, tensors = read_saved(saved)
    tensors["tokens.ids"] = torch.zeros(rows, 0, dtype=torch.int32)
    write_saved(saved, content, tensors)
    with pytest.raises(ValueError, match=r"ids of torch.int32 \[., 0\] for tokens of \[1, 40\]"):
        FlatKVCache.from_pretrained(saved, llama.config)
