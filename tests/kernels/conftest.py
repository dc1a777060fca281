"""Shared by tests of kernels: the compiled library, and its instruction sets."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from hf_kvret_kernels import host_library as library

from .draws import library_threads

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a library built from these sources: the one that is named, or the installed one."""
    named = os.environ.get(library.PATH_VARIABLE)
    if named:
        assert sources_of(Path(named)) == digest_of_sources(), f"{named} is of other sources"
        return named
    installed = next((file for file in library._places() if file.is_file()), None)
    if installed is not None and sources_of(installed) == digest_of_sources():
        return str(installed)
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed: the library can't be built")
    folder = tmp_path_factory.mktemp("host_attention")
    for command in (["-S", str(KERNELS), "-B", str(folder)], ["--build", str(folder), "-j2"]):
        done = subprocess.run(
            ["cmake", *command], capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
    file = folder / library.FILE_NAME
    if not file.exists():
        pytest.skip("no C++ compiler: the library can't be built")
    assert sources_of(file) == digest_of_sources()
    return str(file)


def sources_of(file: Path) -> str | None:
    """What a library says that it was built from; None: it does not say."""
    try:
        sources = ctypes.CDLL(str(file)).hfk_sources
    except AttributeError:
        return None
    sources.restype = ctypes.c_char_p
    return sources().decode()


def digest_of_sources() -> str:
    """As CMakeLists.txt makes it."""
    files = [KERNELS / "CMakeLists.txt", *(KERNELS / "csrc").glob("*.[ch]*")]
    names = sorted((file.relative_to(KERNELS).as_posix(), file) for file in files)
    digests = [f"{name} {sha256(file.read_bytes()).hexdigest()}\n" for name, file in names]
    return sha256("".join(digests).encode()).hexdigest()


@pytest.fixture
def compiled(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is the one built from these sources."""
    monkeypatch.setenv(library.PATH_VARIABLE, built)


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set that the compiled library uses; skips where this processor lacks it."""
    name: str = request.param
    if name not in library.paths():
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv(library.ISA_VARIABLE, name)
    return name


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The compiled library uses so many."""
    with library_threads(request.param):
        yield request.param
