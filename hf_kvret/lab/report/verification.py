"""``hf-kvret inspect --verify``: what was saved is told by its files, and checked byte by byte."""

from __future__ import annotations

from pathlib import Path

from hf_kvret.lab.calibrate import inspection as artifacts
from hf_kvret.saved import description as caches
from hf_kvret.saved.identity import printable


def verify(path: Path) -> list[str]:
    """Lines that say which cache and artifact the folder ``path`` holds, and what was checked.

    Raises:
        OSError: a file is missing, or can't be read.
        ValueError: damage, or nothing that can be verified.
    """
    lines: list[str] = []
    if caches.holds_cache(path):
        lines += caches.verify_cache(path)
    if artifacts.holds_artifact(path):
        lines += artifacts.verify_artifact(path)
    if not lines:
        raise ValueError(f"{path}: --verify checks folders with saved caches and artifacts")
    return [printable(line) for line in lines]
