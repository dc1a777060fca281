"""``vt``: one chain of five variables in noise, after an example with other names."""

from __future__ import annotations

import re

import pytest

from hf_kvret.lab.evaluate.ruler import Sample, generate

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
OPENING = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
STATEMENT = re.compile(r"VAR ([A-Z]+) = (?:VAR )?([A-Z]+|\d+)( ?)")


def words(text: str) -> list[str]:
    return re.findall(r"\w+|\S", text)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return generate("vt", words, 4096, 6)


def split(sample: Sample) -> tuple[str, str]:
    """The example, and the lines of the context that belong to the question."""
    _, example, context = sample.context.split(OPENING)
    return example, context


def chain_of(text: str) -> list[tuple[str, str, str]]:
    return [match.groups() for line in text.split("\n") if (match := STATEMENT.fullmatch(line))]


def test_the_chain_gives_the_value_to_one_variable_and_that_to_the_next(
    samples: list[Sample],
) -> None:
    for sample in samples:
        chain = chain_of(split(sample)[1])
        names = [name for name, _, _ in chain]
        value = chain[0][1]
        assert len(set(names)) == 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name in names)
        assert re.fullmatch("[1-9][0-9]{4}", value)
        assert [source for _, source, _ in chain[1:]] == names[:-1]
        # RULER leaves a blank behind all statements but the first.
        assert [blank for _, _, blank in chain] == ["", " ", " ", " ", " "]
        assert sample.outputs == tuple(names)


def test_question_and_prefix_name_the_value_and_the_number_of_variables(
    samples: list[Sample],
) -> None:
    for sample in samples:
        value = chain_of(split(sample)[1])[0][1]
        assert sample.question == (
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
        )
        assert sample.answer_prefix == (
            " Answer: According to the chain(s) of variable assignment in the text above, 5 "
            f"variables are assigned the value {value}, they are: "
        )


def test_all_other_lines_are_noise(samples: list[Sample]) -> None:
    for sample in samples:
        lines = split(sample)[1].split("\n")
        assert lines.count(NOISE) == len(lines) - 5
        assert len(lines) > 100
        assert lines[-1] == NOISE


def test_an_example_with_its_answer_comes_first(samples: list[Sample]) -> None:
    for sample in samples:
        example, _ = split(sample)
        assert sample.context.startswith(OPENING)
        context, question = example.split("\nQuestion: ")
        names = [name for name, _, _ in chain_of(context)]
        value = chain_of(context)[0][1]
        assert all(re.fullmatch("[A-Z]{3}", name) for name in names)
        assert question == (
            f"Find all variables that are assigned the value {value} in the text above."
            " Answer: According to the chain(s) of variable assignment in the text above, 5 "
            f"variables are assigned the value {value}, they are:  {' '.join(names)}\n\n"
        )
        assert len(words(OPENING + example)) <= 500 + 6
        assert len(words(OPENING + example)) > 400


def test_every_sample_has_names_and_values_of_its_own(samples: list[Sample]) -> None:
    assert len({sample.outputs for sample in samples}) == len(samples)
    examples = {tuple(chain_of(split(sample)[0])) for sample in samples}
    assert len(examples) == len(samples)
    noise_lines = {split(sample)[0].count(NOISE) for sample in samples}
    assert len(noise_lines) == 1
    assert not any("12345" in sample.input for sample in samples)


def test_the_example_stands_inside_the_chat_template() -> None:
    sample = generate("vt", words, 2048, 1, chat_template=lambda text: f"<user>{text}<bot>")[0]
    assert sample.context.startswith(f"<user>{OPENING}")
    assert sample.input.count("<user>") == 1
    assert sample.question.endswith("in the text above.<bot>")


def test_bytes_as_tokens_take_the_smallest_example_though_it_is_over_500() -> None:
    sample = generate("vt", str.encode, 4096, 1)[0]
    example, context = split(sample)
    assert example.count(NOISE) == 5
    assert len(example.encode()) > 500
    assert context.count(NOISE) >= 5
    assert sample.length == len((sample.input + sample.answer_prefix).encode()) + 30 <= 4096


def test_a_length_for_the_example_alone_is_too_short() -> None:
    with pytest.raises(ValueError, match=r"length=600 is too short for task 'vt'.*at least \d+"):
        generate("vt", words, 600, 1)
