"""The small model of novels: with its card, another shape than the others, and able to read."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from hf_kvret.lab.evaluate.bundled import BOOKS_MODEL, REFERENCE_MODEL
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.lab.evaluate.texts import token_ids
from hf_kvret.models.compatibility import check_model

# Dickens, Oliver Twist (1839), which the model has not read.
PASSAGE = (
    "Among other public buildings in a certain town, which for many reasons it will be prudent "
    "to refrain from mentioning, and to which I will assign no fictitious name, there is one "
    "anciently common to most towns, great or small: to wit, a workhouse; and in this workhouse "
    "was born; on a day and date which I need not trouble myself to repeat, inasmuch as it can "
    "be of no possible consequence to the reader, in this stage of the business at all events; "
    "the item of mortality whose name is prefixed to the head of this chapter."
)


@pytest.fixture(scope="module")
def books() -> Subject:
    return load_subject("reference-books")


def test_it_is_small_and_bf16_and_names_its_texts() -> None:
    assert sum(file.stat().st_size for file in BOOKS_MODEL.iterdir()) <= 12_000_000
    weights = load_file(BOOKS_MODEL / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    card = (BOOKS_MODEL / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "public domain" in card and "4,096" in card


def test_its_shape_is_another_and_its_tokenizer_is_not(books: Subject) -> None:
    check_model(books.model)
    config, other = books.model.config, load_subject("reference").model.config
    assert config.num_attention_heads == 4 * config.num_key_value_heads == 8
    assert config.num_hidden_layers == 5 and config.model_type == "qwen3" != other.model_type
    assert config.rope_parameters["rope_theta"] != other.rope_parameters["rope_theta"]
    assert config.max_position_embeddings == 16_384
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (BOOKS_MODEL / name).read_bytes() == (REFERENCE_MODEL / name).read_bytes()


@torch.no_grad()
def test_it_has_learnt_to_read(books: Subject) -> None:
    """English is likelier to it than by chance, and than the same words in disorder."""

    def loss(text: str) -> float:
        ids = token_ids(books.need_tokenizer("test"), text)
        return cross_entropy(books.model(ids[None]).logits[0, :-1], ids[1:]).item()

    english = loss(PASSAGE)
    assert english < math.log(books.model.config.vocab_size) - 3.0
    assert english < loss(" ".join(reversed(PASSAGE.split()))) - 1.0


@torch.no_grad()
@pytest.mark.parametrize("length", [2000, pytest.param(16_000, marks=pytest.mark.slow)])
def test_a_cache_reads_windows_longer_than_its_rows_in_training(
    length: int, books: Subject
) -> None:
    """Exact selection of all cold tokens is full attention, also past 4,096 positions."""
    ids = token_ids(books.need_tokenizer("test"), PASSAGE)
    ids = ids.repeat(-(-length // len(ids)))[:length]
    choice = choose_cache(f"flat:top_k={length}:recent=64:flush=64:dense_below=0")
    logits = []
    for cache in (choice, choose_cache("full")):
        reader = Reader(books.model, cache, length)
        reader.prefill(ids[:-2])
        logits.append(torch.stack([reader.feed(token)[-1] for token in ids[-2:].split(1)]))
    assert torch.isfinite(logits[1]).all()
    torch.testing.assert_close(logits[0], logits[1], atol=2e-3, rtol=1e-3)
