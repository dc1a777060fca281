"""Documents with needles: exact lengths and depths, sentence ends, both languages."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hf_kvret.lab.evaluate.needles import (
    Document,
    NeedleLanguage,
    TextHaystack,
    Wording,
    magic_wording,
    token_wording,
)
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.texts import encode
from hf_kvret.lab.program.arguments import percent, several

LANGUAGE = NeedleLanguage()
TEXT = 'The first is short. Pi is 3.14 or so! Is it? Yes, "it is." And here it ends'


def test_a_text_is_repeated_and_may_begin_inside(subject: Subject) -> None:
    tokenizer = subject.need_tokenizer("test")
    hay, rng = TextHaystack(tokenizer, TEXT), np.random.default_rng(0)
    once, line_break = encode(tokenizer, f"{TEXT}\n"), encode(tokenizer, "\n")
    count, half = 2 * len(once) + 5, len(once) // 2
    assert hay.take(rng, count, 0.0) == (line_break + once * 3)[:count]
    assert hay.take(rng, 20, 0.5) == [*line_break, *(once[half:] + once)][:20]


def test_a_needle_goes_behind_a_sentence_and_not_inside_a_number(subject: Subject) -> None:
    tokenizer = subject.need_tokenizer("test")
    hay, tokens = TextHaystack(tokenizer, TEXT), encode(tokenizer, TEXT)
    places = {hay.index(tokens, depth) for depth in np.linspace(0, 99.9, 400)}
    before = sorted(tokenizer.decode(tokens[:place]) for place in places)
    ends = ("", "short.", "so!", "it?", 'is."')
    assert before == sorted(TEXT[: TEXT.index(end) + len(end)] for end in ends)
    assert hay.index(tokens, 100) == len(tokens)
    # Never ahead of the depth.
    assert all(hay.index(tokens, d) <= len(tokens) * d / 100 for d in (10, 33.3, 50, 99))


def _total(wording: Wording, document: Document) -> int:
    return len(document.context) + sum(wording.turn_len(fact) for fact in document.facts)


@pytest.mark.parametrize("asked", [1, 2])
def test_documents_have_the_length_to_the_token(
    subject: Subject, tiny_text: Path, asked: int
) -> None:
    for essays in (None, tiny_text):
        wording = magic_wording(subject, "test", essays, 8)
        document = wording.document(np.random.default_rng(1), 340, [10.0, 80.0], asked, start=0.3)
        assert _total(wording, document) == 340 and len(document.facts) == asked


def _find(tokens: Sequence[int], part: Sequence[int]) -> list[int]:
    return [i for i in range(len(tokens)) if tokens[i : i + len(part)] == part]


def test_needles_are_at_their_depths_and_nothing_else_changes() -> None:
    wording, depths = token_wording(), [75.0, 0.0, 100.0, 33.3]
    document = wording.document(np.random.default_rng(5), 1000, depths, 4)
    context = document.context.tolist()
    noise_len = 1000 - 1 - 4 * 5 - 4 * (4 + 2)
    rest = list(context)
    for fact, depth in zip(document.facts, depths, strict=True):
        assert fact.question[1:3] == fact.needle[1:3] and fact.gold == fact.needle[3:]
        assert fact.answer == " ".join(map(str, fact.gold))
        (place,) = _find(context, fact.needle)
        earlier = sum(other < depth for other in depths)
        assert place == 1 + int(noise_len * depth / 100) + 5 * earlier
        first = _find(rest, fact.needle)[0]
        del rest[first : first + 5]
    assert rest[0] == LANGUAGE.bos and len(rest) == 1 + noise_len
    assert min(rest[1:]) >= LANGUAGE.first_noise


def test_the_words_are_those_of_ruler(subject: Subject) -> None:
    tokenizer = subject.need_tokenizer("test")
    wording = magic_wording(subject, "test", None, 8)
    (fact,) = wording.facts(np.random.default_rng(0), 1)
    needle = tokenizer.decode(fact.needle)
    key = needle.removesuffix(f" is: {fact.answer}.").removeprefix(
        " One of the special magic numbers for "
    )
    assert re.fullmatch(r"[a-z]+-[a-z]+", key)
    place = f"special magic number for {key} mentioned in the provided text"
    assert tokenizer.decode(fact.question) == f"\nWhat is the {place}? The {place} is"
    one, several = (tokenizer.decode(head, skip_special_tokens=True) for head in wording.heads)
    assert one.startswith("A special magic number is hidden") and one.endswith("afterwards.")
    assert several.startswith("Some special magic numbers are hidden")


def test_a_length_that_is_too_short_names_one_that_is_enough(subject: Subject) -> None:
    wording, rng = magic_wording(subject, "test", None, 8), np.random.default_rng
    with pytest.raises(ValueError, match=r"--context 64 is too short.*at least \d+") as caught:
        wording.document(rng(0), 64, [50.0], 1)
    least = int(str(caught.value).rsplit(" ", 1)[-1])
    assert _total(wording, wording.document(rng(0), least, [50.0], 1)) == least
    with pytest.raises(ValueError, match=f"at least {least}"):
        wording.document(rng(0), least - 1, [50.0], 1)


def test_a_document_holds_every_needle_at_its_start_and_noise_elsewhere() -> None:
    rng = np.random.default_rng(0)
    keys, values = LANGUAGE.pairs(rng, 20)
    assert len({tuple(key) for key in LANGUAGE.pairs(rng, 500)[0]}) == 500
    assert LANGUAGE.first_key <= keys.min() and keys.max() < LANGUAGE.first_value
    assert LANGUAGE.first_value <= values.min() and values.max() < LANGUAGE.first_noise
    tokens, starts = LANGUAGE.document(rng, 400, keys, values)
    assert tokens.shape == (400,) and tokens[0] == LANGUAGE.bos
    for start, key, value in zip(starts, keys, values, strict=True):
        assert tokens[start : start + 5].tolist() == [LANGUAGE.needle, *key, *value]
        tokens[start : start + 5] = LANGUAGE.first_noise
    assert LANGUAGE.first_noise <= tokens[1:].min() and tokens.max() < LANGUAGE.vocab_size


def test_noise_follows_zipf() -> None:
    noise = LANGUAGE.noise(np.random.default_rng(2), 200_000) - LANGUAGE.first_noise
    counts = np.bincount(noise)
    # The second word is 2 ** 1.1 = 2.14 times rarer than the first; 1% sampling error.
    assert counts[0] / counts[1] == pytest.approx(2.14, rel=0.05)


def test_more_needles_than_keys_are_refused_with_the_options_that_ask_for_them() -> None:
    with pytest.raises(ValueError, match=r"16,385 needles .* 16,384: take fewer \(--distractors"):
        LANGUAGE.pairs(np.random.default_rng(0), 16_385)
    with pytest.raises(argparse.ArgumentTypeError, match="the same value twice in '0,50,0"):
        several(percent)("0,50,0.0")
