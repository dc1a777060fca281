"""``hf-kvret inspect --verify``: what was saved is read whole, and every checksum compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_kvret.calibration.artifact import CalibrationArtifact
from hf_kvret.evaluation.results import read_results
from hf_kvret.methods.a2ats import learned as a2ats
from hf_kvret.methods.aqua import learned as aqua

_METHODS = {one.METHOD: one.check_whole for one in (a2ats, aqua)}


def verify(place: str, revision: str | None = None) -> str:
    """One line about what is at ``place``, which is whole.

    Args:
        place: a result file, or folder or hub id of an artifact.
        revision: of an artifact on the hub.

    Raises:
        OSError: nothing is there, or it can't be read.
        ValueError: it is damaged, or can't be what it says.
    """
    path = Path(place).expanduser()
    for recognises, verify_kind in _KINDS:
        if recognises(path):
            if revision is not None:
                raise ValueError(
                    f"revision={revision!r} of {path}, on this machine: only artifacts on the hub "
                    "have revisions; leave it out"
                )
            return verify_kind(path)
    return verify_artifact(place, revision)


def verify_results(path: Path) -> str:
    """One line about a result file; ValueError for a damaged one."""
    content = read_results(path)
    what = f"results of {content['name']}, {len(content['cells'])} cells"
    if content["format"] == 1:
        return (
            f"{path}: {what}, of format 1, which has no checksums: their form alone was looked at"
        )
    return f"{path}: whole {what}, by their checksums"


def verify_artifact(place: str, revision: str | None = None) -> str:
    """One line about an artifact; OSError and ValueError as of ``verify``."""
    artifact = CalibrationArtifact.from_pretrained(place, revision=revision)
    if artifact.method not in _METHODS:
        raise ValueError(
            f"{place} is an artifact of {artifact.method!r}, and this version knows "
            f"{', '.join(_METHODS)}: its checksums are right, but nothing tells what must be in it"
        )
    _METHODS[artifact.method](artifact)
    return (
        f"{place}: a whole {artifact.method} artifact of {artifact.model.name}, "
        f"{len(artifact.tensors)} tensors\nsha256 {artifact.sha256}"
    )


# Each kind of thing on this machine: whether a path is one, and its verification.
_KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path], str]], ...] = (
    (Path.is_file, verify_results),
)
