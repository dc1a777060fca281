"""The tables of options are those of the code: ``docs/site/options.py`` writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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


@dataclass(frozen=True)
class ThreeConfig(hf_kvret.RetrievalConfig):
    """Options of a method that is not there.

    Attributes:
        sink: other than elsewhere, ``0`` | ``1``,
            in two lines.
        depth: its own. ``None``: 3.

    Raises:
        ValueError: not an option.
    """

    presets: ClassVar[Any] = {"paper": {"depth": 4, "flush": 1}}
    depth: int | None = None


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


def test_entries_are_read_from_their_section_alone() -> None:
    assert options.attributes(ThreeConfig.__doc__ or "") == {
        "sink": "other than elsewhere, `0` \\| `1`, in two lines.",
        "depth": "its own. `None`: 3.",
    }
    assert options.attributes("No section.") == {}


def test_a_base_says_what_its_subclass_leaves_out() -> None:
    texts, common = options.meanings(ThreeConfig), options.meanings(hf_kvret.RetrievalConfig)
    assert texts["sink"].startswith("other than elsewhere")
    assert texts["recent"] == common["recent"]


def test_a_method_shows_its_own_options_and_those_that_differ() -> None:
    rows = options.method_part(ThreeConfig).splitlines()[2:]
    assert rows[0] == '| option | default | `preset="paper"` | values | meaning |'
    assert [row.split(" | ")[:3] for row in rows[2:]] == [
        ["| `flush`", "`512`", "`1`"],
        ["| `depth`", "`None`", "`4`"],
    ]
    assert "no options of its own" in options.method_part(hf_kvret.FlatKVCache.Config)


def test_values_are_written_as_python_has_them() -> None:
    values = ["auto", 1.0, None, (0.5, 1.0), math.inf]
    assert [options.literal(value) for value in values] == [
        '`"auto"`',
        "`1.0`",
        "`None`",
        "`(0.5, 1.0)`",
        "`inf`",
    ]
    assert options.literal(tuple(range(30))) == "see below"


def test_a_part_takes_its_place_and_a_page_without_one_is_refused() -> None:
    place = f"{options.BEGIN}\nold\n{options.END}"
    page = options.written(f"# Title\n\n{place}\n\nText.\n\n{place}\n", ["one", "two"])
    assert "old" not in page
    assert page.index("one") < page.index("Text.") < page.index("two")
    with pytest.raises(ValueError, match="0 places for 1 tables"):
        options.written("# Title\n", ["one"])


def test_check_names_stale_pages_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"{options.BEGIN}\nold\n{options.END}\n")
    monkeypatch.setattr(options, "DOCS", page.parent)
    monkeypatch.setattr(options, "parts", lambda: {page: ["new"]})
    assert options.main(["--check"]) == 1
    assert "docs/page.md is stale" in capsys.readouterr().out
    assert "old" in page.read_text()
    assert options.main([]) == 0
    assert options.main(["--check"]) == 0
    assert "new" in page.read_text()
