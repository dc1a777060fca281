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

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    # First, as it lies below the next one.
    "hf_kvret_cli": ROOT / "hf_kvret" / "entry" / "hf_kvret_cli",
    "hf_kvret": ROOT / "hf_kvret",
    "hf_kvret_kernels": ROOT / "kernels" / "hf_kvret_kernels",
    "hf_kvret_model_patches": ROOT / "model_patches" / "hf_kvret_model_patches",
}
OURS = tuple(SOURCES)

KERNELS = "hf_kvret_kernels"

# From the ground up. A module imports only what stands lower, or is of its own room. A name stands
# for all modules below it that are not listed themselves.
LEVELS: tuple[tuple[str, ...], ...] = (
    (KERNELS, "hf_kvret_model_patches", "hf_kvret.loading", "hf_kvret.version", "hf_kvret.models"),
    (
        "hf_kvret.options.checks",
        "hf_kvret.options.sizes",
        "hf_kvret.models.compatibility",
        "hf_kvret.saved.identity",
        "hf_kvret.saved.model_facts",
    ),
    ("hf_kvret.options.config",),
    ("hf_kvret.layer",),
    # What a cache loads of what was learned, and how it is learned.
    ("hf_kvret.stores", "hf_kvret.saved", "hf_kvret.artifacts"),
    ("hf_kvret.cache",),
    ("hf_kvret.attention", "hf_kvret.replay"),
    ("hf_kvret.methods",),
    ("hf_kvret.registry",),
    ("hf_kvret",),
    ("hf_kvret.testing",),
    ("hf_kvret.lab.coverage",),
    # What measures, and the commands; ``calibrate`` learns from texts as evaluation reads them.
    (
        "hf_kvret.lab.evaluate",
        "hf_kvret.lab.bench",
        "hf_kvret.lab.plan",
        "hf_kvret.lab.calibrate.command",
        "hf_kvret.lab.calibrate.command_options",
        "hf_kvret.lab.calibrate.inspection",
        "hf_kvret.lab.calibrate.sources",
        "hf_kvret.lab.calibrate.verification",
        "hf_kvret.lab.coverage.command",
        "hf_kvret.lab.tune",
    ),
    ("hf_kvret.cli",),
    ("hf_kvret.__main__", "hf_kvret_cli"),
)
# These have nothing to do with each other, though they stand on one level.
APART = ("hf_kvret.stores", "hf_kvret.saved", "hf_kvret.attention", "hf_kvret.replay")
MOST_FILES_AT_THE_ROOT = 8
KERNELS_MAY_IMPORT = {"torch", "triton", KERNELS, *sys.stdlib_module_names}

FLOOR_PLAN = (
    "hf_kvret/__init__.py",
    "hf_kvret/cache.py",
    "hf_kvret/options/config.py",
    "hf_kvret/registry.py",
    "hf_kvret/cli.py",
    "hf_kvret/core",
    "hf_kvret/entry",
    "hf_kvret/integration",
    "hf_kvret/io",
    "hf_kvret/stores",
    "hf_kvret/methods/flat",
    "hf_kvret/methods/paris",
    "hf_kvret/methods/lrqk",
    "hf_kvret/methods/ctkvr",
    "hf_kvret/methods/a2ats",
    "hf_kvret/methods/aqua",
    "hf_kvret/replay",
    "hf_kvret/calibration",
    "hf_kvret/evaluation",
    "hf_kvret/testing",
    "hf_kvret/tune",
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


def level_of(module: str) -> tuple[int, str]:
    """Number of the level a module stands on, and its room there."""
    rooms = [(len(room), level, room) for level, rooms in enumerate(LEVELS) for room in rooms]
    _, level, room = max(one for one in rooms if inside(module, one[2]))
    return level, room


def imports_upward(module: str, names: set[str]) -> list[str]:
    """What a module that imports ``names`` must not."""
    level, room = level_of(module)
    wrong = []
    for name in names:
        if name.split(".")[0] not in OURS:
            continue
        other, other_room = level_of(name)
        apart = other_room != room and {room, other_room} <= set(APART)
        if other > level or (other == level and apart):
            wrong.append(f"{module} imports {name}")
    return wrong


def test_the_floor_plan_is_there() -> None:
    assert not [name for name in FLOOR_PLAN if not (ROOT / name).exists()]
    assert not [room for rooms in LEVELS for room in rooms if not modules_in(room)]
    assert modules_in(KERNELS)


def test_at_the_root_is_only_what_a_user_meets() -> None:
    files = [path.name for path in SOURCES["hf_kvret"].glob("*.py")]
    assert len(files) <= MOST_FILES_AT_THE_ROOT, files


def test_no_import_runs_upward() -> None:
    """Those inside functions included."""
    wrong = [each for module in MODULES for each in imports_upward(module, imports(module))]
    assert not wrong
    assert imports_upward("hf_kvret.layer.layer", {"hf_kvret.stores.paged"})
    assert imports_upward("hf_kvret.layer.layer", {"hf_kvret"})
    assert imports_upward("hf_kvret.replay.graph", {"hf_kvret.attention.masks"})
    assert not imports_upward("hf_kvret.layer.layer", {"hf_kvret.contracts.index", "torch"})


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


MEASURING = ("hf_kvret.lab.evaluate", "hf_kvret.lab.bench", "hf_kvret.cli", "hf_kvret.__main__")
# What of other rooms is command line.
COMMANDS = ("hf_kvret.loading", "hf_kvret.lab.calibrate.command")
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


def test_there_is_no_import_cycle() -> None:
    """Neither with the imports inside functions."""
    graph = {
        # A package's own modules import it by being there.
        module: {
            name
            for name in with_packages(imports(module)) - {module}
            if not module.startswith(f"{name}.")
        }
        for module in MODULES
    }
    assert len(graph) > 250
    assert cycle(graph) == []
    broken = {**graph, "hf_kvret.lab.report.results": {"hf_kvret.cli"}}
    assert "hf_kvret.lab.report.results" in cycle(broken)


def test_measuring_is_no_larger_than_it_may_be() -> None:
    """Evaluation, benchmark and command line; more of them belongs into ``examples``."""
    rooms = [*MEASURING, *COMMANDS]
    files = [MODULES[module] for module in MODULES if module.startswith(tuple(rooms))]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert 5_000 < lines <= MOST_MEASURING_LINES
