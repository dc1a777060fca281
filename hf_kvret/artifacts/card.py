"""The model card of an artifact: metadata for the hub, what it is, how to load it, figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

from hf_kvret.artifacts.files import FORMAT_VERSION
from hf_kvret.artifacts.hub import is_hub_id

if TYPE_CHECKING:
    from hf_kvret.artifacts.artifact import CalibrationArtifact

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
    parts = [
        f"---\n{_metadata(artifact)}\n---",
        f"# {artifact.method} artifact for {name}",
        f"What the method `{artifact.method}` of hf-kvret, KV-cache retrieval inside Hugging Face "
        f"transformers, learned about the keys of {link}. It holds no weights of that model and "
        "is of no use for another one, not for another tune of the same base either.",
        "## How to load it",
        _code(artifact, source),
        _settings_text(artifact),
        "## What is in it",
        _table(["tensors", "count", "shape", "dtype", "size"], _sizes(artifact)),
    ]
    if artifact.quality:
        parts += ["## Quality", _quality(artifact.quality)]
    parts += [
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
    return "\n\n".join(part for part in parts if part) + "\n"


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
    """How to load it, and a cache with it."""
    method, source, config = (
        json.dumps(text, ensure_ascii=False)
        for text in (artifact.method, source, {"artifact": source})
    )
    return f"""```python
from hf_kvret.artifacts import CalibrationArtifact

artifact = CalibrationArtifact.from_pretrained({source}, method={method})
artifact.check(model.config)  # the shapes and RoPE that it was made for?
artifact.check_weights(model)  # and the weights?
```

or, in one step with the generation:

```python
import hf_kvret

model.generate(
    **inputs, cache_implementation={method}, cache_config={config}
)
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
