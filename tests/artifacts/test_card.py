"""The model card: metadata that the hub reads, code that runs, figures that are the artifact's."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.artifact import in_bytes, model_card


def test_metadata_is_what_the_hub_reads(artifact: CalibrationArtifact) -> None:
    metadata = ModelCard(model_card(artifact, "alice/x")).data.to_dict()
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
    metadata = ModelCard(model_card(local, "x")).data.to_dict()
    assert set(metadata) == {"library_name", "tags"}
    assert f"`{name}`" in model_card(local, "x")


def test_the_code_of_a_saved_card_runs(
    artifact: CalibrationArtifact,
    llama: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifact.save_pretrained(tmp_path / "my \"ärtifact's")
    text = (tmp_path / "my \"ärtifact's" / "README.md").read_text(encoding="utf-8")
    use, load = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"model": llama}
    exec(load, names)
    loaded = names["artifact"]
    assert isinstance(loaded, CalibrationArtifact) and loaded.quality == artifact.quality
    calls = []

    class _Model:
        def generate(self, **options: object) -> None:
            calls.append(options)

    exec(use, {"model": _Model(), "inputs": {"input_ids": [1]}})
    assert calls == [
        {
            "input_ids": [1],
            "cache_implementation": "a2ats",
            "cache_config": {"artifact": "my \"ärtifact's"},
        }
    ]


def test_sizes_and_figures_are_those_of_the_artifact(artifact: CalibrationArtifact) -> None:
    lines = model_card(artifact, "x").splitlines()
    assert "| `layers.*.codebook` | 2 | [2, 8, 16] | bfloat16 | 1.0 KiB |" in lines
    assert "| `layers.*.factor` | 2 | [2, 2, 16] | float32 | 512 bytes |" in lines
    assert "| all | 4 |  |  | 1.5 KiB |" in lines
    assert "| layer | score_error | plain_error | note |" in lines
    assert "| 0 | 0.1235 | 0.25 |  |" in lines
    assert "| 1 | 0.0625 |  | no RoPE |" in lines
    assert "| `codewords` | 8 |" in lines and "| `seed` |  |" in lines
    assert "| `rope.rope_theta` | 10000 |" in lines
    assert "| `num_key_value_heads` | 2 |" in lines
    assert artifact.model.sha256 in lines[-1]


def test_every_table_has_as_many_cells_as_its_head(artifact: CalibrationArtifact) -> None:
    odd = dataclasses.replace(artifact, data={"text": "a|b\nc", "many": list(range(99))})
    text = model_card(odd, "x")
    assert r"| `text` | a\|b c |" in text and "6, 7, ... (99) |" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_an_artifact_without_figures_has_no_empty_parts(artifact: CalibrationArtifact) -> None:
    bare = CalibrationArtifact("aqua", artifact.model, artifact.tensors)
    text = model_card(bare, "x")
    assert "## Quality" not in text and "calibration data" not in text
    assert "\n\n\n" not in text and 'method="aqua"' in text


def test_a_card_says_when_no_weights_were_sampled(artifact: CalibrationArtifact) -> None:
    last = model_card(artifact, "x").splitlines()[-1]
    assert f"{len(artifact.model.weights)} parameters sampled to tell its weights" in last
    blind = dataclasses.replace(artifact, model=dataclasses.replace(artifact.model, weights={}))
    last = model_card(blind, "x").splitlines()[-1]
    assert "no parameters were sampled" in last and "make sure that you have the same model" in last


def test_bytes_are_told_in_three_units() -> None:
    counts = (0, 1023, 1024, 1536, 1 << 20, 268_435_456, 3 << 30)
    assert [in_bytes(count) for count in counts] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 MiB",
        "256.0 MiB",
        "3.0 GiB",
    ]
