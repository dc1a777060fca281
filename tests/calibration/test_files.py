"""The files of an artifact: written whole or not at all, and every damage is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_kvret.calibration import CalibrationArtifact, ModelIdentity, files

TENSORS, DESCRIPTION, CARD = "artifact.safetensors", "config.json", "README.md"


@pytest.fixture
def saved(artifact: CalibrationArtifact, tmp_path: Path) -> Path:
    """A folder with a whole artifact."""
    artifact.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    description = json.loads((folder / DESCRIPTION).read_text())
    change(description)
    (folder / DESCRIPTION).write_text(json.dumps(description))


def test_a_saved_artifact_comes_back(artifact: CalibrationArtifact, tmp_path: Path) -> None:
    artifact.save_pretrained(tmp_path / "deep" / "down")
    assert {path.name for path in (tmp_path / "deep" / "down").iterdir()} == {
        TENSORS,
        DESCRIPTION,
        CARD,
    }
    loaded = CalibrationArtifact.from_pretrained(str(tmp_path / "deep" / "down"), method="a2ats")
    assert loaded.tensors.keys() == artifact.tensors.keys()
    for name, tensor in artifact.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].device.type == "cpu"
        assert torch.equal(loaded.tensors[name], tensor)
    for part in ("method", "model", "data", "options", "quality", "format_version", "nbytes"):
        assert getattr(loaded, part) == getattr(artifact, part)


def test_a_home_directory_may_be_a_tilde(
    artifact: CalibrationArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    artifact.save_pretrained("~/mine")
    assert (tmp_path / "mine" / DESCRIPTION).is_file()
    assert CalibrationArtifact.from_pretrained("~/mine").options == artifact.options


def test_tensors_of_any_layout_are_saved(identity: ModelIdentity, tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "whole": whole,
        "again": whole,
        "row": whole[1],
        "turned": whole.T,
        "learned": torch.nn.Parameter(whole[:2]),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3, dtype=torch.int32),
    }
    CalibrationArtifact("a2ats", identity, tensors).save_pretrained(tmp_path)
    loaded = CalibrationArtifact.from_pretrained(tmp_path).tensors
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape and loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert (tmp_path / TENSORS).stat().st_size < 4 * (24 * 3 + 6 + 12 + 1) + 1000


def test_a_new_artifact_replaces_the_old_one_and_nothing_else(
    artifact: CalibrationArtifact, saved: Path
) -> None:
    (saved / "notes.txt").write_text("mine")
    newer = CalibrationArtifact("a2ats", artifact.model, {"x": torch.ones(3)})
    newer.save_pretrained(saved)
    assert list(CalibrationArtifact.from_pretrained(saved).tensors) == ["x"]
    assert (saved / "notes.txt").read_text() == "mine"
    assert len(list(saved.iterdir())) == 4


def test_all_files_may_be_read_by_whom_the_umask_says(
    artifact: CalibrationArtifact, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        artifact.save_pretrained(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


class _Interruption(BaseException):
    """Ctrl-C, or the machine taking the process away."""


def _interrupt(*arguments: object, **options: object) -> None:
    raise _Interruption


def test_an_interrupted_save_leaves_what_was_there(
    artifact: CalibrationArtifact, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = CalibrationArtifact("a2ats", artifact.model, {"x": torch.ones(3)})
    for place, name in ((files, "save_file"), (files.json, "dumps"), (files.os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, _interrupt)
            for folder in (saved, tmp_path / "new"):
                with pytest.raises(_Interruption):
                    newer.save_pretrained(folder)
        left = CalibrationArtifact.from_pretrained(saved).tensors
        assert left.keys() == artifact.tensors.keys()
        assert len(list(saved.iterdir())) == 3
        assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("moved", [1, 2])
def test_a_save_that_broke_off_between_two_files_is_found_out(
    artifact: CalibrationArtifact, saved: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    tensors = {name: tensor + 1 for name, tensor in artifact.tensors.items()}
    newer = CalibrationArtifact("a2ats", artifact.model, tensors)
    replace, calls = os.replace, []

    def some(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > moved:
            raise _Interruption
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", some)
        with pytest.raises(_Interruption):
            newer.save_pretrained(saved)
    if moved == 1:
        with pytest.raises(ValueError, match="are of different artifacts"):
            CalibrationArtifact.from_pretrained(saved)
    else:  # only the card is old
        name = "layers.0.codebook"
        loaded = CalibrationArtifact.from_pretrained(saved).tensors[name]
        assert torch.equal(loaded, tensors[name])


def test_a_file_in_the_way_is_named(artifact: CalibrationArtifact, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file is a file: give a folder"):
        artifact.save_pretrained(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="give the folder that holds the artifact"):
        CalibrationArtifact.from_pretrained(tmp_path / "file")


@pytest.mark.parametrize("missing", [DESCRIPTION, TENSORS])
def test_a_folder_without_the_files_is_named(saved: Path, missing: str) -> None:
    (saved / missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"no calibration artifact in .*{missing} is miss"):
        CalibrationArtifact.from_pretrained(saved)


def test_a_folder_without_a_card_is_an_artifact(artifact: CalibrationArtifact, saved: Path) -> None:
    (saved / CARD).unlink()
    assert CalibrationArtifact.from_pretrained(saved).model == artifact.model


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_tensors_are_refused(saved: Path, kept: int) -> None:
    content = (saved / TENSORS).read_bytes()
    (saved / TENSORS).write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"artifact\.safetensors is corrupt or truncated"):
        CalibrationArtifact.from_pretrained(saved)


def test_a_flipped_bit_is_found(saved: Path) -> None:
    content = bytearray((saved / TENSORS).read_bytes())
    content[-1] ^= 1
    (saved / TENSORS).write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"the file was changed .*sha256"):
        CalibrationArtifact.from_pretrained(saved)


def test_a_git_lfs_pointer_names_the_way_out(saved: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (saved / TENSORS).write_text(pointer)
    with pytest.raises(ValueError, match="run git lfs pull"):
        CalibrationArtifact.from_pretrained(saved)


def test_tensors_of_another_artifact_are_refused(
    artifact: CalibrationArtifact, saved: Path, tmp_path: Path
) -> None:
    tensors = {name: tensor + 1 for name, tensor in artifact.tensors.items()}
    CalibrationArtifact("a2ats", artifact.model, tensors).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / TENSORS).replace(saved / TENSORS)
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
    tensors = load_file(saved / TENSORS)
    change(tensors)
    save_file(tensors, saved / TENSORS)
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
    "name", ["method", "model", "data", "options", "quality", "tensors", "tensors_sha256"]
)
def test_a_description_that_lacks_a_part_is_refused(saved: Path, name: str) -> None:
    _edit(saved, lambda description: description.update({name: 3}))
    with pytest.raises(ValueError, match=f"config.json has a int for '{name}' where"):
        CalibrationArtifact.from_pretrained(saved)
    _edit(saved, lambda description: description.pop(name))
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
    _edit(saved, lambda description: change(description["model"]))
    with pytest.raises(ValueError, match=words):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize("version", [0, 2, "1.5", None])
def test_another_format_version_asks_for_an_upgrade(saved: Path, version: object) -> None:
    # A newer format may have none of the other parts.
    (saved / DESCRIPTION).write_text(json.dumps({"format_version": version}))
    with pytest.raises(ValueError, match=r"reads 1: upgrade hf-kvret \(git pull, then pip install"):
        CalibrationArtifact.from_pretrained(saved)


def test_another_method_is_refused_before_its_tensors_are_read(saved: Path) -> None:
    (saved / TENSORS).unlink()
    with pytest.raises(ValueError, match=r"an artifact of 'a2ats', not of 'aqua'.*calibrate aqua"):
        CalibrationArtifact.from_pretrained(saved, method="aqua")
