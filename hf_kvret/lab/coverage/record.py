"""Trials are kept in a JSON file, each with the versions and the state of the code that made it.

Trials go stale with the code that they run. Comments, docstrings and layout don't count. C++ and
Triton don't either: tests compare these kernels with the readable version, and wheels don't ship
their sources.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
import transformers

import hf_kvret_kernels
import hf_kvret_model_patches
from hf_kvret.lab.coverage.trial import Trial, trial, tried_methods
from hf_kvret.saved.folder import replace_file

_LIBRARY = Path(__file__).resolve().parents[2]

# A trial runs these files and rooms of this package beside its methods.
_PATHS = (
    *("cache.py", "registry.py"),
    *("options", "contracts", "models", "stores", "layer", "observe", "saved", "attention"),
    *("lab/coverage/small.py", "lab/coverage/trial.py", "testing/tiny.py"),
)


@cache
def code_state() -> str:
    """The ``state_of`` all code that a trial runs."""
    return state_of(_sources())


def state_of(sources: Iterable[tuple[str, str]]) -> str:
    """Twelve hexadecimal digits, equal where the ``(name, source)`` pairs mean the same."""
    digest = hashlib.sha256()
    for name, source in sorted(sources):
        digest.update(f"{name}\n".encode())
        for word in _words(ast.parse(source)):
            digest.update(f"{word}\n".encode())
    return digest.hexdigest()[:12]


def _sources() -> Iterator[tuple[str, str]]:
    kernels, patches = (
        Path(inspect.getfile(package)).parent
        for package in (hf_kvret_kernels, hf_kvret_model_patches)
    )
    # Methods of other packages don't count.
    methods = [
        folder
        for cls in tried_methods().values()
        if (folder := Path(inspect.getfile(cls)).resolve().parent).parent == _LIBRARY / "methods"
    ]
    for root in (*(_LIBRARY / path for path in _PATHS), *methods, kernels, patches):
        for path in [root] if root.suffix else root.rglob("*.py"):
            if "triton" not in path.name:
                name = f"{root.name}/{path.relative_to(root).as_posix()}"
                yield name, path.read_text(encoding="utf-8")


def _words(node: object) -> Iterator[str]:
    """The tree in words, without docstrings and without what only some versions of Python add."""
    if isinstance(node, list):
        yield "["
        for child in node:
            yield from _words(child)
        yield "]"
    elif isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            content = _without_docstring(node, value) if name == "body" else value
            if content is not None and content != []:
                yield f"{name}="
                yield from _words(content)
    else:
        yield repr(node)


def _without_docstring(node: ast.AST, body: object) -> object:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
        return node.body[1:]
    return body


BUNDLED = Path(__file__).with_name("trials.json")
"""The trials that the library was released with."""


@dataclass(frozen=True)
class Setup:
    """Versions and ``code_state`` with which a trial was made."""

    transformers: str
    torch: str
    code: str

    @classmethod
    def present(cls) -> Setup:
        """The set-up of a trial that is made now."""
        return cls(transformers.__version__, torch.__version__, code_state())

    @property
    def stale(self) -> bool:
        """Whether another transformers or other code of ours might give another result now.

        A trial compares our caches with transformers' own, so torch is only noted.
        """
        present = Setup.present()
        return (self.transformers, self.code) != (present.transformers, present.code)


@dataclass(frozen=True)
class Record:
    """Trials and their set-ups, by type."""

    trials: dict[str, Trial] = field(default_factory=dict)
    setups: dict[str, Setup] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = BUNDLED) -> Record:
        """The record in a file.

        Raises:
            ValueError: the file is no record of trials.
        """
        try:
            types = json.loads(path.read_text(encoding="utf-8"))["types"].items()
            setups = {name: Setup(**entry.pop("setup")) for name, entry in types}
            return cls({name: Trial(**entry) for name, entry in types}, setups)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no record of trials ({error}): give the name of a new file"
            ) from error

    def write(self, path: Path) -> None:
        """Write the record, types in the order of the alphabet; replaces the file in one step."""
        # Each type has a line, so that changes are easy to compare.
        entries = {
            name: {**asdict(self.trials[name]), "setup": asdict(self.setups[name])}
            for name in sorted(self.trials)
        }
        lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
        replace_file(path, ('{"types": {\n' + ",\n".join(lines) + "\n}}\n").encode())

    def pending(self, names: Iterable[str]) -> list[str]:
        """The ``names`` without a trial, or with a stale one."""
        return [name for name in names if name not in self.trials or self.setups[name].stale]

    def versions(self, names: Iterable[str]) -> str:
        """Versions of transformers that ``names`` were tried with, and states of the code."""
        setups = {self.setups[name] for name in names}
        releases = ", ".join(sorted({setup.transformers for setup in setups}))
        codes = ", ".join(sorted({setup.code for setup in setups}))
        return f"transformers {releases} and state {codes} of the code"


def try_types(
    names: Iterable[str],
    path: Path,
    *,
    again: bool = False,
    report: Callable[[str], None] = print,
    progress: Callable[[list[str]], Iterable[str]] = iter,
) -> Record:
    """Try the types in ``names`` whose trial the record in ``path`` lacks or has stale.

    Each trial is written to the file at once, so that an interrupted run goes on there. Other types
    stay in the record.

    Args:
        names: types that the scan finds served.
        path: file of the record; made where there is none.
        again: also try types with a present trial.
        report: called with a line about every type that was tried.
        progress: hands on the types that are to be tried, as a bar does.

    Raises:
        ValueError: the file is no record.
    """
    record = Record.read(path) if path.exists() else Record()
    for name in progress(list(names) if again else record.pending(names)):
        record.trials[name] = trial(name)
        record.setups[name] = Setup.present()
        record.write(path)
        report(f"{name}: {record.trials[name].outcome} {record.trials[name].detail}".rstrip())
    return record
