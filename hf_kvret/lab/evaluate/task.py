"""The base of evaluation tasks: a model, caches, and a cell for each cache and question."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from hf_kvret.lab.evaluate.bundled import default_model
from hf_kvret.lab.evaluate.caches import CacheChoice, artifact_sha256, known_caches
from hf_kvret.lab.evaluate.measurement import CacheMeasurement, Row
from hf_kvret.lab.evaluate.reader import check_positions
from hf_kvret.lab.evaluate.subject import Subject, load_subject, model_folder
from hf_kvret.lab.evaluate.texts import describe_file
from hf_kvret.lab.program.arguments import DTYPES
from hf_kvret.lab.program.options import device_map_option, option
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.registry import registered_methods

# These caches are compared where --caches is not given.
# The last has all tokens in 4 bits, without an index.
_CACHES = ("full", "flat", "paris", "lrqk", "ctkvr", "aqua:predictor=none:bits=4")


@dataclass(frozen=True, kw_only=True)
class Task(CacheMeasurement):
    """A question about caches, cut into cells that are run one by one.

    Subclasses are frozen dataclasses that add their own options.
    """

    command: ClassVar[str] = "eval"

    model: str = option(
        default_model(),
        "a folder, a hub id, or one of these: reference, reference-latent, reference-books "
        "(text), needle (ids), smollm2 (text, real weights)",
    )
    caches: str | None = option(
        None,
        "comma-separated, options after colons as paris:top_k=100:store=host; your own as "
        f"mine=module:factory; known: {', '.join(known_caches())}; default: "
        f"{','.join(_CACHES)}, and those that the model's "
        "folder has an artifact for",
    )
    device_map: str | None = device_map_option()

    @cached_property
    def subject(self) -> Subject:
        """The model, loaded when it is first asked for."""
        return load_subject(self.model, DTYPES[self.dtype], self.device, self.device_map)

    def cache_names(self) -> list[str]:
        if self.caches is not None:
            return super().cache_names()
        home, methods = model_folder(self.model), registered_methods().items()
        learned = (name for name, cls in methods if cls.needs_artifact)
        return [*_CACHES, *(name for name in learned if (home / name).is_dir())]

    def check(self) -> None:
        """Mistakes in caches and files are named before the model is loaded."""
        super().check()
        self.cells()
        _ = self._details

    def setup(self) -> dict[str, Any]:
        """Model, place and budget; and ``details``."""
        place = {"device": self.device_map or self.device, "seed": self.seed}
        return self.subject.describe() | place | self.retrieval | self._details

    @cached_property
    def _details(self) -> dict[str, Any]:
        # Once, because some read whole files.
        return self.details()

    def details(self) -> dict[str, Any]:
        """Everything that numbers depend on besides model, caches and cells, as plain JSON values.

        These are its own options. Those that are tuples stand in the cells.
        """
        shared = {field.name for field in fields(Task)}
        details = {}
        for name in (field.name for field in fields(self) if field.name not in shared):
            value = getattr(self, name)
            if isinstance(value, Path):
                value = describe_file(f"--{name.replace('_', '-')}", value)
            if not isinstance(value, tuple):
                details[name] = value
        return details

    def cells(self) -> list[Cell]:
        """The cells of all caches that are compared."""
        return self.cells_of(list(self.choices))

    @abstractmethod
    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        """The cells, in the order in which they are run. Each names its ``cache``."""

    def check_cells(self, cells: Sequence[Cell]) -> None:
        """Look at what ``cells`` need before any of them is run: caches and lengths.

        Raises:
            ValueError: something of that can't be.
        """
        for name in dict.fromkeys(cell["cache"] for cell in cells):
            self.choices[name].check(self.subject.model)
        for length in sorted({cell["length"] for cell in cells if "length" in cell}):
            self.check_length(length)

    def check_length(self, length: int) -> None:
        """ValueError for a length that the model has no positions for, or no text."""
        check_positions(self.subject.model, length)

    def artifact_sha256(self, cache: str) -> str | None:
        return artifact_sha256(self.choices[cache], self.subject.model.config)

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """One by one, after a look at all of them."""
        self.check_cells(self.waiting(results))
        yield from super().plan(results)

    def rows(self, group: Sequence[Cell]) -> list[Row]:
        rows = []
        for choice, cell in ((self.choices[cell["cache"]], cell) for cell in group):
            with choice.guard(self.subject.model):
                rows.append(self.run(cell, choice))
        return rows

    @abstractmethod
    def run(self, cell: Cell, choice: CacheChoice) -> Row:
        """The numbers of one cell, as plain JSON values. Long work shows a progress bar."""
