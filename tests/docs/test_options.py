"""The tables of options are those of the code: ``docs/site/options.py`` writes them."""

from __future__ import annotations

import pytest

import hf_kvret
from hf_kvret.options.prompt import PromptRecipe

from .pages import DOCS, site_tool

options = site_tool("options")
prose = site_tool("prose")


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
