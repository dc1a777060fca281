"""The four artifacts of A2ATS's table 2, made where they are missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.calibration.a2ats import A2ATSCalibration
from hf_kvret.evaluation.caches import CacheChoice, choose_cache
from hf_kvret.evaluation.study_artifacts import ArtifactShelf
from hf_kvret.evaluation.study_texts import Texts
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


class Artifacts:
    """Artifacts by name of the switches; see ``ArtifactShelf``.

    Args:
        folder: where they are kept; None for one that is gone with this object.
        texts: what is learned from.
        options: of all four; ``space``, ``query_aware`` and ``compare`` are chosen here.

    Raises:
        ValueError: a folder whose name can't stand among the options of a cache.
    """

    def __init__(self, folder: Path | None, texts: Texts, options: A2ATSCalibration) -> None:
        self.texts, self.options = texts, options
        # A plain codebook that was made to compare with changes nothing else.
        self._shelf = ArtifactShelf(folder, texts, ignored=("compare",))

    def find(self, name: str, subject: Subject) -> CalibrationArtifact:
        """The artifact of one row of the table; errors as of ``ArtifactShelf.find``."""
        return self._shelf.find(_folder_name(name), self.calibration(name), subject)

    def choice(
        self, name: str, subject: Subject, cache: str, defaults: dict[str, Any], **options: Any
    ) -> CacheChoice:
        """The cache that ``cache`` names, with the artifact of a row and ``options`` on top."""
        self.find(name, subject)
        given = {"artifact": self._shelf.path(_folder_name(name)), **options}
        text = ":".join([cache, *(f"{option}={value}" for option, value in given.items())])
        # Bars show the name; the path would fill them.
        return replace(choose_cache(text, defaults, str(subject.device)), name=name)

    def calibration(self, name: str) -> A2ATSCalibration:
        """How the artifact of a row is learned."""
        space, aware, _ = SWITCHES[name]
        # The other rows are what a plain codebook would be compared with.
        return replace(self.options, space=space, query_aware=aware, compare=False)


def _folder_name(name: str) -> str:
    return name.replace(", ", "-")
