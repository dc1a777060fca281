"""The tables of the documentation match the code."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import hf_kvret
from hf_kvret.testing import MODELS

from .pages import DOCS, table

LITERAL = re.compile(r"^`([^`]*)`$")


def test_the_lines_of_choose_make_caches() -> None:
    """Each way by machine ends in arguments of ``generate``, or in none of ours."""
    rows = table(DOCS / "choose.md", "machine", "model", "context")
    ends = [cells[-1] for cells in rows if cells[-1] != "none: leave the argument out"]
    lines = [ast.parse(f"f({end.strip('`')})", mode="eval").body for end in ends]
    assert len(lines) >= 6
    for call in lines:
        assert isinstance(call, ast.Call)
        given = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        config = hf_kvret.registered_methods()[given["cache_implementation"]].Config
        config(**given.get("cache_config", {}))


def options_of(page: Path) -> dict[str, list[str]]:
    """The rows of the page's option table, by option."""
    rows = table(page, "option", "default")
    return {cells[0].strip("`"): cells for cells in rows}


def check_column(rows: dict[str, list[str]], column: int, config: object) -> None:
    for option, cells in rows.items():
        literal = LITERAL.match(cells[column])
        if literal:
            assert ast.literal_eval(literal[1]) == getattr(config, option), option


def fields(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def test_the_common_options_are_those_of_the_code() -> None:
    rows = options_of(DOCS / "options.md")
    assert set(rows) == fields(hf_kvret.RetrievalConfig)
    assert all(LITERAL.match(cells[1]) for cells in rows.values())
    check_column(rows, 1, hf_kvret.RetrievalConfig())


@pytest.mark.parametrize("method", sorted(hf_kvret.registered_methods()))
def test_a_method_page_names_the_options_of_its_config(method: str) -> None:
    config = hf_kvret.registered_methods()[method].Config
    rows = options_of(DOCS / "methods" / f"{method}.md")
    defaults, common = config(), hf_kvret.RetrievalConfig()
    changed = {
        name
        for name in fields(hf_kvret.RetrievalConfig)
        if getattr(defaults, name) != getattr(common, name)
    }
    assert set(rows) == fields(config) - fields(hf_kvret.RetrievalConfig) | changed
    check_column(rows, 1, config())
    if hasattr(config, "paper"):
        assert all(len(cells) == 4 for cells in rows.values())
        check_column(rows, 2, config.paper())


def test_the_schedule_of_paris_is_that_of_the_code() -> None:
    page = DOCS / "methods" / "paris.md"
    rows = table(page, "cold tokens", "β, candidates")
    told = [(cells[0], float(cells[1]), float(cells[2])) for cells in rows]
    schedule = hf_kvret.ParisKVCache.Config().schedule
    assert [row[1:] for row in told] == [row[1:] for row in schedule]
    assert [row[0] for row in told[:-1]] == [f"below {row[0]:,}" for row in schedule[:-1]]
    published = hf_kvret.ParisKVCache.Config.paper().schedule
    assert published[:-1] == schedule[: len(published) - 1]
    assert published[-1][1:] == schedule[-2][1:]


def test_every_method_has_a_page_and_every_page_a_method() -> None:
    assert {page.stem for page in (DOCS / "methods").glob("*.md")} == set(
        hf_kvret.registered_methods()
    )


def test_a_page_tells_which_methods_are_here() -> None:
    rows = table(DOCS / "features.md", "method", "what finds the tokens")
    told = {re.sub(r"\(.*|\W", "", cells[0]): cells[2] for cells in rows}
    here = {method for method, state in told.items() if state == "here"}
    assert here == set(hf_kvret.registered_methods())
    assert all(state == "not yet" for method, state in told.items() if method not in here)


def test_the_list_of_models_is_that_of_the_conformance_suite() -> None:
    rows = table(DOCS / "models.md", "model type")
    assert sorted(cells[0].strip("`") for cells in rows) == sorted(MODELS)
