"""Whether a saved cache is whole, without the model that it is of."""

from __future__ import annotations

from pathlib import Path

from hf_kvret.saved.description import DESCRIPTION, FORMAT_VERSION, Description


def holds_cache(path: Path) -> bool:
    """Whether a saved cache, damaged perhaps, seems to be in ``path``."""
    return (path / DESCRIPTION).exists()


def files_of_cache(path: Path) -> set[str]:
    """Names of what ``verify_cache`` reads of a cache that is whole."""
    return {DESCRIPTION, *Description.read(path).content["files"]}


def verify_cache(directory: Path) -> list[str]:
    """Lines that say what was checked: every byte, by its checksum.

    Whether tensors fit one another and the model shows when the cache is loaded.

    Raises:
        MemoryError: there is too little for a tensor.
        OSError: a file is missing, or can't be read.
        ValueError: damage, with its place.
    """
    description = Description.read(directory)
    content, tensors = description.content, description.tensors(directory)
    names = tensors.names()
    nbytes = sum(tensors.read(name).nbytes for name in names)
    records = [name for name in ("identity", "tokens") if content[name] is not None]
    versions = [f"{str(name)[:80]} {str(value)[:80]}" for name, value in content["library"].items()]
    return [
        f"cache    {content['method']}, format {FORMAT_VERSION}, {len(content['layers'])} layers",
        f"tensors  {len(names)}, {nbytes / 2**20:.2f} MiB: whole",
        f"made by  {', '.join(versions)}",
        f"records  {' and '.join(records) or 'neither identity nor tokens'}",
    ]
