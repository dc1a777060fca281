"""``hf-kvret inspect --verify``: what was saved is told by its files, and checked byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hf_kvret.lab.calibrate import inspection as artifacts
from hf_kvret.lab.report.results import read_results, why_no_results
from hf_kvret.saved import description as caches
from hf_kvret.saved.identity import printable

KINDS = ("saved caches", "artifacts", "result files")

# Names in a line.
_MOST_NAMES = 8


class _Item(NamedTuple):
    """Something that is saved.

    Attributes:
        verify: lines that say what was checked; OSError or ValueError for damage.
        files: names of the files that it reads, where they are whole.
    """

    verify: Callable[[], list[str]]
    files: Callable[[], set[str]]


def verify(path: Path) -> list[str]:
    """Lines that say what ``path`` holds, what was checked, and what was not.

    Raises:
        OSError: a file is missing, or can't be read.
        ValueError: damage, or nothing that can be verified.
    """
    lines: list[str] = []
    files: set[str] = set()
    faults: list[OSError | ValueError] = []
    for item in _items(path):
        try:
            lines += map(printable, item.verify())
            files |= item.files()
        except (OSError, ValueError) as error:
            faults.append(error)
    if len(faults) > 1:
        raise ValueError("; ".join(map(str, faults)))
    if faults:
        raise faults[0]
    if not lines:
        raise ValueError(f"{path}: --verify checks {', '.join(KINDS)}")
    others = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    others = [printable(name) for name in others if name not in files]
    if others:
        more = len(others) - _MOST_NAMES
        names = ", ".join(others[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"skipped  {names}: nothing tells whether these are whole")
    return lines


def _items(path: Path) -> Iterator[_Item]:
    """All that is in ``path``, damaged perhaps."""
    if path.is_file():
        yield _Item(partial(_verify_results, path), set)
        return
    if caches.holds_cache(path):
        yield _Item(partial(caches.verify_cache, path), partial(caches.files_of_cache, path))
    if artifacts.holds_artifact(path):
        verify_artifact = partial(artifacts.verify_artifact, path)
        yield _Item(verify_artifact, partial(artifacts.files_of_artifact, path))
    descriptions = {caches.DESCRIPTION, artifacts.DESCRIPTION}
    for file in sorted(path.glob("*.json")):
        if file.name not in descriptions and why_no_results(file) is None:
            title = f"{printable(file.name)}: "
            yield _Item(partial(_verify_results, file, title), partial(set, [file.name]))


def _verify_results(path: Path, title: str = "") -> list[str]:
    """Lines that say what a result file holds; ValueError for damage, with the cell that has it."""
    content = read_results(path)
    return [
        f"results  {title}{content['name']}, format {content['format']}",
        f"cells    {len(content['cells'])}: whole",
    ]
