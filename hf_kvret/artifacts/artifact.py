"""``CalibrationArtifact``: a method's calibration results for one model, and its identity."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from huggingface_hub import ModelCardData

from hf_kvret.artifacts.files import (
    DESCRIPTION,
    FORMAT_VERSION,
    read_description,
    read_tensors,
    write_folder,
    write_for_hub,
)
from hf_kvret.artifacts.hub import find_folder, is_hub_id, upload_folder
from hf_kvret.artifacts.identity import ModelIdentity, WeightsReport, compare_weights
from hf_kvret.saved.strict_json import plain_bytes
from hf_kvret.version import __version__

if TYPE_CHECKING:
    from hashlib import _Hash

    from transformers import PreTrainedConfig, PreTrainedModel

_MOST_ITEMS = 8


def model_card(artifact: CalibrationArtifact, source: str) -> str:
    """Text of ``README.md``.

    Args:
        artifact: what it is about. ``data["datasets"]``, a list of hub ids, joins the metadata.
        source: folder or hub id that the code in the card loads from.
    """
    model = artifact.model
    # A name of several lines would end the heading and the link.
    name = " ".join(model.name.split())
    link = f"[{name}](https://huggingface.co/{name})" if _is_full_id(name) else f"`{name}`"
    sections = [
        f"---\n{_metadata(artifact)}\n---",
        f"# {artifact.method} artifact for {name}",
        f"What the method `{artifact.method}` of hf-kvret, KV-cache retrieval inside Hugging Face "
        f"transformers, learned about the keys of {link}. It holds no weights of that model and "
        "is of no use for another one, not for another tune of the same base either.",
        "## Use with hf_kvret",
        _code(artifact, source),
        _settings_text(artifact),
        "## What is in it",
        _table(["tensors", "count", "shape", "dtype", "size"], _sizes(artifact)),
    ]
    if artifact.quality:
        sections += ["## Quality", _quality(artifact.quality)]
    sections += [
        "## How it was made",
        _facts("option", {n: v for n, v in artifact.options.items() if n != "layers"}),
        _facts("calibration data", artifact.data),
        "## For which model",
        _facts("the model's", model.facts),
        f"Format version {FORMAT_VERSION}; sha256 of the model's facts `{model.sha256}`; "
        + (
            f"{len(model.weights)} parameters sampled to tell its weights from others."
            if model.weights
            else "no parameters were sampled (all were offloaded or quantized), so that nothing "
            "tells its weights from others: make sure that you have the same model."
        ),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _metadata(artifact: CalibrationArtifact) -> str:
    datasets = artifact.data.get("datasets")
    fields: dict[str, Any] = {
        "library_name": "hf-kvret",
        "tags": ["hf-kvret", "kv-cache", "calibration", artifact.method],
    }
    if isinstance(datasets, list) and datasets and all(_is_full_id(name) for name in datasets):
        fields["datasets"] = datasets
    if _is_full_id(artifact.model.name):
        fields["base_model"] = artifact.model.name
        # Without a relation the hub would list it as a fine-tune.
        fields["base_model_relation"] = "adapter"
    return ModelCardData(**fields).to_yaml()


def _code(artifact: CalibrationArtifact, source: str) -> str:
    """How to use it, and how to load it alone."""
    method, source, config = (
        json.dumps(text, ensure_ascii=False)
        for text in (artifact.method, source, {"artifact": source})
    )
    return f"""With hf_kvret installed (in its checkout: `pip install -c constraints.txt .`):

```python
import hf_kvret

model.generate(
    **inputs, cache_implementation={method}, cache_config={config}
)
```

The artifact alone, and whether it belongs to a model:

```python
from hf_kvret.artifacts import CalibrationArtifact

artifact = CalibrationArtifact.from_pretrained({source}, method={method})
artifact.check(model.config)  # the shapes and RoPE that it was made for?
artifact.check_weights(model)  # and the weights?
```"""


def _settings_text(artifact: CalibrationArtifact) -> str:
    """The options that a cache takes from the artifact by default; empty if none."""
    bits, sinks = artifact.options.get("bits"), artifact.options.get("sinks")
    if bits is None:
        return ""
    codes = "rows are kept as they are" if bits == 16 else f"codes have {bits} bits a number"
    text = f"Unless the options name other `bits`, {codes}: that is what it was calibrated with."
    if sinks:
        text += f" Keep the first {sinks} tokens out of the codes (`sink={sinks}` or more)."
    return text


def _sizes(artifact: CalibrationArtifact) -> list[list[str]]:
    """One row per name (with numbers as ``*``), shape and dtype, and a total."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, tensor in artifact.tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        key = (re.sub(r"\d+", "*", name), str(list(tensor.shape)), dtype)
        groups.setdefault(key, []).append(tensor.nbytes)
    rows = [
        [f"`{name}`", str(len(sizes)), shape, dtype, in_bytes(sum(sizes))]
        for (name, shape, dtype), sizes in groups.items()
    ]
    total = sum(sum(sizes) for sizes in groups.values())
    return [*rows, ["all", str(len(artifact.tensors)), "", "", in_bytes(total)]]


def _quality(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return _table(names, [[_cell(row.get(name)) for name in names] for row in rows])


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    return _table([title, "value"], [[f"`{name}`", _cell(facts[name])] for name in facts])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and len(value) > _MOST_ITEMS:
        value = f"{', '.join(map(str, value[:_MOST_ITEMS]))}, ... ({len(value)})"
    if isinstance(value, float):
        value = int(value) if value.is_integer() else f"{value:.4g}"
    return str(value).replace("|", r"\|").replace("\n", " ")


def in_bytes(count: int) -> str:
    """``count`` bytes in words: ``"1.5 MiB"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _is_full_id(name: Any) -> bool:
    """Whether a name is ``user/name``, as the hub's metadata wants it."""
    return isinstance(name, str) and "/" in name and is_hub_id(name)


@dataclass(frozen=True, eq=False)
class CalibrationArtifact:
    """Tensors that a method learned about one model, with their origin.

    Attributes:
        method: name of the method, ``"a2ats"`` or another: small letters, digits, ``-`` and ``_``.
        model: the model that it belongs to.
        tensors: by name; on any device until saved, on the CPU when loaded.
        data: description of the calibration data, plain JSON. ``data["datasets"]``, if given, is a
            list of hub ids.
        options: the method's calibration options, plain JSON.
        quality: a row of figures for each layer: ``layer``, its number in the model, and numbers,
            strings or None by name.

    Raises:
        TypeError, ValueError: a field that is not as above. Plain JSON is kept as a copy that went
            through JSON, so that an artifact is the same before it is saved and after it is loaded.
    """

    method: str
    model: ModelIdentity
    tensors: Mapping[str, torch.Tensor]
    data: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    quality: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not re.fullmatch("[a-z][a-z0-9_-]*", self.method):
            raise ValueError(
                f"method={self.method!r}: the name of a method, small letters, digits, - and _"
            )
        if not isinstance(self.tensors, Mapping) or not self.tensors:
            raise ValueError("tensors: pass a dict with at least one tensor, by name")
        for name, tensor in self.tensors.items():
            if not isinstance(name, str) or name in ("", "__metadata__"):
                raise ValueError(f"tensors: {name!r} is no name for a tensor, take another")
            if not isinstance(tensor, torch.Tensor):
                kind = type(tensor).__name__
                raise TypeError(f"tensors: {name} is a {kind}, pass a torch.Tensor")
        # Copies are kept, so that callers can't change a frozen artifact.
        object.__setattr__(self, "tensors", dict(self.tensors))
        for name in ("data", "options"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} is a {type(value).__name__}: pass a dict of plain JSON")
            object.__setattr__(self, name, _plain_json(name, dict(value)))
        object.__setattr__(self, "quality", _plain_quality(self.quality))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def sha256(self) -> str:
        """Digest of method, model, data, options, quality and all tensors, 64 hexadecimal digits.

        The same however and wherever the artifact is saved.
        """
        plain = {
            "method": self.method,
            "model": self.model.as_json(),
            "data": self.data,
            "options": self.options,
            "quality": self.quality,
        }
        digest = hashlib.sha256(plain_bytes(plain))
        add_tensors(digest, self.tensors)
        return digest.hexdigest()

    def check_sha256(self, sha256: str) -> None:
        """Refuse this artifact unless it is the one that is meant.

        Args:
            sha256: of that one.

        Raises:
            ValueError: its ``sha256`` is another; both are named.
        """
        if self.sha256 != sha256:
            raise ValueError(
                f"the {self.method} artifact of {self.model.name} has sha256 {self.sha256}, and "
                f"artifact_sha256 asks for {sha256}: load the artifact that was meant (a commit's "
                "id as revision= pins it on the hub), or, where you trust this one, give its sha256"
            )

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write ``artifact-<version>.safetensors``, ``config.json`` and the card ``README.md``.

        ``directory`` is made if needed; other files in it stay. Whenever it breaks off, by a kill
        or a full disk, the folder has the old artifact or the new one, whole.

        Raises:
            FileExistsError, NotADirectoryError: ``directory``, or a part of it, is a file.
            OSError: no space, or no right to write.
            ValueError: ``config.json`` there is a model's, or of another method: an artifact
                replaces only an older one of its method; a file to replace is a symbolic link.
        """
        path = Path(directory).expanduser()
        self._write(write_folder, path, path.resolve().name)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | os.PathLike[str],
        *,
        method: str | None = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        sha256: str | None = None,
    ) -> Self:
        """The artifact in a folder or on the hub, with its tensors on the CPU.

        Completeness is checked; ``check`` and ``check_weights`` check that it fits a model. No code
        is executed. The settings of huggingface_hub apply (``HF_ENDPOINT``, ``HF_TOKEN``,
        ``HF_HUB_OFFLINE``, ``HF_HOME``).

        Args:
            path_or_hub_id: a folder that exists wins over a hub id of the same name.
            method: the one it must be for; None for any.
            revision: branch, tag or commit on the hub; None for ``main``.
            cache_dir: where downloads are kept; None for the cache of huggingface_hub.
            token: of the hub; None for the one that is logged in.
            local_files_only: use the local cache only, no network.
            sha256: the ``sha256`` that the artifact must have; None for any.

        Raises:
            FileNotFoundError: no such folder and no such repository or revision; no artifact there;
                not in the cache while offline.
            NotADirectoryError: a file instead of a folder.
            PermissionError: the hub refuses the token, or the repository is gated.
            ValueError: a damaged file, another format version, another method than ``method``,
                another digest than ``sha256``, or a revision of a local folder.
        """
        folder = find_folder(
            path_or_hub_id,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
        )
        description = read_description(folder)
        name = description["method"]
        if method is not None and name != method:
            raise ValueError(
                f"{path_or_hub_id} holds an artifact of {name!r}, not of {method!r}: give one "
                f"that was made with `hf-kvret calibrate {method}`"
            )
        tensors = read_tensors(folder, description)
        try:
            artifact = cls(
                method=name,
                model=ModelIdentity.from_json(description["model"]),
                tensors=tensors,
                data=description["data"],
                options=description["options"],
                quality=description["quality"],
            )
        except (KeyError, TypeError, ValueError) as error:
            why = f"no {error} in 'model'" if isinstance(error, KeyError) else error
            raise ValueError(
                f"{folder / DESCRIPTION} is damaged ({why}): save or download the artifact again"
            ) from error
        if sha256 is not None:
            artifact.check_sha256(sha256)
        return artifact

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload the artifact in one commit; returns the URL of the commit or pull request.

        The repository, and the branch ``revision``, are made where they don't exist. The model card
        there is replaced, an artifact only by one of the same method.

        Args:
            repo_id: ``user/name``, or ``name`` for the user who is logged in.
            private: of a repository that is made; None for the default of its owner.
            revision: branch; None for ``main``.
            token: of the hub; None for the one that is logged in.
            commit_message: None for one that names the method and the model.
            create_pr: open a pull request against ``main`` instead.

        Raises:
            PermissionError: not logged in, or with a token that may not write there.
            ValueError: no hub id, ``config.json`` there is a model's or of another method, or a
                pull request against another branch than ``main``.
            ConnectionError: the hub can't be reached, or ``HF_HUB_OFFLINE`` is set.
        """
        with tempfile.TemporaryDirectory() as name:
            self._write(write_for_hub, Path(name), repo_id)
            return upload_folder(
                Path(name),
                repo_id,
                self.method,
                private=private,
                revision=revision,
                token=token,
                commit_message=commit_message or f"{self.method} artifact for {self.model.name}",
                create_pr=create_pr,
            )

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse a model of another architecture, by its configuration alone.

        Raises:
            ValueError: kind, layers, widths, heads, RoPE or vocabulary are not those of the model
                that the artifact was made for; the first difference is named.
            TypeError: ``config`` is no configuration.
        """
        difference = self.model.difference(config)
        if difference:
            raise ValueError(
                f"the {self.method} artifact of {self.model.name} was {difference}: load the "
                f"artifact of your model, or make it with `hf-kvret calibrate {self.method}`"
            )

    def check_weights(self, model: PreTrainedModel, *, strict: bool = True) -> WeightsReport:
        """Refuse a model with other weights: another tune of the same base, or another training.

        Compares some hundred numbers of up to 32 parameters, with the tolerance of a cast to bf16
        or fp16. Parameters that are quantized, sharded, offloaded, of another shape or absent are
        skipped; the report names them, and a warning tells when none was left to compare.

        Args:
            model: the numbers are read from wherever it is.
            strict: False warns instead of refusing.

        Returns:
            what was compared, what differs, what was skipped and why.

        Raises:
            ValueError: with ``strict``, when numbers differ.
        """
        report = compare_weights(self.model.weights, model)
        if not report.compared:
            reasons = (
                ", ".join(sorted(set(report.skipped.values()))) or "the artifact has no sample"
            )
            warnings.warn(
                f"the weights of the model can't be compared with those that the {self.method} "
                f"artifact of {self.model.name} was made from ({reasons}): make sure that it is "
                "the same model",
                stacklevel=2,
            )
        if report.differing:
            message = (
                f"the {self.method} artifact of {self.model.name} was made from other weights: "
                f"{len(report.differing)} of {report.compared} sampled parameters differ "
                f"({report.example}). Another tune of the same base has other keys: make an "
                f"artifact of your model with `hf-kvret calibrate {self.method}`"
            )
            if strict:
                raise ValueError(
                    f"{message}, or look on with artifact.check_weights(model, strict=False), "
                    "which only warns"
                )
            warnings.warn(message, stacklevel=2)
        return report

    def _write(self, write: Callable[..., None], directory: Path, source: str) -> None:
        """``write`` the files; ``source`` is what the code in the card loads from."""
        description = {
            "method": self.method,
            "made_with": f"hf-kvret {__version__}",
            "model": self.model.as_json(),
            "data": self.data,
            "options": self.options,
            "quality": self.quality,
        }
        write(directory, description, self.tensors, model_card(self, source))


def add_tensors(digest: _Hash, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add names, dtypes, shapes and elements to a digest, in the order of the names."""
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(plain_bytes([name, dtype, list(tensor.shape)]))
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().data)


def _plain_quality(quality: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of figures as JSON gives them back; ValueError for anything but single figures."""
    rows = _plain_json("quality", list(quality))
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("layer"), int):
            raise ValueError(f"quality[{number}]={row!r}: pass a dict with 'layer', its number")
        names = [name for name, value in row.items() if isinstance(value, dict | list)]
        if names:
            raise ValueError(
                f"quality[{number}]: {', '.join(names)} is no number, string or None; give each "
                "figure a name of its own"
            )
    return rows


def _plain_json(name: str, value: Any) -> Any:
    """``value`` after a way through JSON, which knows no tuples and only strings as names."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{name} is not plain JSON ({error}): pass dicts, lists, strings, finite numbers, "
            "booleans and None"
        ) from error
