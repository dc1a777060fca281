"""Where an artifact goes, and what a command refuses before its model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration, CodebookStudy
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.study import Corpus

SMALL = A2ATSCalibration(codewords=8, distance=32, rounds=3)
TEXTS = Corpus(list(torch.arange(1, 101).view(2, 50)), 0, {"text": "numbers"})
FOREIGN = "is not of a calibration artifact (but of a model, perhaps), and would be replaced"
OTHER = "is of an artifact of 'aqua', not of 'a2ats', and would be replaced"


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("words", [FOREIGN, OTHER], ids=["a model", "another method"])
def test_a_folder_of_something_else_is_left_alone(
    words: str,
    artifact: CalibrationArtifact,
    llama: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CodebookStudy, "add", lambda *given: pytest.fail("the texts were read"))
    if words == OTHER:
        CalibrationArtifact("aqua", artifact.model, {"x": torch.ones(3)}).save_pretrained(tmp_path)
    else:
        (tmp_path / "config.json").write_bytes(b'{"model_type": "llama"}')
    before = _contents(tmp_path)
    for act in (
        lambda: artifact.save_pretrained(tmp_path),
        lambda: calibrate(llama, TEXTS, SMALL, tmp_path, progress=False),
    ):
        with pytest.raises(ValueError, match="give a new folder, for instance MODEL/a2ats") as told:
            act()
        assert words in str(told.value)
    assert _contents(tmp_path) == before


def test_an_artifact_of_the_same_method_is_replaced(
    artifact: CalibrationArtifact, llama: PreTrainedModel, tmp_path: Path
) -> None:
    artifact.save_pretrained(tmp_path)
    result = calibrate(llama, TEXTS, SMALL, tmp_path, progress=False)
    again = CalibrationArtifact.from_pretrained(tmp_path)
    assert again.tensors.keys() == result.tensors.keys() != artifact.tensors.keys()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--text", __file__, "--out", "FOREIGN"], "a new folder, for instance MODEL/a2ats"),
        (["--text", "no.txt"], "--text no.txt: no such file"),
        ([], "give one of --text FILE and --dataset ID"),
        (["--dataset", "a/b"], "--dataset a/b needs datasets: pip install datasets"),
    ],
)
def test_the_command_looks_at_its_options_before_the_model(
    more: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "llama"}')
    more = [word.replace("FOREIGN", str(tmp_path)) for word in more]
    # A model that is not there: it would be missed if it were looked for.
    where = ["--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert main(["calibrate", "a2ats", *where, *more]) == 2
    assert words in capsys.readouterr().err


def test_more_codewords_than_tokens_are_refused_and_as_many_are_not(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    many, as_many = (A2ATSCalibration(codewords=n, distance=32, rounds=1) for n in (101, 100))
    words = "codewords=101 of 100 tokens: give more --tokens or fewer --codewords"
    with pytest.raises(ValueError, match=words):
        calibrate(llama, TEXTS, many, tmp_path, progress=False)
    result = calibrate(llama, TEXTS, as_many, tmp_path, progress=False)
    assert result.tensors["layers.0.codewords"].shape[1] == 100
