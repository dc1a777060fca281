"""``hf-kvret bench MEASURE``: from options to a table."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hf_kvret.benchmark.batches import BatchSearch, device_limit
from hf_kvret.benchmark.checks import CheckFailed
from hf_kvret.benchmark.decode import Decode
from hf_kvret.benchmark.filling import choose_fill, measure_rows
from hf_kvret.benchmark.fitting import fit_cells, fit_row
from hf_kvret.benchmark.limits import check_weights
from hf_kvret.benchmark.measure import Bench, Measure, Subject
from hf_kvret.benchmark.memory import Memory
from hf_kvret.benchmark.opponents import choose_bench_caches
from hf_kvret.benchmark.prefill import Prefill
from hf_kvret.benchmark.runs import cells, check_contexts, check_stores, run_cells
from hf_kvret.benchmark.shapes import Shape, load_shape, random_model, weight_bytes
from hf_kvret.benchmark.stand_ins import make_stand_ins
from hf_kvret.benchmark.stepping import LEAST_COMPILED_WARMUP
from hf_kvret.benchmark.timing import measure_bandwidth
from hf_kvret.evaluation.arguments import DTYPES, check_device, names
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.environment import describe_environment
from hf_kvret.evaluation.outputs import check_outputs, write_outputs
from hf_kvret.evaluation.results import Results

_LEAST_CONTEXT = 64


def run_bench(options: argparse.Namespace) -> int:
    """Measure what the command line names, print the table, write what was asked for.

    Returns 1 when a cache failed its check: its row says why, and the others were measured. The
    same command checks it again.
    """
    measure: Measure = options.measure()
    check_outputs(options, f"bench {measure.name}", measure)
    shape, layers, choices = _understand(options, measure)
    setup = _setup(options, shape, layers)
    if isinstance(measure, Prefill):
        measure.chunk = setup["chunk"] = options.chunk
    results = Results(f"bench {measure.name}", setup, options.json)
    wanted = cells(options.context, options.batch, list(choices))
    waiting = [cell for cell in wanted if _unfinished(results.find(cell))]
    limit = getattr(options, "device_memory", None)
    fits = [] if limit is None else fit_cells(options.context, list(choices), options.batch, limit)
    unfitted = [cell for cell in fits if results.find(cell) is None]
    if waiting or unfitted:
        bench = _prepare(options, shape, layers, "random" in _fills(options, choices))
        models = [subject.model for subject in bench.subjects]
        with tempfile.TemporaryDirectory() as folder:
            make_stand_ins(models, choices.values(), Path(folder), options.seed)
            run_cells(bench, measure, choices, waiting, options.fill, results)
            for cell in unfitted:
                choice = choices[cell["cache"]]
                row = fit_row(bench, choice, cell, options.batch, options.fill, results)
                results.add(cell, row)
    print(f"\n{measure.table(results)}")
    known = len(wanted) + len(fits) - len(waiting) - len(unfitted)
    if known:
        print(f"\n{known} rows were finished already and were not measured again")
    write_outputs(options, measure, results)
    return _failures(results)


def run_batch(options: argparse.Namespace) -> int:
    """Find and measure the batches that fit, print the tables, write what was asked for.

    Returns 1 when a cache failed its check: its row says why, and the others were measured.
    """
    measure: Measure = options.measure()
    check_outputs(options, f"bench {measure.name}", measure)
    if options.layers is not None:
        raise ValueError("--layers: which batch fits is a matter of the whole model; leave it out")
    limit = device_limit(options.device_memory, torch.device(options.device))
    shape, layers, choices = _understand(options, measure)
    setup = _setup(options, shape, layers) | {"device_memory": limit, "most": options.most}
    results = Results(f"bench {measure.name}", setup, options.json)
    bench = _prepare(options, shape, layers, "random" in _fills(options, choices))
    models = [subject.model for subject in bench.subjects]
    with tempfile.TemporaryDirectory() as folder:
        make_stand_ins(models, choices.values(), Path(folder), options.seed)
        search = BatchSearch(bench, choices, options.fill, limit, options.most, results)
        for context in options.context:
            search.run(context)
    print(f"\n{measure.table(results)}")
    write_outputs(options, measure, results)
    return _failures(results)


def run_alone(options: argparse.Namespace) -> int:
    """Measure what needs no model, print the table, write what was asked for.

    Returns 1 when two ways to compute the same disagree: then that size and what follows it is not
    measured.
    """
    check_outputs(options, f"bench {options.measurement.name}", options.measurement)
    try:
        results = options.measuring(options)
    except CheckFailed as error:
        print(f"hf-kvret: error: {error}", file=sys.stderr)
        return 1
    print(f"\n{options.measurement.table(results)}")
    write_outputs(options, options.measurement, results)
    return 0


def _understand(
    options: argparse.Namespace, measure: Measure
) -> tuple[Shape, int, dict[str, CacheChoice]]:
    """Shape, layers to build and caches; ValueError for what makes no sense."""
    check_device(options.device)
    if min(options.context) < _LEAST_CONTEXT:
        raise ValueError(f"--context {min(options.context)}: at least {_LEAST_CONTEXT} tokens")
    shape = load_shape(options.shape)
    layers = shape.layers if options.layers is None else options.layers
    shape.with_layers(layers)
    if layers == 1 < shape.layers:
        raise ValueError(
            "--layers 1: scaling takes two runs, with all and with half of the layers given; at "
            "least 2"
        )
    retrieval = {"top_k": options.top_k, "store": options.store}
    choices = choose_bench_caches(names(options.caches), retrieval, options.device)
    _check_ways(options, measure, choices)
    if isinstance(measure, Memory) and options.device_memory and len(options.batch) < 2:
        raise ValueError(
            f"--device-memory with --batch {options.batch[0]}: two batch sizes make the line that "
            "says what fits, as --batch 1,2"
        )
    check_contexts(shape.config, choices, options.context)
    if layers < shape.layers:
        check_stores(choices)
    _fills(options, choices)
    return shape, layers, choices


def _check_ways(
    options: argparse.Namespace, measure: Measure, choices: dict[str, CacheChoice]
) -> None:
    """ValueError for a way to decode where no step is timed, or where its start would be."""
    for name, other in (("dense-graph", "dense"), ("static-compile", "static")):
        if name in choices and not isinstance(measure, Decode):
            raise ValueError(
                f"{name} is a way to decode, bench {measure.name} knows nothing of it: use {other}"
            )
    if "static-compile" in choices and options.warmup < LEAST_COMPILED_WARMUP:
        raise ValueError(
            f"--warmup {options.warmup}: static-compile compiles and records in its first steps, "
            f"give at least {LEAST_COMPILED_WARMUP}"
        )


def _fills(options: argparse.Namespace, choices: dict[str, CacheChoice]) -> set[str]:
    """How the caches will be filled; ValueError where one can't be."""
    device = torch.device(options.device)
    return {
        choose_fill(options.fill, context, device, name)
        for context in options.context
        for name in choices
    }


def _setup(options: argparse.Namespace, shape: Shape, layers: int) -> dict[str, Any]:
    keys = ("dtype", "device", "seed", "top_k", "store", "fill", "steps", "warmup", "rounds")
    sizes = {"shape": shape.name, "layers": layers, "of_layers": shape.layers}
    # JSON has no infinity.
    sizes["limit"] = options.limit if math.isfinite(options.limit) else None
    here = describe_environment()
    machine = {key: here[key] for key in ("processor", "threads", "accelerator", "versions")}
    return sizes | {key: getattr(options, key) for key in keys} | machine


def _prepare(options: argparse.Namespace, shape: Shape, layers: int, random: bool) -> Bench:
    """Models on the device and its bandwidth; ValueError when the weights do not fit.

    ``random``: some caches will be filled with random rows, so it is found out how these look.
    """
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    counts = [layers] if layers == shape.layers else [layers, layers // 2]
    configs = {count: shape.with_layers(count) for count in counts}
    weights = {count: weight_bytes(config, dtype) for count, config in configs.items()}
    check_weights(sum(part.held for part in weights.values()), device, shape.name)
    subjects = []
    for count, config in configs.items():
        model = random_model(config, dtype, device, options.seed)
        rows = measure_rows(model, options.seed) if random else None
        subjects.append(Subject(model, count, weights[count], rows))
    return Bench(
        shape,
        tuple(subjects),
        weight_bytes(shape.config, dtype),
        measure_bandwidth(device),
        options.steps,
        options.warmup,
        options.rounds,
        options.seed,
        options.limit,
    )


def _unfinished(row: dict[str, Any] | None) -> bool:
    return row is None or "check_failed" in row


def _failures(results: Results) -> int:
    """1 where a check failed, and says which; else 0."""
    failed = [row["check_failed"] for _, row in results if "check_failed" in row]
    for why in dict.fromkeys(failed):
        print(f"hf-kvret: error: {why}", file=sys.stderr)
    return int(bool(failed))
