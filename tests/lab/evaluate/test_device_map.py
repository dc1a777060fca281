"""A model whose layers are on several devices measures as on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_kvret.cli import main
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.report.results import Results

NIAH = ["eval", "niah", "--model", "needle", "--context", "256", "--depths", "50"]
CACHES = ["--caches", "full,paris", "--samples", "1"]


def run(path: Path, *more: str) -> int:
    return main([*NIAH, *CACHES, "--json", str(path), *more])


def test_weights_on_a_disk_tell_the_same_model(tmp_path: Path) -> None:
    """Its fingerprint does not depend on where they are."""
    pytest.importorskip("accelerate")
    one = load_subject("needle")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers": "disk", "lm_head": "disk"}
    folder = one.model.config._name_or_path
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=places, offload_folder=tmp_path
    )
    assert any(parameter.is_meta for parameter in model.parameters())
    spread = replace(one, model=model)
    assert spread.describe() == one.describe()
    assert spread.device == torch.device("cpu")


def test_a_spread_model_gives_the_same_answers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert run(tmp_path / "one.json") == 0
    assert run(tmp_path / "spread.json", "--device-map", "auto") == 0
    one, spread = ([*Results.load(tmp_path / f"{x}.json")] for x in ("one", "spread"))
    assert [cell for cell, _ in one] == [cell for cell, _ in spread]
    assert [row["answers"] for _, row in one] == [row["answers"] for _, row in spread]
