"""The time of a whole decode step, modelled: the model's matrices and small kernels, the cache's.

Kernels run one after the other, as a CUDA graph replays them, and share nothing. What is assumed
of a kernel and of the gap behind it is a range, so all times are: see ``machine_model``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from machine_model import H200, QUICK, SLOW, Pace
from step_kernels import ATTENDED, STEPS, LayerLaunches, MethodStep, StepShape

from hf_kvret.evaluation.measurement import Row
from hf_kvret.evaluation.results import Results

FULL = "static"
"""Full attention, by the name of the cache that it stands for."""
NORMS = ("norms", "rotations")
"""The model's own small kernels that a fused implementation would be rid of."""
_TYPE_BYTES = 2

FIRST_LAUNCHES = {
    "paris": LayerLaunches(("paris", "count", "attend-100", "window", "merge")),
    "lrqk": LayerLaunches(("lrqk", "count", "attend-2048", "window", "merge"), 5),
    "lrqk:store=higgs": LayerLaunches(("lrqk", "count", "higgs", "window", "merge"), 5),
    "a2ats": LayerLaunches(("a2ats", "count", "attend-2048", "window", "merge"), 48, 8_388_608),
    "ctkvr": LayerLaunches(("ctkvr", "count", "attend-2048", "window", "merge"), 17),
    "flat": LayerLaunches(("flat", "count", "attend-2048", "window", "merge"), 24, 0, 11_040),
}
"""Of results of ``bench machine-code`` that don't tell their steps: those of the first kernels."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of a step, launched one after the other.

    Attributes:
        launches: of the whole step, all layers.
        issue_seconds, dram_seconds: of all these launches.
    """

    name: str
    launches: int
    dram_seconds: float
    issue_seconds: float = 0.0

    def seconds(self, pace: Pace) -> float:
        """With the gaps between them."""
        return pace.kernel_seconds(self.launches, self.dram_seconds, self.issue_seconds)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a Llama in 16 bits; ``of`` reads them from a config.

    Attributes:
        queries, keys: numbers of a token's queries, of its keys (and of its values).
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    queries: int
    keys: int

    @classmethod
    def of(cls, config: object) -> Self:
        """From a ``LlamaConfig``."""
        dim = config.head_dim
        return cls(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.vocab_size,
            config.num_attention_heads * dim,
            config.num_key_value_heads * dim,
        )

    def matrices(self) -> dict[str, int]:
        """Numbers of each matrix that a step reads; those of a layer, and the head's."""
        return {
            "q": self.hidden * self.queries,
            "k": self.hidden * self.keys,
            "v": self.hidden * self.keys,
            "o": self.queries * self.hidden,
            "gate": self.hidden * self.intermediate,
            "up": self.hidden * self.intermediate,
            "down": self.intermediate * self.hidden,
            "head": self.hidden * self.vocabulary,
        }

    def weights(self) -> Iterator[Kernels]:
        """A product each, of one kernel; reads all weights once, whatever the batch."""
        for name, numbers in self.matrices().items():
            count = 1 if name == "head" else self.layers
            yield Kernels(name, count, count * H200.dram_seconds(_TYPE_BYTES * numbers))

    def small(self, batch: int) -> Iterator[Kernels]:
        """What transformers' own code launches beside: its operations, a kernel each.

        Bytes are those of each operation, in fp32 where a norm computes in it.
        """
        moved = {
            # To fp32, square, mean, epsilon, root, product, to 16 bits, weight; two and the last.
            "norms": (16, 8, 38 * self.hidden * (2 * self.layers + 1)),
            # Product, negative half, halves together, product, sum, of queries and of keys; angles.
            "rotations": (10, 9, 20 * (self.queries + self.keys) * self.layers),
            # SiLU and product.
            "activation": (2, 0, 10 * self.intermediate * self.layers),
            "residual sums": (2, 0, 12 * self.hidden * self.layers),
            # A key and a value into the cache.
            "append": (2, 0, 8 * self.keys * self.layers),
            # The embedding's row; logits to fp32, the largest.
            "token": (0, 3, 10 * self.vocabulary),
        }
        for name, (of_layer, of_step, size) in moved.items():
            launches = self.layers * of_layer + of_step
            yield Kernels(name, launches, H200.dram_seconds(batch * size))

    def full_attention(self, context: int, batch: int) -> Kernels:
        """Flash decoding: all keys and values once, in pieces that a second kernel merges."""
        size = 2 * _TYPE_BYTES * self.keys * context * batch * self.layers
        return Kernels(FULL, 2 * self.layers, H200.dram_seconds(size))


def launches_of(kernels: Results, cache: str) -> LayerLaunches | None:
    """Of a step in results of ``bench machine-code``; None where they know no such cache."""
    if "steps" not in kernels.setup:
        return FIRST_LAUNCHES.get(cache)
    told = kernels.setup["steps"].get(cache)
    return None if told is None else LayerLaunches(**(told | {"parts": tuple(told["parts"])}))


def own_kernels(
    parts: Sequence[str], rows: Results, step: MethodStep, shape: StepShape, layers: int
) -> list[Kernels]:
    """The Triton kernels of all layers, from rows of ``bench machine-code``.

    Raises:
        ValueError: a part is missing in these; says which, and the remedy.
    """
    found = []
    for part in parts:
        row = rows.find({"cache": part, "context": shape.context, "batch": shape.batch})
        if row is None or "kernels" not in row:
            raise ValueError(
                f"no machine code of {part} at {shape.context:,} tokens, batch {shape.batch}, "
                f"which is a part of the step ({', '.join(parts)}); there is {_sizes(rows)}: make "
                "the results again with hf-kvret bench kernels --compile-only --json FILE"
            )
        largest = max(one["dram_seconds"] for one in row["kernels"])
        for one in row["kernels"]:
            scale = 1.0
            # The kernel that reads the rows.
            if part in ATTENDED and one["dram_seconds"] == largest:
                scale = step.selected(shape) / ATTENDED[part]
            found.append(
                Kernels(
                    one["kernel"],
                    layers * one["launches"],
                    layers * scale * one["dram_seconds"],
                    layers * scale * one["issue_seconds"],
                )
            )
    return found


def _sizes(rows: Results) -> str:
    sizes = sorted({(cell["context"], cell["batch"]) for cell, _ in rows})
    return ", ".join(f"{context:,} tokens at batch {batch}" for context, batch in sizes) or "none"


def full_row(model: ModelSizes, context: int, batch: int) -> Row:
    """A step with full attention, see ``_row``."""
    return _row(model, batch, [model.full_attention(context, batch)], [])


def step_row(cache: str, kernels: Results, model: ModelSizes, shape: StepShape) -> Row | None:
    """A step of a method, see ``_row``; None where the results know no such method.

    With ``host_seconds``, those of the step with the selected rows in pinned host memory, where
    they can be: nothing is done while they come.

    Raises:
        ValueError: as ``own_kernels``.
    """
    launched, step = launches_of(kernels, cache), STEPS[cache]
    if launched is None:
        return None
    ours = own_kernels(launched.parts, kernels, step, shape, model.layers)
    moved = launched.torch_bytes + shape.batch * shape.cold_len * launched.torch_token_bytes
    torch_seconds = model.layers * H200.dram_seconds(moved)
    torch = [Kernels("torch", model.layers * launched.torch_launches, torch_seconds)]
    row = _row(model, shape.batch, ours, torch) | {"replayed": step.replayed}
    if step.hosted:
        key = _TYPE_BYTES * shape.head_dim
        of_head = key * (2 * step.selected(shape) + step.compared)
        host_bytes = model.layers * shape.batch * shape.heads * of_head
        row |= {
            "host_bytes": host_bytes,
            "host_seconds": [
                seconds + pace.bus_seconds(host_bytes)
                for seconds, pace in zip(row["seconds"], (QUICK, SLOW), strict=True)
            ],
        }
    return row


def _row(model: ModelSizes, batch: int, ours: Sequence[Kernels], torch: Sequence[Kernels]) -> Row:
    """Seconds of a step and of what it consists of, each a list of the quickest and the slowest.

    ``kernel_seconds`` are those of the cache's kernels, ``torch_seconds`` of its operations of
    torch. ``launches`` are of the whole step, ``launches_a_layer`` of the cache's kernels.
    """
    small = list(model.small(batch))
    shares = {
        "weight": list(model.weights()),
        "norm": [one for one in small if one.name in NORMS],
        "other": [one for one in small if one.name not in NORMS],
        "torch": torch,
        "kernel": ours,
    }
    every = [one for some in shares.values() for one in some]
    apart = [one for one in every if one.name not in NORMS]
    return (
        {f"{name}_seconds": _seconds(some) for name, some in shares.items()}
        | {"seconds": _seconds(every), "seconds_without_norms": _seconds(apart)}
        | {
            "launches": sum(one.launches for one in every),
            "launches_a_layer": sum(one.launches for one in ours) / model.layers,
        }
    )


def _seconds(kernels: Iterable[Kernels]) -> list[float]:
    some = list(kernels)
    return [sum(one.seconds(pace) for one in some) for pace in (QUICK, SLOW)]
