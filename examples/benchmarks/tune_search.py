"""Launch numbers: the operations that have some, and the search for the quickest.

One field after the other, each candidate checked, then timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
from kernel_inputs import Draw, KernelShape
from kernel_work import ATTENTION_ERRORS, SCORE_ERROR, as_tuple, distance

from hf_kvret_kernels._dispatch import launching_on
from hf_kvret_kernels.merge import Pieces
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
class Found:
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


def search(case: TuneCase, timer: Timer) -> Found:
    """The best choice for ``case``.

    All values of a field take turns while the other fields stay as they were best so far; after the
    last field it begins anew, because fields depend on each other. A value that is not 2% quicker
    stays as it was: what changes nothing is not changed. At the end the best meets the rule once
    more, for the least of many noisy times looks better than it is.

    Errors of the rule's own launch come through. Those of a candidate make it refused.
    """
    want = case.run(case.rule)
    wrong: dict[Any, str | None] = {case.rule: None}
    timed: dict[str, float] = {}
    best = case.rule
    for _ in range(_PASSES):
        before = best
        for name, values in case.op.space.items():
            if not case.op.counts(name, best):
                continue
            rivals = list(dict.fromkeys([best, *(replace(best, **{name: one}) for one in values)]))
            for rival in rivals:
                if rival not in wrong:
                    wrong[rival] = _why_refused(case, rival, want)
            rivals = [rival for rival in rivals if wrong[rival] is None]
            if len(rivals) > 1:
                seconds = _medians(case, rivals, timer)
                timed |= seconds
                quickest = min(rivals, key=lambda rival: seconds[label(rival)])
                if seconds[label(quickest)] * (1.0 + _STEP) <= seconds[label(best)]:
                    best = quickest
        if best == before:
            break
    seconds = _medians(case, list(dict.fromkeys((case.rule, best))), timer)
    refused = {label(rival): why for rival, why in wrong.items() if why is not None}
    return Found(best, seconds[label(case.rule)], seconds[label(best)], timed | seconds, refused)


def label(choice: Any) -> str:
    """A choice in a few words: ``"block_k=32, warps=4"``."""
    return ", ".join(f"{name}={value}" for name, value in vars(choice).items())


def _medians(case: TuneCase, choices: Sequence[Any], timer: Timer) -> dict[str, float]:
    calls = {label(choice): partial(case.run, choice) for choice in choices}
    return {name: median(seconds) for name, seconds in timer(calls).items()}


def _why_refused(case: TuneCase, choice: Any, want: Sequence[torch.Tensor]) -> str | None:
    """Launch once, which also compiles; None where the result is the rule's up to rounding."""
    try:
        found = case.run(choice)
        error = distance(found, want)
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
    choices, triton = _modules(name)
    given = query, _, _ = draw.chosen_rows(shape, rows)
    size = choices.size_of(*given)

    def run(choice: Any) -> tuple[torch.Tensor, ...]:
        with launching_on(query):
            found = getattr(triton, call)(*given, shape.scale, None, choice=choice)
            return as_tuple(found("triton") if isinstance(found, Pieces) else found)

    tolerance = SCORE_ERROR if name == "gather_scores" else ATTENTION_ERRORS[shape.dtype]
    return TuneCase(choices.CHOICES, size, choices.rule(size), run, tolerance)


def _window(masked: bool, shape: KernelShape, rows: str, draw: Draw) -> TuneCase:
    """Attention over a window of ``top_k`` tokens, as a decode step asks: its query sees all."""
    choices, triton = _modules("prompt_attention")
    window = replace(shape, length=shape.top_k)
    query, key, value = draw.query(window), draw.keys(window), draw.keys(window)
    size, valid = choices.size_of(query, value, masked), draw.all_valid(window) if masked else None
    # Scale, causal offset, mask, softcap and the dtype of the output.
    given = (query, key, value, shape.scale, None, valid, None, torch.float32)

    def run(choice: Any) -> tuple[torch.Tensor, ...]:
        with launching_on(query):
            return as_tuple(triton.prompt_attention(*given, choice=choice))

    rule = triton.rule_for(query, value)
    return TuneCase(choices.CHOICES, size, rule, run, ATTENTION_ERRORS[shape.dtype])


def _modules(name: str) -> tuple[Any, Any]:
    """Choices and kernels of an operation; they need triton."""
    folder = f"hf_kvret_kernels.{name}"
    return import_module(f"{folder}.choices"), import_module(f"{folder}.triton")


TUNE_OPS: dict[str, Callable[[KernelShape, str, Draw], TuneCase]] = {
    "gather_attention": partial(_chosen, "gather_attention", "gather_pieces"),
    "gather_scores": partial(_chosen, "gather_scores", "gather_scores"),
    "prompt_attention": partial(_window, False),
    "prompt_attention.masked": partial(_window, True),
}
"""By name on the command line, from a shape, whose ``top_k`` is the tokens of a call, and where
rows are, ``"device"`` or ``"host"``. Windows are on the device."""
