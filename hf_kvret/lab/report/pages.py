"""``pages.toml`` beside result files: which of them stand on one page, and what of their tables."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from hf_kvret.lab.report.tables import markdown_table

PAGES_FILE = "pages.toml"


class Part(NamedTuple):
    """A result on a page."""

    result: str
    """Its file's name, without ``.json``."""
    heading: str = ""
    columns: Sequence[str] = ()
    """Headers of the columns that are shown; none: all."""
    rows: str = ""
    """A regular expression: rows are shown where it is found in their cells, joined by ``|``."""


class Page(NamedTuple):
    """A question, and the results that answer it."""

    title: str
    parts: list[Part]
    has_setup: bool = False
    """Whether the set-up of the results is shown, too."""

    @classmethod
    def of(cls, title: str, parts: list[dict[str, Any]], **usual: Any) -> Self:
        """A page; ``usual`` is what parts have that don't say otherwise."""
        return cls(title, [Part(**usual | part) for part in parts])


def listed_pages(folder: Path, results: Collection[str]) -> dict[str, Page]:
    """The pages in ``folder``'s ``pages.toml`` by name; none where there is no such file.

    Args:
        folder: holds the result files.
        results: the names of those in it.

    Raises:
        ValueError: the file is no TOML, has a key that is unknown or missing, or names a result
            that is not there; it says which.
    """
    path = folder / PAGES_FILE
    if not path.is_file():
        return {}
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    pages = {}
    for name, entry in entries.items():
        try:
            pages[name] = Page.of(**entry)
        except TypeError as error:
            raise ValueError(
                f"{path}: [{name}] needs a title and parts, each with a result, and may have "
                f"headings, columns and rows ({error})"
            ) from error
        missing = [part.result for part in pages[name].parts if part.result not in results]
        if missing:
            raise ValueError(f"{path}: [{name}] names {', '.join(missing)}: no such result file")
    return pages


def shown_tables(text: str, part: Part) -> str:
    """The markdown tables in ``text`` with the columns and rows of ``part`` alone.

    A table that has none of them is left out, with the line above it.

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
            seen |= {header[i] for i in indices}
            rows: list[list[Any]] = [[row[i] for i in indices] for row in (header, *kept)]
            blocks.append(markdown_table(rows[0], rows[1:]))
        elif blocks and blocks[-1].endswith(":"):
            blocks.pop()
    missing = [name for name in part.columns if name not in seen]
    if missing or not seen:
        raise ValueError(
            f"{PAGES_FILE}: the tables of {part.result} have no columns {missing} with rows that "
            f"match {part.rows!r}"
        )
    return "\n\n".join(blocks)
