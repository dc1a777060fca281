"""The contract of an evaluation task, and the loop that runs its cells."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from tqdm import tqdm

from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.subject import Subject


class Task(ABC):
    """A question about caches, cut into cells that are run one by one.

    Subclasses are frozen dataclasses whose fields are the task's options.

    Attributes:
        name: on the command line.
        summary: one line for ``--help``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

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

    @abstractmethod
    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        """The numbers of one cell, as plain JSON values. Long work shows a progress bar."""

    @classmethod
    @abstractmethod
    def table(cls, results: Results) -> str:
        """The results as a markdown table; cells that are missing show as ``-``."""

    @classmethod
    @abstractmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Write the results as a picture; matplotlib is there."""

    @classmethod
    def accuracy(cls, results: Results) -> dict[str, tuple[float, float]]:
        """By cache: share of cold rows read, and answers right in 0..1, where a task has both."""
        return {}


def run_task(
    task: Task, subject: Subject, choices: dict[str, CacheChoice], results: Results
) -> list[Cell]:
    """Run the cells that ``results`` does not have yet and add them; returns those that ran."""
    waiting = [cell for cell in task.cells(list(choices)) if results.find(cell) is None]
    for cell in (bar := tqdm(waiting, desc=task.name, unit="cell")):
        bar.set_postfix_str(" ".join(str(value) for value in cell.values()))
        results.add(cell, task.run(cell, subject, choices[cell["cache"]]))
    return waiting
