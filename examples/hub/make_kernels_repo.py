"""Makes the folder of a kernel repository of hf_kvret_kernels, as the package ``kernels`` loads it.

    python examples/hub/make_kernels_repo.py FOLDER [--library FILE ...]

``kernels`` imports a package under a name of its own, so that several versions can be loaded in one
process. Imports of the package by its own name become relative here, and ``__init__.py`` imports
the operations: ``get_local_kernel(FOLDER).top_k.top_k(scores, 8)``.

``build/torch-cpu`` and ``build/torch-cuda`` have the Python code: torch and Triton, for every
platform. A file of ``--library``, one a processor, makes variants that have the C++ library too,
for Linux on that processor. A wheel has it as ``hf_kvret_kernels/libhf_kvret_host.so``.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import struct
import tomllib
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
PACKAGE = KERNELS / "hf_kvret_kernels"
LIBRARY = "libhf_kvret_host.so"
# The library uses no symbol of torch, so it serves whatever has the stable ABI of hf_kvret's oldest
# torch. A variant for CUDA x.y is taken on x.z, z >= y.
FRAMEWORK, LIBRARY_BACKENDS = "torch-stable-abi211", ("cpu", "cu126", "cu130")
# ELF's numbers of processors, at byte 18 of a file.
PROCESSORS = {62: "x86_64", 183: "aarch64"}

_OWN_IMPORT = re.compile(r"^( *)from hf_kvret_kernels\.?([\w.]*) import", re.MULTILINE)


def make_repository(folder: Path, libraries: list[Path]) -> list[str]:
    """Write the repository to ``folder``, whose ``build`` is replaced; the names of its variants.

    Raises:
        ValueError: a library is no ELF file of a known processor, or the folder has other files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / "build.toml").is_file():
        raise ValueError(f"{folder} has files, and none is build.toml: give an empty folder")
    general = tomllib.loads((KERNELS / "build.toml").read_text(encoding="utf-8"))["general"]
    variants: dict[str, Path | None] = {f"torch-{name}": None for name in general["backends"]}
    for library in libraries:
        where = f"{processor(library)}-linux"
        variants |= {f"{FRAMEWORK}-{name}-{where}": library for name in LIBRARY_BACKENDS}
    shutil.rmtree(folder / "build", ignore_errors=True)
    for name, library_file in variants.items():
        write_variant(folder / "build" / name, general, library_file)
    shutil.copy(KERNELS / "build.toml", folder)
    shutil.copy(KERNELS / "CARD.md", folder / "README.md")
    shutil.copy(KERNELS.parent / "LICENSE", folder)
    return list(variants)


def write_variant(folder: Path, general: dict[str, Any], library: Path | None) -> None:
    """Write the package with relative imports, the library if there is one, and the metadata."""
    for path in sorted(PACKAGE.rglob("*")):
        target = folder / path.relative_to(PACKAGE)
        if path.suffix in (".py", ".json"):
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8")
            depth = len(path.relative_to(PACKAGE).parts)
            target.write_text(relative(text, depth) if path.suffix == ".py" else text, "utf-8")
    operations = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    with open(folder / "__init__.py", "a", encoding="utf-8") as file:
        file.write(f"\nfrom . import {', '.join(operations)}\n\n__all__ = {operations}\n")
    if library is not None:
        shutil.copy(library, folder / LIBRARY)
    backend = "cpu" if "cpu" in folder.name.split("-") else "cuda"
    digests = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).digest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    # A name for each state of the files, so that two of them can be loaded in one process.
    state = hashlib.sha256(b"".join(digests.values())).hexdigest()[:8]
    metadata = {
        "id": f"_{general['name'].replace('-', '_')}_{backend}_{state}",
        **{name: general[name] for name in ("name", "version", "license")},
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(one).decode() for name, one in digests.items()},
        },
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n", "utf-8")


def relative(source: str, depth: int) -> str:
    """``source`` with relative imports of the own package, which is ``depth`` levels above it."""
    return _OWN_IMPORT.sub(rf"\1from {'.' * depth}\2 import", source)


def processor(library: Path) -> str:
    """``"x86_64"`` or ``"aarch64"``; ValueError for another file."""
    head = library.read_bytes()[:20]
    name = PROCESSORS.get(struct.unpack_from("<H", head, 18)[0]) if len(head) == 20 else None
    if name is None or head[:4] != b"\x7fELF":
        raise ValueError(f"{library} is no library for {' or '.join(PROCESSORS.values())} Linux")
    return name


def main() -> None:
    """Make the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Make the folder of a kernel repository.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--library", type=Path, nargs="*", default=[], metavar="FILE")
    given = parser.parse_args()
    print("\n".join(make_repository(given.folder, given.library)))


if __name__ == "__main__":
    main()
