"""The artifacts of AQUA-KV's ablation, made where they are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.calibration.aqua import AquaCalibration
from hf_kvret.compatibility import head_dim, retrieval_layers
from hf_kvret.evaluation.study_artifacts import ArtifactShelf
from hf_kvret.evaluation.study_texts import Texts
from hf_kvret.evaluation.subject import Subject

# The paper's 256 of 1024 numbers of a token's keys.
_RANK_SHARE = 4


class Artifacts:
    """Artifacts by what their calibrations differ in; see ``ArtifactShelf``.

    Args:
        folder: where they are kept; None for one that is gone with this object.
        texts: what is learned from.
        options: of all, before changes.
        rank: of reduced-rank predictors; None for a quarter of a token's keys.

    Raises:
        ValueError: a folder whose name can't stand among the options of a cache.
    """

    def __init__(
        self, folder: Path | None, texts: Texts, options: AquaCalibration, rank: int | None
    ) -> None:
        self.texts, self.options, self.rank = texts, options, rank
        self._shelf = ArtifactShelf(folder, texts)

    def find(self, changes: Mapping[str, Any], subject: Subject) -> CalibrationArtifact:
        """The artifact of a calibration with ``changes``; errors as of ``ArtifactShelf.find``."""
        calibration = self.calibration(changes, subject)
        return self._shelf.find(self._name(calibration), calibration, subject)

    def calibration(self, changes: Mapping[str, Any], subject: Subject) -> AquaCalibration:
        """How an artifact is learned, with sizes that fit the model.

        Anchors that are further apart than the model has layers are the first layer alone.
        """
        found = replace(self.options, **changes)
        layers, width = _layers_and_width(subject)
        if found.anchor_every is not None and found.anchor_every >= layers:
            found = replace(found, anchor_every=None)
        if found.predictor == "low_rank":
            found = replace(found, rank=self.rank or max(1, width // _RANK_SHARE))
        return found

    def path(self, changes: Mapping[str, Any], subject: Subject) -> Path:
        """The folder of ``find(changes)``."""
        return self._shelf.path(self._name(self.calibration(changes, subject)))

    def _name(self, calibration: AquaCalibration) -> str:
        """What differs from the usual options."""
        named = {field.name: getattr(calibration, field.name) for field in fields(calibration)}
        usual = self.options.options()
        parts = [f"{name}-{value}" for name, value in named.items() if value != usual[name]]
        return "_".join(parts) or "usual"


def _layers_and_width(subject: Subject) -> tuple[int, int]:
    """Layers with full attention, and numbers of a token's keys in one of them."""
    config = subject.model.config
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return len(retrieval_layers(config)), heads * head_dim(config)
