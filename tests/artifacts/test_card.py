"""The model card: metadata that the hub reads, and code that runs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_kvret.artifacts import CalibrationArtifact


def test_a_card_has_metadata_facts_and_code_that_runs(
    artifact: CalibrationArtifact, tmp_path: Path
) -> None:
    folder = tmp_path / "my \"ärtifact's"
    artifact.save_pretrained(folder)
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert ModelCard(text).data.to_dict() == {
        "library_name": "hf-kvret",
        "tags": ["hf-kvret", "kv-cache", "calibration", "a2ats"],
        "datasets": ["alice/texts"],
        "base_model": "meta/tiny-llama",
        "base_model_relation": "adapter",
    }
    (made,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    expected = {"options": artifact.options, "data": artifact.data, "model": artifact.model.facts}
    assert json.loads(made) == expected
    (use,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    calls = []

    class _Model:
        def generate(self, **options: object) -> None:
            calls.append(options)

    exec(use, {"model": _Model(), "inputs": {"input_ids": [1]}})
    options = {"cache_implementation": "a2ats", "cache_config": {"artifact": "my \"ärtifact's"}}
    assert calls == [{"input_ids": [1], **options}]


@pytest.mark.parametrize("name", ["llama", "a/b/c", "my model"])
def test_a_name_that_is_no_hub_id_is_no_base_model(
    artifact: CalibrationArtifact, name: str, tmp_path: Path
) -> None:
    model = dataclasses.replace(artifact.model, name=name)
    bare = CalibrationArtifact("a2ats", model, artifact.tensors, data={"datasets": ["wiki.txt"]})
    bare.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert set(ModelCard(text).data.to_dict()) == {"library_name", "tags"}
    assert f"`{name}`" in text
