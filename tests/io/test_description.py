"""``cache.json`` is read strictly: text that means several things, or nothing, is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache, attach
from hf_kvret.io.description import checksum, format_of, read_json
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.saved import read_saved, write_saved
from hf_kvret.testing.scenario import prompt


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    model = MODELS["llama"].build()
    attach(model)
    return model


@pytest.fixture
def saved(llama: PreTrainedModel, tmp_path: Path) -> Path:
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    llama.generate(prompt(1, 40), past_key_values=cache, max_new_tokens=1, do_sample=False)
    cache.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"method": "flat"', "'method' is there twice"),
        ('"top_k": 1024', "'top_k' is there twice"),
    ],
)
def test_a_name_that_stands_twice_is_refused(
    llama: PreTrainedModel, saved: Path, entry: str, message: str
) -> None:
    path = saved / "cache.json"
    content, _ = read_saved(saved)
    content["options"]["top_k"] = 1024
    write_saved(saved, content)
    text = path.read_text()
    assert text.count(entry) == 1
    path.write_text(text.replace(entry, f"{entry.partition(':')[0]}: 1, {entry}"))
    with pytest.raises(ValueError, match=rf"cache\.json is corrupt .*{message}"):
        FlatKVCache.from_pretrained(saved, llama.config)


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ('{"options": {"top_k": Infinity, "x": [-Infinity]}}', True),
        ('{"options": {"x": "NaN"}, "y": "Infinity"}', True),
        ('{"options": {"top_k": NaN}}', False),
        ('{"options": {}, "x": {"y": [Infinity]}}', False),
        ('{"options": {"x": 1e999}}', False),
        ('{"options": {"x": 1' + "0" * 400 + "}}", False),
        ('[{"options": Infinity}]', False),
        ("Infinity", False),
        ("[" * 100 + "]" * 100, False),
    ],
)
def test_numbers_are_finite_but_in_options(tmp_path: Path, text: str, fine: bool) -> None:
    path = tmp_path / "cache.json"
    path.write_text(text)
    if fine:
        content, given = read_json(path)
        assert content == json.loads(text) and given == text.encode()
    else:
        with pytest.raises(ValueError, match=r"cache\.json is corrupt"):
            read_json(path)


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


def test_the_format_of_what_is_no_cache_is_not_known(saved: Path) -> None:
    assert format_of(saved) == 2
    content = json.loads((saved / "cache.json").read_text())
    for value in (None, "2", 2.0, True):
        content["format_version"] = value
        content["checksum"] = checksum(content)
        (saved / "cache.json").write_text(json.dumps(content))
        assert format_of(saved) is None


@pytest.mark.parametrize(
    "name",
    [
        *("tokens.evil", "identity.evil", "tokens.", "tokens.ids.x", "identity.ids", "chain"),
        *("layers.01.x", "layers.2.x", "layers.-1.x", "layers.².x", "layers.1e0.x", "layers.0."),
    ],
)
def test_a_tensor_that_no_save_writes_is_refused(
    llama: PreTrainedModel, saved: Path, name: str
) -> None:
    content, tensors = read_saved(saved)
    write_saved(saved, content, {**tensors, name: torch.zeros(3)})
    with pytest.raises(ValueError, match="which no save writes: save the cache again"):
        FlatKVCache.from_pretrained(saved, llama.config)


def test_ids_without_their_record_are_refused(llama: PreTrainedModel, saved: Path) -> None:
    content, tensors = read_saved(saved)
    changes: dict[str, Any] = {"tokens": None}
    write_saved(saved, {**content, **changes}, tensors)
    with pytest.raises(ValueError, match=r"'tokens\.\w+', which no save writes"):
        FlatKVCache.from_pretrained(saved, llama.config)
    left = {name: x for name, x in tensors.items() if not name.startswith("tokens.")}
    write_saved(saved, {**content, **changes}, left)
    assert FlatKVCache.from_pretrained(saved, llama.config).get_seq_length() == 40
