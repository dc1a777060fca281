"""The files of an artifact: written whole or not at all, and read back as they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret.artifacts import CalibrationArtifact, ModelIdentity

from .artifact_folder import CARD, DESCRIPTION, FIXED_NAME, as_of_the_hub, tensor_file


def test_a_saved_artifact_comes_back(
    artifact: CalibrationArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(0o027)
    try:
        artifact.save_pretrained("~/deep/down")
    finally:
        os.umask(before)
    folder = tmp_path / "deep" / "down"
    assert {path.name for path in folder.iterdir()} == {tensor_file(folder).name, DESCRIPTION, CARD}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}
    # The card is for people alone.
    (folder / CARD).unlink()
    loaded = CalibrationArtifact.from_pretrained("~/deep/down", method="a2ats")
    assert loaded.tensors.keys() == artifact.tensors.keys()
    for name, tensor in artifact.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].device.type == "cpu"
        assert torch.equal(loaded.tensors[name], tensor)
    for part in ("method", "model", "data", "options", "quality", "nbytes", "sha256"):
        assert getattr(loaded, part) == getattr(artifact, part)


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
    assert tensor_file(tmp_path).stat().st_size < 4 * (24 * 3 + 6 + 12 + 1) + 1000


def test_a_new_artifact_replaces_the_old_one_and_nothing_else(
    artifact: CalibrationArtifact, saved: Path
) -> None:
    names = (FIXED_NAME, "artifact-202411250228.tar", "artifact-2.safetensors", "notes.txt")
    for name in names:
        (saved / name).write_text("mine")
    CalibrationArtifact("a2ats", artifact.model, {"x": torch.ones(3)}).save_pretrained(saved)
    assert list(CalibrationArtifact.from_pretrained(saved).tensors) == ["x"]
    assert [(saved / name).read_text() for name in names] == ["mine"] * 4
    assert len(list(saved.iterdir())) == 7


class _Interruption(BaseException):
    """Ctrl-C, or the machine taking the process away."""


@pytest.mark.parametrize("before", ["nothing", "hub", "folder"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_save_that_breaks_off_leaves_the_old_or_the_new(
    artifact: CalibrationArtifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    call: str,
) -> None:
    tensors = {name: tensor + 1 for name, tensor in artifact.tensors.items()}
    newer = CalibrationArtifact("a2ats", artifact.model, tensors)
    original = getattr(os, call)
    for count in range(20):
        home = tmp_path / str(count)
        if before != "nothing":
            artifact.save_pretrained(home)
        if before == "hub":
            as_of_the_hub(home)
        calls = []

        def some(*arguments: Any, count: int = count, calls: list[Any] = calls) -> None:
            if len(calls) == count:
                raise _Interruption
            calls.append(arguments)
            original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, some)
            try:
                newer.save_pretrained(home)
            except _Interruption:
                pass
            else:
                break
        if before == "nothing" and not (home / DESCRIPTION).exists():
            assert not list(home.iterdir())
            continue
        loaded = CalibrationArtifact.from_pretrained(home)
        assert loaded.sha256 in (artifact.sha256, newer.sha256)
        # The next save removes what was left.
        newer.save_pretrained(home)
        assert CalibrationArtifact.from_pretrained(home).sha256 == newer.sha256
        # Nothing says any more that a file of the fixed name was ours.
        assert len({path.name for path in home.iterdir()} - {FIXED_NAME}) == 3
    assert count > 2, "nothing was interrupted"
    assert CalibrationArtifact.from_pretrained(home).sha256 == newer.sha256
    assert len(list(home.iterdir())) == 3


def test_an_artifact_is_never_written_through_a_link(
    artifact: CalibrationArtifact, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("kept")
    (saved / CARD).unlink()
    (saved / CARD).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is a symbolic link"):
        artifact.save_pretrained(saved)
    assert (tmp_path / "secret").read_text() == "kept"


def test_the_digest_is_of_all_that_is_loaded_and_of_nothing_else(
    artifact: CalibrationArtifact, identity: ModelIdentity, saved: Path
) -> None:
    plain = {name: getattr(artifact, name) for name in ("tensors", "data", "options", "quality")}
    same = CalibrationArtifact("a2ats", identity, **plain)
    assert same.sha256 == artifact.sha256 and len(same.sha256) == 64
    first = next(iter(artifact.tensors))
    tensors = {**artifact.tensors, first: artifact.tensors[first].clone()}
    tensors[first].view(-1)[3] += 1
    shaped = {**artifact.tensors, first: artifact.tensors[first].flatten()}
    others = [
        CalibrationArtifact("aqua", identity, **plain),
        CalibrationArtifact("a2ats", ModelIdentity("x", identity.facts, identity.weights), **plain),
        CalibrationArtifact("a2ats", identity, **{**plain, "tensors": tensors}),
        CalibrationArtifact("a2ats", identity, **{**plain, "tensors": shaped}),
        CalibrationArtifact("a2ats", identity, **{**plain, "data": {}}),
        CalibrationArtifact("a2ats", identity, **{**plain, "options": {}}),
        CalibrationArtifact("a2ats", identity, **{**plain, "quality": []}),
    ]
    assert len({one.sha256 for one in (artifact, *others)}) == 1 + len(others)
    # One that is pinned is compared with it.
    assert CalibrationArtifact.from_pretrained(saved, sha256=artifact.sha256).method == "a2ats"
    with pytest.raises(ValueError, match=rf"has sha256 {artifact.sha256}, and .* for {'0' * 64}"):
        CalibrationArtifact.from_pretrained(saved, sha256="0" * 64)


def test_a_file_in_the_way_is_named(artifact: CalibrationArtifact, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file is a file: give a folder"):
        artifact.save_pretrained(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="give the folder that holds the artifact"):
        CalibrationArtifact.from_pretrained(tmp_path / "file")
