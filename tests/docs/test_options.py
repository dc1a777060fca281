"""The tables of options are those of the code: ``docs/site/options.py`` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_kvret
from hf_kvret.options.prompt import PromptRecipe

from .pages import DOCS, site_tool

options = site_tool("options")
prose = site_tool("prose")
CONFIGS = [
    hf_kvret.RetrievalConfig,
    PromptRecipe,
    *(cls.Config for cls in hf_kvret.registered_methods().values()),
]


@pytest.mark.parametrize("page", sorted(options.parts()), ids=lambda page: page.stem)
def test_a_page_has_the_tables_that_the_tool_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == options.written(text, options.parts()[page]), "run python docs/site/options.py"


def test_every_method_has_its_part() -> None:
    pages = {DOCS / "methods" / f"{method}.md" for method in hf_kvret.registered_methods()}
    assert set(options.parts()) == pages | {DOCS / "options.md"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_option_has_a_meaning_in_plain_english(config: type) -> None:
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
