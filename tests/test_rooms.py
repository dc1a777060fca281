"""Every room of the library imports only rooms below it, and sums of lines only fall."""

import json
import sys

import pytest

from .rooms import (
    CEILINGS,
    FACE,
    KERNELS,
    MODULES,
    ROOMS,
    ROOT,
    cycle,
    import_graph,
    imports,
    imports_of,
    room_of,
    sums,
    upward,
)

MOST_FILES_AT_THE_ROOT = 6
MOST_FILE_LINES = 600
KERNELS_MAY_IMPORT = {"torch", "triton", KERNELS, *sys.stdlib_module_names}


def method_of(module: str) -> str | None:
    """``paris`` for ``hf_kvret.methods.paris.index``; None outside a method's folder."""
    parts = module.split(".")
    return parts[2] if parts[:2] == [FACE, "methods"] and len(parts) > 2 else None


def modules_in(room: str) -> list[str]:
    return [module for module in MODULES if room_of(module) == room]


def test_every_room_is_there() -> None:
    assert not [room for room in ROOMS if not modules_in(room)]


def test_at_the_root_is_only_what_a_user_meets() -> None:
    files = [path.name for path in (ROOT / "hf_kvret").glob("*.py")]
    assert len(files) <= MOST_FILES_AT_THE_ROOT, files


def test_no_import_runs_upward() -> None:
    """Those inside functions and of types included."""
    assert not [each for module in MODULES for each in upward(module, imports(module))]
    assert upward("hf_kvret.layer.layer", {"hf_kvret.cache"})
    assert upward("hf_kvret.layer.layer", {"hf_kvret"})
    assert upward("hf_kvret.replay.graph", {"hf_kvret.attention.masks"})
    assert upward("hf_kvret.registry", {"hf_kvret.lab.tune"})
    assert not upward("hf_kvret.layer.layer", {"hf_kvret.contracts.index", "torch"})


def test_there_is_no_import_circle() -> None:
    graph = import_graph()
    assert len(graph) > 200
    assert cycle(graph) == []
    broken = {**graph, "hf_kvret.lab.report.results": {"hf_kvret.cli"}}
    assert "hf_kvret.lab.report.results" in cycle(broken)


@pytest.mark.parametrize(("name", "ceiling"), json.loads(CEILINGS.read_text("utf-8")).items())
def test_a_sum_of_lines_stays_below_its_ceiling(name: str, ceiling: int) -> None:
    assert 0 < sums()[name] <= ceiling


def test_no_file_is_too_long_to_read() -> None:
    """Kernels are exempt."""
    files = {path for module, path in MODULES.items() if room_of(module) != KERNELS}
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {path: count for path, count in lengths.items() if count > MOST_FILE_LINES}


def test_a_module_outside_all_rooms_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"add hf_kvret\.attic to ROOMS"):
        room_of("hf_kvret.attic.box")


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
'''


def test_the_reader_sees_every_form_of_import() -> None:
    known = {"hf_kvret.stores.window", "hf_kvret.methods.paris", "hf_kvret.registry"}
    found = imports_of("hf_kvret.stores.host", SAMPLE, is_package=False, known=known)
    expected = known | {"hf_kvret.cli", "hf_kvret.cache", "hf_kvret.stores.paged", "hf_kvret"}
    assert found == expected | {"typing", "numpy"}
    package = imports_of("hf_kvret.stores", "from .host import H", is_package=True, known=known)
    assert package == {"hf_kvret.stores.host"}
