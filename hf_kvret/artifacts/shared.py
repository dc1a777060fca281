"""Artifacts that options name: found, read once a process, and what is made of each made once.

An artifact of another model or version is refused with an error that names it and says how to get
another. Its tensors are believed: checksums find damage.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.files import DESCRIPTION
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.options.declare import OneOf, option, text
from hf_kvret_model_patches.rope import Rope

Value = TypeVar("Value")
Options = TypeVar("Options")

_values: WeakKeyDictionary[CalibrationArtifact, dict[Hashable, Any]] = WeakKeyDictionary()
# Each folder and method has the file that was read last, and its time.
_stamps: dict[tuple[str, str], tuple[str, int] | None] = {}


@dataclass(frozen=True)
class ArtifactConfig(RetrievalConfig):
    """Options of a method that needs a calibration artifact.

    Attributes:
        artifact: folder or hub id of the calibration artifact that belongs to the model. ``None``:
            the folder with the method's name, in the folder that the model was loaded from.
        revision: branch, tag or commit of the artifact on the hub. ``None``: its main branch.
    """

    method: ClassVar[str]
    # The end of the message for a user who has no artifact.
    way_out: ClassVar[str] = ""

    artifact: str | None = option(None, text(note="a name"), OneOf(None))
    revision: str | None = option(None, text(note="a name"), OneOf(None))

    def __post_init__(self) -> None:
        if isinstance(self.artifact, os.PathLike):
            object.__setattr__(self, "artifact", os.fspath(self.artifact))
        super().__post_init__()
        if self.revision is not None and self.artifact is None:
            raise ValueError(
                f"revision={self.revision!r} without artifact: name the artifact's hub id too, or "
                "leave the revision out"
            )

    @property
    def lacks_artifact(self) -> bool:
        """Whether the model's folder must have it."""
        return self.artifact is None

    def located(self, config: PreTrainedConfig) -> Self:
        """These options with a hub id as it is, or a folder's absolute path.

        Raises:
            ValueError: the model's own folder has no artifact; the message says how to make one.
        """
        if self.artifact is not None:
            folder = Path(self.artifact).expanduser()
            return self.replace(artifact=str(folder.absolute())) if folder.is_dir() else self
        home = getattr(config, "_name_or_path", "")
        folder = Path(home) / self.method
        if not home or not folder.is_dir():
            raise ValueError(
                f"{self.method} needs a calibration artifact of the model: pass "
                "artifact='folder-or-hub-id', or make one with `hf-kvret calibrate "
                f"{self.method} --model {home or 'MODEL'} --text FILE --out DIR`"
            )
        return self.replace(artifact=str(folder.absolute()))

    def check_weights(self, model: PreTrainedModel) -> None:
        """ValueError for a model with other weights than the artifact was made from."""
        self.load().check_weights(model)

    def load(self) -> CalibrationArtifact:
        """The artifact, one object for all caches of a process.

        Raises:
            OSError, ValueError: no artifact is named; as ``CalibrationArtifact.from_pretrained``.
        """
        if self.artifact is None:
            name = type(self).__name__
            raise ValueError(
                f"the options name no artifact: pass {name}(artifact='folder-or-hub-id')"
                f"{self.way_out}, or make a cache of {self.method}, which looks beside the model"
            )
        return shared_artifact(self.artifact, self.revision, self.method)


def shared_artifact(artifact: str, revision: str | None, method: str) -> CalibrationArtifact:
    """The artifact of a folder or hub id; read again when a folder was rewritten.

    Raises:
        OSError, ValueError: as ``CalibrationArtifact.from_pretrained``.
    """
    file = (Path(artifact).expanduser() / DESCRIPTION).absolute()
    # A folder that was rewritten has another time, and is another artifact. One that has gone is
    # not needed by the caches that have read it.
    found = (str(file), file.stat().st_mtime_ns) if file.is_file() else None
    stamp = _stamps[artifact, method] = found or _stamps.get((artifact, method))
    return _read_once(artifact, revision, method, stamp)


@functools.lru_cache(maxsize=4)
def _read_once(
    artifact: str, revision: str | None, method: str, stamp: tuple[str, int] | None
) -> CalibrationArtifact:
    """The artifact as it was at ``stamp``."""
    return CalibrationArtifact.from_pretrained(artifact, method=method, revision=revision)


def made_once(artifact: CalibrationArtifact, key: Hashable, make: Callable[[], Value]) -> Value:
    """The result of ``make`` for ``key``, cached as long as the artifact lives."""
    values = _values.setdefault(artifact, {})
    if key not in values:
        values[key] = make()
    return values[key]


def damaged(artifact: CalibrationArtifact, what: str) -> ValueError:
    """An error that says what is wrong with an artifact, and how to get another."""
    return ValueError(
        f"the {artifact.method} artifact of {artifact.model.name} {what}: make it again with "
        f"`hf-kvret calibrate {artifact.method}`, or download it again"
    )


def calibration_options(
    artifact: CalibrationArtifact,
    cls: type[Options],
    stored_names: Mapping[str, str] = MappingProxyType({}),
    unread: Collection[str] = (),
) -> Options:
    """The options of the calibration, each of the type and in the range that ``cls`` knows.

    Args:
        artifact: names that are missing have their default, as options that came later.
        cls: the options of the method's calibration.
        stored_names: fields of ``cls`` by the other name that artifacts have for them.
        unread: names of options that older calibrations stored, and ``cls`` does not have.
    """
    stored = {n: x for n, x in artifact.options.items() if n not in ("layers", *unread)}
    try:
        return cls(**{stored_names.get(name, name): value for name, value in stored.items()})
    except (TypeError, ValueError) as error:
        raise damaged(
            artifact, f"has a wrong option ({error}; upgrade hf-kvret where a newer one made it)"
        ) from error


def learned_rope(artifact: CalibrationArtifact, layer: int) -> Rope:
    """RoPE of layer number ``layer`` from the artifact, on the CPU; ValueError without any."""
    settings = artifact.options.get("layers", {}).get(str(layer))
    if settings is None:
        raise damaged(artifact, f"has nothing of layer {layer}")
    frequencies = artifact.tensors[f"layers.{layer}.inv_freq"]
    factor, last = settings["attention_factor"], settings.get("last", False)
    return Rope(frequencies, factor, settings["layout"], last)


def check_positions_known(config: PreTrainedConfig, instead: str, command: str) -> None:
    """Refuse a model whose rotation of keys can't be undone: for ``instead``, or an artifact that
    ``command`` makes."""
    text = config.get_text_config(decoder=True)
    rotation = getattr(text, "rope_parameters", None) or {}
    if text is not config and "mrope_section" in rotation:
        raise ValueError(
            f"{config.model_type} puts images at positions of three parts and doesn't tell its "
            "attention all of them, so the rotation of its keys can't be undone: use "
            f"{instead}, or an artifact made with {command}"
        )
