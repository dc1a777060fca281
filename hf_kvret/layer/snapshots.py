"""Snapshots: what layers that can't go back held at some lengths, so that a cache can.

A recurrent state has no row for each token, and a sliding window keeps the newest rows alone. Where
newest turns change, as a chat template strips what a model thought, a conversation goes back to a
snapshot, and reads again what lies behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from hf_kvret.contracts.state import State, Tensors
from hf_kvret.layer.foreign_layers import is_known, layer_state, restore
from hf_kvret.layer.hybrid import foreign_layers_of

# The newest ones stay whatever they lie next to: they are of the turn at hand.
_NEWEST = 2


class Snapshot(NamedTuple):
    """The layers of transformers that can't go back, at one length of the text.

    Attributes:
        length: tokens that the cache held.
        layers: by number their tensors on the CPU, and their plain values, by name.
        rows: ``[B]``, the row of the tensors for each sequence; None: there is one for each.
    """

    length: int
    layers: dict[int, tuple[Tensors, dict[str, Any]]]
    rows: torch.Tensor | None = None

    def restore(self, foreign: Mapping[int, Any]) -> None:
        """Have the layers ``foreign``, by number, be as they were, each on its device."""
        for number, (_, values) in self.layers.items():
            restore(foreign[number], values, self.tensors(number), foreign[number].device)

    def tensors(self, number: int) -> Tensors:
        """Copies of the tensors of a layer, for the sequences of the cache."""
        tensors, _ = self.layers[number]
        if self.rows is None:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        rows = self.rows.cpu()
        return {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}


class Snapshots(State):
    """The snapshots of a cache, the shortest first."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.held: list[Snapshot] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens at each of them."""
        return [one.length for one in self.held]

    def newest(self, length: int) -> Snapshot | None:
        """The newest one of at most ``length`` tokens; None where there is none."""
        return next((one for one in reversed(self.held) if one.length <= length), None)

    def take(self, length: int, foreign: Mapping[int, Any], most: int) -> None:
        """Copy what the layers ``foreign`` hold of a text of ``length`` tokens.

        At most ``most`` snapshots stay: the newest two, and others far from each other.
        """
        stuck = {number: layer for number, layer in foreign.items() if is_stuck(layer)}
        if not (most and stuck and all(map(is_known, stuck.values()))):
            return
        layers = {number: _copied(*layer_state(layer)) for number, layer in stuck.items()}
        self.crop(length - 1)
        self.held.append(Snapshot(length, layers))
        self.trim(most)

    def trim(self, most: int) -> None:
        """Drop those that are least missed, so that at most ``most`` stay."""
        while len(self.held) > most:
            del self.held[self._least_missed()]

    def _least_missed(self) -> int:
        """The index of the snapshot whose neighbours are closest to each other."""
        lengths = [0, *self.lengths]
        older = range(max(1, len(self.held) - _NEWEST))
        return min(older, key=lambda i: lengths[min(i + 2, len(lengths) - 1)] - lengths[i])

    def crop(self, length: int) -> None:
        self.held = [one for one in self.held if one.length <= length]

    def reorder(self, rows: torch.Tensor) -> None:
        # Beams do so at each step, and hardly ever go back.
        self.held = [
            one._replace(rows=rows if one.rows is None else one.rows[rows.to(one.rows.device)])
            for one in self.held
        ]

    def fork(self) -> Self:
        twin = super().fork()
        # Snapshots themselves are never written to.
        twin.held = list(self.held)
        return twin

    def nbytes(self) -> int:
        states = (tensors for one in self.held for tensors, _ in one.layers.values())
        return sum(tensor.nbytes for tensors in states for tensor in tensors.values())

    def state_dict(self) -> Tensors:
        """The tensors by length, number of the layer and name."""
        return {
            f"{one.length}.{number}.{name}": tensor
            for one in self.held
            for number in one.layers
            for name, tensor in one.tensors(number).items()
        }

    def described(self) -> list[dict[str, Any]]:
        """What ``state_dict`` lacks, as plain JSON: lengths, and plain values by layer."""
        return [
            {
                "length": one.length,
                "layers": {str(number): values for number, (_, values) in one.layers.items()},
            }
            for one in self.held
        ]

    def load(self, described: Iterable[Mapping[str, Any]], tensors: Tensors) -> None:
        """Have what ``described`` and ``state_dict`` gave."""
        self.held = []
        for one in described:
            length, layers = int(one["length"]), {}
            for number, values in one["layers"].items():
                prefix = f"{length}.{number}."
                own = {
                    name.removeprefix(prefix): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(prefix)
                }
                layers[int(number)] = own, values
            self.held.append(Snapshot(length, layers))


def are_taken(layers: Sequence[Any], most: int) -> bool:
    """Whether some of a cache's ``layers`` can't go back, and it keeps up to ``most`` snapshots."""
    return most > 0 and any(map(is_stuck, foreign_layers_of(layers).values()))


def is_stuck(layer: Any) -> bool:
    """Whether a layer of transformers can't go back once it has gone on."""
    return isinstance(layer, DynamicSlidingWindowLayer | LinearAttentionCacheLayerMixin)


def _copied(tensors: Tensors, values: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    return {name: tensor.clone() for name, tensor in tensors.items()}, values
