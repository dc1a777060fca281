"""The small models of real text: with their cards, served, and able to do their work."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from hf_kvret.lab.evaluate.bundled import BOOKS_MODEL, LATENT_MODEL, REFERENCE_MODEL
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.ruler.prompts import generate, sample_score
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.evaluate.texts import token_ids

LICENCES = ("CC BY-SA 3.0", "CC BY 4.0", "CC0", "public domain")
# Dickens, Oliver Twist (1839), which the model has not read.
PASSAGE = (
    "Among other public buildings in a certain town, which for many reasons it will be prudent "
    "to refrain from mentioning, and to which I will assign no fictitious name, there is one "
    "anciently common to most towns, great or small: to wit, a workhouse; and in this workhouse "
    "was born; on a day and date which I need not trouble myself to repeat, inasmuch as it can "
    "be of no possible consequence to the reader, in this stage of the business at all events; "
    "the item of mortality whose name is prefixed to the head of this chapter."
)


@pytest.mark.parametrize(
    ("folder", "most_bytes", "words"),
    [
        (REFERENCE_MODEL, 16_000_000, LICENCES),
        (LATENT_MODEL, 18_000_000, LICENCES),
        (BOOKS_MODEL, 12_000_000, ("public domain", "4,096")),
    ],
    ids=["reference", "latent", "books"],
)
def test_a_model_is_small_and_bf16_and_names_its_texts(
    folder: Path, most_bytes: int, words: tuple[str, ...]
) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) <= most_bytes
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert not any("expert" in name for name in weights)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert all(word in card for word in words)


@pytest.mark.parametrize("name", ["reference", "reference-latent"])
def test_a_cache_finds_a_needle(name: str) -> None:
    subject = load_subject(name)
    tokenizer = subject.need_tokenizer("test")
    (sample,) = generate("niah_single_1", lambda text: token_ids(tokenizer, text), 900, 1)
    ids = token_ids(tokenizer, sample.prompt)
    cache = choose_cache("paris:top_k=64:recent=64:flush=64:dense_below=0")
    reader = Reader(subject.model, cache, len(ids) + 16)
    answer = tokenizer.decode(reader.answer(reader.prefill(ids), 16))
    assert sample_score("niah_single_1", answer, sample.outputs) == 1


@torch.no_grad()
def test_books_has_learnt_to_read() -> None:
    """English is likelier to it than by chance, and than the same words in disorder."""
    books = load_subject("reference-books")

    def loss(text: str) -> float:
        ids = token_ids(books.need_tokenizer("test"), text)
        return cross_entropy(books.model(ids[None]).logits[0, :-1], ids[1:]).item()

    english = loss(PASSAGE)
    assert english < math.log(books.model.config.vocab_size) - 3.0
    assert english < loss(" ".join(reversed(PASSAGE.split()))) - 1.0
