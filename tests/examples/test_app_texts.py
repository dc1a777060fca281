"""What the app takes as text: files, budgets, and pieces of tokenizers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hf_kvret.lab.evaluate.subject import Subject, load_subject

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import app_parts.languages as languages_module  # noqa: E402
from app_parts.languages import language_of  # noqa: E402
from app_parts.session import Choices, Desk, budget_of  # noqa: E402
from app_parts.uploads import check_size, checked, text_of  # noqa: E402


@pytest.fixture(scope="module")
def english() -> Subject:
    return load_subject("reference")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n ", "a.txt is empty: choose a file"),
        ("a.pdf", b"%PDF-1.7", r"a.pdf is a .pdf file, .* save it as text"),
        ("a.txt", b"caf\xe9", r"not UTF-8 text: byte 3 is 0xe9. Save it as UTF-8, .*iconv"),
        ("a", b"a\0b", "null characters"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_the_way_out(
    name: str, content: bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        text_of(content, name)


def test_text_is_taken_as_it_is_but_for_line_ends() -> None:
    assert text_of(b"\xef\xbb\xbfa\r\nb\rc\n", "a.md") == "a\nb\nc\n"
    assert checked("a\ud800", "x") == "a?"
    with pytest.raises(ValueError, match=r"is 5.0 MB, and at most 1.0 MB .* --max-upload"):
        check_size(5_000_000, 1_000_000, "x")


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "many"])
def test_a_bad_top_k_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="top_k: "):
        budget_of(text)


def test_pieces_of_a_tokenizer_are_the_text(english: Subject) -> None:
    """Also where a character takes several tokens; special names in a document are text."""
    subject = english
    language = language_of(subject, plain=False)
    text = "The naïve 🦉 says </s> twice:\n</s>"
    tokens = language.document(text)
    assert tokens.ids[0] == subject.model.config.bos_token_id
    assert "".join(tokens.pieces[1:]) == text
    assert "" in tokens.pieces
    assert subject.model.config.eos_token_id not in tokens.ids
    assert subject.model.config.eos_token_id in language.stop
    assert "".join(language.answer(tokens.ids[1:])) == text
    assert language.answer(tokens.ids[1:6])[:1] == ["The"]


def test_a_chat_template_goes_around_document_and_question(english: Subject) -> None:
    subject = english
    assert subject.tokenizer is not None
    subject.tokenizer.chat_template = (
        "{% for one in messages %}<s>user: {{ one.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}bot:{% endif %}"
    )
    chat, plain = (language_of(subject, plain=plain) for plain in (False, True))
    tokens = chat.document("A text.") + chat.question("Why?")
    assert "".join(tokens.pieces) == "<s>user: A text.\n\nWhy?</s>bot:"
    assert subject.model.config.eos_token_id in tokens.ids
    assert "".join(plain.question("Why?").pieces) == "\n\nWhy?"


def test_without_the_file_of_the_example_there_is_none(
    english: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Desk(english, Choices()).example is not None
    monkeypatch.setattr(languages_module, "_LICENSE", tmp_path / "LICENSE")
    assert Desk(english, Choices()).example is None
