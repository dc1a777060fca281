"""``inspect --verify`` checks all that a path holds, and names what it did not look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_kvret import FlatKVCache, attach
from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL
from hf_kvret.lab.report.results import Results
from hf_kvret.lab.report.verification import verify
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

from ...saved.saved_files import saved_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache, an artifact, two result files, and something else."""
    model = MODELS["llama"].build()
    attach(model)
    cache = FlatKVCache(model.config, **{**COVERING_OPTIONS, "top_k": 4})
    with torch.no_grad():
        model(prompt(1, 40), past_key_values=cache)
    CalibrationArtifact.from_pretrained(BUNDLED_MODEL / "a2ats").save_pretrained(tmp_path)
    cache.save_pretrained(tmp_path)
    for name in ("a.json", "b.json"):
        results = Results("eval x", {"seed": 1}, tmp_path / name)
        results.add({"cache": name}, {"score": 1.5})
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "more").mkdir()
    return tmp_path


def _flip(path: Path, place: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def _artifact_file(folder: Path) -> Path:
    (path,) = folder.glob("artifact-*.safetensors")
    return path


def test_all_that_is_there_is_verified(folder: Path) -> None:
    lines = verify(folder)
    assert [line.split()[0] for line in lines if not line.startswith("tensors")] == [
        *("cache", "made", "records", "artifact", "sha256"),
        *("results", "cells", "results", "cells", "skipped"),
    ]
    assert "results  b.json: eval x, format 1" in lines
    assert (
        lines[-1]
        == "skipped  README.md, more, tokenizer.json: nothing tells whether these are whole"
    )


@pytest.mark.parametrize("part", ["cache", "artifact", "results"])
def test_damage_of_any_part_is_found(part: str, folder: Path) -> None:
    files = {
        "cache": (saved_file(folder), "tokens|layers"),
        "artifact": (_artifact_file(folder), "is damaged, or of another"),
        "results": (folder / "b.json", "b.json"),
    }
    path, words = files[part]
    _flip(path, path.read_bytes().rfind(b"1.5") if part == "results" else -5)
    with pytest.raises(ValueError, match=words):
        verify(folder)


def test_damages_of_several_parts_are_all_told(folder: Path) -> None:
    saved_file(folder).unlink()
    _flip(_artifact_file(folder))
    (folder / "a.json").write_text((folder / "a.json").read_text().replace("1.5", "1.7"))
    with pytest.raises(
        ValueError, match=r"is missing(.|\n)*is damaged, or of another(.|\n)*cell cache a"
    ):
        verify(folder)


def test_a_models_configuration_beside_a_cache_is_no_artifact(folder: Path) -> None:
    _artifact_file(folder).unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 128}))
    lines = verify(folder)
    assert lines[0].startswith("cache ") and not any("artifact" in line for line in lines)
    assert lines[-1].startswith("skipped  README.md, config.json, more, tokenizer.json")


def test_a_long_list_is_cut_and_can_not_command_the_terminal(folder: Path) -> None:
    for number in range(20):
        (folder / f"\x1b[2J{number:02}").touch()
    assert verify(folder)[-1].startswith(r"skipped  \x1b[2J00, \x1b[2J01, ")
    assert " and 15 more: " in verify(folder)[-1]


def test_what_a_file_says_can_not_command_the_terminal(tmp_path: Path) -> None:
    results = Results("eval \x1b[2Jx", {"seed": 1}, tmp_path / "a.json")
    results.add({"cache": "a"}, {"score": 1.5})
    assert verify(tmp_path)[0] == r"results  a.json: eval \x1b[2Jx, format 1"
