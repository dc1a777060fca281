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

DESCRIPTION, CARD = "config.json", "README.md"


@pytest.fixture
def saved(artifact: CalibrationArtifact, tmp_path: Path) -> Path:
    """A folder with a whole artifact."""
    artifact.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def _edit(folder: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
    """Change ``config.json``; ``seal`` makes its checksum that of the change."""
    description = json.loads((folder / DESCRIPTION).read_text())
    change(description)
    if seal and "description_sha256" in description:
        description["description_sha256"] = files._digest(description)
    (folder / DESCRIPTION).write_text(json.dumps(description))


def _tensors(folder: Path) -> Path:
    """The only tensor file of an artifact."""
    (path,) = folder.glob("artifact*.safetensors")
    return path


def _save_format_1(artifact: CalibrationArtifact, folder: Path) -> None:
    """As versions before 0.2 did: one fixed name, no checksum of ``config.json``."""
    artifact.save_pretrained(folder)
    _tensors(folder).rename(folder / "artifact.safetensors")
    old = {"format_version": 1}
    _edit(folder, lambda d: (d.update(old), d.pop("files"), d.pop("description_sha256")))


def test_a_saved_artifact_comes_back(artifact: CalibrationArtifact, tmp_path: Path) -> None:
    artifact.save_pretrained(tmp_path / "deep" / "down")
    tensors = _tensors(tmp_path / "deep" / "down").name
    assert {path.name for path in (tmp_path / "deep" / "down").iterdir()} == {
        tensors,
        DESCRIPTION,
        CARD,
    }
    loaded = CalibrationArtifact.from_pretrained(str(tmp_path / "deep" / "down"), method="a2ats")
    assert loaded.tensors.keys() == artifact.tensors.keys()
    for name, tensor in artifact.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].device.type == "cpu"
        assert torch.equal(loaded.tensors[name], tensor)
    for part in ("method", "model", "data", "options", "quality", "nbytes", "sha256"):
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
    assert _tensors(tmp_path).stat().st_size < 4 * (24 * 3 + 6 + 12 + 1) + 1000


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


@pytest.mark.parametrize("before", ["nothing", "format 1", "format 2"])
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
        if before == "format 1":
            _save_format_1(artifact, home)
        elif before == "format 2":
            artifact.save_pretrained(home)
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
        assert len(list(home.iterdir())) == 3
    assert count > 2, "nothing was interrupted"
    assert CalibrationArtifact.from_pretrained(home).sha256 == newer.sha256


def test_format_1_is_read_and_replaced(artifact: CalibrationArtifact, tmp_path: Path) -> None:
    _save_format_1(artifact, tmp_path)
    assert json.loads((tmp_path / DESCRIPTION).read_text())["format_version"] == 1
    assert CalibrationArtifact.from_pretrained(tmp_path).sha256 == artifact.sha256
    newer = CalibrationArtifact("a2ats", artifact.model, {"x": torch.ones(3)})
    newer.save_pretrained(tmp_path)
    assert CalibrationArtifact.from_pretrained(tmp_path).sha256 == newer.sha256
    assert len(list(tmp_path.iterdir())) == 3


def test_format_1_with_a_checksum_is_damaged(artifact: CalibrationArtifact, tmp_path: Path) -> None:
    artifact.save_pretrained(tmp_path)
    _edit(tmp_path, lambda d: d.update(format_version=1), seal=False)
    with pytest.raises(ValueError, match="checksums that format 1 has not"):
        CalibrationArtifact.from_pretrained(tmp_path)


def test_an_artifact_is_never_written_through_a_link(
    artifact: CalibrationArtifact, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("kept")
    (saved / CARD).unlink()
    (saved / CARD).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is a symbolic link"):
        artifact.save_pretrained(saved)
    assert (tmp_path / "secret").read_text() == "kept"


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
    _edit(saved, change, seal=False)
    with pytest.raises(ValueError, match=r"config\.json was changed .*sha256"):
        CalibrationArtifact.from_pretrained(saved)


def test_the_digest_is_of_all_that_is_loaded_and_of_nothing_else(
    artifact: CalibrationArtifact, identity: ModelIdentity, tmp_path: Path
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


def test_another_digest_than_the_pinned_one_is_refused(
    artifact: CalibrationArtifact, saved: Path
) -> None:
    loaded = CalibrationArtifact.from_pretrained(saved, sha256=artifact.sha256)
    assert loaded.sha256 == artifact.sha256
    with pytest.raises(ValueError, match=rf"has sha256 {artifact.sha256}, and .* for {'0' * 64}"):
        CalibrationArtifact.from_pretrained(saved, sha256="0" * 64)


def test_a_file_in_the_way_is_named(artifact: CalibrationArtifact, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file is a file: give a folder"):
        artifact.save_pretrained(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="give the folder that holds the artifact"):
        CalibrationArtifact.from_pretrained(tmp_path / "file")


@pytest.mark.parametrize("missing", [DESCRIPTION, "tensors"])
def test_a_folder_without_the_files_is_named(saved: Path, missing: str) -> None:
    path = _tensors(saved) if missing == "tensors" else saved / missing
    path.unlink()
    words = f"no calibration artifact in .*{path.name} is miss"
    with pytest.raises(FileNotFoundError, match=words):
        CalibrationArtifact.from_pretrained(saved)


def test_a_folder_without_a_card_is_an_artifact(artifact: CalibrationArtifact, saved: Path) -> None:
    (saved / CARD).unlink()
    assert CalibrationArtifact.from_pretrained(saved).model == artifact.model


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_tensors_are_refused(saved: Path, kept: int) -> None:
    content = _tensors(saved).read_bytes()
    _tensors(saved).write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"artifact-\w+\.safetensors is corrupt or truncated"):
        CalibrationArtifact.from_pretrained(saved)


def test_a_flipped_bit_is_found(saved: Path) -> None:
    content = bytearray(_tensors(saved).read_bytes())
    content[-1] ^= 1
    _tensors(saved).write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"the file was changed .*sha256"):
        CalibrationArtifact.from_pretrained(saved)


def test_a_git_lfs_pointer_names_the_way_out(saved: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    _tensors(saved).write_text(pointer)
    with pytest.raises(ValueError, match="run git lfs pull"):
        CalibrationArtifact.from_pretrained(saved)


def test_tensors_of_another_artifact_are_refused(
    artifact: CalibrationArtifact, saved: Path, tmp_path: Path
) -> None:
    tensors = {name: tensor + 1 for name, tensor in artifact.tensors.items()}
    CalibrationArtifact("a2ats", artifact.model, tensors).save_pretrained(tmp_path / "other")
    _tensors(tmp_path / "other").replace(_tensors(saved))
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
    tensors = load_file(_tensors(saved))
    change(tensors)
    save_file(tensors, _tensors(saved))
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


@pytest.mark.parametrize("version", [0, 3, "1.5", None, True, 2.0])
def test_another_format_version_asks_for_an_upgrade(saved: Path, version: object) -> None:
    # A newer format may have none of the other parts.
    (saved / DESCRIPTION).write_text(json.dumps({"format_version": version}))
    with pytest.raises(
        ValueError, match=r"reads 1 and 2: upgrade hf-kvret \(git pull, then pip install"
    ):
        CalibrationArtifact.from_pretrained(saved)


def test_another_method_is_refused_before_its_tensors_are_read(saved: Path) -> None:
    _tensors(saved).unlink()
    with pytest.raises(ValueError, match=r"an artifact of 'a2ats', not of 'aqua'.*calibrate aqua"):
        CalibrationArtifact.from_pretrained(saved, method="aqua")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 100_000,
        '{"format_version": ' + "9" * 5000 + "}",
        '{"format_version": 2, "format_version": 1}',
        '{"format_version": 2, "data": NaN}',
        '{"format_version": 2, "data": 1e999}',
        "[" * 70 + "]" * 70,
    ],
    ids=["deep list", "deep dict", "digits", "twice", "NaN", "overflow", "nested"],
)
def test_json_that_is_made_to_do_damage_is_refused(saved: Path, text: str) -> None:
    (saved / DESCRIPTION).write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "x", 3, None, "README.md"]
)
def test_no_file_is_read_but_one_of_an_artifacts_names(saved: Path, name: object) -> None:
    _edit(saved, lambda description: description["files"].update(tensors=name))
    with pytest.raises(ValueError, match="as its tensor file: it is damaged"):
        CalibrationArtifact.from_pretrained(saved)
