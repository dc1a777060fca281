"""Plant each fault of ``faults.json`` in this checkout and see whether the tests notice.

    python tests/mutants/run.py           every fault, on the tests of its module
    python tests/mutants/run.py NAME ...  these

A fault is planted in the file itself and taken back afterwards, also after Ctrl-C; files with
changes that are not committed are refused. Ends with status 1 if a fault survives. A fault names a
text that stands once in its file, and the text in place of it: when code moves, move its fault.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import rooms

ROOT = rooms.ROOT


@dataclass(frozen=True)
class Fault:
    """A small change of the library that some default test must notice.

    Attributes:
        name: of the fault.
        file: path from the root of the repository.
        right: the text in the file, which stands there exactly once.
        wrong: the text there when the fault is planted.
    """

    name: str
    file: str
    right: str
    wrong: str


FAULTS = [
    Fault(**row)
    for row in json.loads(Path(__file__).with_name("faults.json").read_text(encoding="utf-8"))
]


@cache
def imported(test: Path) -> set[str]:
    """Full names of what a test file imports, with and without the last part.

    What modules of the tests import counts for the tests that import these.
    """
    names: set[str] = set()
    files, done = [test], {test}
    while files:
        file = files.pop()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level:
                home = file.parents[node.level - 1] / (node.module or "").replace(".", "/")
                modules = [home, *(home / alias.name for alias in node.names)]
                paths = {module.with_suffix(".py") for module in modules}
                files += [path for path in paths - done if path.is_file()]
                done |= paths
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def tests_of(file: str) -> list[str]:
    """Test files that import the module or its package, bear its name or lie in its folder."""
    module = rooms.module_name(ROOT / file)
    package, _, stem = module.rpartition(".")
    wanted = {module, package} - {"hf_kvret"}
    # Tests mirror the source: those of a room are in the folder of its name.
    folder = ROOT / "tests" / package.removeprefix("hf_kvret").strip(".").replace(".", "/")
    return [
        str(test.relative_to(ROOT))
        for test in sorted((ROOT / "tests").rglob("test_*.py"))
        if imported(test) & wanted or test.stem == f"test_{stem}" or test.parent == folder
    ]


def plant(fault: Fault) -> str:
    """Put ``fault`` into its file; returns what the file held.

    Raises:
        ValueError: the file has changed, so that the fault has no place or several.
    """
    path = ROOT / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise ValueError(
            f"{fault.name}: {fault.right!r} stands {text.count(fault.right)} times in "
            f"{fault.file}: bring tests/mutants/faults.json up to date"
        )
    path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    return text


def is_caught(fault: Fault) -> bool:
    """Whether some test of its module fails with ``fault``."""
    tests, before = tests_of(fault.file), plant(fault)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n2", "-p", "no:cacheprovider", *tests]
    try:
        status = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode
    finally:
        (ROOT / fault.file).write_text(before, encoding="utf-8")
    # 2: with several processes, -x ends as an interruption.
    if status not in (0, 1, 2):
        raise RuntimeError(f"pytest ended with status {status}: {' '.join(command)}")
    return status != 0


def main() -> int:
    """Run the faults that were named, or all; returns the exit status."""
    parser = argparse.ArgumentParser(usage=__doc__)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"no fault is called {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    status = ["git", "status", "--porcelain", "--", *{fault.file for fault in chosen}]
    changed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if changed:
        parser.error(f"commit these first, the faults are planted in them:\n{changed}")
    survivors = 0
    for number, fault in enumerate(chosen, 1):
        result = "caught" if is_caught(fault) else "survived"
        survivors += result == "survived"
        print(f"{number}/{len(chosen)} {fault.name}: {result}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
