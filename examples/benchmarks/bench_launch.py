"""Which launch numbers are quickest here, for each operation and size. Each candidate's result is
compared with that of the rule, the launch numbers without measurements; one that is wrong or does
not run is refused. Candidates take turns, with cold caches before each call. What beats the rule by
5% in the median is written to the file that launches of this GPU family read; where nothing does,
it says that the rule is best. Other sizes in the file stay.

    python examples/benchmarks/bench_launch.py --device cuda --json launch.json
    python examples/benchmarks/bench_launch.py --device cuda --heads 8 --group 4 --head-dim 128 \\
        --batch 1,8,64
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernel_clock import CacheFlush, check_host_memory, time_calls
from tqdm import tqdm

from hf_kvret.lab.bench import timed
from hf_kvret.lab.bench.kernel_work import (
    ATTENTION_ERRORS,
    SCORE_ERROR,
    Draw,
    KernelShape,
    as_tuple,
    distance,
)
from hf_kvret.lab.evaluate.measurement import Measurement, Progress, Row
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.arguments import DTYPES, check_device, known_names
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.outputs import check_file
from hf_kvret.lab.report.plots import plot_groups
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret_kernels import tuning
from hf_kvret_kernels._dispatch import interpreted, launching_on
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.prompt_attention import FEW_ROWS
from hf_kvret_kernels.tuning import Tunable

MARGIN = 0.05
"""Share of its own time by which a choice must beat the rule."""
_STEP = 0.02
_PASSES = 2

Timer = Callable[[Mapping[str, Callable[[], Any]]], Mapping[str, Sequence[float]]]
"""Calls by label to the seconds of each; ``kernels_clock.time_calls`` with a device and repeats."""


@dataclass(frozen=True)
class TuneCase:
    """An operation at one size, with inputs.

    Attributes:
        op: what there is to choose.
        size: its size class, as the operation's launch looks it up.
        rule: what the launch takes without measurements.
        run: launches with a choice, returns tensors.
        tolerance: relative distance to the rule's result that rounding explains.
    """

    op: Tunable[Any]
    size: Any
    rule: Any
    run: Callable[[Any], tuple[torch.Tensor, ...]]
    tolerance: float


@dataclass(frozen=True)
class Winner:
    """What a search found.

    Attributes:
        best: the quickest choice whose result was right; may be the rule.
        rule_seconds, best_seconds: medians of the last comparison, best against rule.
        timed: median by choice, of the last turn in which it stood; the rule is among them.
        refused: why, by choice, for those whose result was wrong or that failed to run.
    """

    best: Any
    rule_seconds: float
    best_seconds: float
    timed: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Time of the rule over time of the best."""
        return self.rule_seconds / self.best_seconds

    @property
    def worth_it(self) -> bool:
        """Whether the best beats the rule by the margin."""
        return self.ratio >= 1.0 + MARGIN


def search(case: TuneCase, timer: Timer) -> Winner:
    """The best choice for ``case``.

    All values of a field take turns while the other fields stay as they were best so far; after the
    last field it begins anew, because fields depend on each other. A value that is not 2% quicker
    stays as it was: what changes nothing is not changed. At the end the best meets the rule once
    more, for the least of many noisy times looks better than it is.

    Errors of the rule's own launch come through. Those of a candidate make it refused.
    """
    want = case.run(case.rule)
    reasons: dict[Any, str | None] = {case.rule: None}
    timed: dict[str, float] = {}
    best = case.rule
    for _ in range(_PASSES):
        before = best
        for name, values in case.op.space.items():
            if not case.op.counts(name, best):
                continue
            rivals = list(dict.fromkeys([best, *(replace(best, **{name: one}) for one in values)]))
            for rival in rivals:
                if rival not in reasons:
                    reasons[rival] = _why_refused(case, rival, want)
            rivals = [rival for rival in rivals if reasons[rival] is None]
            if len(rivals) > 1:
                seconds = _medians(case, rivals, timer)
                timed |= seconds
                quickest = min(rivals, key=lambda rival: seconds[label(rival)])
                if seconds[label(quickest)] * (1.0 + _STEP) <= seconds[label(best)]:
                    best = quickest
        if best == before:
            break
    seconds = _medians(case, list(dict.fromkeys((case.rule, best))), timer)
    refused = {label(rival): why for rival, why in reasons.items() if why is not None}
    return Winner(best, seconds[label(case.rule)], seconds[label(best)], timed | seconds, refused)


def label(choice: Any) -> str:
    """A choice in a few words: ``"block_k=32, warps=4"``."""
    return ", ".join(f"{name}={value}" for name, value in vars(choice).items())


def _medians(case: TuneCase, choices: Sequence[Any], timer: Timer) -> dict[str, float]:
    calls = {label(choice): partial(case.run, choice) for choice in choices}
    return {name: median(seconds) for name, seconds in timer(calls).items()}


def _why_refused(case: TuneCase, choice: Any, want: Sequence[torch.Tensor]) -> str | None:
    """Launch once, which also compiles; None where the result is the rule's up to rounding."""
    try:
        result = case.run(choice)
        error = distance(result, want)
    except _failures() as failure:
        lines = str(failure).strip().splitlines()
        return f"{type(failure).__name__}: {lines[0] if lines else 'no message'}"
    # A comparison with NaN is false, so that NaN is refused.
    if not error <= case.tolerance:
        return f"differs by {error:.1e} from the rule, allowed are {case.tolerance:.1e}"
    return None


def _failures() -> tuple[type[Exception], ...]:
    """What a launch raises that the compiler, or the device, refuses."""
    return (RuntimeError, import_module("triton.errors").TritonError)


def _chosen(name: str, call: str, shape: KernelShape, rows: str, draw: Draw) -> TuneCase:
    """An operation over a store of ``shape.length`` rows, of which ids name ``top_k``.

    Pieces of attention are merged here: what more of them cost a step counts.
    """
    triton = _kernels(name)
    arguments = query, _, _ = draw.chosen_rows(shape, rows)
    size = triton.size_of(*arguments)

    def run(choice: Any) -> tuple[torch.Tensor, ...]:
        with launching_on(query):
            result = getattr(triton, call)(*arguments, shape.scale, None, choice=choice)
            return as_tuple(result("triton") if isinstance(result, Partials) else result)

    tolerance = SCORE_ERROR if name == "gather_scores" else ATTENTION_ERRORS[shape.dtype]
    return TuneCase(triton.CHOICES, size, triton.rule(size), run, tolerance)


def _window(masked: bool, shape: KernelShape, rows: str, draw: Draw) -> TuneCase:
    """Attention over a window of ``top_k`` tokens, as a decode step asks: its query sees all."""
    triton = _kernels("prompt_attention")
    window = replace(shape, length=shape.top_k)
    query, key, value = draw.query(window), draw.keys(window), draw.keys(window)
    size, valid = triton.size_of(query, value, masked), draw.all_valid(window) if masked else None
    # Scale, causal offset, mask, softcap and the dtype of the output.
    arguments = (query, key, value, shape.scale, None, valid, None, torch.float32)

    def run(choice: Any) -> tuple[torch.Tensor, ...]:
        with launching_on(query):
            return as_tuple(triton.prompt_attention(*arguments, choice=choice))

    rule = triton.rule_for(query, value)
    return TuneCase(triton.CHOICES, size, rule, run, ATTENTION_ERRORS[shape.dtype])


def _kernels(name: str) -> Any:
    """The module of an operation's kernels and choices, which needs triton."""
    return import_module(f"hf_kvret_kernels.{name}.triton")


TUNE_OPS: dict[str, Callable[[KernelShape, str, Draw], TuneCase]] = {
    "gather_attention": partial(_chosen, "gather_attention", "gather_partials"),
    "gather_scores": partial(_chosen, "gather_scores", "gather_scores"),
    "prompt_attention": partial(_window, False),
    "prompt_attention.masked": partial(_window, True),
}
"""By name on the command line, from a shape, whose ``top_k`` is the tokens of a call, and where
rows are, ``"device"`` or ``"host"``. Windows are on the device."""

_ROWS = ("device", "host")
_FOUND = ("rule_seconds", "best_seconds", "ratio", "worth_it", "timed", "refused")


@dataclass(frozen=True, kw_only=True)
class Launch(Measurement):
    """Which launch numbers are quickest here, for each operation and size."""

    command = "bench"
    name = "launch"
    smallest = (
        "--device cpu --dry-run --ops gather_scores --context 8 --cold 64 --heads 1 --group 2 "
        "--head-dim 16 --repeats 3 --batch 1"
    )

    ops: tuple[str, ...] = option(
        tuple(TUNE_OPS), f"of {', '.join(TUNE_OPS)} (default: all)", kind=known_names(TUNE_OPS)
    )
    context: tuple[int, ...] = common.context_option(
        (256, 512, 1024, 2048, 4096),
        "tokens of a call: rows selected, keys of a window; sizes between two powers of two share "
        "the choice of the larger",
    )
    batch: tuple[int, ...] = common.batch_option((1, 8))
    heads: int = common.heads_option()
    group: int = common.group_option()
    head_dim: int = common.dim_option()
    rows_on: tuple[str, ...] | None = option(
        None,
        "where selected rows lie, of device, host; default: both on a GPU, else device",
        kind=known_names(_ROWS),
        metavar="ROWS",
        name="--rows",
    )
    cold: int = common.count_option(32_768, "tokens of a store that rows are selected from")
    repeats: int = common.repeats_option(25, "timed calls of each candidate")
    dry_run: bool = option(False, "measure and print, but write no choices")
    dtype: str = common.dtype_option("bfloat16")
    device: str = common.device_option()
    seed: int = common.seed_option()

    def check(self) -> None:
        place = torch.device(self.device)
        if place.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device {self.device}: no CUDA device here; run this where one is")
        if place.type != "cuda" and not interpreted():
            raise ValueError(
                f"--device {self.device}: there is nothing to tune on it. Choices are launch "
                "numbers of Triton kernels, which run on a CUDA device; torch and the compiled "
                "library, which a CPU uses, have none. Run this with --device cuda, on the GPU to "
                "tune for"
            )
        check_device(self.device)
        if self.rows_on and place.type != "cuda" and "host" in self.rows_on:
            raise ValueError(f"--rows host with --device {self.device}: choose of device")
        if self.group > FEW_ROWS and any(name.startswith("prompt_") for name in self.ops):
            raise ValueError(
                f"--group {self.group}: prompt_attention looks up choices for at most {FEW_ROWS} "
                "query heads of a KV head; leave it out of --ops"
            )
        if any(map(_chooses, self.ops)) and max(self.context) > self.cold:
            raise ValueError(
                f"--context {max(self.context)} with --cold {self.cold}: more rows can't be "
                "selected than there are"
            )
        if not self.dry_run:
            tuning.check_replaceable(self._file)
            check_file("HF_KVRET_TUNING", self._file)

    def setup(self) -> dict[str, Any]:
        sizes = ("heads", "group", "head_dim", "cold", "repeats", "dtype", "device", "seed")
        ops = {op.name: op.version for op in tuning.operations().values()}
        here = timed.describe(self, *sizes, machine=("accelerator", "versions"))
        return here | {"margin": MARGIN, "ops": ops}

    def cells(self) -> list[Cell]:
        both = _ROWS if torch.device(self.device).type == "cuda" else _ROWS[:1]
        return [
            # Called a cache as in all results, so that the overview of pages finds it.
            {"op": name, "cache": f"rows on {rows}", "batch": batch, "length": length}
            for name in self.ops
            for batch in self.batch
            for length in self.context
            # A window is on the device, wherever the store is.
            for rows in ((self.rows_on or both) if _chooses(name) else _ROWS[:1])
        ]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """The sizes one by one; after each its choice is written, also of those that are known.

        Launches of this process take them from the end on. OSError where they can't be written.
        """
        waiting = self.waiting(results)
        for cell in self.cells():
            if cell in waiting:
                yield [cell]
            row = results.find(cell) or {}
            if "size" in row and not self.dry_run:
                self._keep(row, results.setup)
        tuning.reload()
        if self.dry_run:
            tqdm.write(f"dry run: {self._file} is as it was")
        else:
            tqdm.write(f"launches on {self._family} take their numbers from {self._file}")

    @torch.inference_mode()
    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """Of one operation and size; MemoryError where the host lacks memory."""
        (cell,) = group
        sizes = (self.cold, cell["batch"], self.heads, self.group, self.head_dim)
        shape, rows = KernelShape(*sizes, DTYPES[self.dtype], cell["length"]), _place(cell)
        check_host_memory(shape.count("2 B H n D x") if rows == "host" else 0)
        case = TUNE_OPS[cell["op"]](shape, rows, Draw(torch.device(self.device), self.seed))
        result = search(case, self._timer)
        return [
            {
                "operation": case.op.name,
                "version": case.op.version,
                "size": case.size._asdict(),
                "rule": case.op.as_json(case.rule),
                "best": case.op.as_json(result.best),
                **{name: getattr(result, name) for name in _FOUND},
            }
        ]

    @cached_property
    def _family(self) -> str:
        return tuning.gpu_family(torch.device(self.device))

    @property
    def _file(self) -> Path:
        return tuning.user_file(self._family)

    @cached_property
    def _timer(self) -> Timer:
        """``--repeats`` calls, with cold caches."""
        device = torch.device(self.device)
        flush = CacheFlush(device)
        return lambda calls: time_calls(calls, dict.fromkeys(calls, self.repeats), flush, device)

    def _keep(self, row: Row, setup: dict[str, Any]) -> None:
        """Write the row's choice; None stands for the rule."""
        known = tuning.operations()
        op = known[row["operation"]]
        choice = op.choice_from(row["best"]) if row["worth_it"] else None
        measured = {key: row[key] for key in ("rule_seconds", "best_seconds", "ratio")}
        measured |= {key: setup[key] for key in ("accelerator", "repeats", "versions")}
        entry = tuning.Entry(op, op.size_from(row["size"]), choice, measured)
        tuning.write_entries(self._file, self._family, [entry], known)

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each operation and size."""
        setup = results.setup
        said = (
            f"{setup['heads']} KV heads of {setup['head_dim']} with {setup['group']} query heads "
            f"each, {setup['dtype']}; stores of {setup['cold']:,} tokens; {_machine(setup)}. The "
            f"best is taken where it beats the rule by {setup['margin']:.0%}, in the median of "
            f"{setup['repeats']} calls."
        )
        if setup["device"] == "cpu":
            said += " Triton ran in its interpreter: these times say nothing about a GPU."
        return timed.rows_table(_COLUMNS, results, 4, said)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Time of the rule over time of the best: a group of bars a size, a bar an operation."""
        sizes = list(dict.fromkeys(_size(cell) for cell, _ in results))
        bars: dict[str, list[float | None]] = {}
        for cell, row in results:
            values = bars.setdefault(f"{cell['op']}, {cell['cache']}", [None] * len(sizes))
            values[sizes.index(_size(cell))] = row.get("ratio")
        title = f"launches as measured against rules, {_machine(results.setup)}"
        plot_groups(path, sizes, bars, title=title, y="time of the rule / time of the best")


def _chooses(op: str) -> bool:
    """Whether it reads rows that ids name, which may lie on the host."""
    return op.startswith("gather_")


def _place(cell: Cell) -> str:
    return cell["cache"].removeprefix("rows on ")


def _machine(setup: dict[str, Any]) -> str:
    return str(setup["accelerator"] or setup["device"])


def _size(cell: Cell) -> str:
    return f"{cell['length']:,} tokens,\nbatch {cell['batch']}"


def _changes(cell: Cell, row: Row) -> str:
    other = [f"{name}={value}" for name, value in row["best"].items() if row["rule"][name] != value]
    return ", ".join(other) or "-"


def _variants(cell: Cell, row: Row) -> str:
    """The least time of each variant, as far as it was tried; ``-`` without variants."""
    least: dict[str, float] = {}
    for choice, seconds in row["timed"].items():
        result = re.search(r"variant=(\w+)", choice)
        if result:
            least[result[1]] = min(seconds, least.get(result[1], seconds))
    return ", ".join(f"{name} {_ms(seconds)}" for name, seconds in least.items()) or "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


_COLUMNS: tuple[timed.Column, ...] = (
    ("operation", lambda cell, row: cell["op"]),
    ("tokens", lambda cell, row: f"{cell['length']:,}"),
    ("batch", lambda cell, row: str(cell["batch"])),
    ("rows", lambda cell, row: _place(cell)),
    ("rule ms", lambda cell, row: _ms(row["rule_seconds"])),
    ("best ms", lambda cell, row: _ms(row["best_seconds"])),
    ("rule / best", lambda cell, row: f"{row['ratio']:.3f}"),
    ("taken", lambda cell, row: "best" if row["worth_it"] else "rule"),
    ("what is other than in the rule", _changes),
    ("ms by variant", _variants),
    ("tried", lambda cell, row: str(len(row["timed"]))),
    ("refused", lambda cell, row: str(len(row["refused"]))),
)


MEASUREMENT = Launch

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
