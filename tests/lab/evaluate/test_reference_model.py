"""The reference model: small, with its card, and able to do what its card says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_kvret.lab.evaluate.bundled import REFERENCE_MODEL
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.ruler import generate, sample_score
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.lab.evaluate.texts import token_ids


@pytest.fixture(scope="module")
def reference() -> Subject:
    return load_subject("reference")


def test_it_is_small_and_bf16_and_names_its_texts() -> None:
    assert sum(file.stat().st_size for file in REFERENCE_MODEL.iterdir()) <= 16_000_000
    weights = load_file(REFERENCE_MODEL / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    card = (REFERENCE_MODEL / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n")
    for licence in ("CC BY-SA 3.0", "CC BY 4.0", "CC0", "public domain"):
        assert licence in card


def test_it_is_deep_and_groups_its_queries(reference: Subject) -> None:
    config = reference.model.config
    assert config.num_hidden_layers >= 6
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.head_dim in (64, 128)


@pytest.mark.parametrize("cache", ["full", "paris:top_k=64:dense_below=0"])
def test_it_finds_a_needle(cache: str, reference: Subject) -> None:
    tokenizer = reference.need_tokenizer("test")
    samples = generate("niah_single_1", lambda text: token_ids(tokenizer, text), 1200, 4)
    right = 0.0
    for sample in samples:
        ids = token_ids(tokenizer, sample.input + sample.answer_prefix)
        reader = Reader(reference.model, choose_cache(cache), len(ids) + 32)
        reader.prefill(ids[:-1])
        answer = tokenizer.decode(reader.answer(ids[-1:], 32))
        right += sample_score("niah_single_1", answer, sample.outputs)
    assert right >= 3


@pytest.mark.parametrize(
    ("cache", "error"), [("flat", 1e-4), ("paris", 0.002), ("lrqk", 0.02)], ids=str
)
def test_the_lost_mass_is_estimated_well(cache: str, error: float, reference: Subject) -> None:
    """In the mean of a layer's heads and queries, on plain text."""
    tokenizer = reference.need_tokenizer("test")
    text = (Path(__file__).parents[3] / "docs" / "concepts.md").read_text(encoding="utf-8")
    ids = token_ids(tokenizer, text)[:1600]
    options = "top_k=0.05:dense_below=0:recent=64:track_recall=True"
    reader = Reader(reference.model, choose_cache(f"{cache}:{options}"), len(ids))
    reader.prefill(ids[:-64])
    for piece in ids[-64:].split(16):
        reader.feed(piece, keep=0)
    for layer in reader.cache.stats()["layers"]:
        assert layer["exact_lost_mass"] > 0.02
        assert layer["lost_mass"] == pytest.approx(layer["exact_lost_mass"], abs=error)
