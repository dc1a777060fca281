"""Where an artifact goes: what lies there already is not destroyed, and one writes at a time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration, CodebookStudy
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.study import LayerFindings

SMALL = A2ATSCalibration(codewords=8, distance=32, rounds=3)
TEXTS = Corpus(list(torch.arange(1, 101).view(2, 50)), 0, {"text": "numbers"})
TEXT = ["--text", __file__]
MODELS_CONFIG = b'{"model_type": "llama"}'
FOREIGN = {"model": MODELS_CONFIG, "no JSON": b"\xff{"}
FOREIGN_WORDS = r"is not of a calibration artifact \(but of a model, perhaps\), and would be replac"


@pytest.fixture
def studied(monkeypatch: pytest.MonkeyPatch) -> list[CodebookStudy]:
    """The studies that finished."""
    finish, result = CodebookStudy.finish, []

    def counted(self: CodebookStudy, *arguments: Any) -> LayerFindings:
        result.append(self)
        return finish(self, *arguments)

    monkeypatch.setattr(CodebookStudy, "finish", counted)
    return result


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_of_something_else_is_left_alone(
    artifact: CalibrationArtifact,
    llama: PreTrainedModel,
    studied: list[CodebookStudy],
    tmp_path: Path,
    content: bytes,
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "README.md").write_text("my model")
    before = _contents(tmp_path)
    words = rf"config\.json {FOREIGN_WORDS}ed: give a new folder, for instance MODEL/a2ats"
    with pytest.raises(ValueError, match=words):
        artifact.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        calibrate(llama, TEXTS, SMALL, tmp_path, progress=False)
    assert _contents(tmp_path) == before and not studied


def test_only_an_artifact_of_the_same_method_is_replaced(
    artifact: CalibrationArtifact,
    llama: PreTrainedModel,
    studied: list[CodebookStudy],
    tmp_path: Path,
) -> None:
    CalibrationArtifact("aqua", artifact.model, {"x": torch.ones(3)}).save_pretrained(tmp_path)
    before = _contents(tmp_path)
    words = r"is of an artifact of 'aqua', not of 'a2ats', and would be replaced: give a new folder"
    with pytest.raises(ValueError, match=words):
        artifact.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        calibrate(llama, TEXTS, SMALL, tmp_path, progress=False)
    assert _contents(tmp_path) == before and not studied
    artifact.save_pretrained(tmp_path / "a2ats")
    result = calibrate(llama, TEXTS, SMALL, tmp_path / "a2ats", progress=False)
    again = CalibrationArtifact.from_pretrained(tmp_path / "a2ats")
    assert again.tensors.keys() == result.tensors.keys() != artifact.tensors.keys()


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        (
            "a2ats",
            [*TEXT, "--out", "FOREIGN"],
            "a new folder, for instance MODEL/a2ats",
        ),
        ("aqua", [*TEXT, "--out", "FOREIGN"], "a new folder, for instance MODEL/aqua"),
        ("a2ats", ["--text", "no.txt"], "--text no.txt: no such file"),
        ("a2ats", [], "give one of --text FILE and --dataset ID"),
        ("a2ats", ["--dataset", "a/b"], "--dataset a/b needs datasets: pip install datasets"),
    ],
)
def test_the_command_looks_at_its_options_before_the_model(
    method: str,
    more: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "config.json").write_bytes(MODELS_CONFIG)
    more = [word.replace("FOREIGN", str(tmp_path)) for word in more]
    # A model that is not there: it would be missed if it were looked for.
    where = ["--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert main(["calibrate", method, *where, *more]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "config.json").read_bytes() == MODELS_CONFIG


def test_more_codewords_than_tokens_are_refused_and_fewer_go_on(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    many = A2ATSCalibration(codewords=101, distance=32, rounds=3)
    words = "codewords=101 of 100 tokens: give more --tokens or fewer --codewords"
    with pytest.raises(ValueError, match=words):
        calibrate(llama, TEXTS, many, tmp_path, progress=False)
    # What the message says must help, in the same folder too.
    fewer = A2ATSCalibration(codewords=100, distance=32, rounds=3)
    result = calibrate(llama, TEXTS, fewer, tmp_path, progress=False)
    assert result.tensors["layers.0.codewords"].shape[1] == 100
