"""The package ships what it should, pins what it needs, and stays out of others' way."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

import hf_kvret

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES: dict[str, str] = PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"]
DATA_SUFFIXES = {".py", ".json", ".safetensors", ".md", ".typed"}
# Files that lie about in a checkout, and are in no sdist.
STRAYS = (
    "notes.txt",
    "tests/test_this.py",
    "hf_kvret/__pycache__/cache.cpython-311.pyc",
    "kernels/build/CMakeCache.txt",
    "kernels/hf_kvret_kernels/libhf_kvret_host.so",
)
# They have to fit the build of torch at hand, or bring one of their own.
UNPINNED = {"triton", "flash-attn", "vllm"}


def run_python(*args: str, folder: Path = ROOT, **variables: str) -> str:
    """Output of a fresh interpreter, at the root as ``python -m pytest`` starts one."""
    done = subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    results = [Requirement(line) for group in groups for line in group]
    return [one for one in results if canonicalize_name(one.name) != project["name"]]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    exact = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in exact}


def test_the_kernels_folder_does_not_shadow_a_package_of_that_name(tmp_path: Path) -> None:
    stand_in = tmp_path / "kernels"
    stand_in.mkdir()
    (stand_in / "__init__.py").write_text("WHO = 'the installed one'\n", encoding="utf-8")
    code = (
        f"import sys; assert sys.path[0] in ('', {str(ROOT)!r}); import kernels; print(kernels.WHO)"
    )
    assert run_python("-c", code, PYTHONPATH=str(tmp_path)) == "the installed one"


def test_every_direct_dependency_has_a_pin_that_it_allows() -> None:
    pinned = pins()
    expected = {canonicalize_name(one.name): one for one in requirements()}
    assert "triton" not in pinned, "a CUDA build of torch brings its own triton"
    assert sorted(set(expected) - set(pinned) - UNPINNED) == []
    refused = [
        f"{one} refuses {pinned[name]}"
        for name, one in expected.items()
        if name in pinned and not one.specifier.contains(pinned[name], prereleases=True)
    ]
    assert not refused


def test_the_promised_versions_are_allowed() -> None:
    allowed = {one.name: one.specifier for one in requirements()}
    assert all(version in allowed["transformers"] for version in ("5.18.0", "5.24.0"))
    assert not any(version in allowed["transformers"] for version in ("5.17.0", "5.25.0"))
    assert "2.11.0" in allowed["torch"]
    assert "3.6.0" in allowed["triton"]


def test_the_readme_has_one_test_and_one_demo_command() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("python3 -m venv")]
    assert sum(line.endswith(".ci/check") for line in commands) == 1
    assert sum(line.endswith("hf-kvret demo") for line in commands) == 1
    assert all("-c constraints.txt" in line for line in commands)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and beside it in ``source`` what it was made of."""
    pytest.importorskip("scikit_build_core", reason="building needs the test extra")
    folder = tmp_path_factory.mktemp("sdist")
    # A copy, so that the test doesn't depend on what lies about in the checkout.
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copy(ROOT / name, source / name)
    for name in ("hf_kvret", "kernels", "model_patches"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "build")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in STRAYS:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("not for others")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run_python("-c", code, str(folder), folder=source)
    for name in STRAYS:
        (source / name).unlink()
    [file] = folder.glob("*.tar.gz")
    return file


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist, made where there is no compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [source] = folder.iterdir()
    code = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1])"
    run_python("-c", code, str(folder), folder=source, CC="no-compiler", CXX="no-compiler")
    [file] = folder.glob("*.whl")
    return file


def test_the_sdist_holds_what_wheels_are_made_of_and_nothing_else(sdist: Path) -> None:
    source = sdist.parent / "source"
    with tarfile.open(sdist) as archive:
        names = {one.name.partition("/")[2] for one in archive if one.isfile()}
    expected = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert len(expected) > 300
    assert names == expected - {".gitignore"} | {"PKG-INFO"}


def test_the_wheel_serves_every_python_3_on_its_platform(wheel: Path) -> None:
    _, version, _, tags = parse_wheel_filename(wheel.name)
    [tag] = tags
    assert version == Version(hf_kvret.__version__)
    assert (tag.interpreter, tag.abi) == ("py3", "none")
    assert tag.platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")


def test_citation_and_changelog_name_this_version_and_one_date() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {hf_kvret.__version__}\n" in citation
    [date] = re.findall(r"^date-released: (\S+)$", citation, flags=re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{hf_kvret.__version__}] - {date}\n" in changelog


def test_one_public_address_is_named_everywhere() -> None:
    urls = PYPROJECT["project"]["urls"]
    repository = urls["Repository"]
    assert all(url.startswith(repository) for url in urls.values())
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f'repository-code: "{repository}"' in citation
    wheels = (ROOT / ".ci" / "wheels").read_text(encoding="utf-8")
    assert f"\nREPOSITORY={repository.removeprefix('https://github.com/')}\n" in wheels


def test_the_wheel_holds_the_packages_and_their_data(sdist: Path, wheel: Path) -> None:
    source = sdist.parent / "source"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        licence = archive.read(metadata.replace("METADATA", "licenses/LICENSE")).decode()
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    expected = {
        f"{package}/{path.relative_to(source / folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in (source / folder).rglob("*")
        if path.suffix in DATA_SUFFIXES and not path.is_relative_to(source / folder / "entry")
    }
    assert expected and "hf_kvret_cli/__init__.py" in expected
    assert not expected - names
    assert not [name for name in names if name.startswith("hf_kvret/entry/")]
    assert {name.split("/")[0] for name in names} == {*PACKAGES, metadata.split("/")[0]}
    assert re.search(r"Apache License\s+Version 2\.0", licence)
    assert "hf-kvret = hf_kvret_cli:main" in entry_points.replace("=", " = ").replace("  ", " ")
