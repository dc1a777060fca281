"""The measurement of a command, and the one loop that carries it out.

A ``Measurement`` is cut into cells. Its plan gives those that are waiting, in groups that are
measured together; each gives rows that go to the result file at once, so that the same command
goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache, choose_caches
from hf_kvret.lab.evaluate.failures import attempt
from hf_kvret.lab.program import options as common
from hf_kvret.lab.program.arguments import check_device, file_path, names
from hf_kvret.lab.program.options import add_options, option, read_options
from hf_kvret.lab.program.program import Parser, example_lines, kept_results, one_line, run_program
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.plots import require_matplotlib
from hf_kvret.lab.report.results import (
    FAILED,
    Cell,
    Results,
    check_file,
    check_picture,
    program,
    read_results,
)
from hf_kvret.saved.identity import printable
from hf_kvret.stores import DISK, store_names

# A store in files needs a folder, so it is named with its cache.
_STORES = [name for name in store_names().split(", ") if name != DISK]
Row = dict[str, Any]
"""The numbers of a cell, as plain JSON values."""


@dataclass(frozen=True)
class Outputs:
    """Where results go; ``check`` tries it before the work."""

    json: Path | None = option(
        None, "keep results here, and go on from what is there", kind=file_path, metavar="FILE"
    )
    plot: Path | None = option(
        None, "write a picture (PNG, SVG, PDF)", kind=file_path, metavar="FILE"
    )

    def check(self, name: str) -> None:
        """Try the files that the measurement ``name`` will write; their folders are made.

        Raises:
            ValueError: a path that can't be written, a picture of unknown type, or a file that
                holds something else than results of that name.
            ModuleNotFoundError: a picture without matplotlib.
        """
        if self.json is not None:
            check_file("--json", self.json)
            if self.json.is_file():
                read_results(self.json, name)
        if self.plot is not None:
            if self.json is not None and self.json.resolve() == self.plot.resolve():
                raise ValueError(f"--json and --plot are both {self.plot}: give each its own file")
            check_picture(self.plot)
            require_matplotlib()


@dataclass(frozen=True)
class Measurement(ABC):
    """A question, cut into cells. Subclasses are frozen dataclasses of ``option`` fields.

    Their docstring is the text of the command's own ``--help``.
    What is loaded or built on the way is a ``functools.cached_property``.

    Attributes:
        command: the program's command, as ``eval``.
        name: of its sub-command, as ``niah``; empty where there is none.
        summary: one line for ``--help``.
        examples: commands below it.
        smallest: of a script, the options of its smallest run.
    """

    command: ClassVar[str]
    name: ClassVar[str]
    summary: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    smallest: ClassVar[str] = ""

    @classmethod
    def title(cls) -> str:
        """The name in result files, as ``eval niah``."""
        return f"{cls.command} {cls.name}".strip()

    def check(self) -> None:  # noqa: B027 - many have nothing to add to their dataclass's checks
        """Look at what the options alone can be wrong about, before anything long is done.

        Raises:
            ValueError: options that make no sense together or on this machine.
        """

    def surroundings(self) -> AbstractContextManager[Any]:
        """A context for set-up, plan and rows, as another number of threads."""
        return nullcontext()

    @abstractmethod
    def setup(self) -> dict[str, Any]:
        """All that numbers depend on besides the cells, as plain JSON values."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """The cells, in the order in which they are measured. Each names its ``cache``."""

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """Groups of cells to measure, from what ``results`` lack; they are asked for one by one.

        When the next one is asked for, the rows of the last are in ``results``.
        """
        for cell in self.waiting(results):
            yield [cell]

    @abstractmethod
    def rows(self, group: Sequence[Cell]) -> Sequence[Row]:
        """The row of each cell of a group.

        Raises:
            CheckFailed: the cells get no rows, are named at the end, and are tried the next time.
                So it is with errors that say that memory is used up.
        """

    def artifact_sha256(self, cache: str) -> str | None:
        """Which artifact a cache works with: ``CalibrationArtifact.sha256``; None for none.

        Rows keep it, as a path may hold another artifact when the same command goes on.
        """
        return None

    def waiting(self, results: Results) -> list[Cell]:
        """The cells without numbers."""
        rows = ((cell, results.find(cell)) for cell in self.cells())
        return [cell for cell, row in rows if row is None or FAILED in row]

    def count(self, results: Results) -> int:
        """How many cells the plan has."""
        return len(self.waiting(results))

    @classmethod
    @abstractmethod
    def table(cls, results: Results) -> str:
        """The results as a markdown table; numbers that are missing show as ``-``."""

    @classmethod
    @abstractmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Write the results as a picture; matplotlib is there."""


@dataclass(frozen=True, kw_only=True)
class CacheMeasurement(Measurement):
    """A measurement that compares caches on one model."""

    caches: str | None
    top_k: int | float = common.budget_option()
    store: str = option("device", "of caches that have it", choices=_STORES)
    dtype: str = common.dtype_option()
    device: str = common.device_option()
    seed: int = common.seed_option()

    @property
    def retrieval(self) -> dict[str, Any]:
        """The options of retrieval caches that name none of their own."""
        return {"top_k": self.top_k, "store": self.store}

    @cached_property
    def choices(self) -> dict[str, CacheChoice]:
        """The caches that are compared, by name; ValueError for one that can't be."""
        return choose_caches(self.cache_names(), self.choose)

    def choose(self, text: str) -> CacheChoice:
        """The cache that ``text`` names."""
        return choose_cache(text, self.retrieval, self.device)

    def cache_names(self) -> list[str]:
        """What ``caches`` names."""
        return names(self.caches or "")

    def check(self) -> None:
        check_device(self.device)


def measure(measurement: Measurement, results: Results) -> list[tuple[Cell, str]]:
    """Measure what ``results`` lack and add it; returns the cells that got no row, with reasons.

    Raises:
        ValueError: the rows of a cache that is measured now are of another artifact.
    """
    failed: list[tuple[Cell, str]] = []
    groups, total = measurement.plan(results), measurement.count(results)
    # The first group is taken before there is a bar, as mistakes are named then.
    first = list(islice(groups, 1))
    if first:
        _check_artifacts(measurement, results)
    with tqdm(
        total=total, desc=measurement.name or measurement.command, unit="cell", disable=not first
    ) as bar:
        for group in chain(first, groups):
            bar.set_postfix_str(" ".join(map(str, group[0].values())))
            rows, why = attempt(partial(measurement.rows, group))
            if rows is None:
                failed += [(cell, *why.values()) for cell in group]
            else:
                for cell, row in zip(group, rows, strict=True):
                    artifact = measurement.artifact_sha256(cell["cache"])
                    results.add(cell, row if artifact is None else row | {"artifact": artifact})
            bar.update(len(group))
    return failed


def _check_artifacts(measurement: Measurement, results: Results) -> None:
    caches = dict.fromkeys(cell["cache"] for cell in measurement.waiting(results))
    artifacts = {cache: measurement.artifact_sha256(cache) for cache in caches}
    for cell, row in results:
        then, now = row.get("artifact"), artifacts.get(cell["cache"])
        if cell["cache"] in artifacts and FAILED not in row and then != now:
            raise ValueError(
                f"{results.path} has {cell['cache']} with another artifact (sha256 {then}, now "
                f"{now}): give another --json, delete the file, or bring the artifact back"
            )


def run_measurement(measurement: Measurement, outputs: Outputs) -> int:
    """Measure, print the table, write what was asked for; returns the exit status.

    That is 1 when cells failed or were not reached: the table or a line says why, and the others
    were measured. The same command tries them again.
    """
    outputs.check(measurement.title())
    measurement.check()
    with measurement.surroundings():
        results = Results(measurement.title(), measurement.setup(), outputs.json)
        finished = len(measurement.cells()) - len(measurement.waiting(results))
        try:
            failed = measure(measurement, results)
        finally:
            # Finished cells are worth seeing, also when a later cell failed.
            if len(results):
                print(f"\n{measurement.table(results)}")
                if unfinished := measurement.count(results):
                    print(f"\n{unfinished} cells are not finished")
    for reason in dict.fromkeys(reason for _, reason in failed):
        first, *others = (cell for cell, why in failed if why == reason)
        more = f", and {len(others)} more" if others else ""
        print(f"\n{printable(' '.join(map(str, first.values())))}{more}: {printable(reason)}")
    if finished:
        print(f"\n{finished} cells were finished already and were not measured again")
    if outputs.plot:
        measurement.plot(outputs.plot, results)
        print(f"wrote {printable(str(outputs.plot))}")
    missing = measurement.count(results)
    if outputs.json:
        goes_on = ": the same command goes on from there" if missing else ""
        print(f"results are in {printable(str(outputs.json))}{goes_on}")
    wrong = dict.fromkeys(row[FAILED] for _, row in results if FAILED in row)
    for why in wrong:
        print(f"{program()}: error: {printable(why)}", file=sys.stderr)
    return int(bool(failed or wrong or missing))


def add_measurement(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], cls: type[Measurement]
) -> None:
    """Add the command of a measurement, with its options, to ``commands``."""
    parser = commands.add_parser(
        cls.name or cls.command,
        help=cls.summary,
        description=one_line(cls.__doc__),
        epilog=example_lines(cls.examples),
    )
    fill_parser(parser, cls)


def add_group(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    measurements: Iterable[type[Measurement]],
    metavar: str,
    **words: Any,
) -> None:
    """Add a command with a sub-command for each measurement; ``words`` are its help's."""
    group = commands.add_parser(name, **words).add_subparsers(required=True, metavar=metavar)
    for cls in measurements:
        add_measurement(group, cls)


def fill_parser(parser: argparse.ArgumentParser, cls: type[Measurement]) -> None:
    """Give a parser the options of a measurement, and what runs it."""
    add_options(parser, cls)
    add_options(parser, Outputs)
    parser.set_defaults(
        run=lambda parsed: run_measurement(read_options(cls, parsed), read_options(Outputs, parsed))
    )


def script_parser(cls: type[Measurement]) -> argparse.ArgumentParser:
    """The parser of a measurement that is a script in the ``examples`` of a checkout."""
    module = sys.modules[cls.__module__]
    epilog = example_lines(cls.examples) if hasattr(cls, "examples") else None
    name = Path(module.__file__ or "").name
    parser = Parser(prog=name, description=module.__doc__, epilog=epilog)
    fill_parser(parser, cls)
    parser.add_argument("--smallest", action="store_true", help=f"as {cls.smallest}")
    return parser


def run_script(cls: type[Measurement], arguments: Sequence[str] | None = None) -> int:
    """Run a script; returns the exit status, see ``run_program``.

    ``--smallest`` stands for ``cls.smallest``, the options of a run of seconds; others go on top.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if "--smallest" in words:
        arguments = [*cls.smallest.split(), *words]
    return run_program(partial(script_parser, cls), arguments, kept_results, Path(sys.argv[0]).name)
