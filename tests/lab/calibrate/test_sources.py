"""What is learned from: sequences of a text, UUIDs, the needle language."""

import uuid

import pytest
import torch
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.lab.evaluate.bundled import REFERENCE_MODEL
from hf_kvret.lab.evaluate.needles import NeedleLanguage, needle_documents
from hf_kvret.lab.evaluate.texts import cut, random_uuids


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(REFERENCE_MODEL)


def test_a_text_is_cut_into_sequences_alike_in_size() -> None:
    ids = torch.arange(100)
    parts = cut(ids, 16, 50, "--tokens")
    assert [len(part) for part in parts] == [13, 13, 12, 12]
    assert torch.equal(torch.cat(parts), ids[:50])
    assert [len(part) for part in cut(ids, 16, 48, "--tokens")] == [16, 16, 16]
    assert [len(part) for part in cut(ids, 400, 48, "--tokens")] == [48]
    with pytest.raises(ValueError, match="--tokens 101: the text has 100 tokens; give more text"):
        cut(ids, 16, 101, "--tokens")


def test_uuids_are_random_and_known_by_their_seed(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = random_uuids(200, tokenizer, 0)
    assert len(ids) >= 200
    lines = tokenizer.decode(ids, skip_special_tokens=True).splitlines()
    # Decoding may put blanks between pieces.
    result = [uuid.UUID(line.replace(" ", "")) for line in lines]
    assert len(set(result)) == len(result) > 5
    assert all(one.version == 4 for one in result)
    assert torch.equal(ids, random_uuids(200, tokenizer, 0))
    assert not torch.equal(ids, random_uuids(200, tokenizer, 1))


@pytest.mark.parametrize(("count", "length"), [(512, 128), (300, 128), (100, 4096)])
def test_needle_documents_have_as_many_tokens_as_asked_for(count: int, length: int) -> None:
    documents = list(needle_documents(count, length, 0))
    assert sum(map(len, documents)) == count
    assert max(map(len, documents)) <= length
    language = NeedleLanguage()
    for document in documents:
        assert document.dtype == torch.int64 and document[0] == language.bos
        # Every question is about a needle, and its answer follows.
        text = document.tolist()
        questions = [place for place, token in enumerate(text) if token == language.question]
        assert questions
        for place in questions:
            key, answer = text[place + 1 : place + 3], text[place + 4 : place + 6]
            needle = [language.needle, *key, *answer]
            assert any(text[i : i + 5] == needle for i in range(len(text)))
