"""What the papers' ablations have in common: parts, variants, texts, and how a script runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.reader import check_positions
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.task import Task
from hf_kvret.lab.evaluate.texts import describe_file, text_windows
from hf_kvret.lab.program.arguments import known_names
from hf_kvret.lab.program.options import context_option, count_option, option, text_option
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import markdown_table, or_dash, with_step
from hf_kvret.options.config import RetrievalConfig

CellResults = list[tuple[Cell, dict[str, Any]]]
"""Cells with their results."""
Table = Callable[[CellResults], str]
Plot = Callable[[Path, CellResults], None]
Lines = Mapping[str, Mapping[int, float]]
"""Numbers by name and layer."""


def of_part(results: Results, part: str) -> CellResults:
    """The cells of a part with their results; those without one are of the part ``""``."""
    return [(cell, result) for cell, result in results if cell.get("part", "") == part]


def layers_table(title: str, lines: Lines, form: str = ".3f") -> str:
    """A row a layer, a column for each of ``lines``, and their means."""
    layers = sorted({layer for values in lines.values() for layer in values})
    rows = [
        [str(layer), *(or_dash(values.get(layer), form) for values in lines.values())]
        for layer in layers
    ]
    means = [fmean(values.values()) if values else None for values in lines.values()]
    rows.append(["mean", *(or_dash(mean, form) for mean in means)])
    return markdown_table([title, *lines], rows)


def lines_of(result: Mapping[str, Any], name: str) -> dict[str, dict[int, float]]:
    """A figure by row and layer, of a result with ``rows``."""
    return {
        row: {one["layer"]: one[name] for one in layers if one.get(name) is not None}
        for row, layers in result["rows"].items()
    }


def layers_of(lines: Callable[[CellResults], Lines], title: str, y: str, **bounds: float) -> Plot:
    """A picture: lines over layers; ``bounds`` are ``low`` and ``high`` of y."""

    def plot(path: Path, cells: CellResults) -> None:
        drawn = {name: (list(known), list(known.values())) for name, known in lines(cells).items()}
        plot_lines(path, drawn, title=title, x="layer", y=y, whole_x=True, **bounds)

    return plot


@dataclass(frozen=True, kw_only=True)
class Ablation(Task):
    """A method taken apart: each part of the study has variants, measured at each length.

    Attributes:
        described: fields that numbers depend on besides the cells.
        apart: parts that need no context.
        tables: what makes the table of each part.
        plots: what draws the picture of a part that has one.
    """

    described: ClassVar[tuple[str, ...]]
    apart: ClassVar[tuple[str, ...]] = ()
    tables: ClassVar[Mapping[str, Table]]
    plots: ClassVar[Mapping[str, Plot]]

    text: Path = text_option()
    context: tuple[int, ...] = context_option((4096,), "tokens of a context")
    windows: int = count_option(1, "at most this many contexts of each length")
    parts: tuple[str, ...]
    new_tokens: int = count_option(128, "that are measured")
    step: int = count_option(1, "tokens a forward pass")

    @abstractmethod
    def variants(self, part: str) -> Sequence[str]:
        """The names of a part's variants, in the order of its table."""

    def following(self, part: str) -> int:
        """Tokens that a part has after its context."""
        return self.new_tokens

    def details(self) -> dict[str, Any]:
        described = {name: getattr(self, name) for name in self.described}
        return {"text": describe_file("--text", self.text), **described}

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [
            {"cache": cache, "part": part, "variant": name, **place}
            for part in self.parts
            for place in ([{}] if part in self.apart else [{"length": n} for n in self.context])
            for name in self.variants(part)
            for cache in caches
        ]

    def check_cells(self, cells: Sequence[Cell]) -> None:
        """ValueError where the text, or the model's positions, are too few for one of ``cells``."""
        places = [(cell.get("part", ""), cell["length"]) for cell in cells if "length" in cell]
        for part, length in dict.fromkeys(places):
            self.contexts(self.subject, part, length)
            check_positions(self.subject.model, length + self.following(part))
        super().check_cells(cells)

    def contexts(self, subject: Subject, part: str, length: int) -> list[torch.Tensor]:
        """``windows`` texts ``[length + following(part)]`` int64 at most; ValueError for none."""
        length += self.following(part)
        return text_windows(subject, self.name, self.text, length, self.windows)

    @classmethod
    def table(cls, results: Results) -> str:
        found = {part: of_part(results, part) for part in cls.tables}
        tables = [cls.tables[part](cells) for part, cells in found.items() if cells]
        return with_step("\n\n".join(tables), results)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """One picture a part: ``path``, and ``NAME-PART.png`` for the parts after the first."""
        for number, name in enumerate(name for name in cls.plots if of_part(results, name)):
            own = path.with_name(f"{path.stem}-{name}{path.suffix}") if number else path
            cls.plots[name](own, of_part(results, name))


def not_here(value: Any = 0) -> Any:
    """A field of a study that has no option for it, as others have."""
    return field(default=value, init=False)


def parts_option(names: Iterable[str], name: str = "--parts") -> Any:
    """A choice among names; all of them by default."""
    usual = tuple(names)
    text = f"default: all of {', '.join(usual)}"
    return option(usual, text, kind=known_names(usual), metavar="NAME,NAME", name=name)


def made(name: str, cache_class: type[RetrievalCache], options: RetrievalConfig) -> CacheChoice:
    """A cache of that class with these options, under a name for progress bars."""
    return CacheChoice(
        name, lambda config, capacity: cache_class(config=config, options=options), options=options
    )
