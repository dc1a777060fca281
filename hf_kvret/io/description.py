"""``cache.json``: what a saved cache is, and which files hold it. See docs/formats.md."""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import transformers

from hf_kvret.io import strict_json
from hf_kvret.io.folder import VERSION_LEN
from hf_kvret.io.tensor_file import TensorEntry
from hf_kvret.version import __version__

FORMAT_VERSION = 2
DESCRIPTION, STEM, SUFFIX = "cache.json", "cache", ".safetensors"
OLD_TENSORS = "cache.safetensors"
"""The tensors of format 1."""

_MOST_BYTES = 64 << 20
_AGAIN = "save the cache again"
_KINDS = {"method": str, "model": dict, "options": dict, "layers": list, "tensors": dict}
_MORE_KINDS = {"library": dict, "files": dict, "checksum": str}


@dataclass(frozen=True)
class LayerValues:
    """What a layer has beside tensors: the name of its class, and plain values by name."""

    type: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Description:
    """The content of ``cache.json``, checked for its form.

    Attributes:
        format_version: 1 or 2.
        method, model, options: of the cache, see ``RetrievalCache``.
        layers: of the cache.
        tensors: by name, in the order of the file; empty for format 1, which has no checksums.
        shapes: of the tensors.
        file: name of the file of tensors.
        origin: ``identity`` and ``tokens``, see ``origin.py``.
        library: versions that it was saved with, by name; empty for format 1.
        digest: SHA-256 of the file ``cache.json``.
    """

    format_version: int
    method: str
    model: Mapping[str, Any]
    options: Mapping[str, Any]
    layers: tuple[LayerValues, ...]
    tensors: Mapping[str, TensorEntry]
    shapes: Mapping[str, list[int]]
    file: str
    origin: Mapping[str, Any]
    library: Mapping[str, str]
    digest: str

    @classmethod
    def read(cls, directory: Path) -> Self:
        """That of the cache saved in ``directory``; warns of what format 1 can't tell.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or of a later format.
        """
        path = directory / DESCRIPTION
        if not path.is_file():
            raise FileNotFoundError(f"no saved cache in {directory}: {DESCRIPTION} is missing")
        content, content_bytes = read_json(path)
        version = content.get("format_version") if isinstance(content, dict) else None
        if type(version) is not int:
            raise ValueError(f"{path} is corrupt (it has no format_version): {_AGAIN}")
        if not 1 <= version <= FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {version}, this hf_kvret reads 1 to {FORMAT_VERSION}: "
                f"upgrade hf_kvret, or {_AGAIN}"
            )
        kinds = _KINDS if version == 1 else _KINDS | _MORE_KINDS
        missing = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
        if missing:
            raise ValueError(f"{path} is corrupt ({missing[0]} is missing): {_AGAIN}")
        if version == 1:
            warnings.warn(
                f"{directory} holds a cache of format 1, which can't be checked for damage, nor "
                "for the model and the tokens that it was filled with: save it again",
                stacklevel=4,
            )
        elif content["checksum"] != checksum(content):
            raise ValueError(f"{path} is damaged: its checksum is another one; {_AGAIN}")
        digest = hashlib.sha256(content_bytes).hexdigest()
        try:
            return cls._of(content, digest)
        except ValueError as error:
            raise ValueError(f"{path} is corrupt ({error}): {_AGAIN}") from error

    @classmethod
    def _of(cls, content: dict[str, Any], digest: str) -> Self:
        version = content["format_version"]
        layers = tuple(_layer(layer, version) for layer in content["layers"])
        form = version, content["method"], content["model"], content["options"], layers
        if version == 1:
            origin = {"identity": None, "tokens": None}
            return cls(*form, {}, content["tensors"], OLD_TENSORS, origin, {}, digest)
        tensors = {}
        for name, entry in content["tensors"].items():
            try:
                tensors[name] = TensorEntry.from_json(entry)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        file = content["files"].get("tensors")
        pattern = rf"{STEM}-[0-9a-f]{{{VERSION_LEN}}}{re.escape(SUFFIX)}"
        if not isinstance(file, str) or not re.fullmatch(pattern, file):
            raise ValueError("files names no file of tensors")
        origin = {name: content.get(name) for name in ("identity", "tokens")}
        if not all(value is None or isinstance(value, dict) for value in origin.values()):
            raise ValueError("identity or tokens are neither an object nor null")
        shapes = {name: list(entry.shape) for name, entry in tensors.items()}
        library = {str(name)[:80]: str(value)[:80] for name, value in content["library"].items()}
        return cls(*form, tensors, shapes, file, origin, library, digest)


def written(
    method: str,
    model: Mapping[str, Any],
    options: Mapping[str, Any],
    layers: list[LayerValues],
    tensors: Mapping[str, TensorEntry],
    file: str,
    origin: Mapping[str, Any],
) -> bytes:
    """``cache.json`` of these; arguments are the attributes of ``Description``."""
    content = {
        "format_version": FORMAT_VERSION,
        "library": {
            "hf_kvret": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "method": method,
        "model": dict(model),
        "options": dict(options),
        **origin,
        "layers": [{"type": layer.type, "values": dict(layer.values)} for layer in layers],
        "files": {"tensors": file},
        "tensors": {name: entry.to_json() for name, entry in tensors.items()},
    }
    content["checksum"] = checksum(content)
    return json.dumps(content, indent=1).encode() + b"\n"


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the values of a description but ``checksum``, however they are laid out."""
    values = {name: value for name, value in content.items() if name != "checksum"}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(directory: Path) -> str | None:
    """SHA-256 of ``cache.json`` in ``directory``; None where there is none."""
    path = directory / DESCRIPTION
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def format_of(directory: Path) -> int | None:
    """The format version that ``cache.json`` in ``directory`` says, known or not.

    None where there is none, or it is not of a saved cache.
    """
    try:
        content, _ = read_json(directory / DESCRIPTION)
    except (FileNotFoundError, ValueError):
        return None
    if isinstance(content, dict) and {"format_version", "method", "layers"} <= content.keys():
        return content["format_version"] if type(content["format_version"]) is int else None
    return None


def read_json(path: Path) -> tuple[Any, bytes]:
    """The content of a JSON file, and its bytes; ValueError for what is not (plain) JSON.

    Infinities, which are no JSON, may stand below ``options``, of which some are infinite.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is corrupt (of more than {_MOST_BYTES >> 20} MiB): {_AGAIN}")
    content = path.read_bytes()
    try:
        value = strict_json.read_json(content.decode("utf-8"), allow_nan=True)
        if b"NaN" in content or b"Infinity" in content:
            _check_numbers(value)
        return value, content
    except ValueError as error:
        # A message may have all of the file's content.
        raise ValueError(f"{path} is corrupt ({str(error)[:200]}): {_AGAIN}") from error


def _check_numbers(value: Any) -> None:
    """ValueError for NaN, and for infinities that are not below ``options``."""
    rest = value
    if isinstance(value, dict):
        rest = {name: each for name, each in value.items() if name != "options"}
        if any(math.isnan(number) for number in _floats(value.get("options"))):
            raise ValueError("NaN is no number")
    if not all(map(math.isfinite, _floats(rest))):
        raise ValueError("NaN and Infinity are no numbers")


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _floats(each)


def _layer(layer: Any, version: int) -> LayerValues:
    if not isinstance(layer, dict) or not {"type", "values"} <= layer.keys():
        raise ValueError("a layer has no type or no values")
    kind, values = layer["type"], layer["values"]
    if not isinstance(kind, str) or not isinstance(values, dict):
        raise ValueError("a layer's type is no text, or its values are no object")
    return LayerValues(kind, _plain(values) if version == 1 and values else values)


def _plain(values: Any) -> dict[str, Any]:
    """The values of a layer as format 2 has them, of format 1: ``{"dict": [[name, value]]}``."""
    items = _value(values)
    if not isinstance(items, dict):
        raise ValueError("a layer's values are not named")
    return {
        name: list(value.values()) if isinstance(value, dict) else value
        for name, value in items.items()
        if isinstance(name, str) and value is not _TENSOR
    }


_TENSOR = object()


def _value(value: Any) -> Any:
    """A value of format 1; tensors, which are named alike there, are left out of dicts."""
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("a layer's value is of no known kind")
    ((kind, content),) = value.items()
    if kind == "tensor":
        return _TENSOR
    if kind in ("plain", "dtype"):
        return content
    if kind == "device":
        return None
    if kind != "dict" or not isinstance(content, list):
        raise ValueError(f"a layer's value is of the kind {kind!r}")
    pairs = [pair for pair in content if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) < len(content) or not all(isinstance(name, str | int) for name, _ in pairs):
        raise ValueError("a layer's values are not pairs")
    return {name: _value(item) for name, item in pairs}
