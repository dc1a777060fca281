"""The messages that a user may meet, from the code: a section of ``docs/troubleshooting.md``.

``python docs/site/messages.py`` writes the section anew. Errors and warnings are found by their
syntax; what a message fills in is shown as an ellipsis.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN = "<!-- made by `python docs/site/messages.py`, from here -->"
END = "<!-- made by `python docs/site/messages.py`, to here -->"
# What a user does, and the files whose messages he may meet then; a file counts where it comes
# first.
GROUPS = {
    "Options": [
        "config.py",
        "methods/*/config.py",
        "core/option_checks.py",
        "core/sizes.py",
        "core/renamed.py",
    ],
    "Making a cache, and generate": [
        "registry.py",
        "cache.py",
        "core/layer.py",
        "core/layer_reference.py",
        "core/layer_stack.py",
        "core/precision.py",
        "core/regions.py",
        "integration/*.py",
        "replay/*.py",
    ],
    "Looking into a cache": ["core/cached_rows.py"],
    "Stores and memory": ["stores/*.py", "core/store.py", "core/host_memory.py"],
    "Saving and loading a cache": ["io/*.py", "core/saved_regions.py"],
    "The command line": [
        "cli.py",
        "calibration/command.py",
        "calibration/command_options.py",
        "calibration/hub_access.py",
        "calibration/inspection.py",
        "calibration/sources.py",
        "evaluation/arguments.py",
        "evaluation/caches.py",
        "evaluation/program.py",
        "evaluation/lm_eval.py",
        "survey/command.py",
        "tune/*.py",
    ],
    "Calibration and artifacts": ["calibration/*.py"],
    "Methods": ["methods/**/*.py"],
}
WARNINGS = ("warn", "warning", "warning_once")
GAP = "…"


class Message(NamedTuple):
    kind: str
    text: str


class Texts:
    """Strings of a module: what its constants hold, and what a function calls by a name."""

    def __init__(self, tree: ast.Module) -> None:
        self.constants = assignments(tree.body)

    def of(self, node: ast.expr, local: dict[str, ast.expr]) -> str | None:
        """The text that an expression makes, or None where that isn't known."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(self.of(part, local) or GAP for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.of(node.value, {}) if isinstance(node.value, ast.Name) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
            left = self.of(node.left, local)
            right = self.of(node.right, local) if isinstance(node.op, ast.Add) else ""
            return None if left is None else left + (GAP if right is None else right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            made = self.of(node.func.value, local) if node.func.attr == "format" else None
            return made and re.sub(r"\{[^{}]*\}", GAP, made)
        if isinstance(node, ast.Name):
            value = local.get(node.id) or self.constants.get(node.id)
            return None if value is None else self.of(value, {})
        return None


def assignments(body: list[ast.stmt]) -> dict[str, ast.expr]:
    found = {}
    for statement in body:
        for one in ast.walk(statement):
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                found[one.targets[0].id] = one.value
    return found


def clean(text: str) -> str:
    """One line: fields of logging, runs of gaps and of blanks become one gap or blank."""
    text = re.sub(r"%(?:\.\d+f|[rsd])", GAP, text.replace("%%", "%"))
    return re.sub(rf"{GAP}(?:\s*{GAP})+", GAP, re.sub(r"\s+", " ", text)).strip()


def messages(file: Path) -> Iterator[Message]:
    """What the code of a file raises and warns of, in its order."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    texts, local = Texts(tree), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for one in ast.walk(node):
                local[one] = node
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, kind = node.exc, ast.unparse(node.exc.func)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in WARNINGS:
            call, kind = node, "warning"
        else:
            continue
        own = assignments(local[node].body) if node in local else {}
        text = texts.of(call.args[0], own) if call.args else None
        if text is not None and len(clean(text).replace(GAP, "").split()) > 1:
            yield Message(kind, clean(text))


def groups() -> dict[str, list[Message]]:
    """The messages of each group, each once."""
    seen: set[Path] = set()
    known: set[str] = set()
    found: dict[str, list[Message]] = {}
    for group, patterns in GROUPS.items():
        files = [one for pattern in patterns for one in sorted((ROOT / "hf_kvret").glob(pattern))]
        found[group] = []
        for file in dict.fromkeys(files):
            if file in seen:
                continue
            seen.add(file)
            for message in messages(file):
                if message.text not in known:
                    known.add(message.text)
                    found[group].append(message)
    return found


def section() -> str:
    lines = [BEGIN, ""]
    for group, found in groups().items():
        lines += [f"### {group}", "", "| | message |", "|---|---|"]
        for kind, text in found:
            shown = text.replace("|", "\\|").replace("`", "'")
            lines.append(f"| {kind} | `{shown}` |")
        lines.append("")
    return "\n".join([*lines, END])


def written(page: str) -> str:
    """The page with its section made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
