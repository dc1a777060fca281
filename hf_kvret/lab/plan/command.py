"""``hf-kvret fits``: its options, the machine, its rows, and the report as text."""

from __future__ import annotations

import argparse
import itertools
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from hf_kvret.lab.bench.shapes import SHAPES, WeightBytes, load_shape, weight_bytes
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.plan.prediction import CacheBytes, Predictor, skipped_layers
from hf_kvret.lab.program.arguments import DTYPES, byte_count, known_names, lengths, names
from hf_kvret.lab.program.options import budget_option, count_option, dtype_option, option
from hf_kvret.lab.program.program import add_command
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.models.compatibility import is_latent
from hf_kvret.saved.identity import printable
from hf_kvret.stores import STORES
from hf_kvret.stores.placement import free_host_bytes

# The search for the largest context ends at so many tokens.
_MOST_TOKENS = 1 << 30
_STEPS = 64


def find_memory(device: int | None, host: int | None) -> tuple[int, int | None, str]:
    """Bytes of the device, bytes of the host, and in words whose memory that is.

    None for the host: the device is the CPU, and all is in its memory. Without ``device`` it is the
    memory that is free on this machine now; ``host`` replaces its part. Among several GPUs the one
    that torch uses by default counts.

    Raises:
        ValueError: ``host`` alone on a machine without a GPU, or a system that doesn't say how much
            memory is free.
    """
    if device is not None:
        return device, host, "as given by the options"
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        gpu = f"this machine's GPU ({torch.cuda.get_device_name()})"
        if host is not None:
            return free, host, f"what is free on {gpu}, and the host as given by the option"
        return free, _free_host(), f"what is free on this machine and on {gpu}"
    if host is not None:
        raise ValueError(
            f"--host-memory {host} without --device-memory: this machine has no GPU whose memory "
            "could be taken; give both, or neither"
        )
    return _free_host(), None, "what is free on this machine, which has no GPU"


def _free_host() -> int:
    free = free_host_bytes()
    if free is None:
        raise ValueError(
            "this system doesn't say how much memory is free: give --device-memory, as 16GB"
        )
    return free


@dataclass(frozen=True)
class Machine:
    """The memory of a machine, and how fast it is read.

    Attributes:
        device: bytes of device memory.
        host: bytes of host memory; None: the device is the CPU, and all is in its memory.
        reserve: bytes of device memory that stay free for passes.
        origin: whose memory that is, in words.
        device_speed, host_speed, bus_speed: bytes a second.
    """

    device: int
    host: int | None
    reserve: int
    origin: str
    device_speed: float
    host_speed: float
    bus_speed: float

    def fits(self, weights: WeightBytes, cache: CacheBytes) -> bool:
        """Whether weights and cache fit at the same time."""
        free = self.device - self.reserve - weights.held
        if self.host is None:
            return cache.device + cache.host <= free
        return cache.device <= free and cache.host <= self.host

    def seconds(self, weights: WeightBytes, cache: CacheBytes, batch: int) -> float:
        """The time of all reads of a decode step at full speed."""
        near = weights.read + batch * weights.row + cache.read_device
        if self.host is None:
            return (near + cache.read_bus + cache.read_cpu) / self.device_speed
        far = cache.read_bus / self.bus_speed + cache.read_cpu / self.host_speed
        return near / self.device_speed + far


def largest_context(
    machine: Machine, weights: WeightBytes, predictor: Predictor, batch: int
) -> int:
    """The most tokens of each of ``batch`` sequences that fit; 0 for none.

    Below ``predictor.even_len`` it is a multiple of a 64th of that, rounded down.
    """

    def fits(length: int) -> bool:
        return machine.fits(weights, predictor.at(length).of_batch(batch))

    even_len, step = predictor.even_len, predictor.even_len // _STEPS
    if not fits(even_len):
        return step * _largest(lambda count: fits(count * step), _STEPS)
    return even_len + _largest(lambda tokens: fits(even_len + tokens), _MOST_TOKENS)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest count up to ``most`` that ``fits``, if all smaller ones do; 0 for none."""
    return bisect_left(range(most), True, key=lambda count: not fits(count + 1))


_CACHES = "full,flat,paris,lrqk,ctkvr,aqua:predictor=none:bits=4"
_FULL = ("full", "static")
# Bytes a second of a usual GPU's memory, of a CPU's, and between them.
_DEVICE_SPEED, _CPU_SPEED, _BUS_SPEED = 1000 * 10**9, 60 * 10**9, 25 * 10**9


@dataclass(frozen=True, kw_only=True)
class FitsOptions:
    """Say what each method and store would hold on the device and the host at a context.

    It says how much of it fits, and how long reading it takes in a step. Only the model's
    configuration is read: the caches' own code is run on tensors without contents.
    """

    model: str = option(
        help=f"{', '.join(SHAPES)}, or a folder or hub id with config.json", name="model"
    )
    context: tuple[int, ...] = option((32_768, 131_072), "as 128K or 128K,1M", kind=lengths)
    device_memory: int | None = option(
        None,
        "of the device that runs the model, as 24GB or 80GiB; default: what is free on this "
        "machine's GPU, or in its memory where it has none",
        kind=byte_count,
        metavar="SIZE",
    )
    host_memory: int | None = option(
        None,
        "free for the cache; default: what is free here beside this machine's GPU; with "
        "--device-memory alone the device is a CPU, and all is in its memory",
        kind=byte_count,
        metavar="SIZE",
    )
    caches: str = option(
        _CACHES, "comma-separated, options after colons as paris:top_k=100:store=host"
    )
    stores: tuple[str, ...] = option(
        ("device", "host"),
        f"for caches that name none, comma-separated, of {', '.join(STORES)}",
        kind=known_names(STORES),
        metavar="STORES",
    )
    batch: int = count_option(1, "sequences")
    top_k: int | float = budget_option(1024)
    dtype: str = dtype_option("bfloat16")
    reserve: int = option(
        2 * 10**9,
        "device memory that stays free for passes and the runtime",
        kind=byte_count,
        metavar="SIZE",
    )
    device_bandwidth: int | None = option(
        None, "bytes a second, as 3350GB; default 1000GB, on a CPU 60GB", kind=byte_count
    )
    host_bandwidth: int | None = option(
        None, "of host memory, for store=cpu; default 60GB", kind=byte_count
    )
    bus_bandwidth: int | None = option(None, "of the bus; default 25GB", kind=byte_count)
    json: bool = option(False, "print JSON instead")

    @property
    def machine(self) -> Machine:
        """The memory that was given, or that is free here now; ValueError of ``find_memory``."""
        device, host, origin = find_memory(self.device_memory, self.host_memory)
        device_speed = _CPU_SPEED if host is None else _DEVICE_SPEED
        return Machine(
            device,
            host,
            self.reserve,
            origin=origin,
            device_speed=self.device_bandwidth or device_speed,
            host_speed=self.host_bandwidth or _CPU_SPEED,
            bus_speed=self.bus_bandwidth or _BUS_SPEED,
        )


def add_fits_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``fits`` to the program's commands."""
    add_command(
        commands,
        "fits",
        FitsOptions,
        run_fits,
        help="what each cache would hold where, and whether it fits; loads nothing",
        examples=(
            "hf-kvret fits qwen3-4b",
            "hf-kvret fits llama-3.1-8b --context 128K,1M --device-memory 24GB --host-memory 64GB",
            "hf-kvret fits ./my-model --device-memory 16GB --stores cpu",
        ),
    )


def run_fits(options: FitsOptions) -> int:
    """Print the table or the JSON of a model; returns the exit status.

    Raises:
        ValueError: an unknown model or cache, or one that this model can't have when it is the only
            one asked for; memory that is not given and that nobody says here.
        OSError: the hub can't be reached.
    """
    transformers_logging.set_verbosity_error()
    # Before anything is loaded, which takes memory itself.
    machine = options.machine
    shape = load_shape(options.model)
    weights = weight_bytes(shape.config, DTYPES[options.dtype])
    rows = list(_rows(options, machine, shape.config, weights))
    refused = [row for row in rows if "refused" in row]
    if len(refused) == len(rows):
        raise ValueError(refused[0]["refused"])
    report = {
        "model": shape.name,
        "layers": shape.layers,
        "positions": getattr(shape.config, "max_position_embeddings", None),
        "dtype": options.dtype,
        "batch": options.batch,
        "top_k": options.top_k,
        "weights": asdict(weights),
        "machine": asdict(machine),
        "layers_left_out": len(skipped_layers(choose_cache("full").make(shape.config, 1))),
        "rows": rows,
    }
    print(json.dumps(report, indent=1) if options.json else report_text(report))
    return 0


def _choices(options: FitsOptions, latent: bool) -> dict[str, CacheChoice]:
    """The caches by name, each in every store that it takes; ValueError for an unknown one."""
    texts = names(options.caches)
    if options.caches == _CACHES and latent:
        texts.insert(1, "latent")
    choices: dict[str, CacheChoice] = {}
    for name, store in itertools.product(texts, options.stores):
        choice = _choice(name, store, options.top_k)
        if choice.options is None and choice.method not in _FULL:
            raise ValueError(
                f"--caches {name}: fits knows {', '.join(_FULL)} and the retrieval caches; "
                "leave it out"
            )
        choices.setdefault(_title(name, choice), choice)
    if not choices:
        raise ValueError("--caches names none: leave it out, or name one, as paris")
    return choices


def _choice(name: str, store: str, top_k: int | float) -> CacheChoice:
    """A cache in ``store``, or in what comes next to it of those that it takes."""
    choice = choose_cache(name, {"top_k": top_k, "store": store})
    if choice.options is not None and not choice.options.takes("store", store):
        near = "device" if store == "higgs" else "host"
        choice = choose_cache(name, {"top_k": top_k, "store": near})
    return choice


def _rows(
    options: FitsOptions, machine: Machine, config: PreTrainedConfig, weights: WeightBytes
) -> Iterator[dict[str, Any]]:
    """A row for each context and cache, or one with ``refused``, the reason."""
    predictors: dict[str, Predictor | str] = {}
    for name, choice in _choices(options, is_latent(config)).items():
        try:
            predictors[name] = Predictor(config, choice, DTYPES[options.dtype])
        except (ValueError, OSError) as error:
            predictors[name] = str(error)
    batch = options.batch
    pairs = list(itertools.product(options.context, predictors.items()))
    for context, (name, predictor) in tqdm(pairs, leave=False, unit="row", delay=1):
        row = {"cache": name, "context": context}
        if isinstance(predictor, str):
            yield row | {"refused": predictor}
            continue
        cache = predictor.at(context).of_batch(batch)
        read = weights.read + batch * weights.row
        yield row | {
            "bytes": {name: round(value) for name, value in asdict(cache).items()},
            "device_bytes": round(cache.device),
            "host_bytes": round(cache.host),
            "fits": machine.fits(weights, cache),
            "largest_context": largest_context(machine, weights, predictor, batch),
            "read_bytes": round(read + cache.read_device + cache.read_bus + cache.read_cpu),
            "floor_seconds": machine.seconds(weights, cache, batch),
        }


def _title(name: str, choice: CacheChoice) -> str:
    """The cache's name, with its store where it has one and the name doesn't say so."""
    options = choice.options
    if options is None or not options.retrieves or "store=" in name:
        return name
    return f"{name}:store={options.store}"


_HEADER = (
    *("cache", "window", "index", "store", "host store", "device with weights", "fits"),
    *("largest context", "read a step", "floor ms"),
)


def report_text(report: Mapping[str, Any]) -> str:
    """Weights and memory in a paragraph, a table for each context, what was refused, notes."""
    contexts = dict.fromkeys(row["context"] for row in report["rows"])
    paragraphs = [_opening(report)]
    for context in contexts:
        rows = [row for row in report["rows"] if row["context"] == context]
        lines = [_line(report, row) for row in rows if "refused" not in row]
        title = f"{context:,} tokens x {report['batch']}, sizes in GB"
        paragraphs.append(f"{title}\n\n{markdown_table(_HEADER, lines)}")
    refused = {row["cache"]: row["refused"] for row in report["rows"] if "refused" in row}
    paragraphs += [f"{cache}: {reason}" for cache, reason in refused.items()]
    return "\n\n".join([*paragraphs, *_notes(report, list(contexts))])


def _opening(report: Mapping[str, Any]) -> str:
    machine, weights = report["machine"], report["weights"]
    host = machine["host"]
    where = "in the CPU's memory" if host is None else f"{_gb(host)} GB on the host"
    return (
        f"Memory: {machine['origin']}\n\n"
        f"{printable(report['model'])}, {report['dtype']}: weights {_gb(weights['held'])} GB; "
        f"{_gb(machine['device'])} GB on the device, {_gb(machine['reserve'])} GB kept free for "
        f"passes, {where}; top_k={report['top_k']}"
    )


def _line(report: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    nbytes = row["bytes"]
    return [
        row["cache"],
        _gb(nbytes["window"]),
        _gb(nbytes["index"] + nbytes["shared"]),
        _gb(nbytes["store_device"]),
        _gb(row["host_bytes"]),
        _gb(row["device_bytes"] + report["weights"]["held"]),
        "yes" if row["fits"] else "no",
        f"{row['largest_context']:,}",
        _gb(row["read_bytes"]),
        f"{row['floor_seconds'] * 1e3:.1f}",
    ]


def _notes(report: Mapping[str, Any], contexts: list[int]) -> list[str]:
    notes = []
    positions, skipped = report["positions"], report["layers_left_out"]
    if not any(row.get("fits") or row.get("largest_context") for row in report["rows"]):
        reserve = _gb(report["machine"]["reserve"])
        notes.append(f"Nothing fits beside the weights and {reserve} GB for passes (--reserve).")
    elif positions is not None and max(contexts) > positions:
        notes.append(
            f"The model was made for {positions:,} positions: more of them fit, but need a model "
            "or a RoPE scaling that knows them."
        )
    if skipped:
        notes.append(
            f"The states of {skipped} linear or recurrent layers, which don't grow, are left out."
        )
    return notes


def _gb(count: float) -> str:
    """Three digits or two decimals."""
    amount = count / 1e9
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.2f}"
