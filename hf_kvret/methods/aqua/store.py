"""AquaStore: the codes of one layer, read with the reconstruction of the layer below."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_kvret.contracts.block import UNKNOWN_POSITION, TokenBlock
from hf_kvret.contracts.state import Tensors, part, transient
from hf_kvret.contracts.store import AttentionResult, RowChunks
from hf_kvret.contracts.token_buffer import TokenBuffer, passed
from hf_kvret.methods.aqua.coder import RowCoder, Rows
from hf_kvret.methods.aqua.config import LayerPlan
from hf_kvret.methods.aqua.learned import NOT_CODED
from hf_kvret.stores import PagedStore, Store
from hf_kvret.stores.memory import DeviceMemory, PageMemory
from hf_kvret_kernels._dispatch import preferred
from hf_kvret_kernels.ids import check_id_range

CHUNK = 4096
"""Tokens coded or decoded at once."""

# The longest row in bytes for the kernel: a tile of 32 longer rows exceeds its registers.
_LONGEST_ROW = 2048


class BytePages(PagedStore):
    """A paged store that can be read from any token on."""

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, H, n, *]`` of tokens ``first .. last``, on the device."""
        rows = self.paged_rows()
        on_gpu = self.memory.device.type == "cuda" or preferred() == "triton"
        if on_gpu and rows.width * rows.dtype.itemsize <= _LONGEST_ROW:
            return self.gathered(first, last)
        start = first // self.page_len
        dense = self._dense(start, -(-last // self.page_len))
        offset = start * self.page_len
        dense = dense[:, :, first - offset : last - offset].to(self.memory.device)
        return self._split(dense)

    def gathered(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``read``, by a kernel that follows the page table: without synchronizing with the GPU,
        and without copying pages in host memory first."""
        rows = self.paged_rows()
        ids = torch.arange(first, last, dtype=torch.int32, device=rows.table.device)
        pair = rows.gather(ids.expand(len(rows.table), rows.heads, 1, -1))
        return pair[0][:, :, 0], pair[1][:, :, 0]


class AquaStore(Store):
    """Codes of prediction residuals, or of the keys and values themselves in an anchor.

    A token is one row: codes of keys and values of all heads, then their scales; values that are
    the first elements of keys have none. Uncoded rows (16 bits) are stored in full.

    Reading a layer needs the same tokens of the layer below, which need those below it. Layers are
    read in order, so each one keeps its reconstruction until the next has read it: two layers are
    reconstructed at a time. If there is no such reconstruction, the layers below are decoded
    recursively. The first store keeps the positions for all others.

    ``gather``, ``attend`` and ``scores`` decode all tokens from the first to the last requested
    one: they are for crops and comparisons. Decoding steps read ``chunks``.

    Args:
        plan: of the layer.
        memory: where codes lie.
    """

    codes_rows = True

    _pages: BytePages = part(key="")
    # Tokens that a crop moved back to the window keep theirs until others replace them.
    _positions: TokenBuffer = passed(may_be_empty=True)
    # For the layer above. It would be of other rows after a reorder, and is no fork's.
    _reconstruction: Rows | None = transient()

    def __init__(self, plan: LayerPlan, memory: PageMemory) -> None:
        self.memory = memory
        self.plan = plan
        self._pages = BytePages(memory)
        self._coder: RowCoder | None = None

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def over_bus(self) -> bool:
        return self._pages.over_bus

    @property
    def reconstruction(self) -> Rows | None:
        """The reconstruction for the layer above, if any."""
        return self._reconstruction

    def append(self, block: TokenBlock) -> None:
        if block.start != len(self):
            raise ValueError(f"block starts at slot {block.start}, the store ends at {len(self)}")
        if len(block) == 0:
            return
        if self._coder is None:
            value_dim = 0 if block.value_in_key else block.values.shape[3]
            shape = block.keys.shape[1], block.keys.shape[3], value_dim
            inputs = block.keys.dtype, block.keys.device, block.value_in_key
            self._coder = RowCoder.of(self.plan, self.below() is None, shape, *inputs)
        if self.plan.keeps_positions:
            self._keep_positions(block)
        if self._coder.bits == NOT_CODED:
            self._pages.append(block)
        else:
            self._encode(self._coder, block)

    def begin(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> Callable[[], AttentionResult]:
        rows, ids = self._dense(ids)
        return rows.begin(query, ids, scale, softcap)

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, ids = self._dense(ids)
        return rows.gather(ids)

    def chunks(self, chunk_len: int = CHUNK, stop: int | None = None) -> RowChunks:
        """As for every store; decodes all tokens, because the layer above needs them all."""
        end, reconstruction = len(self), self._reconstruction
        if not self._has_codes:
            yield from self._pages.chunks(chunk_len, stop)
            return
        if reconstruction is not None and reconstruction.covers(0, end):
            for first, last in _spans(0, end, chunk_len):
                yield first, *self._as_attention_reads(reconstruction.part(first, last))
            return
        for rows in self._reconstructed(0, end, chunk_len, self._decode):
            yield rows.start, *self._as_attention_reads(rows)

    def reset(self) -> None:
        super().reset()
        self._coder = None

    def crop(self, length: int) -> None:
        """As for every state; drops the reconstruction, which has more tokens."""
        super().crop(length)
        self._reconstruction = None

    def nbytes(self) -> int:
        """As for every state, plus the reconstruction."""
        return super().nbytes() + (
            0 if self._reconstruction is None else self._reconstruction.nbytes
        )

    def shared_nbytes(self) -> int:
        """The layer's predictors."""
        predictors = None if self._coder is None else self._coder.predictors
        return 0 if predictors is None else predictors.nbytes

    def row_nbytes(self, plain: int) -> int:
        coder = self._coder
        return plain if coder is None or coder.bits == NOT_CODED else coder.row_nbytes

    def stats(self) -> dict[str, Any]:
        """``bits`` of the codes; 16 where rows are kept as they are."""
        return {} if self._coder is None else {"bits": self._coder.bits}

    def state_dict(self) -> Tensors:
        """``keys`` codes and ``values`` scales ``[B, 1, n, bytes]``, or full rows; and the rest."""
        state = self._pages.dense_state()
        if not state:
            return {}
        coder = self._coder
        assert coder is not None
        shape = [coder.heads, coder.key_dim, coder.value_dim]
        state["shape"] = torch.tensor(shape + [coder.value_in_key] * (coder.value_in_key > 0))
        state["dtype"] = torch.zeros(1, dtype=coder.dtype)
        if len(self._positions):
            state["positions"] = self._positions.rows.cpu().contiguous()
        if coder.predictors is not None:
            state["learned"] = torch.tensor(coder.predictors.fingerprint)
        return state

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        if not state:
            return
        device = device or self.memory.device
        heads, key_dim, value_dim, *in_key = map(int, state["shape"])
        inputs = state["dtype"].dtype, device, sum(in_key)
        shape = heads, key_dim, value_dim
        self._coder = RowCoder.of(self.plan, self.below() is None, shape, *inputs)
        predictors = self._coder.predictors
        if predictors is not None and predictors.fingerprint != int(state["learned"]):
            raise ValueError(
                f"the cache was saved with another artifact than {self.plan.options.artifact} is "
                "now: its codes are of what other predictors missed. Bring that artifact back, or "
                "fill a new cache"
            )
        if self.plan.keeps_positions:
            self._positions.append(state["positions"].to(device))
        self._pages.load_state_dict(state, device)

    @property
    def value_in_key(self) -> int:
        return 0 if self._coder is None else self._coder.value_in_key

    @property
    def _has_codes(self) -> bool:
        """Whether rows are codes; else they are as attention reads them."""
        return self._coder is not None and self._coder.bits != NOT_CODED

    def _dense(self, ids: torch.Tensor) -> tuple[PagedStore, torch.Tensor]:
        """A dense store of the tokens from the lowest to the highest id, and ids relative to it."""
        if not self._has_codes:
            return self._pages, ids
        check_id_range(ids, len(self))
        tokens = ids[ids >= 0]
        first, last = (int(tokens.min()), int(tokens.max()) + 1) if len(tokens) else (0, 1)
        rows = PagedStore(DeviceMemory(self.memory.device))
        for start, end in _spans(first, last, CHUNK):
            keys, values = self._as_attention_reads(self._reconstruct(start, end))
            rows.append(TokenBlock(keys, values, start - first, value_in_key=self.value_in_key))
        return rows, torch.where(ids >= 0, ids - first, ids)

    def _encode(self, coder: RowCoder, block: TokenBlock) -> None:
        coded = []

        def encode(first: int, last: int, below: Rows | None) -> Rows:
            where = slice(first - block.start, last - block.start)
            keys = coder.unrotated(block.keys[:, :, where], self._positions_of(first, last))
            values = coder.values_beside(block.values[:, :, where])
            codes, scales, rows = coder.encode(first, keys, values, below)
            coded.append((codes[:, None], scales[:, None]))
            return rows

        for _ in self._reconstructed(block.start, block.end, CHUNK, encode):
            pass
        # They are appended at once, so that the pages of a prompt have exactly its size.
        codes, scales = (torch.cat(tensors, dim=2) for tensors in zip(*coded, strict=True))
        self._pages.append(TokenBlock(codes, scales, block.start))

    def _decode(self, first: int, last: int, below: Rows | None) -> Rows:
        assert self._coder is not None, "in a pass, the layer below comes first"
        codes, scales = (x[:, 0] for x in self._pages.read(first, last))
        return self._coder.decode(first, codes, scales, below)

    def _reconstructed(
        self, first: int, last: int, chunk_len: int, make: Callable[[int, int, Rows | None], Rows]
    ) -> Iterator[Rows]:
        """Tokens ``first .. last`` in chunks, as ``make`` makes them of the rows below.

        They become the reconstruction where they are all tokens, and the layer above needs it.
        """
        below, target = self._source_store(), None
        for start, end in _spans(first, last, chunk_len):
            rows = make(start, end, self._rows_below(start, end))
            if self.plan.predicts_next and first == 0:
                target = target or Rows.empty_like(rows, last)
                target.put(rows)
            yield rows
        if below is not None and first == 0:
            # It has served; a block at the end leaves it for the pass over all tokens.
            below._reconstruction = None
        self._reconstruction = target

    def _as_attention_reads(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._coder is not None
        return self._coder.as_attention_reads(rows, self._positions_of(rows.start, rows.end))

    def _reconstruct(self, first: int, last: int) -> Rows:
        """Reconstruction of tokens ``first .. last``: a view of the current one, or computed."""
        if self._reconstruction is not None and self._reconstruction.covers(first, last):
            return self._reconstruction.part(first, last)
        coder = self._coder
        if coder is not None and coder.bits == NOT_CODED:
            keys, values = self._pages.read(first, last)
            return coder.rows(first, keys, values, self._positions_of(first, last))
        return self._decode(first, last, self._rows_below(first, last))

    def _source_store(self) -> AquaStore | None:
        """The store that this one is predicted from; None for an anchor."""
        if self.plan.previous is None:
            return None
        below = self.below()
        assert isinstance(below, AquaStore), "make_store gives one to every layer"
        return below

    def _rows_below(self, first: int, last: int) -> Rows | None:
        below = self._source_store()
        return None if below is None else below._reconstruct(first, last).to(self.memory.device)

    def _positions_of(self, first: int, last: int) -> torch.Tensor | None:
        if self._coder is None or self._coder.rope is None:
            return None
        store: AquaStore = self
        while (below := store.below()) is not None:
            assert isinstance(below, AquaStore), "make_store gives one to every layer"
            store = below
        # The layers of a model may lie on several devices.
        return store._positions.rows[:, 0, first:last].to(self.memory.device)

    def _keep_positions(self, block: TokenBlock) -> None:
        assert block.positions is not None, "a cache that lacks them takes no token in"
        buffer, new = self._positions, block.positions[:, None]
        behind = buffer.rows[:, :, block.end :].clone() if len(buffer) else new[:, :, :0]
        if len(buffer) > block.start:
            old = buffer.rows[:, :, block.start : block.end]
            old = torch.nn.functional.pad(old, (0, len(block) - old.shape[2]))
            new = torch.where(new == UNKNOWN_POSITION, old, new)
        buffer.crop(block.start)
        buffer.append(new)
        buffer.append(behind)


def _spans(first: int, last: int, chunk_len: int) -> Iterator[tuple[int, int]]:
    """``first .. last`` in chunks."""
    for start in range(first, last, chunk_len):
        yield start, min(start + chunk_len, last)
