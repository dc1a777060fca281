"""``CalibrationArtifact``: a method's calibration results for one model, and its identity."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import HfApi, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.artifacts.files import (
    DESCRIPTION,
    PATTERNS,
    TENSORS,
    check_no_foreign_artifact,
    find_folder,
    is_hub_id,
    read_description,
    read_tensors,
    write_folder,
)
from hf_kvret.artifacts.identity import ModelIdentity, compare_weights
from hf_kvret.saved.folder import plain_bytes
from hf_kvret.version import __version__

_TEMPLATE = """---
{metadata}
---

# {method} artifact for {name}

The method `{method}` of hf-kvret, KV-cache retrieval inside Hugging Face transformers, learned this
about the keys of `{name}`. It holds no weights of that model and is of no use for another one, not
for another tune of the same base either.

```python
import hf_kvret

model.generate(
    **inputs, cache_implementation={quoted_method}, cache_config={config}
)
```

## How it was made

```json
{made}
```
"""


@dataclass(frozen=True, eq=False)
class CalibrationArtifact:
    """Tensors that a method learned about one model, with their origin.

    Attributes:
        method: name of the method, ``"a2ats"`` or another.
        model: the model that it belongs to.
        tensors: by name; on any device until saved, on the CPU when loaded.
        data: description of the calibration data, plain JSON. ``data["datasets"]``, if given, is a
            list of hub ids.
        options: the method's calibration options, plain JSON.
        quality: a row of figures for each layer: ``layer``, its number in the model, and numbers,
            strings or None by name.

    Raises:
        TypeError, ValueError: ``data``, ``options`` or ``quality`` is no plain JSON. They are kept
            as copies that went through JSON, as they are after a save and a load.
    """

    method: str
    model: ModelIdentity
    tensors: Mapping[str, torch.Tensor]
    data: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    quality: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        # Copies are kept, so that callers can't change a frozen artifact.
        object.__setattr__(self, "tensors", dict(self.tensors))
        for name in ("data", "options", "quality"):
            object.__setattr__(self, name, _plain_json(name, getattr(self, name)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def sha256(self) -> str:
        """Digest of method, model, data, options, quality and all tensors, 64 hexadecimal digits.

        The same however and wherever the artifact is saved.
        """
        digest = hashlib.sha256(plain_bytes(self._plain()))
        for name, tensor in sorted(self.tensors.items()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            digest.update(plain_bytes([name, dtype, list(tensor.shape)]))
            content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(content.numpy().data)
        return digest.hexdigest()

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write ``artifact-<version>.safetensors``, ``config.json`` and the card ``README.md``.

        ``directory`` is made if needed; other files in it stay. Whenever it breaks off, by a kill
        or a full disk, the folder has the old artifact or the new one, whole.

        Raises:
            OSError: no space, no right to write, or ``directory`` is a file.
            ValueError: ``config.json`` there is a model's, or of another method: an artifact
                replaces only an older one of its method.
        """
        path = Path(directory).expanduser()
        self._write(path, path.resolve().name)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | os.PathLike[str],
        *,
        method: str | None = None,
        revision: str | None = None,
    ) -> Self:
        """The artifact in a folder or on the hub, with its tensors on the CPU.

        Completeness is checked; ``check`` and ``check_weights`` check that it fits a model. No code
        is executed. The settings of huggingface_hub apply (``HF_ENDPOINT``, ``HF_TOKEN``,
        ``HF_HUB_OFFLINE``, ``HF_HOME``).

        Args:
            path_or_hub_id: a folder that exists wins over a hub id of the same name.
            method: the one it must be for; None for any.
            revision: branch, tag or commit on the hub; None for ``main``.

        Raises:
            FileNotFoundError: no such folder; no artifact there; not in the cache while offline.
            NotADirectoryError: a file instead of a folder.
            OSError: of the hub's client: no such repository or revision, or no right to read it.
            ValueError: a damaged file, another format version, another method than ``method``,
                or a revision of a local folder.
        """
        folder = find_folder(path_or_hub_id, revision)
        description = read_description(folder)
        name = description["method"]
        if method is not None and name != method:
            raise ValueError(
                f"{path_or_hub_id} holds an artifact of {name!r}, not of {method!r}: give one "
                f"that was made with `hf-kvret calibrate {method}`"
            )
        return cls(
            method=name,
            model=ModelIdentity.from_json(description["model"]),
            tensors=read_tensors(folder, description),
            data=description["data"],
            options=description["options"],
            quality=description["quality"],
        )

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None
    ) -> str:
        """Upload the artifact in one commit; returns the commit's URL.

        The repository, and the branch ``revision``, are made where they don't exist. An artifact
        of the same method and a model card there are replaced.

        Args:
            repo_id: ``user/name``, or ``name`` for the user who is logged in.
            private: of a repository that is made; None for the default of its owner.
            revision: branch; None for ``main``.

        Raises:
            OSError: of the hub's client: offline, not logged in, or no right to write there.
            ValueError: no hub id, or a repository of a model, or of another method's artifact.
        """
        api = HfApi()
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        # A cached copy may be older than the file that would be replaced, so none is taken.
        with tempfile.TemporaryDirectory() as folder, suppress(EntryNotFoundError):
            hf_hub_download(repo_id, DESCRIPTION, revision=revision, local_dir=folder)
            check_no_foreign_artifact(Path(folder), self.method, repo_id)
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder), repo_id)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=f"{self.method} artifact for {self.model.name}",
                revision=revision,
                allow_patterns=list(PATTERNS),
                # The older tensors have another name.
                delete_patterns=list(TENSORS),
            )
        return commit.commit_url

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

    def check_weights(self, model: PreTrainedModel) -> int:
        """Refuse a model with other weights: another tune of the same base, or another training.

        Compares some hundred numbers of up to 32 parameters, with the tolerance of a cast to bf16
        or fp16. Parameters that are quantized, sharded, offloaded, of another shape or absent are
        left out, and a warning tells when none was left to compare.

        Args:
            model: the numbers are read from wherever it is.

        Returns:
            how many parameters were compared.

        Raises:
            ValueError: numbers differ.
        """
        count, differences = compare_weights(self.model.weights, model)
        if not count:
            warnings.warn(
                f"the weights of the model can't be compared with those that the {self.method} "
                f"artifact of {self.model.name} was made from (quantized, in shards or offloaded): "
                "make sure that it is the same model",
                stacklevel=2,
            )
        if differences:
            raise ValueError(
                f"the {self.method} artifact of {self.model.name} was made from other weights: "
                f"{len(differences)} of {count} sampled parameters differ "
                f"({next(iter(differences.values()))}). Another tune of the same base has other "
                f"keys: make an artifact of your model with `hf-kvret calibrate {self.method}`"
            )
        return count

    def _write(self, directory: Path, source: str) -> None:
        """Write the files; ``source`` is what the code in the card loads from."""
        description = {**self._plain(), "made_with": f"hf-kvret {__version__}"}
        write_folder(directory, description, self.tensors, model_card(description, source))

    def _plain(self) -> dict[str, Any]:
        """All but the tensors, as plain JSON."""
        return {
            "method": self.method,
            "model": self.model.as_json(),
            "data": self.data,
            "options": self.options,
            "quality": self.quality,
        }


def _plain_json(name: str, value: Any) -> Any:
    """``value`` after a way through JSON, which knows no tuples and only strings as names."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{name} is not plain JSON ({error}): pass dicts, lists, strings, finite numbers, "
            "booleans and None"
        ) from error


def model_card(description: Mapping[str, Any], source: str) -> str:
    """The text of the card.

    Args:
        description: of the artifact, as in ``config.json``. ``data["datasets"]``, a list of hub
            ids, joins the metadata.
        source: folder or hub id that the code in the card loads from.
    """
    method, model, data = (description[name] for name in ("method", "model", "data"))
    options = {name: x for name, x in description["options"].items() if name != "layers"}
    made = {"options": options, "data": data, "model": model["facts"]}
    datasets = data.get("datasets")
    fields: dict[str, Any] = {}
    if isinstance(datasets, list) and datasets and all(map(_is_full_id, datasets)):
        fields["datasets"] = datasets
    if _is_full_id(model["name"]):
        # Without a relation the hub would list it as a fine-tune.
        fields |= {"base_model": model["name"], "base_model_relation": "adapter"}
    tags = ["hf-kvret", "kv-cache", "calibration", method]
    metadata = ModelCardData(library_name="hf-kvret", tags=tags, **fields)
    return _TEMPLATE.format(
        metadata=metadata.to_yaml(),
        method=method,
        # A name of several lines would end the heading.
        name=" ".join(model["name"].split()),
        quoted_method=json.dumps(method),
        config=json.dumps({"artifact": source}, ensure_ascii=False),
        made=json.dumps(made, indent=1),
    )


def _is_full_id(name: Any) -> bool:
    """Whether a name is ``user/name``, as the hub's metadata wants it."""
    return isinstance(name, str) and "/" in name and is_hub_id(name)
