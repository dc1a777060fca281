"""Every room of the library imports only what the floor plan lets it import.

The imports are read from the source, also those inside functions; what stands below
``if TYPE_CHECKING:`` is for annotations only and does not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "hf_kvret": ROOT / "hf_kvret",
    "hf_kvret_kernels": ROOT / "kernels" / "hf_kvret_kernels",
    "hf_kvret_model_patches": ROOT / "model_patches" / "hf_kvret_model_patches",
}
OURS = tuple(SOURCES)

KERNELS = "hf_kvret_kernels"
# Small modules without a room of their own; they import each other and nothing else of ours.
HELPERS = (
    "hf_kvret.block",
    "hf_kvret.cached_rows",
    "hf_kvret.config",
    "hf_kvret.growing",
    "hf_kvret.pieces",
    "hf_kvret.sizes",
)
CONTRACTS = (
    "hf_kvret.index",
    "hf_kvret.merge",
    "hf_kvret.recall",
    "hf_kvret.relevance",
    "hf_kvret.stores",
)

# room -> what it may import of ours, besides itself. Who imports a room decides what changes
# together with it: a new arrow belongs into the floor plan first.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    **{helper: HELPERS for helper in HELPERS},
    "hf_kvret.index": HELPERS,
    "hf_kvret.merge": (KERNELS, *HELPERS),
    "hf_kvret.relevance": (KERNELS,),
    "hf_kvret.window": (KERNELS, "hf_kvret.merge", *HELPERS),
    "hf_kvret.stores": (KERNELS, "hf_kvret.merge", "hf_kvret.relevance", *HELPERS),
    "hf_kvret.recall": (KERNELS, "hf_kvret.relevance", "hf_kvret.stores", *HELPERS),
    "hf_kvret.counters": CONTRACTS,
    "hf_kvret.regions": (KERNELS, "hf_kvret.window", *CONTRACTS, *HELPERS),
    "hf_kvret.calls": (KERNELS, "hf_kvret.merge"),
    "hf_kvret.exact_attention": (
        "hf_kvret.calls",
        "hf_kvret.regions",
        *CONTRACTS,
        *HELPERS,
    ),
    "hf_kvret.layer": (
        KERNELS,
        "hf_kvret.calls",
        "hf_kvret.exact_attention",
        "hf_kvret.counters",
        "hf_kvret.window",
        "hf_kvret.regions",
        *CONTRACTS,
        *HELPERS,
    ),
    "hf_kvret.replay": (
        "hf_kvret.cache",
        "hf_kvret.layer",
        "hf_kvret.regions",
        "hf_kvret.window",
    ),
    "hf_kvret.methods": (
        KERNELS,
        "hf_kvret.cache",
        "hf_kvret.compatibility",
        "hf_kvret.layer",
        "hf_kvret.window",
        "hf_kvret.calibration",
        "hf_kvret_model_patches",
        *CONTRACTS,
        *HELPERS,
    ),
    "hf_kvret.requests": ("hf_kvret.cache",),
    "hf_kvret.registry": (
        "hf_kvret.methods",
        "hf_kvret.attention",
        "hf_kvret.base_attention",
        "hf_kvret.masks",
        "hf_kvret.compatibility",
        "hf_kvret.cache",
        "hf_kvret.layer",
        "hf_kvret.prefill",
        "hf_kvret.replay",
        "hf_kvret.requests",
        "hf_kvret_model_patches",
        *HELPERS,
    ),
}
# These stand on the rest of hf_kvret; nothing in the rest may lean on them.
UPPER_FLOORS = (
    "hf_kvret.methods",
    "hf_kvret.registry",
    "hf_kvret.calibration",
    "hf_kvret.evaluation",
    "hf_kvret.benchmark",
    "hf_kvret.testing",
    "hf_kvret.cli",
    "hf_kvret.__main__",
)
KERNELS_MAY_IMPORT = {"torch", "triton", KERNELS, *sys.stdlib_module_names}

FLOOR_PLAN = (
    "hf_kvret/__init__.py",
    "hf_kvret/cache.py",
    "hf_kvret/layer.py",
    "hf_kvret/window.py",
    "hf_kvret/block.py",
    "hf_kvret/attention.py",
    "hf_kvret/merge.py",
    "hf_kvret/registry.py",
    "hf_kvret/cli.py",
    "hf_kvret/stores",
    "hf_kvret/methods/flat",
    "hf_kvret/methods/paris",
    "hf_kvret/methods/lrqk",
    "hf_kvret/methods/ctkvr",
    "hf_kvret/methods/a2ats",
    "hf_kvret/calibration",
    "hf_kvret/evaluation",
    "hf_kvret/testing",
    "kernels/hf_kvret_kernels",
    "model_patches/hf_kvret_model_patches",
)


def module_name(path: Path) -> str:
    """``pkg.sub.module`` of a source file; a package's name for its ``__init__.py``."""
    for package, folder in SOURCES.items():
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join((package, *parts)).removesuffix(".__init__")
    raise ValueError(f"{path} is outside {sorted(SOURCES)}")


def source_files() -> list[Path]:
    return sorted(path for folder in SOURCES.values() for path in folder.rglob("*.py"))


MODULES = {module_name(path): path for path in source_files()}


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below ``node`` but for bodies of ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield other
                yield from runtime_nodes(other)
            continue
        yield child
        yield from runtime_nodes(child)


def imports_of(module: str, source: str, *, is_package: bool, known: set[str]) -> set[str]:
    """Full names of the modules that ``source`` imports when it runs.

    ``from a import b`` is ``a.b`` where that is one of the ``known`` modules, else ``a``.
    """
    found: set[str] = set()
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add(name if name in known else base)
    return found


def imports(module: str) -> set[str]:
    path = MODULES[module]
    return imports_of(
        module,
        path.read_text(encoding="utf-8"),
        is_package=path.name == "__init__.py",
        known=set(MODULES),
    )


def inside(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def method_of(module: str) -> str | None:
    """``paris`` for ``hf_kvret.methods.paris.index``; None outside a method's folder."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["hf_kvret", "methods"] and len(parts) > 2 else None


def modules_in(room: str) -> list[str]:
    return [module for module in MODULES if inside(module, room)]


def test_the_floor_plan_is_there() -> None:
    missing = [name for name in FLOOR_PLAN if not (ROOT / name).exists()]
    assert not missing
    assert not [room for room in MAY_IMPORT if not modules_in(room)]
    assert modules_in(KERNELS)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = (room, *MAY_IMPORT[room])
    wrong = [
        f"{module} imports {name}"
        for module in modules_in(room)
        for name in imports(module)
        if name.split(".")[0] in OURS and not any(inside(name, other) for other in allowed)
    ]
    assert not wrong


def test_the_core_knows_no_method_and_no_registry() -> None:
    core = [
        module
        for module in modules_in("hf_kvret")
        if module != "hf_kvret" and not any(inside(module, upper) for upper in UPPER_FLOORS)
    ]
    assert "hf_kvret.cache" in core
    wrong = [
        f"{module} imports {name}"
        for module in core
        for name in imports(module)
        if name == "hf_kvret" or any(inside(name, upper) for upper in UPPER_FLOORS)
    ]
    assert not wrong


def test_kernels_import_only_the_standard_library_torch_and_triton() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in modules_in(KERNELS)
        for name in imports(module)
        if name.split(".")[0] not in KERNELS_MAY_IMPORT
    ]
    assert not wrong


def test_a_method_never_imports_another_method() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in modules_in("hf_kvret.methods")
        for name in imports(module)
        if method_of(name) is not None and method_of(name) != method_of(module)
    ]
    assert not wrong


def test_nothing_imports_the_command_line() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if module != "hf_kvret.__main__" and not inside(module, "hf_kvret.cli")
        for name in imports(module)
        if inside(name, "hf_kvret.cli")
    ]
    assert not wrong


def test_tests_are_no_packages() -> None:
    tests = ROOT / "tests"
    assert list(tests.rglob("test_*.py"))
    assert not [str(path) for path in tests.rglob("__init__.py")]


def undocumented(module: str, source: str) -> list[str]:
    """Public functions and classes at the top of a module, and the module, without docstring."""
    tree = ast.parse(source)
    missing = [] if ast.get_docstring(tree) or not tree.body else [module]
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ):
            missing.append(f"{module}.{node.name}")
    return missing


def test_public_functions_have_docstrings() -> None:
    library = modules_in("hf_kvret")
    assert library
    missing = [
        name
        for module in library
        for name in undocumented(module, MODULES[module].read_text(encoding="utf-8"))
    ]
    assert not missing


SAMPLE = '''
"""Sample."""
import hf_kvret.cli
from typing import TYPE_CHECKING
from . import window
from ..methods import paris
from .paged import PagedStore
if TYPE_CHECKING:
    from hf_kvret.cache import RetrievalCache
else:
    import numpy as np
def f():
    from hf_kvret import registry, __version__
def _g(): ...
'''


def test_the_reader_sees_every_form_of_import() -> None:
    known = {"hf_kvret.stores.window", "hf_kvret.methods.paris", "hf_kvret.registry"}
    found = imports_of("hf_kvret.stores.host", SAMPLE, is_package=False, known=known)
    assert found == {
        "hf_kvret.cli",
        "typing",
        "hf_kvret.stores.window",
        "hf_kvret.methods.paris",
        "hf_kvret.stores.paged",
        "numpy",
        "hf_kvret.registry",
        "hf_kvret",
    }
    package = imports_of("hf_kvret.stores", "from .host import H", is_package=True, known=known)
    assert package == {"hf_kvret.stores.host"}


def test_the_reader_misses_no_docstring() -> None:
    assert undocumented("sample", SAMPLE) == ["sample.f"]
    assert undocumented("sample", "x = 1") == ["sample"]


MEASURING = ("hf_kvret.evaluation", "hf_kvret.benchmark", "hf_kvret.cli", "hf_kvret.__main__")
# What of other rooms is command line.
COMMANDS = ("hf_kvret.loading", "hf_kvret.calibration.command")
MOST_MEASURING_LINES = 13_000


def with_packages(names: set[str]) -> set[str]:
    """``names`` and their packages, whose ``__init__`` runs first."""
    parts = [name.split(".") for name in names]
    return {".".join(one[:n]) for one in parts for n in range(2, len(one) + 1)} & set(MODULES)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of an import cycle; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_the_measuring_rooms_have_no_import_cycle() -> None:
    modules = [module for room in MEASURING for module in modules_in(room)]
    graph = {
        # A package's own modules import it by being there.
        module: {
            name
            for name in with_packages(imports(module)) - {module}
            if not module.startswith(f"{name}.")
        }
        for module in modules
    }
    assert len(graph) > 50
    assert cycle(graph) == []
    broken = {**graph, "hf_kvret.evaluation.results": {"hf_kvret.cli"}}
    assert "hf_kvret.evaluation.results" in cycle(broken)


def test_measuring_is_no_larger_than_it_may_be() -> None:
    """Evaluation, benchmark and command line; more of them belongs into ``examples``."""
    rooms = [*MEASURING, *COMMANDS]
    files = [MODULES[module] for module in MODULES if module.startswith(tuple(rooms))]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert 5_000 < lines <= MOST_MEASURING_LINES
