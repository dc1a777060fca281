"""The model card: metadata that the hub reads, code that runs, figures that are the artifact's."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.card import model_card


def card(artifact: CalibrationArtifact, source: str) -> str:
    return model_card(artifact._plain(), source)


def test_metadata_is_what_the_hub_reads(artifact: CalibrationArtifact) -> None:
    metadata = ModelCard(card(artifact, "alice/x")).data.to_dict()
    assert metadata == {
        "library_name": "hf-kvret",
        "tags": ["hf-kvret", "kv-cache", "calibration", "a2ats"],
        "datasets": ["alice/texts"],
        "base_model": "meta/tiny-llama",
        "base_model_relation": "adapter",
    }


@pytest.mark.parametrize("name", ["llama", "a/b/c", "my model"])
def test_a_name_that_is_no_hub_id_is_no_base_model(
    artifact: CalibrationArtifact, name: str
) -> None:
    model = dataclasses.replace(artifact.model, name=name)
    local = dataclasses.replace(artifact, model=model, data={"datasets": ["wiki.txt"]})
    metadata = ModelCard(card(local, "x")).data.to_dict()
    assert set(metadata) == {"library_name", "tags"}
    assert f"`{name}`" in card(local, "x")


def test_the_code_of_a_saved_card_runs(artifact: CalibrationArtifact, tmp_path: Path) -> None:
    artifact.save_pretrained(tmp_path / "my \"ärtifact's")
    text = (tmp_path / "my \"ärtifact's" / "README.md").read_text(encoding="utf-8")
    (use,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    calls = []

    class _Model:
        def generate(self, **options: object) -> None:
            calls.append(options)

    exec(use, {"model": _Model(), "inputs": {"input_ids": [1]}})
    options = {"cache_implementation": "a2ats", "cache_config": {"artifact": "my \"ärtifact's"}}
    assert calls == [{"input_ids": [1], **options}]


def test_figures_and_facts_are_those_of_the_artifact(artifact: CalibrationArtifact) -> None:
    odd = dataclasses.replace(artifact, data={"text": "a|b\nc"})
    text = card(odd, "x")
    lines = text.splitlines()
    assert "| layer | score_error | plain_error | note |" in lines
    assert "| 0 | 0.1235 | 0.25 |  |" in lines
    assert "| 1 | 0.0625 |  | no RoPE |" in lines
    (made,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    expected = {"options": odd.options, "data": odd.data, "model": odd.model.facts}
    assert json.loads(made) == expected


def test_an_artifact_without_figures_has_no_empty_parts(artifact: CalibrationArtifact) -> None:
    bare = CalibrationArtifact("aqua", artifact.model, artifact.tensors)
    text = card(bare, "x")
    assert "## Quality" not in text and "\n\n\n" not in text
