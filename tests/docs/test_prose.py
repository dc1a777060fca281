"""The English of pages: short sentences, words that a reader knows."""

from __future__ import annotations

import pytest

from .pages import README, site_tool

prose = site_tool("prose")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It takes " + "a " * 27 + "step.\n", []),
        ("It takes " + "a " * 28 + "step.\n", ["31 words, at most 30"]),
        ("It takes `a b c d` " + "a " * 26 + "step.\n", []),
        ("One [two three](http://x) " + "a " * 28 + "b.\n", ["32 words, at most 30"]),
        ("A very long way.\n", ["'very': nothing: leave it out"]),
        ("`very = 1` is code.\n\n```python\nvery = 1\n```\n\n    very = 1\n", []),
        ("What it reads is exact.\n", ["begins with 'What it': begin with the subject"]),
        ("## What it reads\n\n| what it reads | why |\n|---|---|\n| a | What is it? |\n", []),
        ("Of these two are kept.\n", ["begins with 'Of these': begin with the subject"]),
        ("<!-- made by `x`, from here -->\nA very long way.\n<!-- made by `x`, to here -->\n", []),
    ],
)
def test_faults_of_a_page_are_seen(text: str, expected: list[str]) -> None:
    assert [one.what for one in prose.faults(text)] == expected


def test_a_sentence_ends_with_its_paragraph_cell_or_item() -> None:
    text = "# A\n\nOne goes\non. Two ends\n\n- three\n- four\n\n| a. b | c |\n|---|---|\n"
    starts = [(line, sentence) for line, sentence in prose.sentences(text)]
    assert starts[:5] == [(1, "A"), (3, "One goes on."), (4, "Two ends"), (6, "three"), (7, "four")]
    assert [sentence for _, sentence in starts[5:7]] == ["a. b", "c"]


def test_a_line_is_named_where_its_sentence_begins() -> None:
    text = "Good.\n\nIt is\nobviously so. It is\nvery good.\n"
    assert [one.line for one in prose.faults(text)] == [3, 4]


def test_no_page_has_a_fault() -> None:
    pages = prose.pages()
    assert README in pages and len(pages) > 80
    faults = {page: prose.faults(page.read_text(encoding="utf-8")) for page in pages}
    assert not {page: some for page, some in faults.items() if some}
