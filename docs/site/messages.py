"""Whether the code has the messages that ``docs/troubleshooting.md`` quotes.

``python docs/site/messages.py`` names those that it does not have. The page quotes the beginning of
each message, with an ellipsis for what the message fills in.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HEADER = "message begins with"
GAP = "…"
# Modules of other packages whose messages the page quotes, too.
FOREIGN = ("transformers.generation.configuration_utils",)
# Text in one backtick, or in two where it has backticks itself.
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")


def text_of(node: ast.AST) -> str | None:
    """The text of a literal, with gaps for what is filled in; None where it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (one.value if isinstance(one, ast.Constant) else GAP for one in node.values)
        return "".join(map(str, parts))
    return None


def clean(text: str) -> str:
    """One line: fields of logging and ``format``, and runs of gaps and blanks, become one each."""
    text = re.sub(r"%(?:\.\d+f|[rsd])|\{[^{}]*\}", GAP, text)
    return re.sub(rf"{GAP}(?:\s*{GAP})+", GAP, re.sub(r"\s+", " ", text)).strip()


def texts(file: Path) -> Iterator[str]:
    """The texts of a module without its docstrings; messages are among them."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = None if node in docstrings else text_of(node)
        if text:
            yield clean(text)


@functools.cache
def texts_of_the_code() -> tuple[str, ...]:
    """The texts of the package, and of the foreign modules."""
    specs = [importlib.util.find_spec(name) for name in FOREIGN]
    foreign = [Path(spec.origin) for spec in specs if spec and spec.origin]
    files = [*sorted((ROOT / "hf_kvret").rglob("*.py")), *foreign]
    return tuple(text for file in files for text in texts(file))


def quotes(page: str) -> list[str]:
    """The messages that a page quotes: the code in the first cells of its tables of messages."""
    results, inside = [], False
    for line in page.splitlines():
        cell = line.strip("| ").partition(" | ")[0]
        if not line.startswith("|"):
            inside = False
        elif cell == HEADER:
            inside = True
        elif inside:
            results += [match[2].strip() for match in _CODE.finditer(cell)]
    return results


def missing(page: str, code: tuple[str, ...]) -> list[str]:
    """The quotes of a page with which no text of the code begins."""
    return [one for one in quotes(page) if not any(text.startswith(one) for text in code)]


if __name__ == "__main__":
    wrong = missing(PAGE.read_text(encoding="utf-8"), texts_of_the_code())
    sys.exit("\n".join(["not in the code:", *wrong]) if wrong else 0)
