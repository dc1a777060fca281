"""Checks what is to be uploaded: ``python .ci/dist_check.py build/wheels``.

Prints what is wrong with the sdist and the wheels of a folder, and exits with 1 if there is
anything. auditwheel is asked about the tags; what twine checks is left to it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

PACKAGES = {
    "hf_kvret": "hf_kvret",
    "hf_kvret_cli": "hf_kvret/entry/hf_kvret_cli",
    "hf_kvret_kernels": "kernels/hf_kvret_kernels",
    "hf_kvret_model_patches": "model_patches/hf_kvret_model_patches",
}
LIBRARY = "hf_kvret_kernels/libhf_kvret_host.so"
HEADER = "kernels/csrc/hf_kvret_host.h"
# Machine of the ELF header and the loader, by the end of a wheel's name.
MACHINES = {
    "x86_64": ("EM_X86_64", "ld-linux-x86-64.so.2"),
    "aarch64": ("EM_AARCH64", "ld-linux-aarch64.so.1"),
}
PLATFORM = "manylinux_2_28"
# Parts of glibc. OpenMP is not among them: torch brings its own, which the library looks for.
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"}
# An install downloads so many bytes beside its dependencies, at most.
MOST_BYTES = 5 * 2**20
# A link of the README that leads nowhere on an index's page.
RELATIVE = re.compile(r"\]\((?!https?:|#)([^)]*)\)")


def main(arguments: list[str]) -> int:
    [folder] = arguments
    faults = list(check(Path(folder)))
    print("\n".join(faults) or "sdist and wheels hold what they should")
    return int(bool(faults))


def check(folder: Path) -> Iterator[str]:
    """What is wrong with the files of ``folder``, one sentence each."""
    sdists, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    if len(sdists) != 1 or len(wheels) != len(MACHINES):
        yield f"{len(sdists)} sdists and {len(wheels)} wheels instead of 1 and {len(MACHINES)}"
        return
    for file in (*sdists, *wheels):
        if file.stat().st_size > MOST_BYTES:
            yield f"{file.name} has more than {MOST_BYTES:,} bytes"
    sources = read_sdist(sdists[0])
    links = RELATIVE.findall(headers(sources["PKG-INFO"]).get_payload())
    if links:
        yield f"the README has relative links: {links}"
    for architecture in MACHINES:
        yield from check_wheel(folder, sources, architecture)


def read_sdist(file: Path) -> dict[str, bytes]:
    """Files of an sdist by their paths below its folder."""
    with tarfile.open(file) as archive:
        members = [member for member in archive if member.isfile()]
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in members
        }


def check_wheel(folder: Path, sources: dict[str, bytes], architecture: str) -> Iterator[str]:
    """What is wrong with the wheel for ``architecture`` that was made of ``sources``."""
    origin = headers(sources["PKG-INFO"])
    tag = f"py3-none-{PLATFORM}_{architecture}"
    file = folder / f"hf_kvret-{origin['Version']}-{tag}.whl"
    if not file.is_file():
        yield f"there is no {file.name}"
        return
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
    info = f"hf_kvret-{origin['Version']}.dist-info"
    made = headers(contents[f"{info}/WHEEL"])
    if made.get_all("Tag") != [tag] or made["Root-Is-Purelib"] != "false":
        yield f"{file.name}: WHEEL says {made.get_all('Tag')}, purelib {made['Root-Is-Purelib']}"
    grant = granted(file)
    if not fits(grant, architecture):
        yield f"{file.name}: auditwheel grants {grant}"
    if contents[f"{info}/METADATA"] != sources["PKG-INFO"]:
        yield f"{file.name}: METADATA differs from the sdist's"
    yield from (f"{file.name}: {fault}" for fault in compare(sources, contents, info))
    if LIBRARY not in contents:
        yield f"{file.name}: no {LIBRARY}"
        return
    path = folder / f".{architecture}.so"
    path.write_bytes(contents[LIBRARY])
    try:
        yield from (f"{file.name}: {fault}" for fault in library_faults(path, architecture))
        missing = declared(sources[HEADER].decode()) - exports(path)
    finally:
        path.unlink()
    if missing:
        yield f"{file.name}: the library does not export {sorted(missing)}"


def granted(wheel: Path) -> str:
    """The oldest platform that auditwheel finds a wheel fit for."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    result = json.loads(shown or "{}")
    return str(result.get("overall_tag") or result.get("error") or "nothing")


def fits(grant: str, architecture: str) -> bool:
    """Whether what auditwheel grants runs wherever PLATFORM does."""
    pattern = rf"manylinux_(\d+)_(\d+)_{architecture}"
    found, wanted = (re.fullmatch(pattern, tag) for tag in (grant, f"{PLATFORM}_{architecture}"))
    if found is None or wanted is None:
        return False
    return [int(part) for part in found.groups()] <= [int(part) for part in wanted.groups()]


def headers(text: bytes) -> Message:
    return Parser().parsestr(text.decode(), headersonly=True)


def compare(sources: dict[str, bytes], contents: dict[str, bytes], info: str) -> Iterator[str]:
    """Where a wheel's packages are not those of the sdist."""
    wanted = {
        f"{package}{name.removeprefix(folder)}": text
        for package, folder in PACKAGES.items()
        for name, text in sources.items()
        if name.startswith(f"{folder}/") and not name.startswith(f"{folder}/entry/")
    }
    there = {
        name: text
        for name, text in contents.items()
        if name != LIBRARY and not name.startswith(f"{info}/")
    }
    for name in sorted(wanted.keys() | there.keys()):
        if name not in there:
            yield f"no {name}"
        elif name not in wanted:
            yield f"{name} is not of the sdist"
        elif wanted[name] != there[name]:
            yield f"{name} differs from the sdist's"


def declared(header: str) -> set[str]:
    """Functions of the C interface."""
    return set(re.findall(r"^HFK_API .*?\b(hfk_\w+)\(", header, flags=re.MULTILINE))


def library_faults(path: Path, architecture: str) -> Iterator[str]:
    """What keeps a library from running on every Linux with that glibc, beside any torch."""
    machine, loader = MACHINES[architecture]
    with path.open("rb") as file:
        found = ELFFile(file)["e_machine"]
    if found != machine:
        yield f"the library is of {found}"
    others = needs(path) - SYSTEM - {loader}
    if others:
        yield f"the library needs {sorted(others)}"
    strangers = {name for name in exports(path) if not name.startswith("hfk_")}
    if strangers:
        yield f"the library exports {sorted(strangers)[:5]}, {len(strangers)} in all"


def needs(path: Path) -> set[str]:
    """Libraries that a library is linked against."""
    with path.open("rb") as file:
        tags = [tag for part in parts(file, DynamicSection) for tag in part.iter_tags()]
        return {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}


def exports(path: Path) -> set[str]:
    """Names that other libraries of the process can bind to."""
    with path.open("rb") as file:
        tables = [part for part in parts(file, SymbolTableSection) if part.name == ".dynsym"]
        return {
            symbol.name
            for table in tables
            for symbol in table.iter_symbols()
            if symbol.entry.st_shndx != "SHN_UNDEF"
            and symbol.entry.st_info.bind != "STB_LOCAL"
            and symbol.entry.st_other.visibility == "STV_DEFAULT"
        }


def parts(file: Any, kind: type) -> list[Any]:
    return [part for part in ELFFile(file).iter_sections() if isinstance(part, kind)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
