"""A task's template goes into the chat template unchanged, and a prompt comes out in its parts."""

from __future__ import annotations

import pytest

from hf_kvret.lab.evaluate.ruler.fitting import Template

TEXT = "Read {kind}:\n{context}\nWhat is {query}?"


def chat(message: str) -> str:
    return f"<sys>{{x}} You are kind.<user>{message}<end><bot>"


def test_the_prefix_stands_behind_the_end_of_the_chat_template() -> None:
    template = Template(TEXT, " The {query} is", chat)
    draft = template.fill("some {braces}", ("a",), kind="this", query="it")
    assert draft.context == "<sys>{x} You are kind.<user>Read this:\nsome {braces}"
    assert draft.question == "\nWhat is it?<end><bot>"
    assert draft.answer_prefix == " The it is"
    assert draft.prompt == draft.context + draft.question + draft.answer_prefix
    assert draft.outputs == ("a",)


def test_without_a_chat_template_there_is_the_task_alone() -> None:
    draft = Template(TEXT, "", None).fill("c", ("a",), kind="k", query="q")
    assert draft.prompt == "Read k:\nc\nWhat is q?"


def test_an_example_goes_between_chat_template_and_task() -> None:
    template = Template(TEXT, "", chat)
    draft = template.fill("c", ("a",), kind="k", query="q")
    shown = template.fill("c", ("a",), "example\n", kind="k", query="q")
    assert shown.context == "<sys>{x} You are kind.<user>example\nRead k:\nc"
    assert shown.question == draft.question


@pytest.mark.parametrize(
    "wrong",
    [
        lambda message: "nothing of it",
        lambda message: message.replace("\n", " "),
        lambda message: message + message,
    ],
)
def test_a_chat_template_that_changes_its_message_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="once and unchanged"):
        Template(TEXT, "", wrong)  # type: ignore[arg-type]
