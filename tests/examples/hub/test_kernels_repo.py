"""A kernel repository is what the package ``kernels`` loads, and computes the same."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version

from hf_kvret_kernels import host_library, prompt_attention, top_k

kernels = pytest.importorskip("kernels", reason="loading kernels of the hub needs the test extra")

ROOT = Path(__file__).parents[3]
REPO = "alice/kernels"
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


@pytest.fixture(scope="module")
def loaded(folder: Path) -> ModuleType:
    return kernels.get_local_kernel(folder, backend="cpu")


def scores() -> torch.Tensor:
    return torch.randn(2, 3, 1, 50, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_an_operation_is_that_of_the_package(loaded: ModuleType, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    expected = top_k.top_k(scores(), 8, backend=backend)
    assert torch.equal(loaded.top_k.top_k(scores(), 8, backend=backend), expected)
    assert loaded.top_k is not top_k


def test_it_is_whole_where_the_package_is_absent(folder: Path) -> None:
    """All modules, in a process that can't import ours; Triton's are imported by operations."""
    code = f"""
import importlib, pkgutil, sys
from pathlib import Path
for name in ("hf_kvret_kernels", "hf_kvret", "hf_kvret_model_patches"):
    sys.modules[name] = None
from kernels import get_local_kernel
kernel = get_local_kernel(Path({str(folder)!r}), backend="cpu")
names = [one.name for one in pkgutil.walk_packages(kernel.__path__, kernel.__name__ + ".")]
for name in names:
    importlib.import_module(name)
assert kernel.top_k.__name__ in names
assert len(kernel.tuning.operations()) == 3
print(len(names))
"""
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules = {path for path in (folder / "build" / "torch-cpu").rglob("*.py")}
    assert int(done.stdout) == len(modules) - 1


def test_it_comes_from_the_hub(hub: Any, folder: Path) -> None:
    paths = [path for path in folder.rglob("*") if path.suffix in (".py", ".json", ".md", ".toml")]
    hub.add(
        f"kernels/{REPO}",
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths},
        ref="v0",
    )
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        kernels.get_kernel(REPO, version=0)
    kernel = kernels.get_kernel(REPO, version=0, backend="cpu", trust_remote_code=[REPO])
    assert torch.equal(kernel.top_k.top_k(scores(), 8), top_k.top_k(scores(), 8))
    assert not [line for line in hub.bodies() if "torch-cuda" in line]


def test_metadata_are_those_of_kernels(folder: Path) -> None:
    from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

    general = Build.open(folder).general
    for variant in sorted((folder / "build").iterdir()):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert metadata.name.python_name == "hf_kvret_kernels" and metadata.version == 0
        assert metadata.backend.backend_type in general.backends and metadata.id.isidentifier()
        present = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
        metadata.digest.validate(present)
    assert len(general.backends) == len(list((folder / "build").iterdir()))


@pytest.fixture(scope="module")
def library() -> Path:
    if host_library.why_not():
        pytest.skip(host_library.why_not())
    return Path(host_library.load()._name)


def test_a_variant_with_the_library_has_its_operations(
    script: ModuleType, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = script.make_repository(tmp_path, [library])
    assert len(variants) == 5
    monkeypatch.delenv(host_library.PATH_VARIABLE, raising=False)
    kernel = kernels.get_local_kernel(tmp_path, backend="cpu")
    own = importlib.import_module(f"{kernel.__name__}.host_library")
    assert Path(own.load()._name).is_relative_to(tmp_path / "build")
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
    script: ModuleType, library: Path, tmp_path: Path, cuda: str, expected: str
) -> None:
    from kernels import backends, variants

    script.make_repository(tmp_path, [library])
    chosen, _ = variants._resolve_variant_for_system(
        variants.get_variants_local(tmp_path / "build"),
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


def test_only_imports_change(script: ModuleType) -> None:
    source = "from hf_kvret_kernels import a\n    from hf_kvret_kernels.b.c import (\n# {}\n"
    source = source.format("hf_kvret_kernels")
    near = "from . import a\n    from .b.c import (\n# hf_kvret_kernels\n"
    assert script.relative(source, 1) == near
    assert script.relative(source, 2) == near.replace("from .", "from ..")
