"""Snapshots: what layers that can't go back held at some lengths, so that a cache can.

A recurrent state has no row for each token, and a sliding window keeps the newest rows alone. Where
newest turns change, as a chat template strips what a model thought, a conversation goes back to a
snapshot, and reads again what lies behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from hf_kvret.contracts.state import State, Tensors, listed, transient
from hf_kvret.layer.foreign_layers import is_known, layer_state, restore
from hf_kvret.layer.hybrid import foreign_layers_of

# The newest ones stay whatever they lie next to: they are of the turn at hand.
_NEWEST = 2


class Snapshot(NamedTuple):
    """The layers of transformers that can't go back, at one length of the text.

    Attributes:
        length: tokens that the cache held.
        layers: by number their tensors, and their plain values, by name.
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
        """The tensors of a layer, for the sequences of the cache; not to be written to."""
        tensors, _ = self.layers[number]
        if self.rows is None:
            return tensors
        rows = self.rows
        return {name: x.index_select(0, rows.to(x.device)) for name, x in tensors.items()}


class Snapshots(State):
    """The snapshots of a cache, which are never written to.

    Attributes:
        held: in host memory, the shortest first.
        pinned: one on the device, which a round of drafts begins with; None outside of one.
    """

    held: list[Snapshot] = listed(lambda one: one.length)
    pinned: Snapshot | None = transient()

    @property
    def lengths(self) -> list[int]:
        """Tokens at each of those in host memory."""
        return [one.length for one in self.held]

    def newest(self, length: int) -> Snapshot | None:
        """The newest one of at most ``length`` tokens; None where there is none."""
        if self.pinned is not None and self.pinned.length <= length:
            return self.pinned
        return next((one for one in reversed(self.held) if one.length <= length), None)

    def pin(self, length: int, foreign: Mapping[int, Any]) -> None:
        """Have a snapshot on the device of what the layers ``foreign`` hold, which are known."""
        self.pinned = Snapshot(length, _copies(foreign))

    def take(self, length: int, foreign: Mapping[int, Any], most: int) -> None:
        """Copy what the layers ``foreign`` hold of a text of ``length`` tokens.

        At most ``most`` snapshots stay: the newest two, and others far from each other.
        """
        stuck = [layer for layer in foreign.values() if is_stuck(layer)]
        if most and stuck and all(map(is_known, stuck)):
            self.held = [one for one in self.held if one.length < length]
            self.held.append(Snapshot(length, _copies(foreign, torch.device("cpu"))))
            self.trim(most)

    def trim(self, most: int) -> None:
        """Drop those whose neighbours are closest to each other, so that at most ``most`` stay."""
        while len(self.held) > most:
            lengths = [0, *self.lengths]
            gaps = [lengths[min(i + 2, len(lengths) - 1)] - x for i, x in enumerate(lengths[:-1])]
            older = gaps[: max(1, len(gaps) - _NEWEST)]
            del self.held[older.index(min(older))]

    def crop(self, length: int) -> None:
        super().crop(length)
        if self.pinned is not None and self.pinned.length > length:
            self.pinned = None

    def reorder(self, rows: torch.Tensor) -> None:
        # Beams do so at each step, and hardly ever go back.
        self.held = [
            one._replace(rows=rows if one.rows is None else one.rows[rows.to(one.rows.device)])
            for one in self.held
        ]

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


def _copies(
    foreign: Mapping[int, Any], device: torch.device | None = None
) -> dict[int, tuple[Tensors, dict[str, Any]]]:
    """What those of the layers ``foreign`` hold that can't go back; None: on their own devices."""
    layers = {}
    for number, layer in foreign.items():
        if is_stuck(layer):
            tensors, values = layer_state(layer)
            how: Any = {"copy": True, "memory_format": torch.contiguous_format}
            copies = {name: x.to(device or x.device, **how) for name, x in tensors.items()}
            layers[number] = copies, values
    return layers
