"""What a method does with the tokens of one layer: the seam between runner and methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hf_kvret_model_patches.rope import Rope
from hf_kvret_model_patches.taps import LayerTokens

Progress = Callable[[int], object]
Carried = Mapping[str, torch.Tensor]
"""What a layer hands to the next one, by name."""


@dataclass(frozen=True, eq=False)
class LayerFindings:
    """What was learned about one layer.

    Attributes:
        tensors: by name, without the layer's; on the CPU.
        told: what the method must know about the layer, plain JSON.
        quality: figures of the layer by name, for people.
        carried: tensors for the next layer that is studied, on the CPU; no part of the artifact.
            None where layers don't build on each other.
    """

    tensors: Mapping[str, torch.Tensor]
    told: Mapping[str, Any] = field(default_factory=dict)
    quality: Mapping[str, float | int | str | None] = field(default_factory=dict)
    carried: Carried | None = None


class LayerStudy(ABC):
    """Takes in the tokens of one layer, sequence by sequence, and learns from them."""

    @abstractmethod
    def add(self, tokens: LayerTokens, held_out: bool) -> None:
        """Take in a sequence of one row, from position 0 on, without padding.

        What is ``held_out`` is for figures of quality alone, and comes last. Every layer is shown
        the same sequences in the same order. Tensors must be copied.
        """

    @abstractmethod
    def finish(self, progress: Progress, carried: Carried | None = None) -> LayerFindings:
        """Learn. Calls ``progress`` with units of work that were done, ``work`` in all.

        Layers finish in ascending order. ``carried`` is what the layer that finished before left in
        its findings, not to be written to; None for the first one.
        """

    @property
    @abstractmethod
    def work(self) -> int:
        """Units of work of ``finish``, about."""


class Calibration(ABC):
    """How a method is calibrated: its options, and a study for each layer.

    Attributes:
        method: name, as of the cache.
    """

    method: ClassVar[str]

    def check(self, lengths: Sequence[int]) -> None:
        """ValueError where sequences to learn from, of these lengths, are too little.

        Asked before the reading, as ``check_layer``.
        """
        if not sum(lengths):
            raise ValueError("no tokens to learn from: add sequences that are not held out first")

    def check_layer(self, layer: int, tokens: LayerTokens) -> None:
        """ValueError where the options don't fit a layer, of which a token is shown."""
        return None

    @abstractmethod
    def study(self, layer: int, rope: Rope, device: torch.device) -> LayerStudy:
        """A new study of layer number ``layer``, which rotates as ``rope``; works on ``device``."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """All that decides what is learned, plain JSON; kept in the artifact."""
