"""``inspect --verify`` checks the cache and the artifact in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_kvret import FlatKVCache, attach
from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL
from hf_kvret.lab.report.verification import verify
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

from ...saved.saved_files import saved_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache and an artifact."""
    model = MODELS["llama"].build()
    attach(model)
    cache = FlatKVCache(model.config, **{**COVERING_OPTIONS, "top_k": 4})
    with torch.no_grad():
        model(prompt(1, 40), past_key_values=cache)
    CalibrationArtifact.from_pretrained(BUNDLED_MODEL / "a2ats").save_pretrained(tmp_path)
    cache.save_pretrained(tmp_path)
    return tmp_path


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def _artifact_file(folder: Path) -> Path:
    (path,) = folder.glob("artifact-*.safetensors")
    return path


def test_all_that_is_there_is_verified(folder: Path) -> None:
    assert [line.split()[0] for line in verify(folder) if not line.startswith("tensors")] == [
        *("cache", "made", "records", "artifact", "sha256"),
    ]


@pytest.mark.parametrize("part", ["cache", "artifact"])
def test_damage_of_any_part_is_found(part: str, folder: Path) -> None:
    files = {
        "cache": (saved_file(folder), "tokens|layers"),
        "artifact": (_artifact_file(folder), "is damaged, or of another"),
    }
    path, words = files[part]
    _flip(path)
    with pytest.raises(ValueError, match=words):
        verify(folder)


def test_a_models_configuration_beside_a_cache_is_no_artifact(folder: Path) -> None:
    _artifact_file(folder).unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 128}))
    lines = verify(folder)
    assert lines[0].startswith("cache ") and not any("artifact" in line for line in lines)


def test_a_folder_without_either_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="saved caches and artifacts"):
        verify(tmp_path)
