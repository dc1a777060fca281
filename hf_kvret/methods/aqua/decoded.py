"""Stores that decode rows when they are read, and checks of saved codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.schema import damaged
from hf_kvret.contracts.store import AttentionResult, Store
from hf_kvret.stores.memory import DeviceMemory, PageMemory
from hf_kvret.stores.paged import PagedStore
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


class DecodedStore(Store):
    """Decodes rows chunk by chunk.

    ``gather``, ``attend`` and ``scores`` decode all tokens from the first to the last requested
    one: they are for crops and comparisons. Decoding steps read ``chunks``.

    Args:
        memory: where codes lie.
    """

    codes_rows = True

    def __init__(self, memory: PageMemory) -> None:
        self.memory = memory

    @property
    def value_in_key(self) -> int:
        """See ``TokenBlock``; of the rows that it decodes."""
        return 0

    @abstractmethod
    def decoded_chunks(
        self, first: int, last: int, chunk_len: int = CHUNK
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Tokens ``first .. last`` in order: ``(index, keys [B, Hkv, n, Dk], values)``."""

    def begin(
        self,
        query: torch.Tensor,
        ids: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> Callable[[], AttentionResult]:
        rows, ids = self._dense(ids)
        return rows.begin(query, ids, scale, softcap)

    def scores(
        self,
        query: torch.Tensor,
        ids: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        rows, ids = self._dense(ids)
        return rows.scores(query, ids, scale, softcap)

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, ids = self._dense(ids)
        return rows.gather(ids)

    def _dense(self, ids: torch.Tensor) -> tuple[PagedStore, torch.Tensor]:
        """A dense store of the tokens from the lowest to the highest id, and ids relative to it."""
        check_id_range(ids, len(self))
        tokens = ids[ids >= 0]
        first, last = (int(tokens.min()), int(tokens.max()) + 1) if len(tokens) else (0, 1)
        rows = PagedStore(DeviceMemory(self.memory.device))
        for start, keys, values in self.decoded_chunks(first, last):
            in_key = self.value_in_key
            rows.append(TokenBlock(keys, values, start - first, value_in_key=in_key))
        return rows, torch.where(ids >= 0, ids - first, ids)


def spans(first: int, last: int, chunk_len: int) -> Iterator[tuple[int, int]]:
    """``first .. last`` in chunks."""
    for start in range(first, last, chunk_len):
        yield start, min(start + chunk_len, last)


def joined(x: torch.Tensor) -> torch.Tensor:
    """``[B, n, H * D]``, the heads of each token side by side, of ``[B, H, n, D]``."""
    return x.transpose(1, 2).flatten(2)


def split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, H, n, D]``, a view of ``[B, n, H * D]``."""
    return rows.unflatten(2, (heads, -1)).transpose(1, 2)


def check_shape(saved: torch.Tensor, shape: list[int]) -> None:
    """ValueError unless ``saved``, ``store.shape``, is the layer's: heads, key and value dim."""
    if saved.dtype != torch.int64 or saved.shape != (len(shape),) or saved.tolist() != shape:
        raise damaged(f"store.shape is {saved.flatten()[:4].tolist()}, not {shape}")
