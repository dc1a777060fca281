"""``hf-kvret inspect``: what an artifact is, as text, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cli import main
from hf_kvret.lab.calibrate.inspection import plot_quality, quality_table
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL
from hf_kvret.lab.report.results import Results


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


def test_an_artifact_without_figures_is_told_and_not_drawn(
    artifact: CalibrationArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    dataclasses.replace(artifact, quality=()).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "method   a2ats\n" in shown and "no figures of quality" in shown
    assert main(["inspect", str(tmp_path), "--plot", str(tmp_path / "a.png")]) == 2
    assert "no figures of quality; leave the option out" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_the_picture_is_a_picture(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "quality.png"
    assert main(["inspect", str(saved), "--plot", str(picture)]) == 0
    assert f"wrote {picture}" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("layers", [1, 2, 3, 32])
def test_layers_in_a_picture_are_whole_numbers(
    layers: int, artifact: CalibrationArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[list[float]] = []

    def ticks(figure: Any, path: Path) -> None:
        axis = figure.axes[0]
        low, high = axis.get_xlim()
        drawn.append([tick for tick in axis.get_xticks() if low <= tick <= high])

    monkeypatch.setattr("hf_kvret.lab.report.plots._save", ticks)
    quality = [{"layer": layer, "score_error": 0.1} for layer in range(layers)]
    plot_quality(tmp_path / "a.png", dataclasses.replace(artifact, quality=quality))
    assert drawn[0] and all(tick == round(tick) for tick in drawn[0])


def test_a_picture_of_unknown_kind_is_one_line(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["inspect", str(saved), "--plot", str(tmp_path / "quality.xyz")]) == 2
    assert "hf-kvret: error: --plot" in capsys.readouterr().err


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

    assert "no repository alice/none" in error("alice/none")
    assert "config.json is missing" in error(str(tmp_path))
    assert "is a file: give the folder" in error(str(saved / "config.json"))
    assert "only artifacts on the hub have revisions" in error(str(saved), "--revision", "v1")
    (tensors,) = saved.glob("artifact-*.safetensors")
    tensors.write_bytes(b"x")
    assert "is corrupt or truncated" in error(str(saved))


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
    assert "the file was changed" in capsys.readouterr().err


def test_an_artifact_that_lies_in_good_order_is_not_verified(
    bundled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = CalibrationArtifact.from_pretrained(bundled)
    name = "layers.0.codewords"
    tensors = {**whole.tensors, name: whole.tensors[name] * float("nan")}
    dataclasses.replace(whole, tensors=tensors).save_pretrained(bundled)
    assert main(["inspect", "--verify", str(bundled)]) == 2
    assert f"{name} with NaN or infinity" in capsys.readouterr().err


def test_a_result_file_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    Results("eval x", {"seed": 1}, file).add({"cache": "full"}, {"score": 1.5})
    assert main(["inspect", "--verify", str(file)]) == 0
    assert capsys.readouterr().out == "results  eval x, format 1\ncells    1: whole\n"
    file.write_text(file.read_text().replace("1.5", "1.7"))
    assert main(["inspect", "--verify", str(file)]) == 2
    assert "the cell cache full is not what its checksum says" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--json"], ["--plot", "a.png"]])
def test_verify_shows_nothing_else(
    saved: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--verify", str(saved), *option]) == 2
    assert "--verify" in capsys.readouterr().err


def test_what_is_of_no_kind_is_not_verified(
    hub: Any, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["inspect", "--verify", str(tmp_path / "empty")]) == 2
    assert "--verify checks saved caches, artifacts, result files" in capsys.readouterr().err
    assert main(["inspect", "--verify", "alice/none"]) == 2
    assert "no repository alice/none" in capsys.readouterr().err
