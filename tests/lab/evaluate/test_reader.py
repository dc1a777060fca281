"""Readers of every cache go the same way, and branch without touching each other."""

from typing import Any

import pytest
import torch

from hf_kvret import ParisKVCache
from hf_kvret.generate.attach import attach
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader, begin
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.testing.models import MODELS, VOCAB_SIZE

from .runs import greedy

SMALL = "recent=16:flush=8:dense_below=0"
EXACT = ["full", "static", f"flat:top_k=1.0:{SMALL}", f"paris:top_k=1.0:{SMALL}"]
CHUNKED = {"full": 2, "static": 1, f"flat:store=higgs:{SMALL}": 1, f"ctkvr:top_k=8:{SMALL}": 2}


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(3, 400, (120,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", EXACT)
def test_forks_leave_each_other_alone(name: str, subject: Subject, text: torch.Tensor) -> None:
    reader = Reader(subject.model, choose_cache(name), len(text) + 20)
    reader.prefill(text[:100])
    first = reader.fork()
    answer = first.answer(first.feed(text[100:103]), 8)
    other = reader.fork()
    other.answer(other.feed(text[110:115]), 8)
    assert (reader.length, first.length) == (100, 100 + 3 + 7)
    again = reader.fork()
    assert again.answer(again.feed(text[100:103]), 8) == answer
    assert answer == greedy(subject.model, text[:103], 8)


def test_an_answer_ends_before_a_stop_token(subject: Subject, text: torch.Tensor) -> None:
    reader = Reader(subject.model, choose_cache("full"), len(text))
    logits = reader.prefill(text[:50])
    answer = reader.fork().answer(logits, 6)
    index = next(i for i in range(1, 6) if answer[i] not in answer[:i])
    # The stop token was asked for and not fed.
    twin = reader.fork()
    assert twin.answer(logits, 6, stop={answer[index]}) == answer[:index]
    assert twin.length == 50 + index
    done = reader.fork().answer(logits, 6, done=lambda some: len(some) == 2)
    assert done == answer[:2]


def test_exact_answers_come_in_rounds(subject: Subject, text: torch.Tensor) -> None:
    reader = Reader(subject.model, choose_cache(f"paris:top_k=8:{SMALL}:lossless=true"), 140)
    answer = reader.answer(reader.prefill(text), 12)
    assert answer == greedy(subject.model, text, 12) and reader.length == len(text) + 11
    assert isinstance(reader.cache, ParisKVCache) and reader.cache.rounds.drafted > 0
    # The cache is free again.
    assert reader.fork().feed(text[:3]).isfinite().all()


@pytest.mark.parametrize("whole", [True, False], ids=["inside", "after"])
def test_a_question_comes_in_the_passes_of_generate(
    whole: bool, subject: Subject, text: torch.Tensor
) -> None:
    """Methods that learn from queries tell a prompt, a second one and a step apart."""
    passes: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        passes.append(kwargs["input_ids"].shape[1] if "input_ids" in kwargs else args[0].shape[1])

    hook = subject.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        reader, logits = begin(
            subject.model, choose_cache("paris"), text[:100], text[100:110], 6, whole=whole
        )
        answer, own = reader.answer(logits, 6), list(passes)
        passes.clear()
        cache = ParisKVCache(config=subject.model.config)
        if not whole:
            subject.model.generate(text[None, :100], past_key_values=cache, max_new_tokens=1)
        given = subject.model.generate(
            text[None, :110], past_key_values=cache, max_new_tokens=6, eos_token_id=None
        )
    finally:
        hook.remove()
    assert own == passes == ([110] if whole else [100, 10]) + [1] * 5
    assert answer == given[0, 110:].tolist()


def test_usage_counts_bytes_and_rows(subject: Subject, text: torch.Tensor) -> None:
    row = 2 * 2 * 64 * 4  # keys and values, 2 heads, 64 dims, fp32
    full = Reader(subject.model, choose_cache("full"), len(text))
    full.feed(text[:100])
    usage = full.usage()
    assert usage.full_bytes == usage.device_bytes == 2 * 100 * row
    assert (usage.host_bytes, usage.read_ratio) == (0, 1.0)
    flat = Reader(subject.model, choose_cache(f"flat:top_k=8:{SMALL}:store=host"), len(text))
    flat.feed(text[:100])
    assert flat.usage().read_ratio is None
    flat.feed(text[100:101])
    usage = flat.usage()
    assert usage.host_bytes > 0 and usage.full_bytes == 2 * 101 * row
    cold = usage.rows_cold // (2 * 2)
    assert 100 - 16 - 8 <= cold <= 101 - 16
    assert usage.rows_read == 2 * 2 * 8
    assert usage.read_ratio == pytest.approx(8 / cold)


@pytest.mark.parametrize(("name", "passes"), CHUNKED.items())
def test_long_prompts_of_models_that_slide_come_in_chunks(
    name: str, passes: int, text: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and counts of one pass follow, where what chunks read is exact."""
    model, ids, results = MODELS["gemma3"].build(), text % VOCAB_SIZE, []
    attach(model)
    for size in (40, 1000):
        monkeypatch.setattr("hf_kvret.lab.evaluate.reader._SLIDING_CHUNK", size)
        reader = Reader(model, choose_cache(name), 140)
        # A question that is longer than drafts is a part of the prompt to caches that learn.
        read = [reader.prefill(ids[:80]), reader.feed(ids[80:])]
        assert len(reader._fed) == 1 + (passes if size == 40 else 1)
        steps = torch.cat([*read, *(reader.feed(ids[i : i + 1]) for i in range(6))])
        results.append((steps, reader.usage().read_ratio, reader.usage().host_bytes))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
