"""The files of an artifact: every damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_kvret.artifacts import CalibrationArtifact

from .artifact_folder import DESCRIPTION, edit, tensor_file


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda d: d["options"].update(codewords=9), "options"),
        (lambda d: d["data"].update(tokens=4097), "data"),
        (lambda d: d["quality"][0].update(score_error=0.12345679), "quality"),
        (lambda d: d.update(made_with="hf-kvret 9"), "made_with"),
    ],
)
def test_a_changed_description_is_found(
    saved: Path, change: Callable[[dict[str, Any]], object], part: str
) -> None:
    edit(saved, change, seal=False)
    with pytest.raises(ValueError, match=r"config\.json was changed .*sha256"):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize("missing", [DESCRIPTION, "tensors"])
def test_a_folder_without_the_files_is_named(saved: Path, missing: str) -> None:
    path = tensor_file(saved) if missing == "tensors" else saved / missing
    path.unlink()
    words = f"no calibration artifact in .*{path.name} is miss"
    with pytest.raises(FileNotFoundError, match=words):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_tensors_are_refused(saved: Path, kept: int) -> None:
    content = tensor_file(saved).read_bytes()
    tensor_file(saved).write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"artifact-\w+\.safetensors is corrupt or truncated"):
        CalibrationArtifact.from_pretrained(saved)


def test_a_flipped_bit_is_found(saved: Path) -> None:
    content = bytearray(tensor_file(saved).read_bytes())
    content[-1] ^= 1
    tensor_file(saved).write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"the file was changed .*sha256"):
        CalibrationArtifact.from_pretrained(saved)


def test_a_git_lfs_pointer_names_the_way_out(saved: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    tensor_file(saved).write_text(pointer)
    with pytest.raises(ValueError, match="run git lfs pull"):
        CalibrationArtifact.from_pretrained(saved)


def test_tensors_of_another_artifact_are_refused(
    artifact: CalibrationArtifact, saved: Path, tmp_path: Path
) -> None:
    tensors = {name: tensor + 1 for name, tensor in artifact.tensors.items()}
    CalibrationArtifact("a2ats", artifact.model, tensors).save_pretrained(tmp_path / "other")
    tensor_file(tmp_path / "other").replace(tensor_file(saved))
    with pytest.raises(ValueError, match="are of different artifacts"):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.0.factor"), r"layers.0.factor is absent instead of float32 \[2, "),
        (lambda t: t.update(more=torch.ones(2)), r"more is float32 \[2\] instead of absent"),
        (
            lambda t: t.update({"layers.1.factor": t["layers.1.factor"][:1]}),
            r"layers.1.factor is float32 \[1, 2, 16\] instead of float32 \[2, 2, 16\]",
        ),
        (
            lambda t: t.update({"layers.1.factor": t["layers.1.factor"].half()}),
            r"layers.1.factor is float16 \[2, 2, 16\] instead of float32",
        ),
    ],
)
def test_tensors_that_are_not_listed_so_are_refused(
    saved: Path, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    tensors = load_file(tensor_file(saved))
    change(tensors)
    save_file(tensors, tensor_file(saved))
    with pytest.raises(ValueError, match=rf"does not hold what config\.json says: {words}"):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize("text", ["", "{", "\x00\xff", "not json"])
def test_a_description_that_is_no_json_is_refused(saved: Path, text: str) -> None:
    (saved / DESCRIPTION).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"model_type": "llama"}'])
def test_another_files_description_is_told_apart(saved: Path, text: str) -> None:
    (saved / DESCRIPTION).write_text(text)
    with pytest.raises(ValueError, match="'format_version': it is not of a calibration artifact"):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize(
    "name",
    ["method", "model", "data", "options", "quality", "tensors", "tensors_sha256", "files"],
)
def test_a_description_that_lacks_a_part_is_refused(saved: Path, name: str) -> None:
    edit(saved, lambda description: description.update({name: 3}))
    with pytest.raises(ValueError, match=f"config.json has a int for '{name}' where"):
        CalibrationArtifact.from_pretrained(saved)
    edit(saved, lambda description: description.pop(name))
    with pytest.raises(ValueError, match=f"config.json has no '{name}'"):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.pop("sha256"), r"no 'sha256' in 'model'"),
        (lambda model: model.pop("weights"), r"no 'weights' in 'model'"),
        (lambda model: model["weights"][0].pop("values"), r"no 'values' in 'model'"),
        (lambda model: model["weights"][0]["values"].pop(), "damaged .*15 values"),
        (lambda model: model.update(weights=[5]), "damaged"),
        (lambda model: model["facts"].update(hidden_size=4096), "sha256 is not that of its facts"),
    ],
)
def test_a_models_identity_that_is_damaged_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    edit(saved, lambda description: change(description["model"]))
    with pytest.raises(ValueError, match=words):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize("version", [0, 2, "1.5", None, True, 1.0])
def test_another_format_version_asks_for_another_calibration(saved: Path, version: object) -> None:
    # A newer format may have none of the other parts.
    (saved / DESCRIPTION).write_text(json.dumps({"format_version": version}))
    with pytest.raises(
        ValueError, match=r"reads 1: calibrate again, or upgrade hf-kvret \(git pull, then pip "
    ):
        CalibrationArtifact.from_pretrained(saved)


def test_another_method_is_refused_before_its_tensors_are_read(saved: Path) -> None:
    tensor_file(saved).unlink()
    with pytest.raises(ValueError, match=r"an artifact of 'a2ats', not of 'aqua'.*calibrate aqua"):
        CalibrationArtifact.from_pretrained(saved, method="aqua")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 100_000,
        '{"format_version": ' + "9" * 5000 + "}",
        '{"format_version": 1, "data": NaN}',
        '{"format_version": 1, "data": 1e999}',
    ],
    ids=["deep list", "deep dict", "digits", "NaN", "overflow"],
)
def test_json_that_is_made_to_do_damage_is_refused(saved: Path, text: str) -> None:
    (saved / DESCRIPTION).write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "x", 3, None, "README.md"]
)
def test_no_file_is_read_but_one_of_an_artifacts_names(saved: Path, name: object) -> None:
    edit(saved, lambda description: description["files"].update(tensors=name))
    with pytest.raises(ValueError, match="as its tensor file: it is damaged"):
        CalibrationArtifact.from_pretrained(saved)
