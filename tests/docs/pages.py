"""Pages of the documentation, read: their blocks of code, their tables, their prose.

A block after the comment ``<!-- not run: <reason> -->`` does not run, nor does one after
``<!-- needs: <module> -->`` where that module is missing.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = DOCS / "site"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
NEEDS = re.compile(r"<!-- needs: (\w+) -->")
FENCE = re.compile(r"^ *(`{3,})(\w*)")


class Block(NamedTuple):
    """A fenced block: its language, the number of its first line, its text, whether it runs."""

    language: str
    line: int
    text: str
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    lines: list[str] = []
    # A fence ends at one of the same length, so that a longer one can hold others.
    language, first, runs, before, inside = "", 0, True, "", ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if fence and not inside:
            inside, language, first, lines = fence[1], fence[2], number + 1, []
            needs = NEEDS.fullmatch(before)
            missing = needs and importlib.util.find_spec(needs[1]) is None
            runs = not NOT_RUN.fullmatch(before) and not missing
        elif inside and line.strip() == inside:
            inside = ""
            yield Block(language, first, "\n".join(lines), runs)
        elif inside:
            lines.append(line)
        before = line.strip()
    assert not inside, f"{page.name}: the fence before line {first} is never closed"


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    lines, inside = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = FENCE.match(line)
        if fence and not inside:
            inside = fence[1]
        elif inside and line.strip() == inside:
            inside = ""
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def table(page: Path, *header: str) -> list[list[str]]:
    """Cells of all tables whose header begins with these columns."""
    rows, inside = [], False
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if tuple(cells[: len(header)]) == header:
            inside = True
        elif inside and set(line) - set("|-: "):
            rows.append(cells)
    return rows


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def site_tool(name: str) -> ModuleType:
    """A script of the site, as a module; scripts import each other by name."""
    sys.path.insert(0, str(SITE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SITE))
