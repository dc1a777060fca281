"""The rooms of the library, their order, and sums of lines: ``python tests/rooms.py``.

A room is a folder or a file at the top of a package. ``ROOMS`` lists them from the bottom: a room
imports only rooms below it. Imports are read from the source; those inside functions and below
``if TYPE_CHECKING:`` count too.
"""

import ast
import json
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS, PATCHES = "hf_kvret_kernels", "hf_kvret_model_patches"
SOURCES = {
    # First, as it lies below the next one.
    "hf_kvret_cli": ROOT / "hf_kvret" / "entry" / "hf_kvret_cli",
    "hf_kvret": ROOT / "hf_kvret",
    KERNELS: ROOT / "kernels" / KERNELS,
    PATCHES: ROOT / "model_patches" / PATCHES,
}
FACE = "hf_kvret"
"""The package itself: what a user imports."""

ROOMS = (
    *(KERNELS, PATCHES, "hf_kvret.version", "hf_kvret.options", "hf_kvret.contracts"),
    *("hf_kvret.models", "hf_kvret.stores", "hf_kvret.layer", "hf_kvret.observe"),
    *("hf_kvret.saved", "hf_kvret.artifacts", "hf_kvret.cache", "hf_kvret.methods"),
    *("hf_kvret.shelf", "hf_kvret.replay", "hf_kvret.lossless", "hf_kvret.attention"),
    *("hf_kvret.generate", "hf_kvret.registry", FACE, "hf_kvret.vllm", "hf_kvret.testing"),
    *("hf_kvret.lab", "hf_kvret.commands", "hf_kvret.cli", "hf_kvret.__main__", "hf_kvret_cli"),
)
LEVELS = {name: level for level, name in enumerate(ROOMS)}
LAB, COMMANDS, TESTING = "hf_kvret.lab", "hf_kvret.commands", "hf_kvret.testing"
CEILINGS = ROOT / "tests" / "ceilings.json"
"""The most lines that each sum may have. A number here may only fall."""


def module_name(path: Path) -> str:
    """``pkg.sub.module`` of a source file; a package's name for its ``__init__.py``."""
    for package, folder in SOURCES.items():
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join((package, *parts)).removesuffix(".__init__")
    raise ValueError(f"{path} is outside {sorted(SOURCES)}")


def source_files() -> list[Path]:
    """Every Python file of the packages."""
    return sorted(path for folder in SOURCES.values() for path in folder.rglob("*.py"))


MODULES = {module_name(path): path for path in source_files()}


def room_of(module: str) -> str:
    """The room of a module; KeyError for a module of ours that is in none."""
    parts = module.split(".")
    name = ".".join(parts[:2]) if parts[0] == FACE and len(parts) > 1 else parts[0]
    if name not in LEVELS:
        raise KeyError(f"{module} is in no room: add {name} to ROOMS in tests/rooms.py")
    return name


def imports_of(module: str, source: str, *, is_package: bool, known: set[str]) -> set[str]:
    """Full names of the modules that ``source`` imports anywhere.

    ``from a import b`` is ``a.b`` where that is one of the ``known`` modules, else ``a``.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                names.add(name if name in known else base)
    return names


@cache
def imports(module: str) -> set[str]:
    """Full names of what a module of ours imports."""
    path = MODULES[module]
    source = path.read_text(encoding="utf-8")
    is_package = path.name == "__init__.py"
    return imports_of(module, source, is_package=is_package, known=set(MODULES))


def upward(module: str, names: set[str]) -> list[str]:
    """What of ``names`` a module must not import, as it stands in a higher room."""
    level = LEVELS[room_of(module)]
    ours = (name for name in sorted(names) if name.split(".")[0] in SOURCES)
    return [f"{module} imports {name}" for name in ours if LEVELS[room_of(name)] > level]


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of an import circle; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def import_graph() -> dict[str, set[str]]:
    """What each module imports of ours, with the packages whose ``__init__`` runs first."""
    graph = {}
    for module in MODULES:
        parts = [name.split(".") for name in imports(module)]
        names = {".".join(one[:n]) for one in parts for n in range(2, len(one) + 1)}
        # A package's own modules import it by being there.
        graph[module] = {
            name for name in names & set(MODULES) - {module} if not module.startswith(f"{name}.")
        }
    return graph


def line_counts() -> Counter[str]:
    """Lines of Python by room."""
    counts: Counter[str] = Counter()
    for module, path in MODULES.items():
        counts[room_of(module)] += len(path.read_text(encoding="utf-8").splitlines())
    return counts


def sums() -> dict[str, int]:
    """Lines of Python, and of C++ among kernels, of the parts that have a ceiling."""
    counts = line_counts()
    parts = {KERNELS: "kernels", LAB: "lab", COMMANDS: "lab", TESTING: "testing"}
    found = Counter({"kernels": _lines("kernels/csrc", ".cpp", ".h")})
    for name, count in counts.items():
        found[parts.get(name, "library")] += count
    return {**found, "tests": _lines("tests", ".py"), "examples": _lines("examples", ".py")}


def _lines(folder: str, *endings: str) -> int:
    files = (path for path in (ROOT / folder).rglob("*") if path.suffix in endings)
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main() -> None:
    """Print the rooms, their sums and what is wrong with their imports."""
    counts = line_counts()
    for room in ROOMS:
        print(f"{room:28} {counts[room]:6} lines")
    ceilings = json.loads(CEILINGS.read_text(encoding="utf-8"))
    for name, lines in sums().items():
        print(f"{name:28} {lines:6} of {ceilings[name]:6} lines")
    for module in MODULES:
        for each in upward(module, imports(module)):
            print(f"upward: {each}")
    print(f"circle: {' -> '.join(cycle(import_graph())) or 'none'}")


if __name__ == "__main__":
    main()
