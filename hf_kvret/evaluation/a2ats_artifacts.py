"""The four artifacts of A2ATS's table 2, made where they are missing."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.calibration.a2ats import A2ATSCalibration
from hf_kvret.calibration.files import DESCRIPTION
from hf_kvret.calibration.runner import calibrate
from hf_kvret.evaluation.a2ats_texts import Texts
from hf_kvret.evaluation.caches import CacheChoice, choose_cache
from hf_kvret.evaluation.subject import Subject

# By name: space, query-aware, and what the paper calls it.
SWITCHES: dict[str, tuple[str, bool, str]] = {
    "windowed, query-aware": ("windowed", True, "A2ATS"),
    "windowed, plain": ("windowed", False, "WRoPE"),
    "rotated, query-aware": ("rotated", True, "QAVQ"),
    "rotated, plain": ("rotated", False, "Baseline"),
}
FULL_METHOD = "windowed, query-aware"
# A row beside those of the table, which shows what codewords cost and what windowed RoPE does.
EXACT_KEYS = "windowed, exact keys"
# Of few KV heads, so that a text passes a small model once.
_LAYERS_AT_ONCE = 8


class Artifacts:
    """Artifacts by name of the switches, each in a folder of its own.

    What is there is used where it was made of the same model, text and options, and refused
    otherwise; what is missing is made, and an interrupted calibration goes on.

    Args:
        folder: where they are kept; None for one that is gone with this object.
        texts: what is learned from.
        options: of all four; ``space``, ``query_aware`` and ``compare`` are chosen here.

    Raises:
        ValueError: a folder whose name can't stand among the options of a cache.
    """

    def __init__(self, folder: Path | None, texts: Texts, options: A2ATSCalibration) -> None:
        if folder is not None and ":" in str(folder.absolute()):
            raise ValueError(
                f"--artifacts {folder}: a colon in the path would end the option of a cache; give "
                "another folder"
            )
        self.texts, self.options = texts, options
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._found: dict[tuple[str, Any], CalibrationArtifact] = {}

    def find(self, name: str, subject: Subject) -> CalibrationArtifact:
        """The artifact of one row of the table, made first where it is missing.

        Raises:
            ValueError: the folder holds another one; no text to learn from; a model that can't be
                calibrated.
        """
        key = (name, subject.model)
        if key not in self._found:
            self._found[key] = self._load(name, subject) or self._make(name, subject)
        return self._found[key]

    def choice(
        self, name: str, subject: Subject, cache: str, defaults: dict[str, Any], **options: Any
    ) -> CacheChoice:
        """The cache that ``cache`` names, with the artifact of a row and ``options`` on top."""
        self.find(name, subject)
        given = {"artifact": self._path(name), **options}
        text = ":".join([cache, *(f"{option}={value}" for option, value in given.items())])
        # Bars show the name; the path would fill them.
        return replace(choose_cache(text, defaults, str(subject.device)), name=name)

    def calibration(self, name: str) -> A2ATSCalibration:
        """How the artifact of a row is learned."""
        space, aware, _ = SWITCHES[name]
        # The other rows are what a plain codebook would be compared with.
        return replace(self.options, space=space, query_aware=aware, compare=False)

    def _path(self, name: str) -> Path:
        if self._folder is None and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="a2ats-ablation-")
        home = Path(self._temporary.name) if self._temporary else self._folder
        assert home is not None
        return home.absolute() / name.replace(", ", "-")

    def _make(self, name: str, subject: Subject) -> CalibrationArtifact:
        folder = self._path(name)
        tqdm.write(f"calibrating: {name}, in {folder}", file=sys.stderr)
        return calibrate(
            subject.model,
            self.texts.corpus(subject),
            self.calibration(name),
            folder,
            layers_at_once=_LAYERS_AT_ONCE,
        )

    def _load(self, name: str, subject: Subject) -> CalibrationArtifact | None:
        """The artifact that lies there; None for none, ValueError for another one."""
        folder = self._path(name)
        if not (folder / DESCRIPTION).is_file():
            return None
        found = CalibrationArtifact.from_pretrained(folder, method=A2ATSCalibration.method)
        found.check(subject.model.config)
        found.check_weights(subject.model)
        options = self.calibration(name).options()
        wanted = options | self.texts.corpus(subject).description
        # A plain codebook that was made to compare with changes nothing else.
        known = {**found.options, **found.data, "compare": options["compare"]}
        changed = [
            f"{key} was {known.get(key)!r}, now {value!r}"
            for key, value in wanted.items()
            if known.get(key) != value
        ]
        if changed:
            raise ValueError(
                f"{folder} holds an artifact of another calibration ({'; '.join(changed)}): give "
                "another --artifacts, or delete that folder"
            )
        return found
