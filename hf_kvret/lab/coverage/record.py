"""Where results of trials are kept: a JSON file that says with what each of them was made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers

from hf_kvret.lab.coverage.code_state import code_state
from hf_kvret.lab.coverage.trial import Trial, trial
from hf_kvret.saved.folder import replace_file

BUNDLED = Path(__file__).with_name("trials.json")
"""The trials that the library was released with."""


@dataclass(frozen=True)
class Setup:
    """What a trial was made with.

    Attributes:
        transformers: its version.
        torch: its version.
        code: as ``code_state``.
    """

    transformers: str
    torch: str
    code: str

    @classmethod
    def present(cls) -> Setup:
        """That of a trial that is made now."""
        return cls(transformers.__version__, torch.__version__, code_state())

    @property
    def stale(self) -> bool:
        """Whether another transformers or other code of ours might give another result now.

        A trial compares our caches with transformers' own, so torch is only noted.
        """
        present = Setup.present()
        return (self.transformers, self.code) != (present.transformers, present.code)


@dataclass(frozen=True)
class Record:
    """Trials by type, and by type what they were made with."""

    trials: dict[str, Trial] = field(default_factory=dict)
    setups: dict[str, Setup] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = BUNDLED) -> Record:
        """The record in a file.

        Raises:
            ValueError: the file is no record of trials.
        """
        try:
            types = json.loads(path.read_text(encoding="utf-8"))["types"].items()
            setups = {name: Setup(**one.pop("setup")) for name, one in types}
            return cls({name: Trial(**one) for name, one in types}, setups)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no record of trials ({error}): give the name of a new file"
            ) from error

    def write(self, path: Path) -> None:
        """Write the record, types in the order of the alphabet; replaces the file in one step."""
        # A line for each type.
        lines = [
            f"{json.dumps(name)}: "
            f"{json.dumps({**self.trials[name].as_dict(), 'setup': asdict(self.setups[name])})}"
            for name in sorted(self.trials)
        ]
        replace_file(path, ('{"types": {\n' + ",\n".join(lines) + "\n}}\n").encode())

    def pending(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that have no trial, or a stale one."""
        return [name for name in names if name not in self.trials or self.setups[name].stale]

    def versions(self, names: Iterable[str]) -> str:
        """Versions of transformers that ``names`` were tried with, and states of the code."""
        setups = {self.setups[name] for name in names}
        releases = ", ".join(sorted({one.transformers for one in setups}))
        codes = ", ".join(sorted({one.code for one in setups}))
        return f"transformers {releases} and state {codes} of the code"


def try_types(
    names: Iterable[str],
    path: Path,
    *,
    anew: bool = False,
    report: Callable[[str], None] = print,
    progress: Callable[[list[str]], Iterable[str]] = iter,
) -> Record:
    """Try those of ``names`` that the record in ``path`` lacks or has a stale trial of.

    Each is written to the file at once, so that a run that broke off goes on there. Types that are
    not among ``names`` stay in the record.

    Args:
        names: types that the scan finds served.
        path: file of the record; made where there is none.
        anew: try also those that it has.
        report: called with a line about every type that was tried.
        progress: hands on the types that are to be tried, as a bar does.

    Raises:
        ValueError: the file is no record.
    """
    record = Record.read(path) if path.exists() else Record()
    record = Record(dict(record.trials), dict(record.setups))
    for name in progress(list(names) if anew else record.pending(names)):
        record.trials[name] = trial(name)
        record.setups[name] = Setup.present()
        record.write(path)
        report(f"{name}: {record.trials[name].outcome} {record.trials[name].detail}".rstrip())
    return record
