"""The model card: metadata that the hub reads, code that runs, figures that are the artifact's."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_kvret.artifacts import CalibrationArtifact


@pytest.fixture
def odd(artifact: CalibrationArtifact, tmp_path: Path) -> tuple[CalibrationArtifact, str]:
    """An artifact with a text that tables and folders stumble over, and its saved card."""
    odd = dataclasses.replace(artifact, data={**artifact.data, "text": "a|b\nc"})
    folder = tmp_path / "my \"ärtifact's"
    odd.save_pretrained(folder)
    return odd, (folder / "README.md").read_text(encoding="utf-8")


def test_metadata_is_what_the_hub_reads(odd: tuple[CalibrationArtifact, str]) -> None:
    assert ModelCard(odd[1]).data.to_dict() == {
        "library_name": "hf-kvret",
        "tags": ["hf-kvret", "kv-cache", "calibration", "a2ats"],
        "datasets": ["alice/texts"],
        "base_model": "meta/tiny-llama",
        "base_model_relation": "adapter",
    }


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
    assert "## Quality" not in text and "\n\n\n" not in text


def test_the_code_of_a_card_runs(odd: tuple[CalibrationArtifact, str]) -> None:
    (use,) = re.findall(r"```python\n(.*?)```", odd[1], flags=re.DOTALL)
    calls = []

    class _Model:
        def generate(self, **options: object) -> None:
            calls.append(options)

    exec(use, {"model": _Model(), "inputs": {"input_ids": [1]}})
    options = {"cache_implementation": "a2ats", "cache_config": {"artifact": "my \"ärtifact's"}}
    assert calls == [{"input_ids": [1], **options}]


def test_figures_and_facts_are_those_of_the_artifact(odd: tuple[CalibrationArtifact, str]) -> None:
    artifact, text = odd
    lines = text.splitlines()
    assert "| layer | score_error | plain_error | note |" in lines
    assert "| 0 | 0.1235 | 0.25 |  |" in lines
    assert "| 1 | 0.0625 |  | no RoPE |" in lines
    (made,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    expected = {"options": artifact.options, "data": artifact.data, "model": artifact.model.facts}
    assert json.loads(made) == expected
