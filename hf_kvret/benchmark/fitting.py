"""The largest batch that fits: computed from two measured ones, and tried where it can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hf_kvret.benchmark.filling import choose_fill
from hf_kvret.benchmark.limits import largest_batch, predict_need, shortage
from hf_kvret.benchmark.measure import Bench, Turn
from hf_kvret.benchmark.memory import Memory
from hf_kvret.benchmark.runs import attempt
from hf_kvret.benchmark.tables import why_missing
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.results import Cell, Results


def fit_cells(
    contexts: Sequence[int], caches: Sequence[str], batches: Sequence[int], limit: int
) -> list[Cell]:
    """A cell for each largest batch; ``fits``: device memory in bytes, ``batches``: measured."""
    return [
        {"cache": cache, "context": context, "batches": list(batches), "fits": limit}
        for context in contexts
        for cache in caches
    ]


def fit_row(
    bench: Bench, choice: CacheChoice, cell: Cell, batches: Sequence[int], fill: str, found: Results
) -> dict[str, Any]:
    """The row of a ``fit_cells`` cell, from the memory rows of its smallest and largest batch.

    ``batch`` is None where it can't be computed and ``why`` then says the reason. ``how`` is
    ``computed``, ``scaled, computed`` or ``confirmed``; where a run with that batch did not fit
    after all it is ``refuted``.
    """
    points = []
    for batch in (min(batches), max(batches)):
        row = found.find({"cache": cell["cache"], "context": cell["context"], "batch": batch})
        assert row is not None
        missing = why_missing(row)
        if missing is not None:
            return {"batch": None, "why": f"batch {batch}: {missing}"}
        part = row["scaled"] if bench.scaled else row
        points.append((batch, float(part["device_peak_bytes"])))
    result = largest_batch(points[0], points[1], bench.whole.held, cell["fits"])
    if result is None:
        return {"batch": None, "why": "more sequences took no more memory"}
    fitted: dict[str, Any] = {
        "batch": result.batch,
        "per_sequence_bytes": result.per_sequence_bytes,
        "fixed_bytes": result.fixed_bytes,
        "from_batches": [points[0][0], points[1][0]],
        "how": "scaled, computed" if bench.scaled else "computed",
    }
    if bench.scaled or not result.batch or not _large_enough(bench.device, cell["fits"]):
        return fitted
    return fitted | confirm(bench, choice, cell, result.batch, fill)


def confirm(bench: Bench, choice: CacheChoice, cell: Cell, batch: int, fill: str) -> dict[str, Any]:
    """``how``, and what a run with ``batch`` sequences took beside the weights."""
    subject = bench.subjects[0]
    model, context = subject.model, cell["context"]
    need = predict_need(model.config, choice, batch, context, model.dtype)
    lacking = shortage(need, bench.device)
    if lacking is not None:
        return {"how": "computed", "why": f"not tried: {lacking}"}
    chosen = choose_fill(fill, context, bench.device, choice.name)
    turn = Turn(bench, subject, choice, context, batch, chosen)
    sample, lacking = attempt(partial(Memory().once, turn))
    if lacking is not None:
        return {"how": "refuted", "why": lacking}
    total = sample.device_peak + subject.weights.held
    return {"how": "confirmed" if total <= cell["fits"] else "refuted", "run_bytes": total}


def _large_enough(device: torch.device, limit: int) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).total_memory >= limit
