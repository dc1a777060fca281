"""``pages.toml`` beside result files: which of them stand on one page, and what of their tables."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_kvret.lab.report.tables import markdown_table

PAGES_FILE = "pages.toml"


class Part(NamedTuple):
    """A result on a page, by the name of its file, and what is shown of it."""

    result: str
    heading: str = ""
    columns: Sequence[str] = ()
    """Headers; none for all."""
    rows: str = ""
    """A regular expression, searched for in a row's cells as joined by ``|``."""


class Page(NamedTuple):
    """A question, and the results that answer it; ``has_setup``: with their set-ups."""

    title: str
    parts: list[Part]
    has_setup: bool = False


def listed_pages(folder: Path, results: Collection[str]) -> dict[str, Page]:
    """The pages in ``folder``'s ``pages.toml`` by name; none where there is no such file.

    Raises:
        ValueError: the file is no TOML, or names a result that is none of ``results``.
        TypeError: an entry is no page: it has a title and parts, each with a result.
    """
    path = folder / PAGES_FILE
    if not path.is_file():
        return {}
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    pages = {name: _page(**entry) for name, entry in entries.items()}
    missing = {part.result for page in pages.values() for part in page.parts} - {*results}
    if missing:
        raise ValueError(f"{path} names {', '.join(sorted(missing))}: no such result file")
    return pages


def _page(title: str, parts: list[dict[str, Any]], **usual: Any) -> Page:
    """A page; ``usual`` is what parts have that don't say otherwise."""
    return Page(title, [Part(**usual | part) for part in parts])


def shown_tables(text: str, part: Part) -> str:
    """The markdown tables in ``text`` with the columns and rows of ``part``, where they have any.

    Raises:
        ValueError: no table has a column of that name, or a row that matches.
    """
    if not part.columns and not part.rows:
        return text
    blocks: list[str] = []
    seen: set[str] = set()
    for block in text.split("\n\n"):
        if not block.startswith("|"):
            blocks.append(block)
            continue
        header, _, *body = ([*map(str.strip, line[1:-1].split("|"))] for line in block.split("\n"))
        indices = [i for i, name in enumerate(header) if name in part.columns or not part.columns]
        kept = [row for row in body if re.search(part.rows, " | ".join(row))]
        if indices and kept:
            head, *rows = ([row[i] for i in indices] for row in (header, *kept))
            seen |= {*head}
            blocks.append(markdown_table(head, rows))
    missing = [name for name in part.columns if name not in seen]
    if missing or not seen:
        raise ValueError(
            f"{PAGES_FILE}: {part.result} has no columns {missing} with rows that match {part.rows}"
        )
    return "\n\n".join(blocks)
