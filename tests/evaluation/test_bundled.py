"""The bundled model: small, in bf16, with its card, and trained by a script that repeats itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_kvret.evaluation import bundled
from hf_kvret.evaluation.bundled import BUNDLED_MODEL, load_bundled_model

SCRIPT = Path(__file__).parents[2] / "examples" / "train_needle_model.py"


def test_the_weights_are_small_and_bf16_and_have_a_card() -> None:
    weights = BUNDLED_MODEL / "model.safetensors"
    assert weights.stat().st_size <= 8_000_000
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
    card = (BUNDLED_MODEL / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n") and "## Training" in card


def test_it_is_loaded_to_be_used() -> None:
    model = load_bundled_model(torch.float16)
    assert not model.training and model.dtype == torch.float16


def test_a_missing_model_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "BUNDLED_MODEL", tmp_path)
    with pytest.raises(FileNotFoundError, match="install hf_kvret again, or train it"):
        load_bundled_model()


def _train(folder: Path, *options: str) -> dict[str, torch.Tensor]:
    command = [sys.executable, str(SCRIPT), "--out", str(folder), "--tokens", "4e3", "--eval"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_training_twice_gives_the_same_weights(tmp_path: Path) -> None:
    first, second, other = (
        _train(tmp_path / name, "--seed", seed)
        for name, seed in (("first", "0"), ("second", "0"), ("other", "1"))
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
