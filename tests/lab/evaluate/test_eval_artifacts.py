"""Artifacts in evaluations: that of another model is refused, and so are its results."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """``eval niah`` with a copy of the bundled model's artifact, results in ``r.json``."""
    shutil.copytree(BUNDLED_MODEL / "a2ats", tmp_path / "words")
    small = f"a2ats:artifact={tmp_path / 'words'}:dense_below=0:recent=16:flush=16"
    options = ["--context", "256", "--depths", "50", "--samples", "1", "--answer-tokens", "2"]
    return ["eval", "niah", "--caches", small, *options, "--json", str(tmp_path / "r.json")]


def test_the_artifact_of_another_tune_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path / "tuned")
    assert main([*arguments, "--model", str(tmp_path / "tuned")]) == 2
    assert "was made from other weights" in capsys.readouterr().err


def test_results_of_another_artifact_are_not_gone_on_with(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--model", "needle"]) == 0
    assert main([*arguments, "--model", "needle"]) == 0
    assert "1 cells were finished already" in capsys.readouterr().out
    artifact = CalibrationArtifact.from_pretrained(tmp_path / "words")
    tensors = {name: x + 1 if "codewords" in name else x for name, x in artifact.tensors.items()}
    CalibrationArtifact(
        artifact.method, artifact.model, tensors, artifact.data, artifact.options
    ).save_pretrained(tmp_path / "words")
    assert main([*arguments, "--model", "needle"]) == 2
    assert "with another artifact" in capsys.readouterr().err
