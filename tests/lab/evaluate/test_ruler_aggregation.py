"""``cwe`` and ``fwe``: the words that are asked for are as frequent as RULER says."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from hf_kvret.lab.evaluate.ruler import RulerData, Sample, generate
from hf_kvret.lab.evaluate.ruler.texts import single_words

CWE_OPENING = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"


def words(text: str) -> list[str]:
    return re.findall(r"\w+|\S", text)


def numbered(text: str) -> list[str]:
    """The words of ``1. a 2. b ...``; fails where the numbers don't count up."""
    parts = re.split(r"(?:^| )(\d+)\. ", text)
    assert parts[0] == ""
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def cwe_parts(sample: Sample) -> tuple[str, str, str]:
    """List and answer of the example, and the list of the question."""
    _, example, context = sample.context.split(CWE_OPENING)
    shown, answer = example.split(CWE_QUESTION + CWE_PREFIX)
    assert answer.startswith(" ")
    assert answer.endswith("\n")
    return shown, answer[1:-1], context


@pytest.mark.parametrize(
    ("length", "example_counts", "counts", "example_words"),
    [(4096, (10, 3), (30, 3), 40), (4095, (3, 1), (6, 1), 20)],
)
def test_ten_words_of_cwe_are_common(
    length: int, example_counts: tuple[int, int], counts: tuple[int, int], example_words: int
) -> None:
    known = set(single_words())
    for sample in generate("cwe", words, length, 3):
        shown, answer, context = cwe_parts(sample)
        found = Counter(numbered(context))
        common = {word for word, count in found.items() if count == counts[0]}
        assert set(found.values()) == set(counts)
        assert common == set(sample.outputs)
        assert len(sample.outputs) == 10
        assert set(found) <= known
        in_example = Counter(numbered(shown))
        assert len(in_example) == example_words
        assert set(in_example.values()) == set(example_counts)
        assert set(numbered(answer)) == {
            word for word, count in in_example.items() if count == example_counts[0]
        }
        assert sample.question == CWE_QUESTION
        assert sample.answer_prefix == CWE_PREFIX


def test_the_example_of_cwe_has_a_chat_template_of_its_own() -> None:
    sample = generate("cwe", words, 2048, 1, chat_template=lambda text: f"<user>{text}<bot>")[0]
    assert sample.input.count("<user>") == 2
    assert f"{CWE_QUESTION}<bot>{CWE_PREFIX} 1. " in sample.context
    assert sample.question == f"{CWE_QUESTION}<bot>"


def test_cwe_says_when_words_run_out_and_takes_more_from_a_file(tmp_path: Path) -> None:
    def few(text: str) -> list[str]:
        # A token is 64 characters, so 16K of them hold more than all wonderwords.
        return [text[i : i + 64] for i in range(0, len(text), 64)]

    with pytest.raises(ValueError, match=r"8\d{3} different words.*english_words=Path"):
        generate("cwe", few, 16_384, 1)

    listed = tmp_path / "words.json"
    more = {str(i): f"zz{i}" for i in range(40_000)}
    listed.write_text(json.dumps(more), encoding="utf-8")
    lines = tmp_path / "words.txt"
    lines.write_text("\n".join(more.values()), encoding="utf-8")
    sample = generate("cwe", few, 16_384, 1, data=RulerData(english_words=listed))[0]
    assert set(numbered(cwe_parts(sample)[2])) <= set(more.values())
    assert set(numbered(cwe_parts(sample)[0])) <= set(single_words())
    assert sample.length > 0.9 * 16_384
    assert generate("cwe", few, 16_384, 1, data=RulerData(english_words=lines)) == [sample]


def test_fwe_counts_follow_the_zeta_distribution_and_rank_one_is_dots() -> None:
    vocabularies = set()
    for sample in generate("fwe", words, 4096, 3):
        head, text = sample.context.split("Find the three most frequently appeared coded words. ")
        assert head == (
            "Read the following coded text and track the frequency of each coded word. "
        )
        counts = Counter(text.split(" ")).most_common()
        assert counts[0][0] == "..."
        assert [word for word, _ in counts[1:4]] == list(sample.outputs)
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counts[1:])
        # The size that makes the first count what it is gives the others too, up to rounding.
        size = counts[0][1] * math.pi**2 / 6
        for rank, (_, count) in enumerate(counts[:10], start=1):
            assert abs(count - size / rank**2 / (math.pi**2 / 6)) <= 1
        assert len(counts) <= (4096 - 50) // 50
        assert sample.question == (
            "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are "
            "the three most frequently appeared words in the above coded text?"
        )
        assert sample.answer_prefix == (
            " Answer: According to the coded text above, the three most frequently appeared words "
            "are:"
        )
        vocabularies.add(sample.outputs)
    assert len(vocabularies) == 3


def test_fwe_text_is_shuffled() -> None:
    text = generate("fwe", words, 4096, 1)[0].context.split("words. ")[-1].split(" ")
    assert text != sorted(text)
    dots = [i for i, word in enumerate(text) if word == "..."]
    assert min(dots) < len(text) * 0.1
    assert max(dots) > len(text) * 0.9


@pytest.mark.parametrize("length", [1, 40, 60, 150])
def test_fwe_never_asks_for_words_that_are_not_there(length: int) -> None:
    with pytest.raises(ValueError, match=r"too short for task 'fwe'.*at least \d+"):
        generate("fwe", words, length, 1)


def test_a_tokenizer_that_cuts_texts_off_does_not_make_fwe_run_for_ever() -> None:
    with pytest.raises(ValueError, match="truncation off"):
        generate("fwe", lambda text: words(text)[:900], 4096, 1)


def test_the_shortest_fwe_text_has_all_three_words() -> None:
    for length in range(200, 420, 20):
        for sample in generate("fwe", words, length, 2):
            assert sample.length <= length
            assert set(sample.outputs) <= set(sample.context.split(" "))
