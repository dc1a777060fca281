"""Artifacts shared within a process: each is read once, and derived objects are made once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from transformers import PreTrainedConfig

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.files import DESCRIPTION

Value = TypeVar("Value")

# Artifacts live as long as their users; a few of the newest are kept alive for the next cache.
_artifacts: WeakValueDictionary[tuple[Any, ...], CalibrationArtifact] = WeakValueDictionary()
_newest: deque[CalibrationArtifact] = deque(maxlen=4)
_values: WeakKeyDictionary[CalibrationArtifact, dict[Hashable, Any]] = WeakKeyDictionary()


def artifact_place(artifact: str | None, config: PreTrainedConfig, method: str) -> str:
    """A hub id unchanged, or a folder's absolute path; for None the model's own artifact.

    That is the folder named ``method`` in the folder that the model was loaded from.

    Raises:
        ValueError: there is no such folder; the message says how to make an artifact.
    """
    if artifact is not None:
        folder = Path(artifact).expanduser()
        return str(folder.absolute()) if folder.is_dir() else artifact
    home = getattr(config, "_name_or_path", "")
    folder = Path(home) / method
    if not home or not folder.is_dir():
        raise ValueError(
            f"{method} needs a calibration artifact of the model: pass "
            f"artifact='folder-or-hub-id', or make one with `hf-kvret calibrate {method} --model "
            f"{home or 'MODEL'} --text FILE --out DIR`"
        )
    return str(folder.absolute())


def shared_artifact(
    artifact: str,
    revision: str | None,
    method: str,
    sha256: str | None = None,
) -> CalibrationArtifact:
    """The artifact of a folder or hub id; read anew when a folder was rewritten.

    Raises:
        OSError, ValueError: as ``CalibrationArtifact.from_pretrained``.
    """
    file = (Path(artifact).expanduser() / DESCRIPTION).absolute()
    stamp = (str(file), file.stat().st_mtime_ns) if file.is_file() else None
    key = method, artifact, revision, stamp
    result = _artifacts.get(key)
    if result is None:
        result = CalibrationArtifact.from_pretrained(artifact, method=method, revision=revision)
        _artifacts[key] = result
    if sha256 is not None:
        result.check_sha256(sha256)
    if not _newest or _newest[-1] is not result:
        _newest.append(result)
    return result


def made_once(artifact: CalibrationArtifact, key: Hashable, make: Callable[[], Value]) -> Value:
    """The result of ``make`` for ``key``, cached as long as the artifact lives."""
    values = _values.setdefault(artifact, {})
    if key not in values:
        values[key] = make()
    return values[key]
