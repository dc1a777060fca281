"""Which index belongs to which request of vLLM, by the blocks that hold the request's rows.

vLLM's attention knows no requests. It sees block tables, and blocks are shared by requests
with a common prefix, given back when a request is preempted or ends, and used again. A block that
is used anew gets a token at its first place, which is counted here: blocks and counts together name
the tokens that lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from hf_kvret.contracts.index import Index


@dataclass(eq=False)
class Sequence:
    """The indexes of some tokens, which lie in ``blocks`` as they were used for the nth time.

    Attributes:
        blocks, uses: of the request's blocks.
        indexes: by layer.
        added: how many tokens are in the index of a layer, from the first one on.
    """

    blocks: np.ndarray
    uses: np.ndarray
    indexes: dict[str, Index] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens in the indexes of all layers."""
        return min(self.added.values(), default=0)

    def index(self, layer: str, make: Callable[[], Index]) -> tuple[Index, int]:
        """The index of ``layer``, made where there is none, and the number of its tokens."""
        if layer not in self.indexes:
            self.indexes[layer] = make()
        return self.indexes[layer], self.added.get(layer, 0)


class Sequences:
    """The sequences of one engine, found again by block tables from step to step.

    Args:
        block_len: tokens in a block.
        most: sequences that are kept; those unused for the longest time are forgotten.
    """

    def __init__(self, block_len: int, most: int) -> None:
        self.block_len, self._most = block_len, most
        # How often each block was used.
        self._uses = np.zeros(0, dtype=np.int64)
        # The one that was used last comes last.
        self._known: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._known)

    def note_writes(self, slots: torch.Tensor) -> None:
        """Count the blocks whose first place is among ``slots [n]``, which are about to be written.

        Padding of a batch has negative slots.
        """
        places = slots.cpu().numpy()
        blocks = places[(places >= 0) & (places % self.block_len == 0)] // self.block_len
        self._make_room(blocks)
        np.add.at(self._uses, blocks, 1)

    def _make_room(self, blocks: np.ndarray) -> None:
        """Count these blocks from now on."""
        missing = int(blocks.max(initial=-1)) + 1 - len(self._uses)
        if missing > 0:
            self._uses = np.pad(self._uses, (0, missing + len(self._uses)))

    def of_requests(
        self, table: torch.Tensor, lengths: Iterable[int], ends: Iterable[int]
    ) -> list[Sequence]:
        """A sequence for each request, with indexes of its longest known beginning.

        Requests with a common beginning have a sequence each: nobody else's is copied.

        Args:
            table: ``[B, pages]``, the blocks of each request.
            lengths: its tokens.
            ends: how many of them, the first ones, may be in an index.
        """
        rows, sequences = table.cpu().numpy(), list[Sequence]()
        self._make_room(rows)
        self._known = [one for one in self._known if self._holds(one, one.blocks)]
        for row, length, end in zip(rows, lengths, ends, strict=True):
            blocks = row[: -(-length // self.block_len)].copy()
            fitting = [one for one in self._known if one.length <= end and self._holds(one, blocks)]
            sequence = max(fitting, key=lambda one: one.length, default=None)
            if sequence is None:
                sequence = Sequence(blocks, self._uses[blocks])
            else:
                # Nobody else's in this step.
                self._known.remove(sequence)
                sequence.blocks, sequence.uses = blocks, self._uses[blocks]
            sequences.append(sequence)
        self._known += sequences
        del self._known[: max(0, len(self._known) - max(self._most, len(sequences)))]
        return sequences

    def _holds(self, one: Sequence, blocks: np.ndarray) -> bool:
        """Whether all tokens of a sequence, at least one, lie in these blocks as they are now."""
        count = -(-one.length // self.block_len)
        blocks = blocks[:count]
        alike = np.array_equal(one.blocks[:count], blocks)
        return count > 0 and alike and np.array_equal(one.uses[:count], self._uses[blocks])
