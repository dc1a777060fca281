"""llama.cpp's ``llama-bench``, run on the model that the caches are measured with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gguf_model import write_gguf

from hf_kvret.lab.bench.filling import Subject
from hf_kvret.lab.bench.floors import Floor
from hf_kvret.lab.bench.model_measurement import ModelMeasurement, TimedSample, timed_row
from hf_kvret.lab.evaluate.measurement import CheckFailed, Row
from hf_kvret.lab.evaluate.reader import Usage
from hf_kvret.models.compatibility import layer_shapes

LLAMA_CPP = "llama.cpp"
PROGRAM = "llama-bench"
VARIABLE = "LLAMA_BENCH"
"""Of the environment: the program, where it is not on PATH."""
# Of what a program printed, in an error.
_TOLD = 200


class RowType(NamedTuple):
    """How llama.cpp keeps keys and values.

    Attributes:
        bytes: of a number, scales included.
        flags: of flash attention that allow it; codes of values need it.
    """

    bytes: float
    flags: tuple[str, ...]


# q8_0 has two bytes of scale for 32 numbers.
ROW_TYPES: Mapping[str, RowType] = {
    "f16": RowType(2, ("-fa 0", "-fa 1")),
    "q8_0": RowType(34 / 32, ("-fa 1",)),
}
"""By their names in llama.cpp, which ``-ctk`` and ``-ctv`` take."""


def find_program() -> Path:
    """The file that ``LLAMA_BENCH`` names, or else the ``llama-bench`` on PATH.

    Raises:
        ValueError: there is none, or it can't be run; names the remedy.
    """
    given = os.environ.get(VARIABLE)
    # A bare name that is given is a file here, not one on PATH.
    found = shutil.which(Path(given).expanduser().absolute() if given else PROGRAM)
    if found is None:
        where = f"there is no program at {given}" if given else "it is not on PATH"
        raise ValueError(
            f"--opponents {LLAMA_CPP} runs {PROGRAM}, and {where}: build it as "
            f'docs/benchmark.md says ("{LLAMA_CPP}"), and put it on PATH or set {VARIABLE} to its '
            "path"
        )
    return Path(found)


@dataclass(frozen=True)
class LlamaSample:
    """What one turn of ``llama-bench`` brings home.

    Attributes:
        seconds: of a step, by the flag of flash attention: the mean of all steps of the turn.
        floor: of a step behind the last token.
        usage: of keys and values then.
        build: the commit and number of the build, as llama.cpp tells them.
    """

    seconds: Mapping[str, float]
    floor: Floor
    usage: Usage
    build: str


@dataclass(frozen=True)
class LlamaBench:
    """Decode steps of llama.cpp with one type of keys and values, on as many threads as torch.

    Attributes:
        program: ``llama-bench``.
        folder: where models are written, and read again in the next turn.
        kind: of ``ROW_TYPES``.
    """

    program: Path
    folder: Path
    kind: str

    def held_bytes(self, subject: Subject, length: int) -> float:
        """Keys and values of ``length`` tokens of one sequence."""
        return self._numbers(subject) * length * ROW_TYPES[self.kind].bytes

    def needed_bytes(self, subject: Subject, length: int) -> int:
        """What the program takes: the weights, and keys and values twice, for it keeps a copy."""
        return int(subject.weights.held + 2 * self.held_bytes(subject, length))

    def sample(self, subject: Subject, context: int, steps: int) -> LlamaSample:
        """Read ``context`` tokens and time ``steps`` more, with each flag that there is.

        Raises:
            CheckFailed: the program fails, or prints something else than its results.
            ValueError: no room for the model on the disk.
        """
        flags = ROW_TYPES[self.kind].flags
        command = [str(self.program), "-m", str(self._file(subject)), "-o", "json", "-r", "1"]
        command += ["-p", "0", "-n", str(steps), "-d", str(context)]
        command += ["-t", str(torch.get_num_threads()), "-ngl", "0"]
        command += ["-ctk", self.kind, "-ctv", self.kind]
        command += ["-fa", ",".join(flag.split()[1] for flag in flags)]
        tests = self._run(command)
        try:
            seconds = {
                f"-fa {int(one['flash_attn'])}": one["samples_ns"][0] / 1e9 / steps
                for one in tests
                if (one["n_depth"], one["n_gen"]) == (context, steps)
            }
            build = f"{tests[0]['build_commit']} ({tests[0]['build_number']})"
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckFailed(
                f"{self.program} printed results that can't be read: {error!r}"
            ) from error
        if set(seconds) != set(flags):
            raise CheckFailed(
                f"{self.program} was asked for {steps} steps behind {context} tokens with "
                f"{' and '.join(flags)}, and printed {', '.join(seconds) or 'none'} of them"
            )
        length = context + steps
        held = self.held_bytes(subject, length)
        plain = self._numbers(subject) * length * subject.model.dtype.itemsize
        floor = Floor(subject.weights.read + subject.weights.row + held, 0.0)
        return LlamaSample(seconds, floor, Usage(int(held), 0, plain, 0, 0, int(held)), build)

    def row(
        self,
        measurement: ModelMeasurement,
        samples: Mapping[int, Sequence[LlamaSample]],
    ) -> Row:
        """As of a cache, with the flag that was quicker; ``seconds_by_kind`` has the others too.

        The program tells no single steps: median and quartiles are over the rounds' means.
        """
        rounds, steps = samples[measurement.built], measurement.steps
        flags = ROW_TYPES[self.kind].flags
        by_flag = {flag: median(one.seconds[flag] for one in rounds) for flag in flags}
        best = min(by_flag, key=lambda flag: by_flag[flag])
        timed = {
            layers: [TimedSample([one.seconds[best]], one.floor, one.usage, {}) for one in those]
            for layers, those in samples.items()
        }
        return timed_row(measurement, 1, timed) | {
            "timed": steps * len(rounds),
            "device_peak_bytes": rounds[-1].usage.device_bytes,
            "steps": {best: steps * len(rounds)},
            "seconds_by_kind": by_flag,
            "llama_cpp": rounds[-1].build,
        }

    def _numbers(self, subject: Subject) -> int:
        """Of keys and values of a token."""
        return 2 * sum(shape.width for shape in layer_shapes(subject.model.config))

    def _file(self, subject: Subject) -> Path:
        """The model, written if it isn't there."""
        path = self.folder / f"{subject.layers}-layers.gguf"
        if not path.exists():
            free = shutil.disk_usage(self.folder).free
            if subject.weights.held > free:
                raise ValueError(
                    f"--opponents {LLAMA_CPP} writes {subject.weights.held / 1e9:.1f} GB to "
                    f"{self.folder}, where {free / 1e9:.1f} GB are free: set TMPDIR to a folder "
                    "with more room, or give --layers"
                )
            write_gguf(path, subject.model)
        return path

    def _run(self, command: Sequence[str]) -> list[dict[str, Any]]:
        """The tests that the program printed."""
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:] or ["without a word"]
            raise CheckFailed(f"{self.program} ended with status {done.returncode}: {why[0]}")
        try:
            tests = json.loads(done.stdout)
        except json.JSONDecodeError:
            tests = None
        if not isinstance(tests, list) or not all(isinstance(one, dict) for one in tests):
            told = " ".join(done.stdout.split())[:_TOLD]
            raise CheckFailed(f"{self.program} printed {told!r} in the place of JSON results")
        return tests
