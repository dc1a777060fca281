"""Artifacts that a study needs several of: kept in folders, made where they are missing."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.calibration.files import DESCRIPTION
from hf_kvret.calibration.runner import calibrate
from hf_kvret.calibration.sources import Corpus
from hf_kvret.calibration.study import Calibration
from hf_kvret.evaluation.subject import Subject

# Of few KV heads, so that a text passes a small model once.
_LAYERS_AT_ONCE = 8


class ArtifactShelf:
    """Artifacts by name, each in a folder of its own.

    What is there is used where it was made of the same model, text and options, and refused
    otherwise; what is missing is made, and an interrupted calibration goes on.

    Args:
        folder: where they are kept; None for one that is gone with this object.
        corpus: what is learned from, for a model.
        ignored: options of a calibration that change nothing of what is used.

    Raises:
        ValueError: a folder whose name can't stand among the options of a cache.
    """

    def __init__(
        self,
        folder: Path | None,
        corpus: Callable[[Subject], Corpus],
        ignored: tuple[str, ...] = (),
    ) -> None:
        if folder is not None and ":" in str(folder.absolute()):
            raise ValueError(
                f"--artifacts {folder}: a colon in the path would end the option of a cache; give "
                "another folder"
            )
        self._folder, self._corpus, self._ignored = folder, corpus, ignored
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._found: dict[tuple[str, Any], CalibrationArtifact] = {}

    def path(self, name: str) -> Path:
        """The folder of the artifact ``name``."""
        if self._folder is None and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="hf-kvret-artifacts-")
        home = Path(self._temporary.name) if self._temporary else self._folder
        assert home is not None
        return home.absolute() / name

    def find(self, name: str, calibration: Calibration, subject: Subject) -> CalibrationArtifact:
        """The artifact ``name``, learned as ``calibration`` says where it is missing.

        Raises:
            ValueError: the folder holds another one; no text to learn from; a model that can't be
                calibrated.
        """
        key = (name, subject.model)
        if key not in self._found:
            self._found[key] = self._load(name, calibration, subject) or self._make(
                name, calibration, subject
            )
        return self._found[key]

    def _make(self, name: str, calibration: Calibration, subject: Subject) -> CalibrationArtifact:
        folder = self.path(name)
        tqdm.write(f"calibrating: {name}, in {folder}", file=sys.stderr)
        corpus = self._corpus(subject)
        return calibrate(subject.model, corpus, calibration, folder, layers_at_once=_LAYERS_AT_ONCE)

    def _load(
        self, name: str, calibration: Calibration, subject: Subject
    ) -> CalibrationArtifact | None:
        """The artifact that lies there; None for none, ValueError for another one."""
        folder = self.path(name)
        if not (folder / DESCRIPTION).is_file():
            return None
        found = CalibrationArtifact.from_pretrained(folder, method=calibration.method)
        found.check(subject.model.config)
        found.check_weights(subject.model)
        wanted = calibration.options() | self._corpus(subject).description
        known = {**found.options, **found.data}
        changed = [
            f"{key} was {known.get(key)!r}, now {value!r}"
            for key, value in wanted.items()
            if known.get(key) != value and key not in self._ignored
        ]
        if changed:
            raise ValueError(
                f"{folder} holds an artifact of another calibration ({'; '.join(changed)}): give "
                "another --artifacts, or delete that folder"
            )
        return found
