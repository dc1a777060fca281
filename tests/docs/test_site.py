"""The site of the docs: what it is made from is complete, and its tools see what is wrong.

Building it takes packages of the extra ``docs``; `.ci/docs` does that.
"""

import importlib
import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import hf_kvret
from hf_kvret.options.config import PromptRecipe

from .pages import DOCS, README, ROOT, SITE, site_tool

links, messages, options, prose = map(site_tool, ("links", "messages", "options", "prose"))
CONFIG = tomllib.loads((SITE / "zensical.toml").read_text(encoding="utf-8"))["project"]


def test_every_message_that_the_page_quotes_is_in_the_code() -> None:
    page = messages.PAGE.read_text(encoding="utf-8")
    quotes = messages.quotes(page)
    assert len(quotes) == len(set(quotes)) >= 35
    assert messages.missing(page, messages.texts_of_the_code()) == []


def test_a_quote_that_is_not_in_the_code_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(
        '"""This is a docstring."""\n'
        "def f(x):\n"
        "    if x: raise ValueError(f'x={x!r} is odd: ' f'{NAMES}')\n"
        "    _log.warning('%s of %d rows', x, 2)\n"
    )
    table = (
        "| message begins with | do |\n|---|---|\n| `x=… is odd` | `not a message` |\n"
        "| `… of … rows` | |\n| `x=… is even`, `This is a docstring` | |\n"
    )
    code = tuple(messages.texts(file))
    assert messages.missing(table, code) == ["x=… is even", "This is a docstring"]


def test_the_page_of_the_api_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: hf_kvret\.(\w+)$", text, re.MULTILINE)) == sorted(
        hf_kvret.__all__
    )


def public_names(module: ModuleType) -> set[str]:
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }


def test_the_page_of_parts_has_every_public_name_of_its_modules() -> None:
    text = (DOCS / "api-parts.md").read_text(encoding="utf-8")
    sections = re.split(r"^## `([\w.]+)`$", text, flags=re.MULTILINE)[1:]
    assert {"hf_kvret.testing", "hf_kvret.artifacts"} <= set(sections[::2])
    for module, section in zip(sections[::2], sections[1::2], strict=True):
        names = re.findall(rf"^::: {re.escape(module)}\.(\w+)$", section, re.MULTILINE)
        assert set(names) == public_names(importlib.import_module(module)), module


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    sections = nav.values() if isinstance(nav, dict) else nav
    return [page for section in sections for page in pages_of(section)]


def test_every_page_is_in_the_navigation_but_results() -> None:
    """Results and tasks are reached from their own tables."""
    pages = pages_of(CONFIG["nav"])
    assert len(pages) == len(set(pages))
    for page in pages:
        assert (DOCS / page).is_file() or (ROOT / page).is_file(), page
    here = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    left = {page for page in here - set(pages) if not page.startswith(("results/", "eval/"))}
    assert not left


def test_the_site_takes_nothing_from_other_servers() -> None:
    assert CONFIG["strict"] is True
    assert CONFIG["theme"]["font"] is False
    # Zensical then leaves out its own shim, which comes from a CDN.
    assert [one["path"] for one in CONFIG["extra"]["polyfills"]] == ["site/iframe-worker.js"]
    # It draws mermaid by a script from a CDN: diagrams of the pages are pictures.
    mermaid = [page for page in DOCS.rglob("*.md") if "```mermaid" in page.read_text("utf-8")]
    assert not mermaid


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ('<a href="other.html#here">', None),
        ('<a href="https://example.org/">', None),
        ('<a href="gone.html">', "gone.html"),
        ('<a href="other.html#gone">', "no such anchor"),
        ('<img src="https://example.org/a.png">', "fetches"),
        ('<script src="https://example.org/a.js"></script>', "fetches"),
    ],
)
def test_faults_of_a_built_site_are_seen(tmp_path: Path, link: str, fault: str | None) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>')
    (tmp_path / "index.html").write_text(f'<p id="top">{link}')
    faults = links.faults(tmp_path, links.read(tmp_path))
    assert faults == [] if fault is None else fault in faults[0]


def test_pages_have_the_tables_that_the_tool_writes() -> None:
    pages = {DOCS / "methods" / f"{method}.md" for method in hf_kvret.registered_methods()}
    parts = options.parts()
    assert set(parts) == pages | {DOCS / "options.md"}
    for page, tables in parts.items():
        text = page.read_text(encoding="utf-8")
        assert text == options.written(text, tables), f"{page}: run python docs/site/options.py"


def test_every_option_has_a_meaning_in_plain_english() -> None:
    methods = (cls.Config for cls in hf_kvret.registered_methods().values())
    for config in (hf_kvret.RetrievalConfig, PromptRecipe, *methods):
        texts = options.meanings(config)
        assert set(texts) == set(options.names_of(config))
        assert prose.faults(options.table(config, texts, config())) == []


def test_a_part_takes_its_place_and_a_page_without_one_is_refused() -> None:
    place = f"{options.BEGIN}\nold\n{options.END}"
    page = options.written(f"# Title\n\n{place}\n\nText.\n\n{place}\n", ["one", "two"])
    assert "old" not in page
    assert page.index("one") < page.index("Text.") < page.index("two")
    with pytest.raises(ValueError, match="0 places for 1 tables"):
        options.written("# Title\n", ["one"])


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
