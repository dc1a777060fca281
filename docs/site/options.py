"""The tables of options in the pages, from the declarations and docstrings of the configs.

``python docs/site/options.py`` writes the tables of ``docs/options.md`` and of each page of
``docs/methods/`` again. With ``--check`` it writes nothing, and ends with 1 where a page is stale.
The values that an option takes are declared in its field. Its meaning stands in the
``Attributes:`` section of its config's docstring, or in that of a base class.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hf_kvret
from hf_kvret.options.config import PromptRecipe
from hf_kvret.options.declare import OneOf, declared, words_of

DOCS = Path(__file__).parents[1]
BEGIN = "<!-- made by `python docs/site/options.py`, from here -->"
END = "<!-- made by `python docs/site/options.py`, to here -->"
_MADE = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
# The section ends with the first line that is not indented.
_SECTION = re.compile(r"^Attributes:\n((?:(?: .*)?\n)*)", re.MULTILINE)
_ENTRY = re.compile(r" {4}(\w+): (.*)")
# Longer values, as a schedule, are explained below the table.
_MOST_CHARACTERS = 24
_COMMON = "those of every cache](../options.md)"


def attributes(docstring: str) -> dict[str, str]:
    """The entries of a docstring's section ``Attributes:``, each as one line of markdown."""
    section = _SECTION.search(inspect.cleandoc(docstring) + "\n")
    entries: dict[str, str] = {}
    name = ""
    for line in section[1].splitlines() if section else ():
        entry = _ENTRY.fullmatch(line)
        if entry:
            name, entries[entry[1]] = entry[1], entry[2]
        elif line.strip():
            entries[name] += f" {line.strip()}"
    return {name: text.replace("``", "`").replace("|", "\\|") for name, text in entries.items()}


def meanings(config: type) -> dict[str, str]:
    """The meaning of each option, from a config's own docstring or that of its nearest base."""
    results: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        results |= attributes(cls.__doc__ or "")
    return results


def literal(value: Any) -> str:
    """A value as Python writes it, in code; a long one is left to the page."""
    text = json.dumps(value) if isinstance(value, str) else repr(value)
    return f"`{text}`" if len(text) <= _MOST_CHARACTERS else "see below"


def allowed(config: Any, name: str) -> str:
    """The values that a config takes for an option, without those that its method refuses."""
    kinds = list(declared(config).get(name, ()))
    for index, kind in enumerate(kinds):
        if isinstance(kind, OneOf) and hasattr(config, "why_not"):
            taken = (value for value in kind.values if not config.why_not(name, value))
            kinds[index] = OneOf(*taken)
    return words_of(tuple(kinds)) if kinds else ""


def table(config: type, names: Iterable[str], *columns: object) -> str:
    """Rows for the options ``names`` with their values in ``columns``, objects of ``config``."""
    texts = meanings(config)
    titles = ["option", "default", '`preset="paper"`'][: 1 + len(columns)]
    rows = [[*titles, "values", "meaning"], ["---"] * (len(titles) + 2)]
    for name in names:
        values = [literal(getattr(one, name)) for one in columns]
        rows.append([f"`{name}`", *values, allowed(config, name), texts[name]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def names_of(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def method_part(config: type[hf_kvret.RetrievalConfig]) -> str:
    """A method's own options, and those of every cache where a default or the preset differs."""
    common = hf_kvret.RetrievalConfig()
    columns = [config(), *([config.preset("paper")] if config.presets else [])]
    names = [
        name
        for name in names_of(config)
        if not hasattr(common, name)
        # An option that takes only its default is left out.
        or (
            any(getattr(one, name) != getattr(common, name) for one in columns)
            and allowed(config, name) != repr(getattr(columns[0], name))
        )
    ]
    if not names:
        return f"The method has no options of its own; some of [{_COMMON} apply."
    preset = ", or another value in the preset" if config.presets else ""
    intro = f"The method's options, and [{_COMMON} that have another default{preset}:"
    return f"{intro}\n\n{table(config, names, *columns)}"


def parts() -> dict[Path, list[str]]:
    """What the tool writes, by page and in the order of the page."""
    pages = {
        DOCS / "options.md": [
            table(config, names_of(config), config())
            for config in (hf_kvret.RetrievalConfig, PromptRecipe)
        ]
    }
    for method, cls in hf_kvret.registered_methods().items():
        pages[DOCS / "methods" / f"{method}.md"] = [method_part(cls.Config)]
    return pages


def written(page: str, made: list[str]) -> str:
    """The text of a page with its made parts written again.

    Raises:
        ValueError: the page has not as many places for them.
    """
    places = len(_MADE.findall(page))
    if places != len(made):
        raise ValueError(
            f"{places} places for {len(made)} tables: put {BEGIN} and {END} around each"
        )
    texts = iter(made)
    return _MADE.sub(lambda _: f"{BEGIN}\n\n{next(texts)}\n\n{END}", page)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 for a stale page")
    check = parser.parse_args(arguments).check
    stale = 0
    for path, made in parts().items():
        text = path.read_text(encoding="utf-8")
        new = written(text, made)
        stale += new != text
        if new != text and check:
            sys.stdout.write(f"{path.relative_to(DOCS.parent)} is stale\n")
        elif new != text:
            path.write_text(new, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
