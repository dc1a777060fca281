"""Filled caches: saved, loaded and continued."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import (
    FlatKVCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
    attach,
    registered_methods,
)
from hf_kvret.saved import persistence
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.conformance import ALL_MODELS

from .saved_files import read_saved, saved_file, write_saved

RUN = {"max_new_tokens": 6, "do_sample": False}
DESCRIPTION = "cache.json"
Damage = Callable[[Path], object]


def _document(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 128, (batch, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[batch - 1, :9], mask[batch - 1, :9] = 0, 0
    return ids, mask


def _prefill(model: PreTrainedModel, cache: RetrievalCache) -> RetrievalCache:
    ids, mask = _document()
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=1)
    return cache


def _continue(model: PreTrainedModel, cache: RetrievalCache) -> torch.Tensor:
    """Tokens of a second turn."""
    ids, mask = _document()
    more = torch.arange(20, 20 + 7).repeat(2, 1)
    ids, mask = torch.cat([ids, more], dim=1), torch.cat([mask, torch.ones_like(more)], dim=1)
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **RUN)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a filled cache of ``llama``."""
    directory, model = tmp_path_factory.mktemp("saved"), MODELS["llama"].build()
    _prefill(model, FlatKVCache(model.config, **COVERING_OPTIONS)).save_pretrained(directory)
    return directory


def test_a_load_while_another_save_replaces_the_files_gives_the_new_cache(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = (FlatKVCache(llama.config, **COVERING_OPTIONS) for _ in range(2))
    _prefill(llama, older).save_pretrained(tmp_path)
    llama.generate(torch.arange(3, 60)[None], past_key_values=newer, max_new_tokens=1)
    read, calls = persistence.read_description, []

    def read_and_save(directory: Path) -> Any:
        content = read(directory)
        if not calls:
            calls.append(1)
            newer.save_pretrained(directory)
        return content

    monkeypatch.setattr(persistence, "read_description", read_and_save)
    loaded = FlatKVCache.from_pretrained(tmp_path, llama.config)
    assert loaded.get_seq_length() == newer.get_seq_length() != older.get_seq_length()


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(original, tmp_path / "saved"))


# One method needs latent attention, and one a model's own indexer.
OWN = {"latent": "deepseek_v3", "native": "deepseek_v32"}


@pytest.mark.parametrize(
    ("name", "model_name"),
    [
        *((name, OWN.get(name, "llama")) for name in registered_methods()),
        # The last has a KV head for each query head, whatever its configuration says.
        *(("paris", "gemma3"), ("flat", "qwen3_next"), ("flat", "gpt_neox")),
    ],
)
def test_every_method_goes_on_from_a_save(
    name: str, model_name: str, tmp_path: Path, artifact_options: Any
) -> None:
    """As a model fills it: what an index keeps may be views of the model's tensors."""
    model = ALL_MODELS[model_name].build()
    attach(model)
    cls = registered_methods()[name]
    place = artifact_options(name, "llama")
    options = {**COVERING_OPTIONS, "top_k": 4, **place}
    takes = cls.Config.takes
    cache = cls(model.config, **{key: x for key, x in options.items() if takes(key, x)})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # A prompt, a step, drafts and a second prompt.
        for count in (90, 1, 6, 3, 3, 60):
            model(torch.randint(3, 128, (2, count), generator=generator), past_key_values=cache)
        cache.save_pretrained(tmp_path)
        twin = cls.from_pretrained(tmp_path, model.config, **place)
        assert twin.options == cache.options
        for _ in range(4):
            ids = torch.randint(3, 128, (2, 1), generator=generator)
            logits = [model(ids, past_key_values=one).logits for one in (cache, twin)]
            assert torch.equal(*logits)


def test_a_cache_without_tokens_or_without_cold_ones_comes_back(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    FlatKVCache(llama.config, **COVERING_OPTIONS).save_pretrained(tmp_path / "empty")
    empty = FlatKVCache.from_pretrained(tmp_path / "empty", llama.config)
    assert empty.get_seq_length() == 0
    fresh = _continue(llama, FlatKVCache(llama.config, **COVERING_OPTIONS))
    assert torch.equal(_continue(llama, empty), fresh)
    # An index knows what it watched before anything went cold.
    options = {**COVERING_OPTIONS, "dense_below": 45, "top_k": 4, "rank": 8, "factors": "als"}
    dense = _prefill(llama, LRQKCache(llama.config, **options))
    dense.save_pretrained(tmp_path / "dense")
    loaded = LRQKCache.from_pretrained(tmp_path / "dense", llama.config)
    assert torch.equal(_continue(llama, loaded), _continue(llama, dense))
    assert all(layer["selected"] for layer in loaded.stats()["layers"])


@pytest.mark.parametrize(("before", "after"), [("higgs", "higgs-host"), ("higgs-host", "higgs")])
def test_coded_rows_come_back_as_they_were(
    llama: PreTrainedModel, before: str, after: str, tmp_path: Path
) -> None:
    cache = _prefill(llama, ParisKVCache(llama.config, store=before, bits=3, **COVERING_OPTIONS))
    cache.save_pretrained(tmp_path)
    loaded = ParisKVCache.from_pretrained(tmp_path, llama.config, store=after)
    assert (loaded.options.store, loaded.options.bits) == (after, 3)
    names = [name for name in read_saved(tmp_path)[1] if name.startswith("layers.0.store.")]
    assert not any(name.endswith(("keys", "values")) for name in names), "nothing is kept twice"
    assert torch.equal(_continue(llama, loaded), _continue(llama, cache))
    with pytest.raises(ValueError, match="saved with coded rows, which other stores can't"):
        ParisKVCache.from_pretrained(tmp_path, llama.config, store="host")


def test_plain_rows_are_coded_by_a_store_for_coded_rows(
    llama: PreTrainedModel, saved: Path, tmp_path: Path
) -> None:
    coded = FlatKVCache.from_pretrained(saved, llama.config, store="higgs")
    fresh = _prefill(llama, FlatKVCache(llama.config, store="higgs", **COVERING_OPTIONS))
    assert coded.memory().store_device == fresh.memory().store_device
    # The mean around which keys are coded is that of the prompt there, and of all rows here.
    for one, other in zip(coded.layers, fresh.layers, strict=True):
        near, keys = one.keys[:], other.keys[:]
        assert (near - keys).square().mean() < 0.02 * keys.square().mean()
    whole = _prefill(llama, FlatKVCache(llama.config, store="higgs", bits=16, **COVERING_OPTIONS))
    whole.save_pretrained(tmp_path)
    plain = FlatKVCache.from_pretrained(tmp_path, llama.config, store="host")
    assert torch.equal(_continue(llama, plain), _continue(llama, whole))


def test_a_load_changes_only_options_that_no_tokens_depend_on(
    llama: PreTrainedModel, saved: Path
) -> None:
    free = {"top_k": 3, "track_recall": True, "flush": 9, "max_draft": 2, "store": "host"}
    changed = FlatKVCache.from_pretrained(saved, llama.config, **free)
    assert free.items() <= vars(changed.options).items()
    assert changed.retrieval_layers[0].config.top_k == 3
    for bound in ({"sink": 3}, {"dense_below": 1}, {"topk": 3}):
        words = f"{next(iter(bound))}: not an option that a filled cache can change"
        with pytest.raises(ValueError, match=words):
            FlatKVCache.from_pretrained(saved, llama.config, **bound)


def truncated(kept: int) -> Damage:
    """The shard ends after, or before, so many bytes."""
    return lambda folder: saved_file(folder).write_bytes(saved_file(folder).read_bytes()[:kept])


def described_as(text: str) -> Damage:
    return lambda folder: (folder / DESCRIPTION).write_text(text)


def with_values(**values: Any) -> Damage:
    """``cache.json`` says something else, with a checksum that is right."""
    return lambda folder: write_saved(folder, read_saved(folder)[0] | values)


def without(name: str) -> Damage:
    """A layer lacks a tensor, of which nothing knows."""

    def damage(folder: Path) -> None:
        content, tensors = read_saved(folder)
        del tensors[f"layers.1.{name}"]
        write_saved(folder, content, tensors)

    return damage


def with_windows(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Keys and values of the windows are others."""

    def damage(folder: Path) -> None:
        content, tensors = read_saved(folder)
        windows = [name for name in tensors if name.endswith(("window.keys", "window.values"))]
        write_saved(folder, content, tensors | {name: change(tensors[name]) for name in windows})

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated(100), "safetensors is corrupt or truncated"),
        (truncated(-1), "safetensors is corrupt or truncated"),
        (described_as("{"), r"cache\.json is corrupt \(no JSON: Expecting .* line 1 column 2"),
        (described_as("[" * 100_000), r"cache\.json is corrupt \(no JSON: maximum recursion"),
        (described_as("[]"), r"cache\.json is corrupt \(no JSON object with a format_version"),
        (described_as(json.dumps({"format_version": 3})), r"cache\.json is corrupt"),
        (with_values(format_version=2), "has format version 2, this hf_kvret reads 3"),
        (with_values(files=["../x"]), "names files that are not of tensors"),
        (without("window.keys"), r"layers\.1\.window\.keys"),
        (without("built"), r"layers\.1\.built"),
        (with_windows(lambda x: x[:, :1]), "of 1 KV heads with 16 numbers, and this model has 2"),
        (with_windows(lambda x: x[..., :8]), "of 2 KV heads with 8 numbers, and this model has 2"),
        (with_windows(lambda x: x.half()), r"index\.keys is float32 .*, not float16"),
    ],
)
def test_what_is_damaged_or_of_another_form_is_refused(
    llama: PreTrainedModel, saved: Path, damage: Damage, words: str
) -> None:
    damage(saved)
    with pytest.raises(ValueError, match=words):
        FlatKVCache.from_pretrained(saved, llama.config)


def test_a_missing_cache_another_method_and_another_model_are_named(
    llama: PreTrainedModel, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"no saved cache in .*cache\.json is missing"):
        FlatKVCache.from_pretrained(tmp_path / "nowhere", llama.config)
    with pytest.raises(ValueError, match="holds a 'flat' cache, not 'paris': load it with the"):
        ParisKVCache.from_pretrained(saved, llama.config)
    with pytest.raises(ValueError, match=r"another model: made for model_type=llama.* gemma3"):
        FlatKVCache.from_pretrained(saved, MODELS["gemma3"].config())
    saved_file(saved).unlink()
    with pytest.raises(FileNotFoundError, match=r"cache-[0-9a-f]{12}\.safetensors is missing"):
        FlatKVCache.from_pretrained(saved, llama.config)
