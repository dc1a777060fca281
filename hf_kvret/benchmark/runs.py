"""The rounds: every cache in turn, several times, each checked before it is timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig

from hf_kvret.benchmark.checks import Checker, CheckFailed
from hf_kvret.benchmark.filling import choose_fill
from hf_kvret.benchmark.limits import predict_need, shortage
from hf_kvret.benchmark.measure import Bench, Measure, Turn
from hf_kvret.compatibility import head_dim
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.results import Cell, Results


def cells(contexts: Sequence[int], batches: Sequence[int], caches: Sequence[str]) -> list[Cell]:
    """The cells in the order in which they are run."""
    return [
        {"cache": cache, "context": context, "batch": batch}
        for context in contexts
        for batch in batches
        for cache in caches
    ]


def run_cells(
    bench: Bench,
    measure: Measure,
    choices: dict[str, CacheChoice],
    waiting: Sequence[Cell],
    fill: str,
    results: Results,
    checker: Checker | None = None,
) -> None:
    """Measure the ``waiting`` cells and add them to ``results``.

    Cells of one context and batch go round together, so that all of them see the same moods of the
    machine; they are added when the last round is over. Where there is one round, each is added
    when it is measured. A cell that runs out of memory gets a row with ``out_of_memory``, one whose
    cache is wrong at this shape a row with ``check_failed``: each says why, and the others go on.
    ``checker`` is that of an earlier call, which knows what it has checked.
    """
    checker = checker or Checker(bench.subjects[0].model, bench.subjects[0].rows, bench.seed)
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in waiting:
        alone = cell["cache"] if bench.rounds == 1 else None
        groups.setdefault((cell["context"], cell["batch"], alone), []).append(cell)
    turns = len(waiting) * bench.rounds * len(bench.subjects)
    with tqdm(total=turns, desc=measure.name, unit="turn") as bar:
        for group in groups.values():
            named = {cell["cache"]: choices[cell["cache"]] for cell in group}
            rows = _run_group(bench, measure, checker, named, group[0], fill, bar)
            for cell in group:
                results.add(cell, rows[cell["cache"]])


def _run_group(
    bench: Bench,
    measure: Measure,
    checker: Checker,
    choices: dict[str, CacheChoice],
    cell: Cell,
    fill: str,
    bar: Any,
) -> dict[str, dict[str, Any]]:
    """Rows by cache, for one context and batch."""
    context, batch = cell["context"], cell["batch"]
    common: dict[str, dict[str, Any]] = {}
    missing: dict[str, dict[str, str]] = {}
    samples: dict[str, dict[int, list[Any]]] = {}
    for name, choice in choices.items():
        chosen = choose_fill(fill, context, bench.device, name)
        common[name] = {
            "fill": chosen,
            "layers": bench.subjects[0].layers,
            "of_layers": bench.shape.layers,
        }
        samples[name] = {subject.layers: [] for subject in bench.subjects}
        model = bench.subjects[0].model
        short = shortage(
            predict_need(model.config, choice, batch, context, model.dtype), bench.device
        )
        if short is not None:
            missing[name] = {"out_of_memory": short}
            continue
        bar.set_postfix_str(f"{name}: check")
        found, lacking = _told(partial(checker.check, choice, context, batch, chosen))
        if lacking is not None:
            missing[name] = lacking
        common[name]["check"] = found
    for number in range(bench.rounds):
        for name, choice in choices.items():
            for subject in bench.subjects:
                bar.set_postfix_str(f"{name} {context} x {batch}, round {number + 1}")
                if name not in missing:
                    turn = Turn(bench, subject, choice, context, batch, common[name]["fill"])
                    sample, lacking = _told(partial(measure.once, turn))
                    if lacking is not None:
                        missing[name] = lacking
                    samples[name][subject.layers].append(sample)
                bar.update()
    return {
        name: common[name]
        | (
            missing[name]
            if name in missing
            else measure.row(bench, cell | {"cache": name}, samples[name])
        )
        for name in choices
    }


def _told(work: Callable[[], Any]) -> tuple[Any, dict[str, str] | None]:
    """``(work(), None)``, or None and what the row says instead of numbers."""
    try:
        found, lacking = attempt(work)
    except CheckFailed as error:
        return None, {"check_failed": str(error)}
    return found, None if lacking is None else {"out_of_memory": lacking}


def attempt(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """``(work(), None)``, or ``(None, reason)`` when memory runs out. Memory is freed after it."""
    result, reason = None, None
    try:
        result = work()
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        reason = f"out of memory ({str(error).strip().splitlines()[0]})"
    # Outside the handler: its traceback would keep the tensors of the failed run. Collecting takes
    # long beside a small run, and matters where memory is scarce.
    if reason is not None or torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    return result, reason


def check_contexts(
    config: PreTrainedConfig, choices: dict[str, CacheChoice], contexts: Sequence[int]
) -> None:
    """ValueError for a context at which a retrieval cache would be plain attention."""
    for name, choice in choices.items():
        options = choice.options
        if options is None:
            continue
        options.check_model(head_dim(config))
        dense = max(options.dense_len, options.recent + options.flush + 1)
        short = [context for context in contexts if context < dense]
        if short:
            raise ValueError(
                f"--context {short[0]}: {name} attends to everything below {dense} tokens "
                f"(dense_below={options.dense_len}, recent={options.recent}, "
                f"flush={options.flush}); give a longer context, or smaller options as "
                f"{name}:dense_below=0:recent=64:flush=64"
            )


def check_stores(choices: dict[str, CacheChoice]) -> None:
    """ValueError for a retrieval cache whose store depends on how many layers there are."""
    for name, choice in choices.items():
        if choice.options is not None and choice.options.store == "auto":
            raise ValueError(
                f"{name} with store=auto decides by the number of layers, so fewer of them may "
                "decide otherwise: give --store device or host with --layers"
            )


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no class of its own for a host that can't allocate, for pinned memory, and for what
    # CUDA's libraries can't get.
    told = str(error)
    signs = ("DefaultCPUAllocator", "ALLOC_FAILED", "out of memory")
    return any(sign in told for sign in signs)
