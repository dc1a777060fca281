"""Hand-made codebooks for an ``A2ATSIndex`` by itself, and prompts before and after RoPE.

Dimensions: B batch, ``HEADS`` KV heads, ``GROUP`` query heads of each, n tokens, D head dim.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_kvret.artifacts import CalibrationArtifact, ModelIdentity
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.methods.a2ats import A2ATSConfig, A2ATSIndex
from hf_kvret_model_patches.rope import Rope

from ..patches.test_rope import by_complex_numbers

HEADS, GROUP, DIM = 2, 3, 16
WORDS, WINDOW = 64, 100
"""Codewords of a head where no others are given; distance that queries are rotated to."""
SCALE = 1.5 / math.sqrt(DIM)
FREQUENCIES = 300.0 ** -(torch.arange(DIM // 2) / (DIM // 2))


class Turn(NamedTuple):
    """How a layer rotates: the first pairs of a head, by complex numbers."""

    pairs: int = DIM // 2
    factor: float = 1.0
    layout: str = "half"

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """float64 ``x [B, H, n, D]``, turned and stretched."""
        if not self.pairs:
            return x.double()
        rope = Rope(FREQUENCIES[: self.pairs], self.factor, self.layout)
        return by_complex_numbers(x, positions, rope)


PLAIN = Turn()


@dataclass(frozen=True, eq=False)
class Book:
    """What a hand-made artifact holds, and where it is.

    Attributes:
        folder: of the artifact.
        words: ``[H, C, D]`` codewords.
        metric: ``[H, D, D]``, by which keys before RoPE are multiplied to be compared with them.
    """

    folder: str
    words: torch.Tensor
    metric: torch.Tensor

    def index(self, **changes: Any) -> A2ATSIndex:
        """An empty index of the artifact's only layer, with other options of ``A2ATSConfig``."""
        return A2ATSIndex(A2ATSConfig.from_options(artifact=self.folder, **changes), 0)


class Prompt(NamedTuple):
    """Tokens before RoPE and after it.

    Attributes:
        turn: what rotates them.
        queries: ``[B, HEADS * G, n, D]`` before RoPE.
        keys: ``[B, HEADS, n, D]`` before RoPE.
        positions: ``[B, n]``.
    """

    turn: Turn
    queries: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor

    @property
    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys after RoPE, fp32."""
        return (
            self.turn(self.queries, self.positions).float(),
            self.turn(self.keys, self.positions).float(),
        )


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers on the CPU, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write_book(
    folder: Path,
    turn: Turn = PLAIN,
    space: str = "windowed",
    words: torch.Tensor | None = None,
    metric: torch.Tensor | None = None,
) -> Book:
    """An artifact of one layer in ``folder``; without ``words`` and ``metric`` of random ones."""
    if words is None or metric is None:
        metric = torch.tril(0.3 * normal(1, HEADS, DIM, DIM)) + torch.eye(DIM)
        words = normal(2, HEADS, WORDS, DIM) @ metric
    inv_freq = FREQUENCIES[: turn.pairs].clone()
    tensors = {"codewords": words, "metric": metric, "inv_freq": inv_freq}
    CalibrationArtifact(
        method="a2ats",
        model=ModelIdentity("hand-made", {"model_type": "none"}),
        tensors={f"layers.0.{name}": x.contiguous() for name, x in tensors.items()},
        options={
            "space": space,
            "window": WINDOW,
            "layers": {"0": {"layout": turn.layout, "attention_factor": turn.factor}},
        },
    ).save_pretrained(folder)
    return Book(str(folder), words, metric)


def filled(index: A2ATSIndex, prompt: Prompt, cuts: tuple[int, ...] = ()) -> A2ATSIndex:
    """The index after a prompt in chunks, cut before the tokens ``cuts``; all of it is cold."""
    queries, keys = prompt.seen
    count = keys.shape[2]
    for start, end in itertools.pairwise((0, *cuts, count)):
        part = slice(start, end)
        positions = prompt.positions[:, part]
        index.on_forward(queries[:, :, part], keys[:, :, part], start, None, positions)
        index.add(TokenBlock(keys[:, :, part], keys[:, :, part], start))
    return index
