"""The small model with latent attention: with its card, served, and able to find a needle."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from hf_kvret.lab.evaluate.bundled import LATENT_MODEL
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.ruler import generate, sample_score
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.lab.evaluate.texts import token_ids
from hf_kvret.models.compatibility import check_model, is_latent


@pytest.fixture(scope="module")
def latent() -> Subject:
    return load_subject("reference-latent")


def test_it_is_small_and_bf16_and_names_its_texts() -> None:
    assert sum(file.stat().st_size for file in LATENT_MODEL.iterdir()) <= 18_000_000
    weights = load_file(LATENT_MODEL / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert not any("expert" in name for name in weights)
    card = (LATENT_MODEL / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n")
    for licence in ("CC BY-SA 3.0", "CC BY 4.0", "CC0", "public domain"):
        assert licence in card


def test_many_heads_share_a_row(latent: Subject) -> None:
    check_model(latent.model)
    config = latent.model.config
    assert is_latent(config) and config.num_attention_heads == 16


@pytest.mark.parametrize("method", ["flat:select_heads=4", "paris"])
def test_it_finds_a_needle(method: str, latent: Subject) -> None:
    tokenizer = latent.need_tokenizer("test")
    [sample] = generate("niah_single_1", lambda text: token_ids(tokenizer, text), 900, 1)
    ids = token_ids(tokenizer, sample.input + sample.answer_prefix)
    choice = choose_cache(f"{method}:top_k=32:recent=64:flush=64:dense_below=0")
    reader = Reader(latent.model, choice, len(ids) + 16)
    reader.prefill(ids[:-1])
    answer = tokenizer.decode(reader.answer(ids[-1:], 16))
    assert sample_score("niah_single_1", answer, sample.outputs) == 1
