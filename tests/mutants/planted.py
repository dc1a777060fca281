"""Small faults that are planted in the product, and the test that notices each.

    python tests/mutants/planted.py     plant those of faults.json, one by one; commit first

A fault names a text that stands once in its file, and the text in place of it: when code moves,
move its fault. It meets the tests that its row names, tests of its room, then some cases of
conformance, each for half a minute of CPU time. The status is 1 if one survives.
"""

import ast
import importlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
import rooms

ROOT = rooms.ROOT
CONFORMANCE = ["tests/conformance/test_matrix.py", "-k", "llama"]
LIMIT_S, IMPORT = 30, "importing"


@dataclass(frozen=True)
class Fault:
    """A small change of the library that some default test must notice.

    Attributes:
        name: of the fault.
        file: path from the root of the repository.
        right: the text in the file, which stands there exactly once.
        wrong: the text there when the fault is planted.
        tests: pytest's arguments for tests of another room, where only these notice it.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = ()


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


def room_tests(file: str) -> list[str]:
    """The six test files of the file's room that are nearest to it, the nearest first."""
    module = rooms.module_name(ROOT / file)
    room, word = rooms.room_of(module), module.rpartition(".")[2]
    name = re.split("[._]", room)[-1]

    def distance(test: str) -> tuple[bool, bool, int]:
        mentions = (ROOT / test).read_text(encoding="utf-8").count(word)
        return not test.endswith(f"_{word}.py"), module not in imported(ROOT / test), -mentions

    near = (test for test in tests_of(file) if test.split("/")[1] in (name, f"test_{name}.py"))
    return sorted(near, key=distance)[:6]


def first_failure(arguments: list[str]) -> tuple[str, bool]:
    """The first test that fails ("": none), in its own process, and whether time ended in it."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "started")).write_text(IMPORT)
        if not (child := os.fork()):
            os.setsid()
            for stream in range(3):
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
            signal.alarm(20 * LIMIT_S)
            hooks = SimpleNamespace(pytest_runtest_logstart=lambda nodeid: path.write_text(nodeid))
            options = ["-x", "-q", "-n0", "--timeout=0", "-p", "no:cacheprovider"]
            os._exit(pytest.main([*options, *arguments], plugins=[hooks]))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        test = "" if status in (0, 5) else path.read_text()
    return test, -status in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)


def outcome(fault: Fault, clean: set[str]) -> str:
    """The first test that notices, else ``survived``. ``clean``: tests known to pass without it."""
    path, unsure = ROOT / fault.file, ""
    times = path.stat()
    for tests in filter(None, ([*fault.tests], room_tests(fault.file), CONFORMANCE)):
        before = plant(fault)
        try:
            test, is_late = first_failure(tests)
        finally:
            path.write_text(before, encoding="utf-8")
            # Python may use its compiled files again.
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if test and not is_late and (test in clean or not first_failure([test])[0]):
            clean.add(test)
            return test
        if test:
            unsure = f", but the time ended in {test}" if is_late else f", but for {test}"
    return f"survived{unsure}"


def _prepare() -> set[str]:
    """The first of the tests that are known to pass without a fault."""
    os.chdir(ROOT)
    # As in conftest.py, kernels are interpreted. Slow imports are done once, before the forks.
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("torch._dynamo", "transformers.generation", "triton.language"):
        importlib.import_module(name)
    return {IMPORT}


def run_planted() -> int:
    """Print the fate of each fault of ``FAULTS``; 1 where one survives."""
    clean, fates = _prepare(), []
    for fault in FAULTS:
        fates.append(outcome(fault, clean))
        print(f"{fault.name}: {fates[-1]}", flush=True)
    return int(any(fate.startswith("survived") for fate in fates))


if __name__ == "__main__":
    sys.exit(run_planted())
