"""What is learned from, and the interfaces between the calibration runner and the methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hf_kvret.lab.calibrate.taps import LayerTokens
from hf_kvret_model_patches.rope import Rope

Progress = Callable[[int], object]
Carried = Mapping[str, torch.Tensor]
"""Tensors that a layer passes to the next one, by name."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sequences of token ids, and what they are.

    Attributes:
        sequences: ``[n]`` int64 each, none empty.
        held_out: how many of the last are not learned from; fewer than there are.
        description: plain JSON.

    Raises:
        ValueError: ``held_out`` leaves nothing to learn from.
    """

    sequences: list[torch.Tensor]
    held_out: int
    description: dict[str, Any]

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < len(self.sequences):
            raise ValueError(
                f"held_out={self.held_out} of {len(self.sequences)} sequences: at least one must "
                "be left to learn from"
            )

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.sequences))


@dataclass(frozen=True, eq=False)
class LayerFindings:
    """Results for one layer.

    Attributes:
        tensors: by name, without the layer prefix; on the CPU.
        settings: what the method needs to know of the layer, plain JSON.
        quality: figures of the layer by name, for people.
        carried: tensors for the next layer, on the CPU; not part of the artifact. None if layers
            don't depend on each other.
    """

    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    quality: Mapping[str, float | int | str | None] = field(default_factory=dict)
    carried: Carried | None = None


class LayerStudy(ABC):
    """Collects the tokens of one layer, sequence by sequence, and learns from them."""

    @abstractmethod
    def add(self, tokens: LayerTokens, held_out: bool) -> None:
        """Add a sequence of one row, from position 0 on, without padding.

        Sequences that are ``held_out`` are for figures of quality only, and come last. Every layer
        gets the same sequences in the same order. Tensors must be copied.
        """

    @abstractmethod
    def finish(self, progress: Progress, carried: Carried | None = None) -> LayerFindings:
        """Learn. Calls ``progress`` with finished units of work, ``work`` in all.

        Layers finish in ascending order. ``carried`` is that of the findings of the layer before,
        read-only; None for the first layer.
        """

    @property
    @abstractmethod
    def work(self) -> int:
        """Approximate units of work of ``finish``."""


class Calibration(ABC):
    """How a method is calibrated: its options, and a study for each layer.

    Attributes:
        method: name, as of the cache.
        tensors_held: by a study, of those as large as the keys of all tokens.
    """

    method: ClassVar[str]
    tensors_held: ClassVar[int] = 2

    def check(self, lengths: Sequence[int]) -> None:
        """ValueError if training sequences of these lengths are too little.

        Called before the reading.
        """
        if not sum(lengths):
            raise ValueError("no tokens to learn from: add sequences that are not held out first")

    @abstractmethod
    def study(self, layer: int, rope: Rope, device: torch.device) -> LayerStudy:
        """A new study of layer number ``layer`` with RoPE ``rope``, on ``device``."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """All options that affect the result, plain JSON; saved in the artifact."""
