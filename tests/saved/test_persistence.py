"""Filled caches: saved, loaded here or in another process, and continued."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import (
    CTkvrCache,
    FlatKVCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
    attach,
    registered_methods,
)
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.models.versions import INDEXED_MODELS_CACHE_LATENTS
from hf_kvret.testing import COVERING_OPTIONS, INDEXED_MODELS, LATENT_MODELS, MODELS

from .saved_files import read_saved, saved_file, write_saved

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 1.0}
RUN = {"max_new_tokens": 10, "do_sample": False}
DESCRIPTION = "cache.json"


def _document(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 128, (batch, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[batch - 1, :9], mask[batch - 1, :9] = 0, 0
    return ids, mask


def _continue(model: PreTrainedModel, cache: RetrievalCache, batch: int = 2) -> torch.Tensor:
    """Tokens of a second turn."""
    ids, mask = _document(batch)
    more = torch.arange(20, 20 + 7).repeat(batch, 1)
    ids, mask = torch.cat([ids, more], dim=1), torch.cat([mask, torch.ones_like(more)], dim=1)
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **RUN)


@pytest.fixture
def saved(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    cache = FlatKVCache(llama.config, **SMALL)
    _prefill(llama, cache).save_pretrained(directory)
    return directory


def _prefill(model: PreTrainedModel, cache: RetrievalCache, batch: int = 2) -> RetrievalCache:
    ids, mask = _document(batch)
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=1)
    return cache


PASSES = {
    "dense": [5],
    "prompt": [90],
    "question": [90, 1, 6],
    "drafts": [90, *[3] * 9],
    "second prompt": [90, 1, 60],
}


@pytest.mark.parametrize("state", PASSES)
@pytest.mark.parametrize("name", list(registered_methods()))
def test_every_method_is_saved_in_every_state(
    llama: PreTrainedModel,
    name: str,
    state: str,
    tmp_path: Path,
    artifact_options: Callable[[str, str], dict[str, str]],
) -> None:
    """As a model fills it: what an index keeps may be views of the model's tensors."""
    # One method needs latent attention, and one a model's own indexer.
    own = {"latent": LATENT_MODELS["deepseek_v3"], "native": INDEXED_MODELS["deepseek_v32"]}
    if name == "native" and not INDEXED_MODELS_CACHE_LATENTS:
        pytest.skip("models with an indexer cache the keys of each head")
    model = own[name].build() if name in own else llama
    attach(model)
    cls = registered_methods()[name]
    place = artifact_options(name, "llama")
    options = {**COVERING_OPTIONS, "top_k": 4, **place}
    takes = cls.Config.takes
    cache = cls(model.config, **{key: x for key, x in options.items() if takes(key, x)})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for count in PASSES[state]:
            model(torch.randint(3, 128, (2, count), generator=generator), past_key_values=cache)
        cache.save_pretrained(tmp_path)
        twin = type(cache).from_pretrained(tmp_path, model.config, **place)
        for _ in range(4):
            ids = torch.randint(3, 128, (2, 1), generator=generator)
            logits = [model(ids, past_key_values=one).logits for one in (cache, twin)]
            assert torch.equal(*logits)


@pytest.mark.parametrize("cls", [FlatKVCache, CTkvrCache, LRQKCache])
def test_a_cache_that_was_cropped_to_nothing_is_as_new(
    llama: PreTrainedModel, cls: type[RetrievalCache]
) -> None:
    caches = [cls(llama.config, **{**COVERING_OPTIONS, "top_k": 4}) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for count in (90, 1, 1):
            llama(torch.randint(3, 128, (1, count), generator=generator), past_key_values=caches[0])
        caches[0].crop(-92)
        for count in (80, 1, 1):
            ids = torch.randint(3, 128, (1, count), generator=generator)
            logits = [llama(ids, past_key_values=cache).logits for cache in caches]
            assert torch.equal(*logits)


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, dirs_exist_ok=True))


@pytest.mark.parametrize(
    ("name", "cls", "store"),
    [
        ("llama", ParisKVCache, "device"),
        ("llama", FlatKVCache, "host"),
        ("gemma3", ParisKVCache, "host"),
        ("qwen3_next", FlatKVCache, "device"),
        ("gpt_oss", FlatKVCache, "host"),
        ("gpt_neox", FlatKVCache, "device"),
    ],
)
def test_a_loaded_cache_goes_on_with_the_same_tokens(
    name: str, cls: type[RetrievalCache], store: str, tmp_path: Path
) -> None:
    model = MODELS[name].build()
    cache = _prefill(model, cls(model.config, store="device", **SMALL))
    cache.save_pretrained(tmp_path / "deep" / "down")
    loaded = cls.from_pretrained(tmp_path / "deep" / "down", model.config, store=store)
    assert loaded.options == cache.options.replace(store=store)
    assert loaded.get_seq_length() == cache.get_seq_length() == 40
    expected = _continue(model, cache)
    assert torch.equal(_continue(model, loaded), expected)
    for layer in loaded.stats()["layers"]:
        assert layer["selected"] > 0 and layer["steps"] == cache.stats()["layers"][0]["steps"]
    assert loaded.stats()["store"] == store
    assert (loaded.memory().host > 0) == (store == "host")


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("before", "after"), [("higgs", "higgs-host"), ("higgs-host", "higgs")])
def test_coded_rows_come_back_as_they_were(
    llama: PreTrainedModel, before: str, after: str, bits: int, tmp_path: Path
) -> None:
    cache = _prefill(llama, ParisKVCache(llama.config, store=before, bits=bits, **SMALL))
    cache.save_pretrained(tmp_path)
    loaded = ParisKVCache.from_pretrained(tmp_path, llama.config, store=after)
    assert (loaded.options.store, loaded.options.bits) == (after, bits)
    names = [name for name in read_saved(tmp_path)[1] if name.startswith("layers.0.store.")]
    assert {"codes", "scales"} <= {name.rpartition(".")[2] for name in names}
    assert not any(name.endswith(("keys", "values")) for name in names), "nothing is kept twice"
    assert torch.equal(_continue(llama, loaded), _continue(llama, cache))
    assert (loaded.memory().store_host > 0) == (after == "higgs-host")


def test_coded_rows_stay_in_stores_for_coded_rows(llama: PreTrainedModel, tmp_path: Path) -> None:
    cache = _prefill(llama, FlatKVCache(llama.config, store="higgs", bits=4, **SMALL))
    cache.save_pretrained(tmp_path)
    for store in ("device", "host", "resident", "cpu"):
        with pytest.raises(ValueError, match="saved with coded rows, which other stores can't"):
            FlatKVCache.from_pretrained(tmp_path, llama.config, store=store)
    with pytest.raises(ValueError, match="bits: not an option that a filled cache can change"):
        cache.fork(bits=2)


def test_plain_rows_are_coded_by_a_store_for_coded_rows(
    llama: PreTrainedModel, saved: Path, tmp_path: Path
) -> None:
    coded = FlatKVCache.from_pretrained(saved, llama.config, store="higgs")
    fresh = _prefill(llama, FlatKVCache(llama.config, store="higgs", **SMALL))
    assert coded.memory().store_device == fresh.memory().store_device
    # The mean around which keys are coded is that of the prompt there, and of all rows here.
    for one, other in zip(coded.layers, fresh.layers, strict=True):
        near, keys = one.keys[:], other.keys[:]
        assert (near - keys).square().mean() < 0.02 * keys.square().mean()
    whole = _prefill(llama, FlatKVCache(llama.config, store="higgs", bits=16, **SMALL))
    whole.save_pretrained(tmp_path)
    plain = FlatKVCache.from_pretrained(tmp_path, llama.config, store="host")
    assert torch.equal(_continue(llama, plain), _continue(llama, whole))


def test_options_come_back_and_a_filled_cache_keeps_them(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    cache = _prefill(llama, CTkvrCache(llama.config, **SMALL, nprobe=2))
    cache.save_pretrained(tmp_path)
    description, _ = read_saved(tmp_path)
    assert description["format_version"] == 3
    assert description["options"]["nprobe"] == 2
    loaded = CTkvrCache.from_pretrained(tmp_path, llama.config)
    assert loaded.options == cache.options
    with pytest.raises(ValueError, match="nprobe: not an option that"):
        loaded.fork(nprobe=3)
    with pytest.raises(ValueError, match="nprobe: not an option that"):
        CTkvrCache.from_pretrained(tmp_path, llama.config, nprobe=3)


def test_published_options_come_back(llama: PreTrainedModel, tmp_path: Path) -> None:
    options = ParisConfig.preset("paper", **SMALL)
    cache = _prefill(llama, ParisKVCache(llama.config, options))
    cache.save_pretrained(tmp_path)
    loaded = ParisKVCache.from_pretrained(tmp_path, llama.config)
    assert loaded.options == options
    assert torch.equal(_continue(llama, loaded), _continue(llama, cache))


def test_a_cache_without_tokens_or_without_cold_ones_comes_back(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    FlatKVCache(llama.config, **SMALL).save_pretrained(tmp_path / "empty")
    empty = FlatKVCache.from_pretrained(tmp_path / "empty", llama.config)
    assert empty.get_seq_length() == 0
    fresh = _continue(llama, FlatKVCache(llama.config, **SMALL))
    assert torch.equal(_continue(llama, empty), fresh)
    dense = _prefill(llama, FlatKVCache(llama.config, **{**SMALL, "dense_below": 45}))
    dense.save_pretrained(tmp_path / "dense")
    loaded = FlatKVCache.from_pretrained(tmp_path / "dense", llama.config)
    assert torch.equal(_continue(llama, loaded), fresh)


def test_a_cache_that_was_cropped_to_nothing_comes_back(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    for cls in (FlatKVCache, ParisKVCache):
        cache = _prefill(llama, cls(llama.config, **SMALL))
        cache.crop(-40)
        cache.save_pretrained(tmp_path / cls.name)
        loaded = cls.from_pretrained(tmp_path / cls.name, llama.config)
        assert loaded.get_seq_length() == 0
        assert torch.equal(_continue(llama, loaded), _continue(llama, cache))


_OTHER_PROCESS = """
import sys, torch
from hf_kvret import ParisKVCache
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS, MODELS
directory, name = sys.argv[1:]
torch.set_num_threads(1)
model = MODELS[name].build()
cache = ParisKVCache.from_pretrained(directory, model.config)
prompt = torch.load(f"{directory}/prompt.pt")
out = model.generate(**prompt, past_key_values=cache, max_new_tokens=10, do_sample=False)
assert cache.stats()["layers"][0]["selected"] > 0
torch.save(out, f"{directory}/out.pt")
"""


def test_another_process_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    model = MODELS["gemma3"].build()
    cache = _prefill(model, ParisKVCache(model.config, **SMALL))
    cache.save_pretrained(tmp_path)
    ids, mask = _document()
    more = torch.arange(20, 27).repeat(2, 1)
    prompt = {
        "input_ids": torch.cat([ids, more], dim=1),
        "attention_mask": torch.cat([mask, torch.ones_like(more)], dim=1),
    }
    torch.save(prompt, tmp_path / "prompt.pt")
    command = [sys.executable, "-c", _OTHER_PROCESS, str(tmp_path), "gemma3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "out.pt"), _continue(model, cache))


def test_saving_leaves_the_cache_as_it_was(llama: PreTrainedModel, tmp_path: Path) -> None:
    cache = _prefill(llama, ParisKVCache(llama.config, **SMALL))
    expected = _continue(llama, cache.fork())
    cache.save_pretrained(tmp_path)
    assert torch.equal(_continue(llama, cache), expected)


def test_options_that_the_tokens_depend_on_cannot_change(
    llama: PreTrainedModel, saved: Path
) -> None:
    changed = FlatKVCache.from_pretrained(
        saved, llama.config, top_k=3, track_recall=True, flush=9, max_draft=2, store="host"
    )
    assert changed.options.top_k == 3
    assert changed.retrieval_layers[0].config.top_k == 3
    for bound in ({"sink": 3}, {"recent": 4}, {"dense_below": 1}, {"topk": 3}):
        words = f"{next(iter(bound))}: not an option that a filled cache can change"
        with pytest.raises(ValueError, match=words):
            FlatKVCache.from_pretrained(saved, llama.config, **bound)
    with pytest.raises(ValueError, match="top_k=0"):
        FlatKVCache.from_pretrained(saved, llama.config, top_k=0)


def test_a_missing_cache_is_named(llama: PreTrainedModel, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no saved cache in .*cache\.json is missing"):
        FlatKVCache.from_pretrained(tmp_path / "nowhere", llama.config)
    _copy(saved, tmp_path)
    saved_file(tmp_path).unlink()
    with pytest.raises(FileNotFoundError, match=r"cache-[0-9a-f]{12}\.safetensors is missing"):
        FlatKVCache.from_pretrained(tmp_path, llama.config)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_tensors_are_refused(
    llama: PreTrainedModel, saved: Path, tmp_path: Path, kept: int
) -> None:
    path = saved_file(_copy(saved, tmp_path))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"safetensors is corrupt or truncated"):
        FlatKVCache.from_pretrained(tmp_path, llama.config)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"format_version": 3}',
        '{"format_version": 3, "method": "flat", "options": 3, "layers": []}',
        "[" * 200_000,
        "\ud800",
    ],
)
def test_a_corrupt_description_is_refused(
    llama: PreTrainedModel, saved: Path, tmp_path: Path, text: str
) -> None:
    (_copy(saved, tmp_path) / DESCRIPTION).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=r"cache\.json is corrupt"):
        FlatKVCache.from_pretrained(tmp_path, llama.config)


def test_another_method_is_refused(llama: PreTrainedModel, saved: Path) -> None:
    with pytest.raises(ValueError, match="holds a 'flat' cache, not 'paris': load it with the"):
        ParisKVCache.from_pretrained(saved, llama.config)


@pytest.mark.parametrize("missing", ["window.keys", "store.length", "index.keys", "built"])
def test_a_missing_tensor_is_named(
    llama: PreTrainedModel, saved: Path, tmp_path: Path, missing: str
) -> None:
    description, tensors = read_saved(saved)
    del tensors[f"layers.1.{missing}"]
    write_saved(tmp_path, description, tensors)
    with pytest.raises(ValueError, match=rf"layers\.1\.{missing}"):
        FlatKVCache.from_pretrained(tmp_path, llama.config)


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "gemma3", "smollm3"])
def test_another_models_shape_is_refused(saved: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"saved from another model: made for a llama .* {name}"):
        FlatKVCache.from_pretrained(saved, MODELS[name].config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :1], "of 1 KV heads with 16 numbers, and this model has 2 with 16"),
        (lambda x: x[..., :8], "of 2 KV heads with 8 numbers, and this model has 2 with 16"),
        (lambda x: torch.cat([x, x], -1), "with 32 numbers, and this model has 2 with 16"),
        (lambda x: x.half(), r"index\.keys is float32 .*, not float16 .*save the cache again"),
    ],
    ids=["heads", "numbers", "more numbers", "dtype"],
)
def test_rows_of_another_form_are_refused(
    llama: PreTrainedModel, saved: Path, tmp_path: Path, change: Any, message: str
) -> None:
    content, tensors = read_saved(saved)
    windows = [name for name in tensors if ".window.keys" in name or ".window.values" in name]
    changed = {name: change(tensors[name]) for name in windows}
    write_saved(tmp_path, content, {**tensors, **changed})
    with pytest.raises(ValueError, match=message):
        FlatKVCache.from_pretrained(tmp_path, llama.config)


def test_a_model_with_a_kv_head_for_each_query_head_is_served(tmp_path: Path) -> None:
    """Whatever its configuration says: GPT-NeoX does not look at it."""
    model = MODELS["gpt_neox"].build()
    assert model.config.num_key_value_heads == 2
    _prefill(model, FlatKVCache(model.config, **SMALL)).save_pretrained(tmp_path)
    loaded = FlatKVCache.from_pretrained(tmp_path, model.config)
    assert loaded.retrieval_layers[0].kv.window.keys.shape[1] == 4
