"""A model of the hub finds the artifact in its own repository, and asks for it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvret import A2ATSCache, AquaKVCache
from hf_kvret.artifacts import shared
from hf_kvret.lab.evaluate import bundled

REPO = "alice/needles"
HOME = Path(bundled.__file__).parent / "needle_llama"
CACHES = {"a2ats": A2ATSCache, "aqua": AquaKVCache}


def files(*folders: str) -> dict[str, bytes]:
    """Those of the bundled model, and its artifacts in ``folders``, as a repository has them."""
    paths = [HOME / "config.json", HOME / "model.safetensors"]
    paths += [path for name in folders for path in (HOME / name).iterdir()]
    return {path.relative_to(HOME).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(autouse=True)
def forget() -> None:
    shared._folder_on_hub.cache_clear()


@pytest.fixture
def model(hub: Any) -> PreTrainedModel:
    """That of a repository with an artifact of ``aqua``."""
    hub.add(REPO, files("aqua"))
    return AutoModelForCausalLM.from_pretrained(REPO)


@pytest.mark.parametrize("name", CACHES)
def test_generate_takes_it_and_asks_once(name: str, hub: Any) -> None:
    hub.add(REPO, files("a2ats", "aqua"))
    model = AutoModelForCausalLM.from_pretrained(REPO)
    hub.requests.clear()
    prompt = {"input_ids": torch.arange(3, 43)[None], "attention_mask": torch.ones(1, 40)}
    options = {"recent": 8, "flush": 4, "dense_below": 0}
    call = {"cache_implementation": name, "cache_config": options, "max_new_tokens": 3}
    first = model.generate(**prompt, **call, do_sample=False)
    # The other method's files stay where they are.
    assert hub.bodies() and all(f"/{name}/" in line or "/blobs/" in line for line in hub.bodies())
    hub.requests.clear()
    assert torch.equal(model.generate(**prompt, **call, do_sample=False), first)
    artifact = Path(CACHES[name](model.config).options.artifact)
    assert artifact.name == name and artifact.is_relative_to(constants.HF_HUB_CACHE)
    assert not hub.requests


def test_the_artifact_is_that_of_the_models_commit(hub: Any, model: PreTrainedModel) -> None:
    commit = hub.repositories[REPO].refs["main"]
    hub.add(REPO, {"aqua/config.json": b"{}"})
    assert commit in AquaKVCache(model.config).options.artifact


@pytest.mark.parametrize("cached", [True, False])
def test_offline_the_cache_alone_is_looked_at(
    cached: bool, hub: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cached:
        AquaKVCache(model.config)
        shared._folder_on_hub.cache_clear()
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if cached:
        assert Path(AquaKVCache(model.config).options.artifact).is_dir()
    else:
        with pytest.raises(ValueError, match=r"aqua needs a .*try once online"):
            AquaKVCache(model.config)
    assert not hub.requests


def test_a_repository_without_one_names_the_ways_out(hub: Any, model: PreTrainedModel) -> None:
    message = r"calibrate a2ats .*no folder a2ats at .*publish apart"
    with pytest.raises(ValueError, match=message):
        A2ATSCache(model.config)
    hub.requests.clear()
    with pytest.raises(ValueError, match=message):
        A2ATSCache(model.config)
    assert not hub.requests
    # One that others publish apart is named.
    apart = {name.removeprefix("a2ats/"): x for name, x in files("a2ats").items() if "/" in name}
    hub.add("bob/needles-a2ats", apart)
    A2ATSCache(model.config, artifact="bob/needles-a2ats")


def test_a_model_of_a_folder_never_asks_the_hub(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the folder is gone, and its name is that of a repository."""
    hub.add(REPO, files("aqua"))
    monkeypatch.chdir(tmp_path)
    for name, content in files().items():
        path = tmp_path / REPO / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    model = AutoModelForCausalLM.from_pretrained(REPO)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"--model alice/needles --text FILE --out DIR`$"):
            AquaKVCache(model.config)
        monkeypatch.chdir(tmp_path / "alice")
    assert not hub.requests
