"""Checks of the self-test: operations, decode steps and caches beside slower and plainer ones."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from hf_kvret import attach, registered_methods
from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.bundled import load_bundled_model
from hf_kvret.models.versions import as_argument
from hf_kvret.replay import DecodeGraph
from hf_kvret.replay.layer_step import LayerStep
from hf_kvret.replay.recorders import RECORDERS
from hf_kvret.stores import STORES
from hf_kvret.stores.memory import pinned
from hf_kvret.testing.conformance import (
    COVERING_OPTIONS,
    Case,
    check,
    no_proof,
    reads_cold_rows,
    run_case,
)
from hf_kvret.testing.indexed_models import known_indexed
from hf_kvret.testing.modes import MODES, Mode
from hf_kvret.testing.scenario import Outcome, Scenario, prompt
from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import prefer
from hf_kvret_kernels.catalog import (
    ATTENTION_ERRORS,
    OPERATIONS,
    Draw,
    KernelOp,
    KernelShape,
    distance,
)
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.paged import PagedRows

GROUPS = {
    "kernels": "each operation beside the same in plain torch, in the dtypes of the device",
    "steps": "decode steps as they run here, beside slower ones: without graph, in torch",
    "memory": "rows read over the bus by their address, and copies while the GPU is busy",
    "caches": "each method and store: tokens of full attention, after a flush, a crop, a load",
}
"""What is checked, in this order."""

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_LONGEST = 300


class Skip(Exception):
    """Raised by a check that can't be made here; says why."""


@dataclass(frozen=True)
class Check:
    """Something that must hold.

    Attributes:
        group: one of ``GROUPS``.
        name: of the check within its group.
        run: raises ``Skip`` where it can't be made, AssertionError or whatever the code raises
            where it fails; returns a detail, such as the largest error.
        remedy: the option that avoids what failed.
    """

    group: str
    name: str
    run: Callable[[], str]
    remedy: str


@dataclass(frozen=True)
class Verdict:
    """What became of a check: ``PASSED``, ``FAILED`` or ``SKIPPED``, and why or what was found."""

    group: str
    name: str
    status: str
    detail: str
    remedy: str
    seconds: float


def run_check(check: Check) -> Verdict:
    """Run a check; whatever it raises becomes a verdict."""
    start, status = time.perf_counter(), PASSED
    try:
        detail = check.run()
    except Skip as reason:
        status, detail = SKIPPED, without_folders(str(reason))
    # Whatever a kernel, a driver or a compiler raises is what the test is there to find.
    except Exception as error:
        status, detail = FAILED, without_folders(f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    return Verdict(check.group, check.name, status, detail, check.remedy, seconds)


def without_folders(text: str) -> str:
    """One line of an error, in which ``~`` stands for the user's folder."""
    line = " ".join(text.split()).replace(str(Path.home()), "~")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


# The length is no multiple of a page or a tile, and several query heads share a KV head.
_SIZES: dict[str, Any] = {
    "length": 1_491, "batch": 2, "heads": 2, "group": 4, "head_dim": 128, "top_k": 200,
    "codewords": 256, "rank": 64, "candidates": 746, "centroids": 93, "listed": 500,
}  # fmt: skip
# Its rows take more than 4 MiB, from where on memory is pinned in huge pages.
_LONG = 20_000
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REMEDIES = {
    "paris": "another method than paris, as cache_implementation='flat'",
    "codebook": "another method than a2ats, as cache_implementation='paris'",
    "proxy": "another method than lrqk, as cache_implementation='paris'",
    "centroid": "another method than ctkvr, as cache_implementation='paris'",
    "higgs": "a store that codes nothing: store='device' or 'host', and no aqua",
    "resident": "another store than 'resident', as store='host'",
    "block_lse": "prompt='exact'",
}


def kernel_checks(device: torch.device) -> Iterator[Check]:
    """Each operation in each dtype, on a CPU with each instruction set of the library."""
    on_gpu, missing = device.type == "cuda", bool(host_library.why_not())
    paths = [None] if on_gpu or missing else [*host_library.paths()]
    for operation in OPERATIONS:
        group = operation.name.partition(".")[0]
        for name, dtype in _DTYPES.items():
            for path in paths:
                label = f"{operation.name}, {name}" + (f", {path}" if path else "")
                remedy = _REMEDIES.get(group, "cache_implementation='dynamic'")
                if path is not None:
                    others = [each for each in reversed(paths) if each != path]
                    remedy = f"{host_library.ISA_VARIABLE}={(*others, 'portable')[0]}"
                yield Check(
                    "kernels", label, partial(_beside_naive, operation, dtype, device, path), remedy
                )


@torch.inference_mode()
def _beside_naive(
    operation: KernelOp, dtype: torch.dtype, device: torch.device, path: str | None
) -> str:
    check_dtype(dtype, device)
    if operation.backends(device)[0] == "naive":
        reason = host_library.why_not() if operation.compiled else None
        raise Skip(reason or "plain torch does this on a CPU")
    call = operation.prepare(KernelShape(dtype=dtype, **_SIZES), Draw(device, 0))
    # The compiled library takes the code of that instruction set.
    variables = {} if path is None else {host_library.ISA_VARIABLE: path}
    with patch.dict(os.environ, variables):
        own = call.run(operation.backends(device)[0])
    return _rounding(call.error(own, call.run("naive")), call.tolerance)


def _rounding(error: float, most: float) -> str:
    """An error in words; AssertionError where it is more than rounding."""
    if not error <= most:
        raise AssertionError(f"error {error:.2g}, at most {most:.2g} is rounding")
    return f"error {error:.1g}"


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Skip where a GPU has no arithmetic in bf16, as before compute capability 8.0."""
    if dtype == torch.bfloat16 and device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        if major < 8:
            raise Skip("this GPU has no bf16: load models in fp16 or fp32")


def host_row_checks(device: torch.device) -> Iterator[Check]:
    """Attention to rows in pinned host memory, which the GPU reads by their addresses."""
    for length in (_SIZES["length"], _LONG):
        yield Check(
            "memory",
            f"rows on the host, {length:,} tokens",
            partial(_attend_host_rows, device, length),
            "store='device', or 'cpu'",
        )


@torch.inference_mode()
def _attend_host_rows(device: torch.device, length: int) -> str:
    if device.type != "cuda":
        raise Skip("a GPU reads rows over the bus, and none is tested")
    shape = KernelShape(dtype=torch.bfloat16, **_SIZES | {"length": length})
    query, same, ids = Draw(device, 0).chosen_rows(shape)
    # Two chunks of the memory that stores use, of which neither ends with a huge page.
    chunks = []
    for part in same.chunks[0].tensor_split([same.chunks[0].shape[0] // 3]):
        chunk = pinned(tuple(part.shape), part.dtype, torch.cuda.current_stream(device))
        chunks.append(chunk.copy_(part))
    rows = PagedRows(chunks, same.table, same.key_dim)
    own = gather_attention(query, rows, ids, scale=shape.scale)
    error = distance(own, gather_attention(query, same, ids, scale=shape.scale, backend="naive"))
    return _rounding(error, ATTENTION_ERRORS[shape.dtype])


METHODS = ("flat", "paris", "lrqk", "ctkvr", "a2ats", "h2o", "aqua")
"""Those that serve the bundled model."""

# The budget is a few tokens, and rows are cold from the first step on.
_OPTIONS: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 24, "recent": 16, "flush": 8}
_PROMPT_LEN, _STEPS = 200, 20
# Sums come in another order; logits of the bundled model are 10 to 20.
_TOLERANCE = 2e-3
_TOLERANCES = {torch.float32: _TOLERANCE, torch.bfloat16: 0.5}
# With a small budget rounding decides between two tokens that matter alike, once in a while.
_LEAST_ALIKE = 0.9
# Methods and stores take them in turns, so that each of them is played.
_MODES = (
    "greedy_ragged", "crop_deep", "second_turn_ragged", "beams", "prefix_reuse", "prompt_lookup",
    "batch_select_indices", "chunked_prefill", "sampling", "saved", "reset",
)  # fmt: skip
# These products take longer than a step, on another stream.
_LOAD, _LOAD_SIZE = 8, 4096


def saved(scenario: Scenario) -> None:
    """A cache that is saved, loaded and used for more tokens."""
    ids, mask = scenario.ragged((70, 55))
    cached = scenario.cache()
    scenario.forward(ids, cached, "prompt", mask, keep=1)
    more = scenario.prompt(2, 12, salt=1)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    scenario.feed(more[:, :6], cached, "before", mask)
    if isinstance(cached, RetrievalCache):
        with tempfile.TemporaryDirectory(prefix="hf_kvret_") as folder:
            cached.save_pretrained(folder)
            options = {"store": cached.options.store}
            if cached.options.disk is not None:
                options["disk"] = cached.options.disk
            cached = type(cached).from_pretrained(
                folder, scenario.model.config, device=scenario.device, **options
            )
        scenario.register(cached)
    scenario.feed(more[:, 6:], cached, "after", mask)


_PLAYED = {**MODES, "saved": Mode("saved", saved, direct=True)}


class Bundled:
    """The bundled model on a device, and what transformers' own cache gives with it.

    Args:
        device: where the model is.
        dtype: of the model.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        self._references: dict[str, Outcome | str] = {}

    @cached_property
    def model(self) -> PreTrainedModel:
        """It is attached, and loaded when it is first used."""
        model = load_bundled_model(self.dtype, self.device)
        attach(model)
        return model

    def new_cache(self, method: str, store: str, **changes: Any) -> RetrievalCache:
        """An empty cache.

        Raises:
            Skip: the method can't have the store.
        """
        cls = registered_methods()[method]
        if not cls.Config.takes("store", store):
            raise Skip(f"{method} has rows of its own, and no store={store!r}")
        options = {**_OPTIONS, **changes, "store": store}
        if store == "disk":
            options["disk"] = tempfile.gettempdir()
        taken = {name: value for name, value in options.items() if cls.Config.takes(name, value)}
        return cls(self.model.config, **taken)

    def covering(self, method: str, store: str, mode: str) -> str:
        """With a budget for all and rows in full: values of full attention in a mode of use."""
        coded = {"bits": 16} if method == "aqua" or store.startswith("higgs") else {}
        make = partial(self.new_cache, method, store, **COVERING_OPTIONS, **coded)
        if mode not in self._references:
            self._references[mode] = _PLAYED[mode].reference(self.model)
        reference = self._references[mode]
        if isinstance(reference, str):
            raise AssertionError(reference)
        proof = no_proof if method == "aqua" else reads_cold_rows
        check(self.model, _PLAYED[mode], make, baseline=reference, atol=_TOLERANCE, proof=proof)
        return mode

    @torch.inference_mode()
    def decode(
        self,
        cached: RetrievalCache,
        call: Callable[..., Any] | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """``[steps, B, V]``: logits of given tokens after a prompt, with flushes in between."""
        call, logits = call or self.model, []
        tokens = prompt(2, _PROMPT_LEN + _STEPS).to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        parts = [_PROMPT_LEN, *[1] * _STEPS]
        for inputs, places in zip(
            tokens.split(parts, dim=1), positions.split(parts, dim=1), strict=True
        ):
            before_step()
            out = call(input_ids=inputs, position_ids=places, **as_argument(cached), use_cache=True)
            logits.append(out.logits[:, -1].float())
        return torch.stack(logits[1:])


def step_checks(bundled: Bundled) -> Iterator[Check]:
    """Steps beside those of plain torch, and on a GPU replayed ones beside usual ones."""
    on_gpu = bundled.device.type == "cuda"
    remedy = "cache_implementation='dynamic'" if on_gpu else "HF_KVRET_CPU_PATH=portable"
    half = Bundled(bundled.device, torch.bfloat16)
    cases = [
        (bundled, method, store, f"{method}, store={store!r}")
        for method, store in itertools.product(METHODS, ("device", "host", "higgs"))
        if registered_methods()[method].Config.takes("store", store)
    ]
    cases += [(half, method, "device", f"{method}, bf16") for method in ("flat", "paris", "lrqk")]
    for model, method, store, name in cases:
        # torch reads no rows over the bus.
        if not on_gpu or store != "host":
            run = partial(_beside_torch, model, method, store)
            yield Check("steps", f"{name}, torch", run, remedy)
        if on_gpu:
            run = partial(replayed, model, method, store)
            yield Check("steps", f"{name}, graph", run, "graph=False")
    if on_gpu:
        run = partial(replayed, bundled, "flat", "device", compile=True)
        yield Check("steps", "flat, compiled layers, graph", run, "compile=False")


def replayed(bundled: Bundled, method: str, store: str, compile: bool = False) -> str:
    """Replayed steps beside usual ones; with ``compile`` of layers that torch has compiled.

    Raises:
        Skip: such steps can't be replayed.
        AssertionError: they differ, or too few were replayed.
    """
    check_dtype(bundled.dtype, bundled.device)
    usual = bundled.decode(bundled.new_cache(method, store, graph=False))
    cached = bundled.new_cache(method, store, compile=compile)
    graph = DecodeGraph(bundled.model, cached)
    own = bundled.decode(cached, graph)
    if obstacle := LayerStep(cached.retrieval_layers[0]).capture_obstacle:
        raise Skip(obstacle)
    said = _compare(own, usual, method, _TOLERANCES[bundled.dtype])
    if compile and (graph.compiled is None or graph.compiled.layers.why is not None):
        raise AssertionError("torch did not compile the layers: the log says why")
    if graph.replays < _STEPS // 2:
        why = f"{graph.replays} of {_STEPS} steps were replayed: {graph.reason}"
        raise (AssertionError if bundled.device.type in RECORDERS else Skip)(why)
    return f"{graph.replays} of {_STEPS} steps replayed, {said}"


def _beside_torch(bundled: Bundled, method: str, store: str) -> str:
    if bundled.device.type == "cpu" and host_library.why_not():
        raise Skip(f"torch does all of it on this CPU: {host_library.why_not()}")
    check_dtype(bundled.dtype, bundled.device)
    own = bundled.decode(bundled.new_cache(method, store, graph=False))
    with prefer("naive"):
        usual = bundled.decode(bundled.new_cache(method, store, graph=False))
    return _compare(own, usual, method, _TOLERANCES[bundled.dtype])


def _compare(own: torch.Tensor, usual: torch.Tensor, method: str, tolerance: float) -> str:
    """Words for how near logits ``[steps, B, V]`` are; AssertionError where too many differ."""
    if not own.isfinite().all():
        raise AssertionError("logits are not finite")
    errors = (own - usual).abs().amax(dim=-1)
    alike = (errors <= tolerance).float().mean().item()
    # Exact scores leave nothing for rounding to decide.
    if alike < (1.0 if method == "flat" else _LEAST_ALIKE):
        raise AssertionError(
            f"{1 - alike:.0%} of the steps have other logits, by up to {errors.max().item():.2g}"
        )
    return f"logits within {errors.max().item():.1g}"


def stream_checks(bundled: Bundled) -> Iterator[Check]:
    """Steps with rows on the host while the GPU works on another stream."""
    for store in ("host", "resident", "cpu"):
        run = partial(_loaded_steps, bundled, store)
        yield Check("memory", f"a busy GPU, store={store!r}", run, "store='device'")


def _loaded_steps(bundled: Bundled, store: str) -> str:
    if bundled.device.type != "cuda":
        raise Skip("a GPU has streams, and none is tested")
    quiet = bundled.decode(bundled.new_cache("paris", store))
    stream = torch.cuda.Stream(bundled.device)
    matrix = torch.randn(_LOAD_SIZE, _LOAD_SIZE, device=bundled.device)

    def load() -> None:
        with torch.cuda.stream(stream):
            for _ in range(_LOAD):
                matrix @ matrix

    busy = bundled.decode(bundled.new_cache("paris", store), before_step=load)
    if not torch.equal(quiet, busy):
        raise AssertionError(f"logits differ by {(quiet - busy).abs().max().item():.2g}")
    return f"{_STEPS} steps"


def cache_checks(bundled: Bundled) -> Iterator[Check]:
    """Every method with every store, each in one of the modes of use in turn."""
    stores = [*STORES, "disk"]
    modes = itertools.cycle(_MODES)
    for store, method in itertools.product(stores, METHODS):
        if registered_methods()[method].Config.takes("store", store):
            mode = next(modes)
            other = "device" if store != "device" else "host"
            yield Check(
                "caches",
                f"{method}, store={store!r}, {mode}",
                partial(bundled.covering, method, store, mode),
                f"store={other!r}, another method, or cache_implementation='dynamic'",
            )
    for method, model in (("latent", "deepseek_v3"), ("native", next(iter(known_indexed()), ""))):
        for mode in ("greedy_ragged", "crop_deep"):
            run = partial(_other_model, method, model, mode, bundled.device)
            remedy = "cache_implementation='dynamic'"
            yield Check("caches", f"{method}, {model or 'no model'}, {mode}", run, remedy)


def _other_model(method: str, model: str, mode: str, device: torch.device) -> str:
    if not model:
        raise Skip("this transformers has no model with an indexer that native serves")
    cls = registered_methods()[method]
    options = {name: value for name, value in COVERING_OPTIONS.items() if name != "top_k"}
    taken = {name: value for name, value in options.items() if cls.Config.takes(name, value)}
    proof = no_proof if method == "latent" else reads_cold_rows
    result = run_case(
        Case(model, mode), lambda built: cls(built.config, **taken), device=str(device), proof=proof
    )
    if result.status != "passed":
        raise AssertionError(result.detail)
    return "tokens of full attention"


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of the library, which the checks provoke."""
    logger = logging.getLogger("hf_kvret")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
