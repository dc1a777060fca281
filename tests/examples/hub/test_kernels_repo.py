"""A kernel repository is what the package ``kernels`` loads, and computes the same."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version

from hf_kvret_kernels import host_library, prompt_attention, top_k

kernels = pytest.importorskip("kernels", reason="loading kernels of the hub needs the test extra")

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "hub" / "make_kernels_repo.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_kernels_repo", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository without the library."""
    path = tmp_path_factory.mktemp("repository")
    assert script.make_repository(path, []) == ["torch-cpu", "torch-cuda"]
    return path


@contextmanager
def package_absent() -> Iterator[None]:
    """Context in which the package can't be imported by its own name."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("hf_kvret")]:
            patch.delitem(sys.modules, name)
        for name in ("hf_kvret", "hf_kvret_kernels", "hf_kvret_model_patches"):
            patch.setitem(sys.modules, name, None)
        yield


@pytest.fixture(scope="module")
def loaded(folder: Path) -> ModuleType:
    with package_absent():
        return kernels.get_local_kernel(folder, backend="cpu")


def scores(count: int = 50) -> torch.Tensor:
    return torch.randn(2, 3, 1, count, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_an_operation_is_that_of_the_package(loaded: ModuleType, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    expected = top_k.top_k(scores(), 8, backend=backend)
    assert torch.equal(loaded.top_k.top_k(scores(), 8, backend=backend), expected)
    assert loaded.top_k is not top_k


def test_all_modules_are_there_where_the_package_is_absent(
    loaded: ModuleType, folder: Path
) -> None:
    """Operations import those of Triton when they run."""
    pytest.importorskip("triton")
    prefix = f"{loaded.__name__}."
    names = [one.name for one in pkgutil.walk_packages(loaded.__path__, prefix)]
    with package_absent():
        modules = [importlib.import_module(name) for name in names]
    files = {module.__file__ for module in modules}
    variant = folder / "build" / "torch-cpu"
    assert files == {str(path) for path in variant.rglob("*.py")} - {loaded.__file__}


def test_it_comes_from_the_hub_as_the_page_has_it(
    hub: Any, folder: Path, example: Callable[[str], str]
) -> None:
    paths = [path for path in folder.rglob("*") if path.suffix in (".py", ".json", ".md", ".toml")]
    hub.add(
        "kernels/NAME/kernels",
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths},
        ref="v0",
    )
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        kernels.get_kernel("NAME/kernels", version=0)
    names: dict[str, Any] = {"scores": scores(80)}
    exec(example("get_kernel"), names)
    assert torch.equal(names["positions"], top_k.top_k(scores(80), 64))
    assert len({"torch-cpu" in line for line in hub.bodies() if "/build/" in line}) == 1


def test_metadata_are_those_of_kernels(folder: Path) -> None:
    rust = pytest.importorskip("kernels._rust", reason="kernels 0.17 and newer have it")
    general = rust.Build.open(folder).general
    for variant in sorted((folder / "build").iterdir()):
        metadata = rust.Metadata.read_from_file(variant / "metadata.json")
        assert metadata.name.python_name == "hf_kvret_kernels" and metadata.version == 0
        assert metadata.backend.backend_type in general.backends and metadata.id.isidentifier()
        present = rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant)
        metadata.digest.validate(present)
    assert len(general.backends) == len(list((folder / "build").iterdir()))


@pytest.fixture(scope="module")
def library() -> Path:
    if host_library.why_not():
        pytest.skip(host_library.why_not())
    return Path(host_library.load()._name)


@pytest.fixture(scope="module")
def with_library(
    script: ModuleType, library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A repository with variants for this processor."""
    path = tmp_path_factory.mktemp("repository")
    assert len(script.make_repository(path, [library])) == 5
    return path


def test_a_variant_with_the_library_has_its_operations(
    with_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(host_library.PATH_VARIABLE, raising=False)
    kernel = kernels.get_local_kernel(with_library, backend="cpu")
    own = importlib.import_module(f"{kernel.__name__}.host_library")
    assert Path(own.load()._name).is_relative_to(with_library / "build")
    rows = torch.randn(3, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    (out, lse), (own_out, own_lse) = (
        each.prompt_attention(*rows, scale=0.5, causal_offset=0, backend="cpp")
        for each in (prompt_attention, kernel.prompt_attention)
    )
    assert torch.equal(out, own_out) and torch.equal(lse, own_lse)


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("12.8", "cu126"), ("12.6", "cu126"), ("13.1", "cu130"), ("12.4", "torch-cuda")],
)
def test_a_gpu_takes_the_library_of_its_cuda(
    script: ModuleType, library: Path, with_library: Path, cuda: str, expected: str
) -> None:
    from kernels import backends, variants

    chosen, _ = variants._resolve_variant_for_system(
        variants.get_variants_local(with_library / "build"),
        selected_backend=backends.CUDA(version=Version(cuda)),
        cpu=script.processor(library),
        os="linux",
        torch_version=Version("2.13"),
        torch_cxx11_abi=True,
        tvm_ffi_version=None,
    )
    assert expected in chosen[0].variant_str


def test_a_file_that_is_no_library_is_refused(script: ModuleType, tmp_path: Path) -> None:
    for content in (b"", b"\x7fELF" + bytes(16), b"MZ" + bytes(30)):
        (tmp_path / "x.so").write_bytes(content)
        with pytest.raises(ValueError, match=r"no library for x86_64 or aarch64 Linux"):
            script.make_repository(tmp_path / "out", [tmp_path / "x.so"])
