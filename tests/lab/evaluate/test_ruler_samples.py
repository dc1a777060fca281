"""Samples of all tasks: RULER's own letter for letter, of the right length, and well scored."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_kvret.lab.evaluate.ruler import TASKS, RulerData, Sample, generate, sample_score
from hf_kvret.lab.evaluate.ruler.prompts import NOISE
from hf_kvret.lab.evaluate.ruler.texts import single_words

EXPECTED_TASKS = {
    **{f"niah_single_{i}": (128, "all") for i in (1, 2, 3)},
    **{f"niah_multikey_{i}": (128, "all") for i in (1, 2, 3)},
    "niah_multivalue": (128, "all"),
    "niah_multiquery": (128, "all"),
    "vt": (30, "all"),
    "cwe": (120, "all"),
    "fwe": (50, "all"),
    "qa_1": (32, "part"),
    "qa_2": (32, "part"),
}
# Made by running the scripts of NVIDIA/RULER at c3f5e3b on the files that ``texts`` writes, with
# ``words`` for the tokenizer and ``split_simply`` for NLTK's sentences.
SAMPLES = 3
CHAT = ("<|user|>\n", "<|end|>\n<|assistant|>\n")
DIGESTS = {
    ("niah_single_1", 4096, 42, False): "ab1f913232f8a5e4",
    ("niah_single_2", 4096, 42, False): "c1b2d2ed7ce02192",
    ("niah_single_3", 4096, 42, False): "1935caf6a68bf2fe",
    ("niah_multikey_1", 4096, 42, False): "bb85f416ae21515c",
    ("niah_multikey_2", 4096, 42, False): "33d98709d30332ea",
    ("niah_multikey_3", 4096, 42, False): "3062169dfc9842f3",
    ("niah_multivalue", 4096, 42, False): "47dc3269c1345c90",
    ("niah_multiquery", 4096, 42, False): "e08ad260391d92b7",
    ("vt", 4096, 42, False): "3301bbf63a2264f4",
    ("cwe", 4096, 42, False): "6f98eeb1471629a5",
    ("fwe", 4096, 42, False): "51d5c084c77bd081",
    ("qa_1", 4096, 42, False): "5558cf72a394b3ec",
    ("qa_2", 4096, 42, False): "2462436f68b30b48",
    ("niah_single_1", 2048, 7, True): "6c1b938ef12bf201",
    ("niah_multikey_3", 2048, 7, True): "25b6163b63b66771",
    ("niah_multivalue", 2048, 7, True): "d2eacba1ac140449",
    ("vt", 2048, 7, True): "37d811d5bfa059d5",
    ("cwe", 2048, 7, True): "adbb6d19add9e1d9",
    ("fwe", 2048, 7, True): "9dcfcdeee2fcb915",
    ("qa_1", 2048, 7, True): "147852477a54d3c9",
}


def words(text: str) -> list[str]:
    return re.findall(r"\w+|\S", text)


def passage(start: int, sentences: int) -> str:
    """Sentences of words that are neither all the same nor in order."""
    return " ".join(
        f"Thing {i} has {i * i % 71} parts, and {'so' * (i % 3 + 1)} it {'is' if i % 2 else 'was'}."
        for i in range(start, start + sentences)
    )


def texts() -> dict[str, Any]:
    """Essays, SQuAD and HotpotQA in the formats of RULER's files."""
    articles = [
        {
            "paragraphs": [
                {
                    "context": passage(31 * a + 7 * p, 3 + (a + p) % 4),
                    "qas": [
                        {
                            "question": f"What of {a} and {p}, {q}? ",
                            "answers": [{"text": f"{a} {p} {q}"}, {"text": f"it is {a}"}],
                            "is_impossible": (a + p + q) % 3 == 0,
                        }
                        for q in range(2)
                    ],
                }
                for p in range(2 + a % 3)
            ]
        }
        for a in range(40)
    ]
    items = [
        {
            "question": f"Which of {i}?",
            "answer": f"number {i}",
            "context": [
                [f"Title {i + j}", [passage(i + 5 * j, 2), " " + passage(j, 1 + j % 3)]]
                for j in range(10)
            ],
        }
        for i in range(12)
    ]
    return {
        "essays": {"text": "\n" + passage(0, 120).replace(". Thing 5", ".\n\nThing  5") + "\n"},
        "squad": {"data": articles},
        "hotpot": items,
    }


def digest(rows: Iterable[tuple[str, str, Sequence[str], int]]) -> str:
    """The hash of input, answer prefix, references and length of each sample."""
    text = json.dumps([[text, prefix, list(right), n] for text, prefix, right, n in rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RulerData:
    folder: Path = tmp_path_factory.mktemp("original")
    for name, content in texts().items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return RulerData(**{name: folder / f"{name}.json" for name in texts()})


@pytest.mark.skipif(
    version("wonderwords") != "3.0.1", reason="the digests hold for the words of wonderwords 3.0.1"
)
@pytest.mark.parametrize(("task", "length", "seed", "chat"), DIGESTS)
def test_samples_are_those_of_the_original(
    task: str,
    length: int,
    seed: int,
    chat: bool,
    data: RulerData,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    samples = generate(task, words, length, SAMPLES, seed, data, CHAT if chat else ("", ""))
    made = digest((s.input, s.answer_prefix, s.outputs, s.length) for s in samples)
    assert made == DIGESTS[task, length, seed, chat]


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    """Byte-level BPE that begins every text with a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    template = generate("vt", words, 1024, 1)[0].input
    report = "The report number {} tells of {} things that were found there."
    reports = [report.format(number, number * 7 % 53) for number in range(60)]
    tokenizer.train_from_iterator([*reports, passage(0, 120), template, *single_words()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_the_tasks_are_rulers_in_its_order() -> None:
    assert list(TASKS) == list(EXPECTED_TASKS)
    for name, task in TASKS.items():
        assert (task.max_new_tokens, task.metric) == EXPECTED_TASKS[name]
        assert task.name == name


def check_lengths(
    task: str, encode: Callable[[str], list[str] | list[int]], samples: list[Sample], length: int
) -> None:
    for sample in samples:
        assert sample.length == len(encode(sample.prompt)) + TASKS[task].max_new_tokens
        assert sample.length <= length
    # Essays shrink by 500 words where a sample is too long, cwe by ten words thirty times each,
    # fwe grows by a 32nd of the length in words of several tokens.
    fills = [sample.length / length for sample in samples]
    assert min(fills) >= (0.7 if TASKS[task].data == "essays" else 0.8)
    assert max(fills) >= 0.85


@pytest.mark.parametrize("task", TASKS)
def test_samples_fill_4096_words_and_no_more(task: str, data: RulerData) -> None:
    check_lengths(task, words, generate(task, words, 4096, 4, data=data), 4096)


@pytest.mark.parametrize("task", TASKS)
def test_samples_fill_4096_tokens_of_a_bpe_with_its_special_tokens(
    task: str, data: RulerData, bpe: PreTrainedTokenizerFast
) -> None:
    samples = generate(task, bpe.encode, 4096, 4, data=data)
    assert bpe.encode("x")[0] == bpe.bos_token_id
    check_lengths(task, bpe.encode, samples, 4096)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_samples_and_another_gives_others(task: str, data: RulerData) -> None:
    random.seed(1)
    first = generate(task, words, 2048, 3, data=data)
    state = random.getstate()
    random.seed(2)
    assert generate(task, words, 2048, 3, data=data) == first
    assert generate(task, words, 2048, 2, data=data) == first[:2]
    assert generate(task, words, 2048, 3, seed=7, data=data) != first
    random.seed(1)
    assert random.getstate() == state


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_numbered_parted_and_different(task: str, data: RulerData) -> None:
    samples = generate(task, words, 2048, 3, data=data)
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert len({sample.input for sample in samples}) == 3
    for sample in samples:
        assert sample.question.startswith("\n")
        assert len(words(sample.question)) < 90
        assert sample.outputs
        assert all(isinstance(text, str) and text for text in sample.outputs)


@pytest.mark.parametrize("task", TASKS)
def test_a_chat_template_is_around_the_prompt_and_counts(task: str, data: RulerData) -> None:
    before, after = "<|sys|> Be {brief}. <|user|>\n", "<|end|>\n<|bot|>\n"
    for sample in generate(task, words, 4096, 2, data=data, chat=(before, after)):
        assert sample.context.startswith(before) and sample.question.endswith(after)
        assert sample.answer_prefix.startswith(" ")
        assert sample.length == len(words(sample.prompt)) + TASKS[task].max_new_tokens <= 4096


@pytest.mark.parametrize("task", TASKS)
def test_a_length_that_is_too_short_names_one_that_will_do(task: str, data: RulerData) -> None:
    length = 100
    for _ in range(5):
        try:
            samples = generate(task, words, length, 2, data=data)
        except ValueError as error:
            match = re.search(rf"length={length} is too short for task '{task}'", str(error))
            advice = re.search(r"use a length of at least (\d+)", str(error))
            assert match is not None
            assert advice is not None
            assert int(advice[1]) > length
            length = int(advice[1])
        else:
            break
    else:
        pytest.fail(f"even {length} was too short")
    assert length > 100
    assert all(sample.length <= length for sample in samples)


def test_a_tokenizer_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="makes no tokens"):
        generate("vt", lambda text: [], 4096, 1)


def test_an_essay_that_is_too_short_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "essay.txt"
    path.write_text("Only\tthis  sentence.\nAnd that one.", encoding="utf-8")
    sample = generate("niah_single_2", words, 2500, 1, data=RulerData(essays=path))[0]
    assert "Only this sentence. And that one. Only this sentence. And" in sample.context
    assert sample.length > 0.7 * 2500


def test_bytes_as_tokens_take_the_smallest_example_though_it_is_over_500() -> None:
    sample = generate("vt", str.encode, 4096, 1)[0]
    _, example, context = sample.context.split("Memorize and track the chain(s)")
    assert example.count(NOISE) == 5
    assert len(example.encode()) > 500
    assert context.count(NOISE) >= 5
    assert sample.length == len(sample.prompt.encode()) + 30 <= 4096


def test_a_length_for_the_example_alone_is_too_short() -> None:
    with pytest.raises(ValueError, match=r"length=600 is too short for task 'vt'.*at least \d+"):
        generate("vt", words, 600, 1)


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
    shown, _, asked = re.split(r"Question: |Memorize the ones", sample.context)[1:4]
    assert set(re.findall(r"\d+\. (\S+)", asked)) <= set(more.values())
    assert set(re.findall(r"\d+\. (\w+)", shown)) <= set(single_words())
    assert sample.length > 0.9 * 16_384
    assert generate("cwe", few, 16_384, 1, data=RulerData(english_words=lines)) == [sample]


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


def documents_of(sample: Sample) -> list[str]:
    return re.split(r"(?:\n\n)?Document \d+:\n", sample.context)[1:]


def test_all_documents_are_taken_over_and_over_where_they_do_not_fill_the_length(
    data: RulerData,
) -> None:
    sample = generate("qa_2", words, 8192, 1, data=data)[0]
    documents = documents_of(sample)
    assert len(set(documents)) == 120 < len(documents)
    assert sample.length > 0.9 * 8192


def test_a_length_that_leaves_no_room_for_other_documents_keeps_the_gold_ones(
    tmp_path: Path,
) -> None:
    # Question 0 has short documents, so that far too many are fitted to question 1.
    items = texts()["hotpot"][:6]
    items[0]["context"] = [[f"T{j}", ["Short."]] for j in range(10)]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(items), encoding="utf-8")
    second = generate("qa_2", words, 660, 2, data=RulerData(hotpot=path))[1]
    gold = [f"{title}\n{''.join(sentences)}" for title, sentences in items[1]["context"]]
    assert sorted(documents_of(second)) == sorted(gold)


def test_more_samples_than_questions_are_refused(data: RulerData) -> None:
    with pytest.raises(ValueError, match=r"samples=13 .*data\.hotpot has 12 questions"):
        generate("qa_2", words, 2048, 13, data=data)


def test_gold_documents_that_do_not_fit_make_the_length_too_short(data: RulerData) -> None:
    with pytest.raises(ValueError, match=r"length=300 is too short for task 'qa_2'.*at least"):
        generate("qa_2", words, 300, 1, data=data)


@pytest.mark.parametrize(
    ("task", "answer", "references", "score"),
    [
        ("niah_multivalue", "They are 1111111, 2222222.", ["1111111", "2222222"], 1.0),
        ("niah_multivalue", "They are 1111111, 2222222.", ["1111111", "4444444"], 0.5),
        ("vt", "They are 1111111.", ["ABCDE", "FGHIJ"], 0.0),
        ("qa_1", "in Paris, France", ["paris", "the capital"], 1.0),
        ("qa_1", "in Rome", ["paris", "the capital"], 0.0),
        ("qa_2", "THE eiffel Tower", ["The Eiffel tower"], 1.0),
        # A reference counts inside a longer word.
        ("qa_2", "abnormal", ["normal"], 1.0),
        # Control characters become newlines before the comparison.
        ("qa_1", "new\tyork", ["new york"], 0.0),
        ("qa_1", "new\tyork", ["new\nyork"], 1.0),
        ("qa_1", "\x00one\x1ftwo\x7f\x07", ["one\ntwo\x7f"], 1.0),
        # White space at the ends is stripped from the answer, and not from references.
        ("qa_1", "yes ", ["yes "], 0.0),
        *((task, "red", ["red", "blue"], 1.0 if "qa" in task else 0.5) for task in TASKS),
    ],
)
def test_scores_count_references_in_an_answer(
    task: str, answer: str, references: list[str], score: float
) -> None:
    assert sample_score(task, answer, references) == score
