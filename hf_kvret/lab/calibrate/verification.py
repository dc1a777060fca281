"""Whether an artifact is whole, without the model that it is of."""

from __future__ import annotations

from pathlib import Path

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.files import DESCRIPTION, read_description
from hf_kvret.methods.a2ats import learned as a2ats
from hf_kvret.methods.aqua import learned as aqua
from hf_kvret.saved.strict_json import read_json

_METHODS = {one.METHOD: one.check_whole for one in (a2ats, aqua)}


def holds_artifact(path: Path) -> bool:
    """Whether an artifact, damaged perhaps, seems to be in ``path``.

    ``config.json`` is also what transformers calls the configuration of a model.
    """
    file = path / DESCRIPTION
    if not file.is_file():
        return file.exists()
    try:
        content = read_json(file.read_bytes())
    except (OSError, ValueError):
        return True
    is_a_models = isinstance(content, dict) and isinstance(content.get("model_type"), str)
    return not is_a_models or "format_version" in content


def files_of_artifact(path: Path) -> set[str]:
    """Names of what ``verify_artifact`` reads of an artifact that is whole."""
    return {DESCRIPTION, read_description(path)["files"]["tensors"]}


def verify_artifact(directory: Path) -> list[str]:
    """Lines that say what was checked: checksums, and each tensor and option against the method.

    Whether it fits a model shows when a cache loads it.

    Raises:
        OSError: a file is missing, or can't be read.
        ValueError: damage, or what no calibration makes; a method that this version doesn't know.
    """
    artifact = CalibrationArtifact.from_pretrained(directory)
    if artifact.method not in _METHODS:
        raise ValueError(
            f"{directory} is an artifact of {artifact.method!r}, and this version knows "
            f"{', '.join(_METHODS)}: its checksums are right, but nothing tells what must be in it"
        )
    _METHODS[artifact.method](artifact)
    return [
        f"artifact {artifact.method} of {artifact.model.name}",
        f"tensors  {len(artifact.tensors)}, {artifact.nbytes / 2**20:.2f} MiB: whole",
        f"sha256   {artifact.sha256}",
    ]
