"""``hf-kvret inspect``: what an artifact is; whether files are whole."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret import FlatKVCache, attach
from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.lab.calibrate.command import quality_table, verify
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt

from ...saved.saved_files import saved_file


def test_text_says_what_an_artifact_is(
    saved: Path, artifact: CalibrationArtifact, program: Any
) -> None:
    shown = program("inspect", saved).out
    assert "method   a2ats, 2 layers" in shown and f"sha256   {artifact.sha256}\n" in shown
    assert "model    meta/tiny-llama (llama, " in shown
    assert "tokens 4096" in shown and "codewords 8" in shown
    lines = [line.strip("| ") for line in shown.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert rows[0] == ["layer", "score error", "plain error", "note"]
    assert rows[2:] == [["0", "0.1235", "0.25", "-"], ["1", "0.0625", "-", "no RoPE"]]
    figures = [{"layer": 0, "score_error": 3.456789e-05, "seen": 123456}]
    last = quality_table(dataclasses.replace(artifact, quality=figures)).splitlines()[-1]
    assert last.replace(" ", "") == "|0|3.457e-05|123456|"


def test_mistakes_say_what_is_wrong(hub: Any, saved: Path, tmp_path: Path, program: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tensors,) = saved.glob("artifact-*.safetensors")
    for words, message in (
        (["alice/none"], "Repository Not Found"),
        ([tmp_path / "empty"], "config.json is missing"),
        ([saved / "config.json"], "is a file: give the folder"),
        ([saved, "--revision", "v1"], "only artifacts on the hub have revisions"),
        (["--verify", tmp_path / "empty"], "checks folders with saved caches and artifacts"),
        (["--verify", "alice/none"], "Repository Not Found"),
    ):
        assert message in program("inspect", *words, status=2).err, words
    tensors.write_bytes(b"x")
    assert "is damaged, or of another artifact" in program("inspect", saved, status=2).err


@pytest.fixture
def both(model: Any, tmp_path: Path) -> Path:
    """A folder with a cache and an artifact."""
    attach(model)
    cache = FlatKVCache(model.config, **{**COVERING_OPTIONS, "top_k": 4})
    with torch.no_grad():
        model(prompt(1, 40), past_key_values=cache)
    CalibrationArtifact.from_pretrained(BUNDLED_MODEL / "a2ats").save_pretrained(tmp_path / "both")
    cache.save_pretrained(tmp_path / "both")
    return tmp_path / "both"


def test_cache_and_artifact_are_verified(both: Path, program: Any) -> None:
    shown = program("inspect", "--verify", both).out.splitlines()
    assert [line.split()[0] for line in shown if not line.startswith("tensors")] == [
        *("cache", "made", "artifact", "sha256")
    ]
    assert shown[-1] == f"sha256   {CalibrationArtifact.from_pretrained(both).sha256}"
    (tensors,) = both.glob("artifact-*.safetensors")
    whole = tensors.read_bytes()
    for file, words in (
        (tensors, "is damaged, or of another"),
        (saved_file(both), "tokens|layers"),
    ):
        content = bytearray(file.read_bytes())
        content[-5] ^= 4
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            verify(both)
        tensors.write_bytes(whole)
