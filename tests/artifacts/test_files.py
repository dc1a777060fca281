"""The files of an artifact: read back as they were written, and refused where they are not."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret.artifacts import CalibrationArtifact, ModelIdentity

from .artifact_folder import CARD, DESCRIPTION, FIXED_NAME, as_of_the_hub, edit, tensor_file

FIXTURES = Path(__file__).parents[1] / "fixtures" / "saved" / "artifacts"
Change = Callable[[Path], object]


def test_tensors_of_any_layout_are_saved(identity: ModelIdentity, tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {"whole": whole, "again": whole, "row": whole[1], "turned": whole.T}
    tensors |= {"learned": torch.nn.Parameter(whole[:2]), "empty": torch.empty(0, 3)}
    CalibrationArtifact("a2ats", identity, tensors).save_pretrained(tmp_path)
    loaded = CalibrationArtifact.from_pretrained(tmp_path).tensors
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert tensor_file(tmp_path).stat().st_size < 4 * (24 * 3 + 6 + 12 + 1) + 1000


def test_parts_are_kept_as_json_has_them(identity: ModelIdentity) -> None:
    options: dict[str, Any] = {"ranks": (1, 2), "by layer": {3: "three"}}
    artifact = CalibrationArtifact("a2ats", identity, {}, options=options)
    options["ranks"] = ()
    assert artifact.options == {"ranks": [1, 2], "by layer": {"3": "three"}}
    with pytest.raises(TypeError, match="data is not plain JSON"):
        CalibrationArtifact("a2ats", identity, {}, data={"x": torch.ones(1)})


def test_a_new_artifact_replaces_an_older_one_and_nothing_else(
    artifact: CalibrationArtifact, saved: Path
) -> None:
    (saved / "notes.txt").write_text("mine")
    CalibrationArtifact("a2ats", artifact.model, {"x": torch.ones(3)}).save_pretrained(saved)
    assert list(CalibrationArtifact.from_pretrained(saved).tensors) == ["x"]
    names = {tensor_file(saved).name, DESCRIPTION, CARD, "notes.txt", f".{DESCRIPTION}.lock"}
    assert {path.name for path in saved.iterdir()} == names


def test_artifacts_of_the_first_release_are_read(
    artifact: CalibrationArtifact, saved: Path
) -> None:
    as_of_the_hub(saved)
    assert (saved / FIXED_NAME).is_file()
    assert CalibrationArtifact.from_pretrained(saved).sha256 == artifact.sha256


def test_the_digest_is_of_all_that_is_loaded(
    artifact: CalibrationArtifact, identity: ModelIdentity, saved: Path
) -> None:
    parts = {name: getattr(artifact, name) for name in ("tensors", "data", "options", "quality")}
    assert CalibrationArtifact("a2ats", identity, **parts).sha256 == artifact.sha256
    first, rows = next(iter(artifact.tensors.items()))
    changed = [{"data": {}}, {"options": {}}, {"quality": []}]
    changed += [{"tensors": parts["tensors"] | {first: x}} for x in (rows + 1, rows.flatten())]
    others = [CalibrationArtifact("a2ats", identity, **(parts | change)) for change in changed]
    others.append(CalibrationArtifact("aqua", identity, **parts))
    assert len({one.sha256 for one in (artifact, *others)}) == 1 + len(others)
    assert CalibrationArtifact.from_pretrained(saved).sha256 == artifact.sha256


def test_a_flip_a_cut_or_an_appendix_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    chance = random.Random(0)
    expected = CalibrationArtifact.from_pretrained(FIXTURES / "a2ats").sha256
    for number in range(45):
        folder = Path(shutil.copytree(FIXTURES / "a2ats", tmp_path / str(number)))
        path = chance.choice([tensor_file(folder), folder / DESCRIPTION])
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content) - 2)
        if number % 3 == 0:
            content[place] ^= 1 << chance.randrange(8)
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


def _written(content: str) -> Change:
    return lambda folder: (folder / DESCRIPTION).write_text(content)


def _edited(change: Callable[[dict[str, Any]], object], seal: bool) -> Change:
    return lambda folder: edit(folder, change, seal=seal)


REFUSED: list[tuple[Change, type[Exception], str]] = [
    (_edited(lambda d: d["options"].update(codewords=9), False), ValueError, "was changed"),
    (_written("{"), ValueError, "is no JSON: .* line 1 column 2"),
    (_written('{"model_type": "llama"}'), ValueError, "not of a calibration artifact"),
    (
        _edited(lambda d: d["files"].update(tensors="../x.safetensors"), True),
        ValueError,
        "as its tensor file",
    ),
    (_written('{"format_version": 2}'), ValueError, "calibrate again, or upgrade"),
    (lambda folder: (folder / DESCRIPTION).unlink(), FileNotFoundError, "json is missing"),
    (lambda folder: tensor_file(folder).unlink(), FileNotFoundError, "safetensors is missing"),
    (
        lambda folder: shutil.copy(tensor_file(FIXTURES / "a2ats"), tensor_file(folder)),
        ValueError,
        "damaged, or of another artifact",
    ),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_what_is_no_whole_artifact_is_refused(
    saved: Path, change: Change, error: type[Exception], words: str
) -> None:
    change(saved)
    with pytest.raises(error, match=words):
        CalibrationArtifact.from_pretrained(saved)


def test_another_method_and_files_of_others_are_refused(
    artifact: CalibrationArtifact, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"of 'a2ats', not of 'aqua'.*calibrate aqua"):
        CalibrationArtifact.from_pretrained(saved, method="aqua")
    other = CalibrationArtifact("aqua", artifact.model, artifact.tensors)
    with pytest.raises(ValueError, match="of an artifact of 'a2ats', not of 'aqua'"):
        other.save_pretrained(saved)
    (tmp_path / DESCRIPTION).write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"of a model, perhaps.*give a new folder"):
        artifact.save_pretrained(tmp_path)
    with pytest.raises(NotADirectoryError, match="give the folder that holds the artifact"):
        CalibrationArtifact.from_pretrained(tmp_path / DESCRIPTION)
