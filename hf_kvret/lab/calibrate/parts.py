"""Finished layers on disk until all layers are finished; one writer at a time.

Each file has a checksum. One that is damaged, by a power cut for instance, counts as missing: its
layer is learned again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hf_kvret.artifacts.artifact import add_tensors
from hf_kvret.lab.calibrate.study import Carried, LayerFindings
from hf_kvret.saved.folder import replace_file

_SETUP = "setup.sha256"
_LOCK = ".lock"
_CHECKSUM = "sha256"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other calibrations out of ``folder``, which is made if needed, with a file ``.lock``.

    The file names the process and its machine. A stale one of an ended process on this machine is
    replaced; a process on another machine counts as running.

    Raises:
        ValueError: another calibration is, or may be, at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / _LOCK
    _take(lock)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _take(lock: Path) -> None:
    mine = f"{os.getpid()} {platform.node()}"
    for stale in (False, True):
        try:
            with lock.open("x", encoding="utf-8") as file:
                file.write(mine)
            return
        except FileExistsError:
            owner = lock.read_text(encoding="utf-8") if lock.exists() else ""
            if stale or _may_run(owner):
                raise ValueError(
                    f"another calibration writes to {lock.parent} (process {owner or 'unknown'}): "
                    f"wait for it, or give another --out; if it is not running, delete {lock}"
                ) from None
            lock.unlink(missing_ok=True)


def _may_run(owner: str) -> bool:
    """Whether the process named in a lock may still be running."""
    number, _, machine = owner.partition(" ")
    # On Windows signal 0 is Ctrl-C and not a test.
    if not number.isdecimal() or machine != platform.node() or os.name == "nt":
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class FinishedLayers:
    """A folder of finished layers, and of the tensors that the newest carries to the next one.

    A folder without finished layers is reused for another ``setup``.

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
        """The layers still to learn, and the tensors carried by the layer before the first of them.

        If layers depend on each other, and one in the middle or its carried tensors can't be read,
        all layers are returned: the chain starts again.
        """
        carries = {layer: self._record(layer).get("carried") for layer in layers}
        todo = [layer for layer in layers if carries[layer] is None]
        if len(todo) in (0, len(layers)) or not any(carries.values()):
            return todo, None
        count = len(layers) - len(todo)
        if todo == list(layers[count:]):
            before = layers[count - 1]
            if not carries[before]:
                return todo, None
            tensors = _read(self._carry_file(before))
            if tensors is not None:
                return todo, tensors[0]
        return list(layers), None

    def keep(self, layer: int, findings: LayerFindings, *, last: bool = False) -> None:
        """Write one layer, atomically.

        Its carried tensors are written too, unless it is the ``last``; those of older layers are
        deleted.
        """
        newest = None
        if findings.carried is not None and not last:
            # It comes before the layer itself, so that a finished layer has what the next needs.
            newest = self._carry_file(layer)
            self._write(newest, findings.carried, {})
        record = {
            "told": findings.settings,
            "quality": findings.quality,
            "carried": findings.carried is not None,
        }
        self._write(self._file(layer), findings.tensors, {"findings": json.dumps(record)})
        for file in self._folder.glob("carried_*.safetensors"):
            if file != newest:
                file.unlink()

    def find(self, layer: int) -> LayerFindings | None:
        """A finished layer, without carried tensors; None if it is missing or damaged."""
        content = _read(self._file(layer))
        if content is None:
            return None
        record = json.loads(content[1]["findings"])
        return LayerFindings(content[0], record["told"], record["quality"])

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder)

    def _record(self, layer: int) -> dict[str, Any]:
        """The metadata of a layer's file; empty if it is missing or damaged."""
        content = _read(self._file(layer))
        return {} if content is None else json.loads(content[1]["findings"])

    def _write(self, file: Path, tensors: Carried, metadata: dict[str, str]) -> None:
        metadata = {**metadata, _CHECKSUM: _checksum(tensors, metadata)}
        replace_file(file, save({name: x.contiguous() for name, x in tensors.items()}, metadata))

    def _file(self, layer: int) -> Path:
        return self._folder / f"layer_{layer}.safetensors"

    def _carry_file(self, layer: int) -> Path:
        return self._folder / f"carried_{layer}.safetensors"


def _read(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
    """Tensors and metadata of a file; None if it is missing or damaged."""
    try:
        with safe_open(file, "pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - no mapping
            metadata = reader.metadata() or {}
    except (FileNotFoundError, SafetensorError):
        return None
    checksum = metadata.pop(_CHECKSUM, None)
    return (tensors, metadata) if checksum == _checksum(tensors, metadata) else None


def _checksum(tensors: Carried, metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    add_tensors(digest, tensors)
    return digest.hexdigest()
