"""A number for the state of the code that a trial runs, so that trials go stale with it.

Comments, docstrings and layout don't count. C++ and Triton don't either: kernels have tests of
their own against the readable version, and wheels don't ship the sources.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import hf_kvret_kernels
import hf_kvret_model_patches
from hf_kvret.lab.coverage.trial import tried_methods

_LIBRARY = Path(__file__).resolve().parents[2]

_PARTS = (
    *("cache.py", "registry.py"),
    *("options", "contracts", "models", "stores", "layer", "observe", "saved", "attention"),
    *(
        "lab/coverage/small.py",
        "lab/coverage/trial.py",
        "lab/coverage/unusual.py",
        "testing/tiny.py",
    ),
)
"""What a trial runs of this package beside its methods: files, and rooms as a whole."""

_DIGITS = 12


@cache
def code_state() -> str:
    """Twelve hexadecimal digits, equal where all code that a trial runs means the same."""
    return state_of(_sources())


def state_of(sources: Iterable[tuple[str, str]]) -> str:
    """The state of ``(name, source)`` pairs, in any order."""
    digest = hashlib.sha256()
    for name, source in sorted(sources):
        digest.update(f"{name}\n".encode())
        for word in _words(ast.parse(source)):
            digest.update(f"{word}\n".encode())
    return digest.hexdigest()[:_DIGITS]


def _sources() -> Iterator[tuple[str, str]]:
    """Names and sources of the files."""
    kernels, patches = (
        Path(inspect.getfile(package)).parent
        for package in (hf_kvret_kernels, hf_kvret_model_patches)
    )
    parts = (_LIBRARY / part for part in _PARTS)
    for root in (*parts, *_method_folders(), kernels, patches):
        for path in [root] if root.suffix else root.rglob("*.py"):
            if "triton" not in path.name:
                name = f"{root.name}/{path.relative_to(root).as_posix()}"
                yield name, path.read_text(encoding="utf-8")


def _method_folders() -> Iterator[Path]:
    """Those of the methods that a trial tries; methods from elsewhere don't count."""
    for kind in tried_methods().values():
        folder = Path(inspect.getfile(kind)).resolve().parent
        if folder.parent == _LIBRARY / "methods":
            yield folder


def _words(node: object) -> Iterator[str]:
    """The tree in words, without docstrings and without what only some versions of Python add."""
    if isinstance(node, list):
        yield "["
        for one in node:
            yield from _words(one)
        yield "]"
    elif isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            rest = _without_docstring(node, value) if name == "body" else value
            if rest is not None and rest != []:
                yield f"{name}="
                yield from _words(rest)
    else:
        yield repr(node)


def _without_docstring(node: ast.AST, body: object) -> object:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
        return node.body[1:]
    return body
