"""``hf-kvret inspect``: what an artifact is, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.lab.calibrate.inspection import quality_table
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    """The folder of a whole artifact, of the small model that comes with the library."""
    CalibrationArtifact.from_pretrained(BUNDLED_MODEL / "a2ats").save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def test_the_text_tells_what_it_is(
    saved: Path, artifact: CalibrationArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "method   a2ats, 2 layers" in shown and f"sha256   {artifact.sha256}\n" in shown
    assert "model    meta/tiny-llama (llama, " in shown
    assert "tokens 4096" in shown and "codewords 8" in shown
    lines = [line.strip("| ") for line in shown.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert rows[0] == ["layer", "score error", "plain error", "note"]
    assert rows[2:] == [["0", "0.1235", "0.25", "-"], ["1", "0.0625", "-", "no RoPE"]]


def test_json_is_json_with_everything_but_the_numbers(
    saved: Path, artifact: CalibrationArtifact, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(saved), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == "a2ats" and result["bytes"] == artifact.nbytes
    assert result["sha256"] == artifact.sha256
    assert result["model"] == artifact.model.as_json()
    assert result["quality"] == artifact.quality
    assert result["data"] == artifact.data and result["options"] == artifact.options
    expected = {"shape": [2, 8, 16], "dtype": "bfloat16"}
    assert result["tensors"]["layers.0.codebook"] == expected
    assert result["tensors"].keys() == artifact.tensors.keys()


def test_small_figures_keep_their_digits(artifact: CalibrationArtifact) -> None:
    rows = [{"layer": 0, "score_error": 3.456789e-05, "seen": 123456}]
    shown = quality_table(dataclasses.replace(artifact, quality=rows))
    cells = [cell.strip() for cell in shown.splitlines()[-1].strip("| ").split("|")]
    assert cells == ["0", "3.457e-05", "123456"]


def test_layers_are_told_in_json_alone(
    artifact: CalibrationArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**artifact.options, "layers": {"0": {"layout": "half"}}}
    dataclasses.replace(artifact, options=options).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "layout" not in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"] == options


def test_an_artifact_without_figures_says_so(
    artifact: CalibrationArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataclasses.replace(artifact, quality=()).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "method   a2ats\n" in shown and "no figures of quality" in shown


def test_artifacts_on_the_hub_are_inspected(
    hub: Any, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
    first = hub.add("alice/codebooks", files)
    whole = CalibrationArtifact.from_pretrained(saved)
    options = {**whole.options, "seed": 7}
    dataclasses.replace(whole, options=options).save_pretrained(saved)
    hub.add("alice/codebooks", {file.name: file.read_bytes() for file in saved.iterdir()})
    assert main(["inspect", "alice/codebooks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["seed"] == 7
    assert main(["inspect", "alice/codebooks", "--json", "--revision", first]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["seed"] is None


def test_what_is_no_artifact_is_one_line(
    hub: Any, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        assert main(["inspect", *arguments]) == 2
        return capsys.readouterr().err

    assert "Repository Not Found" in error("alice/none")
    assert "config.json is missing" in error(str(tmp_path))
    assert "is a file: give the folder" in error(str(saved / "config.json"))
    assert "only artifacts on the hub have revisions" in error(str(saved), "--revision", "v1")
    (tensors,) = saved.glob("artifact-*.safetensors")
    tensors.write_bytes(b"x")
    assert "is damaged, or of another artifact" in error(str(saved))


def test_what_a_stranger_wrote_can_not_command_the_terminal(
    artifact: CalibrationArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"text": "\x1b[2Jgone\nmethod   aqua"}
    dataclasses.replace(artifact, data=data).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\\x1b[2Jgone\\nmethod   aqua" in shown


def test_an_artifact_is_verified(bundled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bundled
    assert main(["inspect", "--verify", str(folder)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("artifact a2ats of ") and shown[1].endswith(": whole")
    assert shown[2] == f"sha256   {CalibrationArtifact.from_pretrained(folder).sha256}"
    (tensors,) = folder.glob("artifact-*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    assert main(["inspect", "--verify", str(folder)]) == 2
    assert "is damaged, or of another artifact" in capsys.readouterr().err


def test_verify_shows_nothing_else(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--verify", str(saved), "--json"]) == 2
    assert "--verify" in capsys.readouterr().err


def test_what_is_of_no_kind_is_not_verified(
    hub: Any, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["inspect", "--verify", str(tmp_path / "empty")]) == 2
    assert "--verify checks folders with saved caches and artifacts" in capsys.readouterr().err
    assert main(["inspect", "--verify", "alice/none"]) == 2
    assert "Repository Not Found" in capsys.readouterr().err
