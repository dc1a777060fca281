"""Small changes of the product, and the test that notices each: a measure for cuts of tests.

    python tests/mutants/sampled.py --planted       plant the faults of faults.json; commit first
    python tests/mutants/sampled.py --draw 120      draw others into sampled.json, by cosmic-ray
    python tests/mutants/sampled.py --run           plant those that have no outcome there
    python tests/mutants/sampled.py --run FILE      the same in code that changed since
    python tests/mutants/sampled.py --compare FILE  FILE's outcomes beside those of sampled.json

A fault of faults.json names a text that stands once in its file, and the text in place of it: when
code moves, move its fault. ``--planted`` ends with status 1 if one survives.

A mutant changes one line, by whose text it is found again. It meets tests of its room, then some
cases of conformance, each for half a minute of CPU time. Rooms take turns, so a part tells of all.
An entry may have the outcome of an earlier commit, too, as ``before``.
"""

import argparse
import ast
import importlib
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
import rooms

ROOT = rooms.ROOT
SAMPLED = Path(__file__).with_suffix(".json")
# Cosmic-ray's operators that seldom leave the meaning as it is.
OPERATORS = re.compile(
    r"core/(AddNot|NumberReplacer|Replace(True|False|And|Or|Break|Continue)With\w+|"
    r"Replace\w+Operator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|Add_Sub|"
    r"Sub_Add|Mul_Add|Div_Mul|FloorDiv_Mul|Mod_Mul|BitAnd_BitOr|Delete_Not|USub_UAdd))"
)
ROOMS = [*rooms.ROOMS[: rooms.LEVELS[rooms.FACE]], "hf_kvret.vllm"]
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


def draw(count: int) -> list[dict[str, Any]]:
    """Mutants of lines drawn from each room, of larger rooms more."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    rng = random.Random(0)
    names = filter(OPERATORS.fullmatch, operator_names())
    operators = {name.removeprefix("core/"): get_operator(name)() for name in names}
    sizes = {room: rooms.line_counts()[room] ** 0.5 for room in ROOMS}
    entries = []
    for room, size in sizes.items():
        lines: dict[tuple[Path, int], dict[str, int]] = defaultdict(dict)
        for path in _sources([room]):
            nodes = list(ast_nodes(get_ast(path.read_text(encoding="utf-8"))))
            for name, operator in operators.items():
                spans = [span for node in nodes for span in operator.mutation_positions(node)]
                for number, ((line, _), _) in enumerate(spans):
                    lines[path, line][name] = number
        faults: list[Fault] = []
        quota = max(2, round(count * size / sum(sizes.values())))
        for path, line in rng.sample(list(lines), len(lines)):
            if len(faults) == quota:
                break
            name, number = rng.choice(list(lines[path, line].items()))
            old = path.read_text(encoding="utf-8")
            texts = old.splitlines()
            new = mutate_code(old, operators[name], number).splitlines()
            right, wrong = f"\n{texts[line - 1]}\n", f"\n{new[line - 1]}\n"
            texts[line - 1] = new[line - 1]
            # Several lines, or one that stands twice, could not be found again.
            if new == texts and old.count(right) == 1:
                file = str(path.relative_to(ROOT))
                faults.append(Fault(f"{file}:{line}:{name}", file, right, wrong))
        entries += [((at + 0.5) / quota, room, fault) for at, fault in enumerate(faults)]
    entries.sort(key=lambda entry: entry[:2])
    return [{"room": room, **vars(fault), "outcome": ""} for _, room, fault in entries]


def _sources(names: list[str]) -> list[Path]:
    return [path for module, path in rooms.MODULES.items() if rooms.room_of(module) in names]


def place_of(fault: Fault) -> Fault | None:
    """The fault where its line stands once now, in its file or where that has moved to."""
    home = ROOT / fault.file
    for path in [home] if home.exists() else _sources(ROOMS):
        if path.read_text(encoding="utf-8").count(fault.right) == 1:
            return replace(fault, file=str(path.relative_to(ROOT)))
    return None


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


def run(results: Path) -> None:
    """Plant the mutants that have no outcome in ``results``, and write each outcome at once."""
    entries = _read(results) if results.exists() else [e | {"outcome": ""} for e in _read(SAMPLED)]
    clean = _prepare()
    for number, entry in enumerate(entries, 1):
        if not entry["outcome"]:
            start = time.monotonic()
            place = place_of(Fault(*(entry[key] for key in ("name", "file", "right", "wrong"))))
            entry["outcome"] = outcome(place, clean) if place else "gone"
            _write(results, entries)
            result = f"{entry['outcome']} ({time.monotonic() - start:.0f} s)"
            print(f"{number}/{len(entries)} {entry['name']}: {result}", flush=True)


def compare(results: Path) -> int:
    """Print how many fates changed, and what lives now; 1 where something does."""
    old, new = ({e["name"]: e["outcome"] for e in _read(path)} for path in (SAMPLED, results))
    fates = {name: (_fate(old[name]), _fate(new[name])) for name in old}
    for pair, count in sorted(Counter(fates.values()).items()):
        print(f"{count:4} {' -> '.join(pair)}")
    lost = [name for name, pair in fates.items() if pair == ("noticed", "alive")]
    print("\n".join(f"{name} was noticed by {old[name]}" for name in lost))
    return 1 if lost else 0


def _fate(result: str) -> str:
    if result.startswith("survived"):
        return "alive"
    if result.startswith("gone"):
        return "gone"
    return "noticed" if result else "to run"


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(path: Path, entries: list[dict[str, Any]]) -> None:
    rows = ",\n".join(json.dumps(entry) for entry in entries)
    path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--draw", type=int)
    parser.add_argument("--run", type=Path, nargs="?", const=SAMPLED)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    if options.planted:
        sys.exit(run_planted())
    if options.draw:
        _write(SAMPLED, draw(options.draw))
    if options.run:
        run(options.run)
    sys.exit(compare(options.compare) if options.compare else 0)
