"""Which index belongs to which request of vLLM, told by the blocks that hold the request's rows.

vLLM's attention is not told of requests. It sees block tables, and blocks are shared by requests
with a common prefix, given back when a request is preempted or ends, and used again. A block that
is used anew gets a token at its first place, which is counted here: blocks and counts together name
the tokens that lie there.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def common(self, blocks: np.ndarray, uses: np.ndarray, block_len: int) -> int:
        """Tokens that its indexes have in common with a request of these blocks."""
        count = min(len(blocks), len(self.blocks))
        differs = (self.blocks[:count] != blocks[:count]) | (self.uses[:count] != uses[:count])
        first = int(differs.argmax()) if differs.any() else count
        return min(first * block_len, self.length)

    def fork(self, length: int) -> Sequence:
        """A copy that holds the first ``length`` tokens, of which rows are shared."""
        twin = Sequence(self.blocks, self.uses)
        for layer, index in self.indexes.items():
            twin.indexes[layer], twin.added[layer] = index.fork(), length
            twin.indexes[layer].crop(length)
        return twin

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
        # By block.
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

    def of_requests(self, table: torch.Tensor, lengths: list[int]) -> list[Sequence]:
        """A sequence for each request with blocks ``table [B, pages]`` and so many tokens.

        It holds indexes of the longest known beginning of the request, and of nothing else.
        """
        rows, claimed = table.cpu().numpy(), set[int]()
        self._make_room(rows)
        # Requests that are too short have nothing in their indexes.
        self._known = [one for one in self._known if one.length]
        found = []
        for row, length in zip(rows, lengths, strict=True):
            blocks = row[: -(-length // self.block_len)].copy()
            sequence = self._of_request(blocks, claimed)
            claimed.add(id(sequence))
            found.append(sequence)
        self._known = [one for one in self._known if id(one) not in claimed] + found
        del self._known[: max(0, len(self._known) - max(self._most, len(found)))]
        return found

    def _of_request(self, blocks: np.ndarray, claimed: set[int]) -> Sequence:
        uses = self._uses[blocks]
        best, rank = None, (0, False)
        for one in self._known:
            common = one.common(blocks, uses, self.block_len)
            # Its own sequence is used up as a whole, and is nobody else's in this step.
            is_own = common == one.length and id(one) not in claimed
            if common and (common, is_own) > rank:
                best, rank = one, (common, is_own)
        if best is None:
            return Sequence(blocks, uses)
        if not rank[1]:
            best = best.fork(rank[0])
        best.blocks, best.uses = blocks, uses
        return best
