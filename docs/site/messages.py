"""The messages that a user may meet, from the code: a section of ``docs/troubleshooting.md``.

``python docs/site/messages.py`` writes the section anew. Errors and warnings are found by their
syntax; what a message fills in is shown as an ellipsis.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_kvret"
OPTIONS = PACKAGE / "options" / "config.py"
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN = "<!-- made by `python docs/site/messages.py`, from here -->"
END = "<!-- made by `python docs/site/messages.py`, to here -->"
# What a user does, and the files whose messages he may meet then; a file counts where it comes
# first.
GROUPS = {
    "Options": ["options/*.py", "methods/*/config.py"],
    "Making a cache, and generate": [
        "registry.py",
        "attention/visit.py",
        "cache.py",
        "layer/layer.py",
        "layer/model_state.py",
        "contracts/block.py",
        "layer/layer_kv.py",
        "layer/flash.py",
        "layer/block_sums.py",
        "layer/window.py",
        "layer/prompt_groups.py",
        "layer/retrieved.py",
        "layer/reference.py",
        "attention/*.py",
        "models/*.py",
        "replay/*.py",
    ],
    "Looking into a cache": ["layer/cached_rows.py", "observe/*.py"],
    "Stores and memory": ["stores/*.py", "contracts/store.py"],
    "Saving and loading a cache": ["saved/*.py", "contracts/schema.py", "shelf/*.py"],
    "vLLM": ["vllm/*.py"],
    "The command line": [
        "lab/documents/*.py",
        "lab/serve/*.py",
        "cli.py",
        "lab/calibrate/command.py",
        "lab/calibrate/command_options.py",
        "artifacts/hub.py",
        "lab/program/hub_access.py",
        "lab/calibrate/inspection.py",
        "lab/calibrate/sources.py",
        "lab/program/arguments.py",
        "lab/evaluate/bundled.py",
        "lab/evaluate/caches.py",
        "lab/program/options.py",
        "lab/report/outputs.py",
        "lab/report/plots.py",
        "lab/program/program.py",
        "lab/evaluate/subject.py",
        "lab/evaluate/texts.py",
    ],
    "hf-kvret tune": ["lab/tune/*.py"],
    "hf-kvret demo, eval, lm-eval and report": [
        "lab/evaluate/**/*.py",
        "lab/report/*.py",
        "lab/program/*.py",
    ],
    "hf-kvret bench": ["lab/bench/*.py"],
    "hf-kvret fits and models": ["lab/plan/*.py", "lab/coverage/*.py"],
    "Calibration and artifacts": ["artifacts/*.py", "lab/calibrate/*.py"],
    "Methods": ["methods/**/*.py"],
    "An index or a method of your own": ["contracts/*.py", "layer/*.py", "testing/*.py"],
}
# Files whose messages are not on the page, and why.
LEFT_OUT: dict[str, str] = {}
# Files that raise what another one says, word for word or behind a name.
PASSED_ON = (
    "lab/bench/limits.py",
    "lab/serve/requests.py",
    "lab/bench/opponents.py",
    "contracts/state.py",
    "layer/layer_kv.py",
    "layer/step.py",
    "layer/operations.py",
    "lab/evaluate/caches.py",
    "lab/report/report.py",
    "lab/report/verification.py",
    "lab/plan/command.py",
    "saved/shards.py",
    "testing/tape.py",
)
# Raised for a loader of ours, which tells what is missing.
SIGNALS = ("KeyError", "AttributeError")
# Functions whose text another file raises.
RAISED_ELSEWHERE = {"methods/aqua/cache.py": ("needs_positions",)}
WARNINGS = ("warn", "warning", "warning_once")
GAP = "…"
ERROR = re.compile(r"[A-Z]\w+$")
# What names hold, as expressions.
Local = dict[str, ast.expr]


class Message(NamedTuple):
    kind: str
    text: str


class Helper(NamedTuple):
    """A function that makes an error or its text, and what its module knows."""

    function: ast.FunctionDef
    texts: Texts

    def results(self, call: ast.Call, texts: Texts, local: Local) -> list[tuple[ast.expr, Local]]:
        """What it may return, each with its names as ``call`` gives them."""
        nodes = (node for node in ast.walk(self.function) if isinstance(node, ast.Return))
        returned = [one.value for one in nodes if one.value and ast.unparse(one.value) != "None"]
        names = assignments(self.function.body) | self.arguments(call, texts, local)
        return [(one, names) for one in returned]

    def arguments(self, call: ast.Call, texts: Texts, local: Local) -> Local:
        """The texts of a call's arguments, by the names of the parameters."""
        names = [one.arg for one in self.function.args.args if one.arg not in ("self", "cls")]
        values = dict(zip(names, call.args, strict=False))
        values |= {one.arg: one.value for one in call.keywords if one.arg}
        return {name: ast.Constant(texts.argument(value, local)) for name, value in values.items()}


class Texts:
    """Strings of a module: its constants, its functions, and those that it imports from us."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.constants = assignments(tree.body)

    @functools.cached_property
    def functions(self) -> dict[str, Helper]:
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))
        return {node.name: Helper(node, self) for node in nodes}

    @functools.cached_property
    def helpers(self) -> dict[str, Helper]:
        """Its own functions, and those that it imports from files of ours."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_kvret"):
                file = ROOT / f"{node.module.replace('.', '/')}.py"
                theirs = read(file).functions if file.is_file() else {}
                found |= {one.name: theirs[one.name] for one in node.names if one.name in theirs}
        return found | self.functions

    def helper(self, call: ast.Call) -> Helper | None:
        """The function of ours that a call names, as ``f()`` or ``self.f()``."""
        return self.helpers.get(ast.unparse(call.func).rpartition(".")[2])

    def makes_error(self, call: ast.Call) -> bool:
        """Whether it is an exception's name that is called, or a function of ours."""
        return bool(self.helper(call) or ERROR.search(ast.unparse(call.func)))

    def of(self, node: ast.expr, local: Local) -> str | None:
        """The text that an expression makes, or None where that isn't known."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(self.of(part, local) or GAP for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.of(node.value, local) if isinstance(node.value, ast.Name) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
            left = self.of(node.left, local)
            right = self.of(node.right, local) if isinstance(node.op, ast.Add) else ""
            return None if left is None else left + (GAP if right is None else right)
        if isinstance(node, ast.Call):
            return self.of_call(node, local)
        if isinstance(node, ast.Name):
            value = local.get(node.id) or self.constants.get(node.id)
            return None if value is None else self.of(value, {})
        return None

    def argument(self, node: ast.expr, local: Local) -> str:
        """The text of an argument, an int's too; a gap where it isn't known."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return str(node.value)
        return self.of(node, local) or GAP

    def of_call(self, call: ast.Call, local: Local) -> str | None:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "format":
            made = self.of(call.func.value, local)
            return made and re.sub(r"\{[^{}]*\}", GAP, made)
        helper = self.helper(call)
        results = helper.results(call, self, local) if helper else []
        return helper.texts.of(*results[0]) if helper and len(results) == 1 else None

    def choices(self, argument: ast.expr, local: Local) -> list[str | None]:
        """The texts that an argument may be."""
        if isinstance(argument, ast.IfExp):
            return [self.of(one, local) for one in (argument.body, argument.orelse)]
        helper = self.helper(argument) if isinstance(argument, ast.Call) else None
        if helper and isinstance(argument, ast.Call):
            return [helper.texts.of(*one) for one in helper.results(argument, self, local)]
        return [self.of(argument, local)]

    def error(self, call: ast.Call, local: Local) -> Iterator[Message]:
        """The messages of a call that makes an error or warns; several where it chooses."""
        helper = self.helper(call)
        if helper:
            for made, names in helper.results(call, self, local):
                if isinstance(made, ast.Call) and helper.texts.makes_error(made):
                    yield from helper.texts.error(made, names)
            return
        kind = ast.unparse(call.func)
        for text in (one for argument in call.args for one in self.choices(argument, local)):
            if len(clean(text or "").replace(GAP, "").split()) > 1:
                yield Message("error" if kind == "type(error)" else kind, clean(text or ""))


@functools.cache
def read(file: Path) -> Texts:
    return Texts(ast.parse(file.read_text(encoding="utf-8")))


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


def functions_around(texts: Texts) -> dict[ast.AST, ast.FunctionDef]:
    """The innermost function of each node of a module that is in one."""
    around: dict[ast.AST, ast.FunctionDef] = {}
    for node in ast.walk(texts.tree):
        if isinstance(node, ast.FunctionDef):
            around |= dict.fromkeys(ast.walk(node), node)
    return around


def calls(texts: Texts) -> Iterator[tuple[ast.Call, Local]]:
    """What a module raises and warns with, and what the names of that place hold."""
    around = functions_around(texts)
    for node in ast.walk(texts.tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        if call is not node or ast.unparse(call.func).rpartition(".")[2] in WARNINGS:
            yield call, names_of(around.get(node))


def names_of(function: ast.FunctionDef | None) -> Local:
    """What the names of a function hold; a parameter may hold anything."""
    if function is None:
        return {}
    parameters = {one.arg: ast.Constant(GAP) for one in function.args.args}
    return parameters | assignments(function.body)


def option_checks(texts: Texts) -> Iterator[Message]:
    """The messages of the checks of options that a module calls, with the options' names."""
    around = functions_around(texts)
    for node in ast.walk(texts.tree):
        if isinstance(node, ast.Call):
            yield from option_check(texts, node, names_of(around.get(node)))


def option_check(texts: Texts, call: ast.Call, local: Local) -> Iterator[Message]:
    helper = texts.helper(call)
    if helper is None or helper.texts is not read(OPTIONS) or not call.args:
        return
    arguments = helper.arguments(call, texts, local)
    # A check that was called in a loop has no name here.
    if next(iter(arguments)) != "name" or ast.unparse(arguments["name"]) == repr(GAP):
        return
    names = names_of(helper.function) | arguments
    for node in ast.walk(helper.function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from helper.texts.error(node.exc, names)
        elif isinstance(node, ast.Call):
            yield from option_check(helper.texts, node, names)


@functools.cache
def messages(file: Path) -> tuple[Message, ...]:
    """What the code of a file raises and warns of, in its order."""
    return tuple(found(file))


def found(file: Path) -> Iterator[Message]:
    texts = read(file)
    for call, local in calls(texts):
        for kind, text in texts.error(call, local):
            yield Message("warning" if kind.rpartition(".")[2] in WARNINGS else kind, text)
    yield from option_checks(texts)
    inside = str(file.relative_to(PACKAGE)) if file.is_relative_to(PACKAGE) else ""
    for name in RAISED_ELSEWHERE.get(inside, ()):
        for node in ast.walk(texts.functions[name].function):
            text = texts.of(node.value, {}) if isinstance(node, ast.Return) and node.value else None
            if text:
                yield Message("ValueError", clean(text))


def silent(file: Path) -> list[str]:
    """What a file raises for users without a text that can be read here."""
    texts, left_out = read(file), (*WARNINGS, *SIGNALS)
    return [
        ast.unparse(call)
        for call, local in calls(texts)
        if not list(texts.error(call, local)) and not ast.unparse(call.func).endswith(left_out)
    ]


def files(patterns: Iterable[str]) -> list[Path]:
    """The files of these patterns, each once."""
    return list(dict.fromkeys(one for each in patterns for one in sorted(PACKAGE.glob(each))))


def ungrouped() -> list[str]:
    """Files with messages that are neither in a group nor left out for a reason."""
    known = {file for patterns in GROUPS.values() for file in files(patterns)} | set(
        files(LEFT_OUT)
    )
    rest = (file for file in files(["**/*.py"]) if file not in known)
    return [str(file.relative_to(ROOT)) for file in rest if any(messages(file))]


def groups() -> dict[str, list[Message]]:
    """The messages of each group, each once."""
    seen = set(files(LEFT_OUT))
    known: set[str] = set()
    grouped: dict[str, list[Message]] = {}
    for group, patterns in GROUPS.items():
        grouped[group] = []
        for file in files(patterns):
            if file in seen:
                continue
            seen.add(file)
            for message in messages(file):
                if message.text not in known:
                    known.add(message.text)
                    grouped[group].append(message)
    return grouped


def section() -> str:
    lines = [BEGIN, ""]
    for group, found in groups().items():
        lines += [f"### {group}", "", '<details markdown="1">']
        lines += [f"<summary>{len(found)} messages</summary>", "", "| | message |", "|---|---|"]
        for kind, text in found:
            shown = text.replace("|", "\\|").replace("`", "'")
            lines.append(f"| {kind} | `{shown}` |")
        lines += ["", "</details>", ""]
    return "\n".join([*lines, END])


def written(page: str) -> str:
    """The page with its section made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
