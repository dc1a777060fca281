"""Where results of trials are kept: a JSON file with the versions that they were made with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from hf_kvret.io.folder import replace_file
from hf_kvret.survey.trial import Trial, trial

BUNDLED = Path(__file__).with_name("trials.json")
"""The trials that the library was released with."""


@dataclass(frozen=True)
class Record:
    """Trials by type, and the versions that they were made with."""

    transformers: str = transformers.__version__
    torch: str = torch.__version__
    trials: dict[str, Trial] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = BUNDLED) -> Record:
        """The record in a file.

        Raises:
            ValueError: the file is no record of trials.
        """
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            trials = {name: Trial(**one) for name, one in kept["types"].items()}
            return cls(kept["transformers"], kept["torch"], trials)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no record of trials ({error}): give the name of a new file"
            ) from error

    def write(self, path: Path) -> None:
        """Write the record, types in the order of the alphabet; replaces the file in one step."""
        types = {name: self.trials[name].as_dict() for name in sorted(self.trials)}
        versions = {"transformers": self.transformers, "torch": self.torch}
        # A line for each type.
        lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in types.items()]
        text = json.dumps(versions)[:-1] + ', "types": {\n' + ",\n".join(lines) + "\n}}\n"
        replace_file(path, text.encode())


def try_types(
    names: Iterable[str], path: Path, *, anew: bool = False, report: Callable[[str], None] = print
) -> Record:
    """Try those of ``names`` that the record in ``path`` lacks, and add them to it one by one.

    Types that are no longer among ``names`` stay in the record.

    Args:
        names: types that the scan finds served.
        path: file of the record; made where there is none.
        anew: try also those that it has.
        report: called with a line about every type that was tried.

    Raises:
        ValueError: the file is no record, or one of another version of transformers.
    """
    record = Record.read(path) if path.exists() else Record()
    if record.transformers != transformers.__version__:
        raise ValueError(
            f"{path} was made with transformers {record.transformers}, this is "
            f"{transformers.__version__}: give the name of a new file"
        )
    record = Record(trials=dict(record.trials))
    for name in names:
        if anew or name not in record.trials:
            record.trials[name] = trial(name)
            record.write(path)
            report(f"{name}: {record.trials[name].outcome} {record.trials[name].detail}".rstrip())
    return record
