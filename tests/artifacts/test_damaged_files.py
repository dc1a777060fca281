"""The files of an artifact: damage is refused, and so are another method and another format."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.artifacts import CalibrationArtifact

from .artifact_folder import DESCRIPTION, edit, tensor_file

SAVED = Path(__file__).parents[1] / "fixtures" / "saved" / "artifacts"


@pytest.mark.parametrize("method", ["a2ats", "aqua"])
def test_a_damaged_file_is_refused_or_the_artifact_is_the_same(method: str, tmp_path: Path) -> None:
    """Files with a flipped bit, cut off or with bytes at the end."""
    rng = random.Random(0)
    expected = CalibrationArtifact.from_pretrained(SAVED / method).sha256
    for number in range(60):
        folder = Path(shutil.copytree(SAVED / method, tmp_path / str(number)))
        path = rng.choice([tensor_file(folder), folder / DESCRIPTION])
        content = bytearray(path.read_bytes())
        place = rng.randrange(len(content) - 2)
        if number % 3 == 0:
            content[place] ^= 1 << rng.randrange(8)
        elif number % 3 == 1:
            del content[place:]
        else:
            content += b"xxxxxxxx"
        path.write_bytes(content)
        try:
            loaded = CalibrationArtifact.from_pretrained(folder)
        except ValueError as error:
            assert "artifact again" in str(error) or "format version" in str(error)
        else:
            assert loaded.sha256 == expected, number


def _change(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit(folder, change, seal=False)


def _write(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / DESCRIPTION).write_bytes(content)


def _names(name: str) -> Callable[[Path], object]:
    return lambda folder: edit(folder, lambda content: content["files"].update(tensors=name))


CHANGED = r"config\.json was changed .*sha256"
FOREIGN = "'format_version': it is not of a calibration artifact"
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (_change(lambda d: d["options"].update(codewords=9)), CHANGED),
    (_change(lambda d: d["quality"][0].update(score_error=0.12345679)), CHANGED),
    (_change(lambda d: d["model"]["facts"].update(hidden_size=4096)), CHANGED),
    (_change(lambda d: d.pop("description_sha256")), CHANGED),
    (_write(b""), r"config\.json is no JSON"),
    (_write(b"\x00\xff"), r"config\.json is no JSON"),
    (_write(b"[]"), FOREIGN),
    (_write(b'{"model_type": "llama"}'), FOREIGN),
    (_names("../secret.safetensors"), "as its tensor file"),
    (_names("README.md"), "as its tensor file"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_a_description_that_is_not_what_was_saved_is_refused(
    saved: Path, change: Callable[[Path], object], words: str
) -> None:
    change(saved)
    with pytest.raises(ValueError, match=words):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize("version", [0, 2, "1.5", None])
def test_another_format_version_asks_for_another_calibration(saved: Path, version: object) -> None:
    # A newer format may have none of the other parts.
    (saved / DESCRIPTION).write_text(json.dumps({"format_version": version}))
    with pytest.raises(
        ValueError, match=r"reads 1: calibrate again, or upgrade hf-kvret \(git pull, then pip "
    ):
        CalibrationArtifact.from_pretrained(saved)


@pytest.mark.parametrize("missing", [DESCRIPTION, "tensors"])
def test_a_folder_without_the_files_is_named(saved: Path, missing: str) -> None:
    path = tensor_file(saved) if missing == "tensors" else saved / missing
    path.unlink()
    words = f"no calibration artifact in .*{path.name} is miss"
    with pytest.raises(FileNotFoundError, match=words):
        CalibrationArtifact.from_pretrained(saved)


def test_tensors_of_another_artifact_are_refused(
    artifact: CalibrationArtifact, saved: Path, tmp_path: Path
) -> None:
    tensors = {name: tensor + 1 for name, tensor in artifact.tensors.items()}
    CalibrationArtifact("a2ats", artifact.model, tensors).save_pretrained(tmp_path / "other")
    tensor_file(tmp_path / "other").replace(tensor_file(saved))
    with pytest.raises(ValueError, match="is damaged, or of another artifact"):
        CalibrationArtifact.from_pretrained(saved)


def test_another_method_is_refused_before_its_tensors_are_read(saved: Path) -> None:
    tensor_file(saved).unlink()
    with pytest.raises(ValueError, match=r"an artifact of 'a2ats', not of 'aqua'.*calibrate aqua"):
        CalibrationArtifact.from_pretrained(saved, method="aqua")
