"""``generate``: samples fill the length and never pass it, and a seed fixes them all."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_kvret.lab.evaluate.ruler import TASKS, RulerData, Sample, generate
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


def words(text: str) -> list[str]:
    return re.findall(r"\w+|\S", text)


def sentence(number: int) -> str:
    return f"The report number {number} tells of {number * 7 % 53} things that were found there."


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RulerData:
    folder: Path = tmp_path_factory.mktemp("ruler")
    squad = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": sentence(10 * a + p) + " " + sentence(a),
                        "qas": [{"question": f"What {a}?", "answers": [{"text": f"{a}"}]}],
                    }
                    for p in range(3)
                ]
            }
            for a in range(60)
        ]
    }
    hotpot = [
        {
            "question": f"Where {i}?",
            "answer": f"{i}",
            "context": [[f"T {i} {j}", [sentence(i), " " + sentence(j)]] for j in range(10)],
        }
        for i in range(20)
    ]
    files = {"essays": " ".join(map(sentence, range(300))), "squad": squad, "hotpot": hotpot}
    for name, content in files.items():
        text = json.dumps([content] if name == "essays" else content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return RulerData(**{name: folder / f"{name}.json" for name in files})


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
    tokenizer.train_from_iterator([*map(sentence, range(60)), template, *single_words()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def full(sample: Sample) -> str:
    return sample.input + sample.answer_prefix


def test_the_tasks_are_rulers_in_its_order() -> None:
    assert list(TASKS) == list(EXPECTED_TASKS)
    for name, task in TASKS.items():
        assert (task.max_new_tokens, task.metric) == EXPECTED_TASKS[name]
        assert task.name == name


def check_lengths(
    task: str, encode: Callable[[str], list[str] | list[int]], samples: list[Sample], length: int
) -> None:
    for sample in samples:
        assert sample.length == len(encode(full(sample))) + TASKS[task].max_new_tokens
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
    samples = generate(task, bpe, 4096, 4, data=data)
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
    def chat(text: str) -> str:
        return f"<|sys|> Be {{brief}}. <|user|>\n{text}<|end|>\n<|bot|>\n"

    for sample in generate(task, words, 4096, 2, data=data, chat_template=chat):
        assert sample.context.startswith("<|sys|> Be {brief}. <|user|>\n")
        assert sample.question.endswith("<|end|>\n<|bot|>\n")
        assert sample.answer_prefix.startswith(" ")
        assert sample.length == len(words(full(sample))) + TASKS[task].max_new_tokens <= 4096


@pytest.mark.parametrize("task", TASKS)
def test_a_length_that_is_too_short_names_one_that_will_do(task: str, data: RulerData) -> None:
    length = 160
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
    assert length > 160
    assert all(sample.length <= length for sample in samples)


def test_wrong_arguments_are_refused(data: RulerData) -> None:
    with pytest.raises(ValueError, match=r"task='niah' is not .*niah_single_1, .*, qa_2"):
        generate("niah", words, 4096, 1)
    with pytest.raises(ValueError, match="samples=0: ask for at least 1"):
        generate("vt", words, 4096, 0)
    with pytest.raises(ValueError, match="length=0"):
        generate("vt", words, 0, 1)
    with pytest.raises(TypeError, match="tokenizer=None has no encode method"):
        generate("vt", None, 4096, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="makes no tokens"):
        generate("vt", lambda text: [], 4096, 1)


def test_the_same_length_is_found_for_a_tokenizer_and_its_function(
    bpe: PreTrainedTokenizerFast,
) -> None:
    with_object = generate("niah_single_1", bpe, 1024, 2)
    assert generate("niah_single_1", bpe.encode, 1024, 2) == with_object
    plain = generate(
        "niah_single_1", lambda text: bpe.encode(text, add_special_tokens=False), 1024, 2
    )
    assert plain[0].length <= 1024
    assert plain[0].length == len(bpe.tokenize(full(plain[0]))) + 128
