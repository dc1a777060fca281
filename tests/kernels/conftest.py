"""Shared by tests of kernels: the compiled library, and its instruction sets."""

import ctypes
import warnings
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from hf_kvret_kernels import host_library as library

from .draws import library_threads

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@pytest.fixture(scope="session")
def compiled() -> None:
    """The compiled library; skips where there is none, and warns of one of other sources."""
    if library.why_not():
        pytest.skip(library.why_not())
    sources = library.load().hfk_sources
    sources.restype = ctypes.c_char_p
    if sources().decode() != digest_of_sources():
        warnings.warn("the compiled library is of other sources: install it again", stacklevel=1)


def digest_of_sources() -> str:
    """As CMakeLists.txt makes it."""
    files = [KERNELS / "CMakeLists.txt", *(KERNELS / "csrc").glob("*.[ch]*")]
    names = sorted((file.relative_to(KERNELS).as_posix(), file) for file in files)
    digests = [f"{name} {sha256(file.read_bytes()).hexdigest()}\n" for name, file in names]
    return sha256("".join(digests).encode()).hexdigest()


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
