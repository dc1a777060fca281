"""The artifacts of AQUA-KV's ablation, made where they are missing."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.cache_utils import DynamicLayer

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.calibration.aqua import AquaCalibration
from hf_kvret.calibration.files import DESCRIPTION
from hf_kvret.calibration.runner import calibrate
from hf_kvret.compatibility import head_dim, model_layers
from hf_kvret.evaluation.a2ats_texts import Texts
from hf_kvret.evaluation.subject import Subject

# Of few KV heads, so that a text passes a small model once.
_LAYERS_AT_ONCE = 8
# The paper's 256 of 1024 numbers of a token's keys.
_RANK_SHARE = 4


class Artifacts:
    """Artifacts by what their calibrations differ in, each in a folder of its own.

    What is there is used where it was made of the same model, text and options, and refused
    otherwise; what is missing is made, and an interrupted calibration goes on.

    Args:
        folder: where they are kept; None for one that is gone with this object.
        texts: what is learned from.
        options: of all, before changes.
        rank: of reduced-rank predictors; None for a quarter of a token's keys.
    """

    def __init__(
        self, folder: Path | None, texts: Texts, options: AquaCalibration, rank: int | None
    ) -> None:
        self.texts, self.options, self.rank = texts, options, rank
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._found: dict[tuple[Path, Any], CalibrationArtifact] = {}

    def find(self, changes: Mapping[str, Any], subject: Subject) -> CalibrationArtifact:
        """The artifact of a calibration with ``changes``, made first where it is missing.

        Raises:
            ValueError: the folder holds another one; no text to learn from; a model that can't be
                calibrated.
        """
        key = self.path(changes, subject), subject.model
        if key not in self._found:
            calibration = self.calibration(changes, subject)
            self._found[key] = self._load(key[0], calibration, subject) or self._make(
                key[0], calibration, subject
            )
        return self._found[key]

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
        """The folder of ``find(changes)``, named after what differs from the usual options."""
        if self._folder is None and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="aqua-ablation-")
        home = Path(self._temporary.name) if self._temporary else self._folder
        assert home is not None
        calibration = self.calibration(changes, subject)
        named = {field.name: getattr(calibration, field.name) for field in fields(calibration)}
        usual = self.options.options()
        parts = [f"{name}-{value}" for name, value in named.items() if value != usual[name]]
        return home.absolute() / ("_".join(parts) or "usual")

    def _make(
        self, folder: Path, calibration: AquaCalibration, subject: Subject
    ) -> CalibrationArtifact:
        tqdm.write(f"calibrating: {folder.name}, in {folder}", file=sys.stderr)
        corpus = self.texts.corpus(subject)
        return calibrate(subject.model, corpus, calibration, folder, layers_at_once=_LAYERS_AT_ONCE)

    def _load(
        self, folder: Path, calibration: AquaCalibration, subject: Subject
    ) -> CalibrationArtifact | None:
        """The artifact that lies there; None for none, ValueError for another one."""
        if not (folder / DESCRIPTION).is_file():
            return None
        found = CalibrationArtifact.from_pretrained(folder, method=AquaCalibration.method)
        found.check(subject.model.config)
        found.check_weights(subject.model)
        wanted = calibration.options() | self.texts.corpus(subject).description
        known = {**found.options, **found.data}
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


def _layers_and_width(subject: Subject) -> tuple[int, int]:
    """Layers with full attention, and numbers of a token's keys in one of them."""
    config = subject.model.config
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    layers = sum(type(kind) is DynamicLayer for kind in model_layers(config))
    return layers, heads * head_dim(config)
