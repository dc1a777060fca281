"""Whether a saved cache is whole, without the model that it is of."""

from __future__ import annotations

import warnings
from pathlib import Path

from hf_kvret.io.description import DESCRIPTION, Description
from hf_kvret.io.persistence import read_parts


def holds_cache(path: Path) -> bool:
    """Whether a saved cache, damaged perhaps, seems to be in ``path``."""
    return (path / DESCRIPTION).exists()


def files_of_cache(path: Path) -> set[str]:
    """Names of what ``verify_cache`` reads of a cache that is whole."""
    with warnings.catch_warnings():
        # Of format 1, as the check has said already.
        warnings.simplefilter("ignore")
        return {DESCRIPTION, Description.read(path).file}


def verify_cache(directory: Path) -> list[str]:
    """Lines that say what was checked: every byte, by its checksum, and the form of all.

    Whether tensors fit one another and the model shows when the cache is loaded.

    Raises:
        MemoryError: there is too little for a tensor.
        OSError: a file is missing, or can't be read.
        ValueError: damage, with its place.
    """
    description = Description.read(directory)
    count = nbytes = 0
    for parts in read_parts(directory, description):
        count += len(parts)
        nbytes += sum(tensor.nbytes for tensor in parts.values())
    known = [name for name, value in description.origin.items() if value is not None]
    checked = "whole" if description.format_version > 1 else "readable; format 1 has no checksums"
    return [
        f"cache    {description.method}, format {description.format_version}, "
        f"{len(description.layers)} layers",
        f"tensors  {count}, {nbytes / 2**20:.2f} MiB: {checked}",
        f"made by  {', '.join(f'{name} {value}' for name, value in description.library.items())}"
        if description.library
        else "made by  unknown versions",
        f"records  {' and '.join(known) or 'neither identity nor tokens'}",
    ]
