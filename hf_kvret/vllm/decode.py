"""A decode step over vLLM's pages: each request attends to sinks, recent tokens and ``top_k`` rows.

Nothing here imports vLLM. Selection is that of ``cache_implementation="paris"`` or ``"flat"`` with
the same options, but that the window moves at multiples of ``flush`` tokens.

An index belongs to a request by the blocks that hold the request's rows: vLLM's attention knows no
requests. It sees block tables, and blocks are shared by requests with a common prefix, given back
when a request is preempted or ends, and used again. A block that is used anew gets a token at its
first place, which is counted here: blocks and counts together name the tokens that lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index, Scoring
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import preferred
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.paged import PagedRows


@dataclass(frozen=True)
class Selector:
    """How a layer selects.

    Attributes:
        method: whose index it is.
        options: of the method.
        layer: name of the layer.
        scale: factor of the dot products.
        softcap: or None.
    """

    method: type[RetrievalCache]
    options: RetrievalConfig
    layer: str
    scale: float
    softcap: float | None = None


def cold_end(options: RetrievalConfig, length: int) -> int:
    """How many tokens of ``length``, the query's included, are selected among: the first ones."""
    if length <= options.dense_len:
        return 0
    return max(0, length - 1 - options.recent) // options.flush * options.flush


def decode(
    selector: Selector,
    query: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: Items[int],
    sequences: Items[Sequence],
) -> torch.Tensor:
    """Attention ``[B, Hq, D]`` of one query a request to what it selects.

    Args:
        selector: of the layer.
        query: ``[B, Hq, D]``.
        pages: ``[blocks, Hkv, block_len, 2 * D]``, key and value of a token side by side.
        table: ``[B, max_blocks]`` int32, the blocks of each request.
        lengths: tokens of each request, that of its query included, whose rows are in ``pages``.
        sequences: of each request, see ``Sequences``; tokens that left the window are added.
    """
    results = []
    for number, (length, sequence) in enumerate(zip(lengths, sequences, strict=True)):
        rows = PagedRows([pages], table[number : number + 1], query.shape[-1], tokens=length)
        one, end = query[number, None, :, None], cold_end(selector.options, length)
        if end > selector.options.sink:
            results.append(_select(selector, one, rows, end, sequence))
        else:
            ids = torch.arange(length, device=query.device, dtype=torch.int32)
            results.append(_attend(selector, one, rows, ids.expand(1, rows.heads, 1, -1)))
    return torch.cat(results)[:, :, 0]


def _select(
    selector: Selector, query: torch.Tensor, rows: PagedRows, end: int, sequence: Sequence
) -> torch.Tensor:
    """Attention ``[1, Hq, 1, D]`` to sinks, to tokens from ``end`` on, and to what is found."""
    options, device = selector.options, query.device
    make_index: Any = partial(selector.method.make_index, options, 0)
    index, known = sequence.index(selector.layer, make_index)
    if known < end:
        new = torch.arange(known, end, device=device)
        # An index of these methods reads keys alone.
        keys = _rows_of(rows, new, rows.key_dim)
        index.add(TokenBlock(keys, keys, known))
        sequence.added[selector.layer] = end
    valid = torch.ones(1, end, dtype=torch.bool, device=device)
    valid[:, : options.sink] = False
    # These indexes need no store: an empty one satisfies ColdTokens.
    store = PagedStore(DeviceMemory(device))
    scoring = Scoring(valid, selector.scale, selector.softcap)
    cold = ColdTokens(store, scoring, options.budget(end))
    sinks = torch.arange(options.sink, device=device)
    always = torch.cat([sinks, torch.arange(end, rows.token_count, device=device)])
    by_library = query.is_cpu and preferred() is None and host_step.library() is not None
    search = index.host_search(query, cold) if by_library else None
    if search is not None:
        window_rows = _rows_of(rows, always, rows.width).split(rows.key_dim, dim=-1)
        keys, values = (part.contiguous() for part in window_rows)
        window = host_step.HostWindow(keys, values, len(always))
        host_cold = host_step.HostCold(rows, search, valid, cold.budget)
        scores: dict[str, Any] = {"scale": selector.scale, "softcap": selector.softcap}
        return host_step.run_step(query, window, host_cold, **scores)[0]
    ids = index.search(query, cold)
    shared = always.int().expand(*ids.shape[:3], -1)
    return _attend(selector, query, rows, torch.cat([shared, ids], dim=-1))


def _attend(
    selector: Selector, query: torch.Tensor, rows: PagedRows, ids: torch.Tensor
) -> torch.Tensor:
    scores: dict[str, Any] = {"scale": selector.scale, "softcap": selector.softcap}
    return gather_attention(query, rows, ids.contiguous(), **scores)[0]


def _rows_of(rows: PagedRows, ids: torch.Tensor, width: int) -> torch.Tensor:
    """``[1, Hkv, n, width]``, the first ``width`` numbers of the rows ``ids [n]``, contiguous."""
    blocks = rows.table[0, ids // rows.page_len].long()
    chosen = rows.chunks[0][..., :width][blocks, :, ids % rows.page_len]
    return chosen.transpose(0, 1).contiguous()[None]


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
