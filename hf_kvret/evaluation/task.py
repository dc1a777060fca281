"""The contract of an evaluation task, and the loop that runs its cells."""

from __future__ import annotations

import argparse
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Self

import torch
from tqdm import tqdm

from hf_kvret.cache import RetrievalCache
from hf_kvret.calibration.files import read_description
from hf_kvret.calibration.hub import find_folder
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.reader import Reader
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.subject import Subject

Choices = Mapping[str, CacheChoice]
"""Caches by the name that cells have."""


class Task(ABC):
    """A question about caches, cut into cells that are run one by one.

    Subclasses are frozen dataclasses whose fields are the task's options.

    Attributes:
        name: on the command line.
        summary: one line for ``--help``.
        description: the text of the task's own ``--help``.
        examples: commands below it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    description: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]

    @staticmethod
    @abstractmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the task's own options; those of all tasks are there already."""

    @classmethod
    @abstractmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        """The task that was asked for; ValueError for options that make no sense."""

    @abstractmethod
    def setup(self) -> dict[str, Any]:
        """What its numbers depend on besides model, caches and cells, as plain JSON values."""

    @abstractmethod
    def cells(self, caches: Sequence[str]) -> list[Cell]:
        """The cells, in the order in which they are run. Each names its ``cache``."""

    def check(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        """Look at what ``cells`` need before any of them is run: caches that serve the model.

        Tasks add texts that are long enough, and lengths that the model has positions for.

        Raises:
            ValueError: something of that can't be.
        """
        for name in dict.fromkeys(cell["cache"] for cell in cells):
            Reader(subject.model, choices[name], 0)

    @abstractmethod
    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        """The numbers of one cell, as plain JSON values. Long work shows a progress bar."""

    @classmethod
    @abstractmethod
    def table(cls, results: Results) -> str:
        """The results as a markdown table; cells that are missing show as ``-``."""

    @classmethod
    def folders(cls, options: argparse.Namespace) -> dict[str, Path]:
        """Folders that it writes to besides the files of ``--json``, ``--plot`` and ``--table``.

        By the option that names them. They are tried before the work.
        """
        return {}

    @classmethod
    def pictures(cls, path: Path) -> list[Path]:
        """All files that ``plot`` may write for ``path``. They are tried before the work."""
        return [path]

    @classmethod
    @abstractmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Write the results as a picture; matplotlib is there."""

    @classmethod
    def accuracy(cls, results: Results) -> dict[str, tuple[float, float]]:
        """By cache: bytes that a step reads, as a share of full K,V; and answers right in 0..1.

        Empty where a task has no answers. ``mean_points`` makes it.
        """
        return {}


def run_task(
    task: Task, subject: Subject, choices: Choices, results: Results
) -> list[tuple[Cell, str]]:
    """Run the cells that ``results`` does not have yet and add them.

    Returns the cells that ran out of memory, with the reason; the others are run all the same.
    """
    waiting = [cell for cell in task.cells(list(choices)) if results.find(cell) is None]
    artifacts = {name: artifact_sha256(choice, subject) for name, choice in choices.items()}
    check_artifacts(results, artifacts)
    task.check(waiting, subject, choices)
    failed = []
    for cell in (bar := tqdm(waiting, desc=task.name, unit="cell")):
        bar.set_postfix_str(" ".join(str(value) for value in cell.values()))
        try:
            found = task.run(cell, subject, choices[cell["cache"]])
            artifact = artifacts[cell["cache"]]
            results.add(cell, found if artifact is None else {**found, "artifact": artifact})
        except (torch.OutOfMemoryError, MemoryError) as error:
            failed.append((cell, str(error).split("\n")[0] or "no memory left"))
    return failed


def lengths_of(cells: Sequence[Cell]) -> list[int]:
    """The different lengths of cells, ascending; those of cells without one don't count."""
    return sorted({cell["length"] for cell in cells if "length" in cell})


def artifact_sha256(choice: CacheChoice, subject: Subject) -> str | None:
    """Which artifact a cache works with; None where it needs none, or a task makes its own."""
    if choice.options is None or not hasattr(choice.options, "artifact"):
        return None
    home = Path(subject.model.config._name_or_path)
    if choice.lacks_artifact and not (home / choice.method).is_dir():
        return None
    cache = choice.make(subject.model.config, 1)
    assert isinstance(cache, RetrievalCache)
    artifact, revision = (getattr(cache.options, name) for name in ("artifact", "revision"))
    if artifact is None:
        return None
    return read_description(find_folder(artifact, revision=revision))["tensors_sha256"]


def check_artifacts(results: Results, artifacts: dict[str, str | None]) -> None:
    """ValueError for finished cells of the same caches that had other artifacts."""
    for cell, found in results:
        now, then = artifacts.get(cell.get("cache", "")), found.get("artifact")
        if now is not None and then is not None and now != then:
            raise ValueError(
                f"{results.path} has {cell['cache']} with another artifact (sha256 "
                f"{str(then)[:12]}, now {now[:12]}): give another --json, or delete the file"
            )


def mean_points(results: Results, score: str, best: float = 1.0) -> dict[str, tuple[float, float]]:
    """What ``Task.accuracy`` returns, from the score of that name, which is ``best`` at most.

    Means over those cells that every cache has finished, so that all caches are asked the same.
    """
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for cell, result in results:
        place = json.dumps({key: cell[key] for key in sorted(cell) if key != "cache"})
        pair = (result["step_bytes"] / result["full_bytes"], result[score] / best)
        found.setdefault(cell["cache"], {})[place] = pair
    shared = set.intersection(*(set(points) for points in found.values())) if found else set()
    if not shared:
        return {}
    return {
        cache: (
            fmean(points[place][0] for place in shared),
            fmean(points[place][1] for place in shared),
        )
        for cache, points in found.items()
    }
