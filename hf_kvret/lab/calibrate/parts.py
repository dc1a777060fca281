"""Finished layers on disk until all layers are finished."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from hf_kvret.lab.calibrate.study import Carried, LayerFindings
from hf_kvret.saved.folder import replace_file

_SETUP = "setup.sha256"


class FinishedLayers:
    """A folder of finished layers, and of the tensors that the newest carries to the next one.

    Layers are finished in order, and each file is replaced in one step. A folder without finished
    layers is reused for another ``setup``.

    Raises:
        ValueError: the folder holds layers of another ``setup`` (plain JSON).
    """

    def __init__(self, folder: Path, setup: Mapping[str, Any]) -> None:
        self._folder = folder
        mark = hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()
        mark_file = folder / _SETUP
        if not mark_file.is_file() or not any(folder.glob("layer_*.safetensors")):
            replace_file(mark_file, mark.encode())
        elif mark_file.read_bytes() != mark.encode():
            raise ValueError(
                f"{folder} holds finished layers of another calibration (model, data or options "
                "differ): delete that folder, or give another --out"
            )

    def left(self, layers: Sequence[int]) -> tuple[list[int], Carried | None]:
        """The layers still to learn, and the tensors carried by the layer before them, if any."""
        count = sum(self._file(layer).is_file() for layer in layers)
        carried = self._carry_file(layers[count - 1])
        has_carried = count > 0 and carried.is_file()
        return list(layers[count:]), self._read(carried)[0] if has_carried else None

    def keep(self, layer: int, findings: LayerFindings) -> None:
        """Write one layer and what it carries; what older layers carried is deleted."""
        newest = self._carry_file(layer)
        if findings.carried is not None:
            # It comes before the layer itself, so that a finished layer has what the next needs.
            self._write(newest, findings.carried, {})
        record = {"settings": findings.settings, "quality": findings.quality}
        self._write(self._file(layer), findings.tensors, {"findings": json.dumps(record)})
        for file in self._folder.glob("carried_*.safetensors"):
            if file != newest:
                file.unlink()

    def read(self, layer: int) -> LayerFindings:
        """A finished layer, without carried tensors."""
        tensors, metadata = self._read(self._file(layer))
        record = json.loads(metadata["findings"])
        return LayerFindings(tensors, record["settings"], record["quality"])

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder)

    def _read(self, file: Path) -> tuple[Carried, dict[str, str]]:
        """The tensors and the metadata of a file."""
        try:
            with safe_open(file, "pt") as reader:
                metadata = reader.metadata()
            return load_file(file), metadata
        except SafetensorError as error:
            raise ValueError(
                f"{file} is damaged ({error}): delete {self._folder}, and calibrate again"
            ) from error

    def _write(self, file: Path, tensors: Carried, metadata: dict[str, str]) -> None:
        replace_file(file, save({name: x.contiguous() for name, x in tensors.items()}, metadata))

    def _file(self, layer: int) -> Path:
        return self._folder / f"layer_{layer}.safetensors"

    def _carry_file(self, layer: int) -> Path:
        return self._folder / f"carried_{layer}.safetensors"
