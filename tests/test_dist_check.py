"""The check of sdist and wheels before a release notices what is wrong with them."""

import importlib
import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hf_kvret_kernels import host_library

pytest.importorskip("elftools", reason="reading a library needs the test extra")

ROOT = Path(__file__).resolve().parents[1]
VERSION = "1.2.3"
METADATA = f"Metadata-Version: 2.1\nName: hf-kvret\nVersion: {VERSION}\n"
HEADER = "kernels/csrc/hf_kvret_host.h"
LIBRARY = "hf_kvret_kernels/libhf_kvret_host.so"
# Files of an sdist, and where they lie in a wheel.
SOURCES = {
    "hf_kvret/__init__.py": "hf_kvret/__init__.py",
    "hf_kvret/entry/hf_kvret_cli/__init__.py": "hf_kvret_cli/__init__.py",
    "kernels/hf_kvret_kernels/paged.py": "hf_kvret_kernels/paged.py",
    "model_patches/hf_kvret_model_patches/patch.py": "hf_kvret_model_patches/patch.py",
}


sys.path.append(str(ROOT / ".ci"))
dist_check = importlib.import_module("dist_check")


def wheel_name(architecture: str) -> str:
    return f"hf_kvret-{VERSION}-py3-none-manylinux_2_28_{architecture}.whl"


def wheel_files(architecture: str) -> dict[str, str]:
    tag = f"py3-none-manylinux_2_28_{architecture}"
    info = f"hf_kvret-{VERSION}.dist-info"
    return {
        **{target: f"# {source}" for source, target in SOURCES.items()},
        LIBRARY: "compiled",
        f"{info}/METADATA": METADATA,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
    }


SDIST = {
    **{source: f"# {source}".encode() for source in SOURCES},
    "PKG-INFO": METADATA.encode(),
    HEADER: b"HFK_API int32_t hfk_version(void);\n",
}


def write_wheel(folder: Path, architecture: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / wheel_name(architecture), "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sdist and two wheels with nothing wrong, whose libraries are not looked into."""
    monkeypatch.setattr(dist_check, "library_faults", lambda path, architecture: iter(()))
    monkeypatch.setattr(dist_check, "exports", lambda path: {"hfk_version"})
    monkeypatch.setattr(dist_check, "granted", lambda wheel: wheel.stem.partition("none-")[2])
    with tarfile.open(tmp_path / f"hf_kvret-{VERSION}.tar.gz", "w:gz") as archive:
        for name, data in SDIST.items():
            member = tarfile.TarInfo(f"hf_kvret-{VERSION}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    for architecture in dist_check.MACHINES:
        write_wheel(tmp_path, architecture, wheel_files(architecture))
    return tmp_path


def test_good_files_pass(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dist_check.main([str(folder)]) == 0
    assert "hold what they should" in capsys.readouterr().out
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (LIBRARY, None, f"no {LIBRARY}"),
        ("hf_kvret/__init__.py", "# changed", "hf_kvret/__init__.py differs"),
        ("hf_kvret.libs/libgomp.so.1", "elf", "hf_kvret.libs/libgomp.so.1 is not of the sdist"),
        (f"hf_kvret-{VERSION}.dist-info/METADATA", f"{METADATA}Author: x\n", "METADATA differs"),
        (
            f"hf_kvret-{VERSION}.dist-info/WHEEL",
            "Root-Is-Purelib: true\nTag: py3-none-any\n",
            "WHEEL says ['py3-none-any'], purelib true",
        ),
    ],
)
def test_a_wheel_with_a_fault_is_named(
    folder: Path, name: str, text: str | None, fault: str
) -> None:
    files = wheel_files("aarch64")
    if text is None:
        del files[name]
    else:
        files[name] = text
    write_wheel(folder, "aarch64", files)
    [message] = dist_check.check(folder)
    assert wheel_name("aarch64") in message
    assert fault in message


def test_missing_and_foreign_files_are_named(folder: Path) -> None:
    wheel = folder / wheel_name("x86_64")
    other = wheel.with_name(wheel.name.replace("2_28", "2_39"))
    wheel.rename(other)
    assert list(dist_check.check(folder)) == [f"there is no {wheel.name}"]
    other.unlink()
    assert list(dist_check.check(folder)) == ["1 sdists and 1 wheels instead of 1 and 2"]


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("granted", lambda wheel: "manylinux_2_39_x86_64", "grants manylinux_2_39_x86_64"),
        ("exports", lambda path: set(), "does not export ['hfk_version']"),
        ("MOST_BYTES", 1, "has more than 1 bytes"),
    ],
)
def test_a_distribution_that_no_index_would_take_is_named(
    name: str, value: object, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist_check, name, value)
    faults = list(dist_check.check(folder))
    assert len(faults) >= 2 and all(fault in each for each in faults)


def test_the_compiled_library_needs_no_openmp_and_exports_its_interface(tmp_path: Path) -> None:
    compiled = next((file for file in host_library._places() if file.is_file()), None)
    if compiled is None:
        pytest.skip("the library is not compiled")
    # A copy: as what is checked comes from a wheel.
    library = Path(shutil.copy(compiled, tmp_path))
    if library.read_bytes()[:4] != b"\x7fELF":
        pytest.skip("no ELF file on this system")
    interface = dist_check.declared((ROOT / HEADER).read_text(encoding="utf-8"))
    assert len(interface) > 5
    assert interface == dist_check.exports(library)
    assert not [name for name in dist_check.needs(library) if "omp" in name or "torch" in name]
