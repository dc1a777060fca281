"""``hf-kvret inspect --verify``: what was saved is told by its files, and checked byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hf_kvret.calibration.verification import holds_artifact, verify_artifact
from hf_kvret.evaluation.results import read_results
from hf_kvret.io.verification import holds_cache, verify_cache


class Kind(NamedTuple):
    """Something that is saved.

    Attributes:
        name: in the plural, for messages.
        is_at: whether a path has it, damaged perhaps.
        verify: lines that say what was checked; OSError or ValueError for damage.
    """

    name: str
    is_at: Callable[[Path], bool]
    verify: Callable[[Path], list[str]]


def verify_results(path: Path) -> list[str]:
    """Lines that say what a result file holds and what was checked.

    Raises:
        ValueError: damage, with the cell that has it.
    """
    content = read_results(path)
    checked = {
        1: "readable; format 1 has no checksums",
        2: "each whole; format 2 has nothing that ties them to this file",
    }.get(content["format"], "whole")
    return [
        f"results  {content['name']}, format {content['format']}",
        f"cells    {len(content['cells'])}: {checked}",
    ]


KINDS = (
    Kind("saved caches", holds_cache, verify_cache),
    Kind("artifacts", holds_artifact, verify_artifact),
    Kind("result files", Path.is_file, verify_results),
)


def verify(path: Path) -> list[str]:
    """Lines that say what ``path`` holds and what was checked.

    Raises:
        OSError: a file is missing, or can't be read.
        ValueError: damage, or nothing that can be verified.
    """
    for kind in KINDS:
        if kind.is_at(path):
            return kind.verify(path)
    raise ValueError(f"{path}: --verify checks {', '.join(kind.name for kind in KINDS)}")
