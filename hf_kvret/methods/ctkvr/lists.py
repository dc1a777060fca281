"""CentroidLists: centroids in order of age, each with a list of slots in two or three bytes."""

from __future__ import annotations

from typing import Self

import torch

from hf_kvret.growing import GrowingRows
from hf_kvret_kernels import centroid

_NARROW = (1 << 16) - 1


class CentroidLists:
    """Bundles of queries ``[B, H, m, G, D]`` with slots ``[B, H, m, rho]``.

    A slot is kept as the low 16 bits of itself plus 1, so that 0 is none, and as 8 bits more once
    there are slots that need them: 2 bytes up to 65,535 tokens, 3 above.

    Attributes:
        width: slots of a list, rho.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._planes = {
            name: GrowingRows(64) for name in ("queries", "inverse", "slots", "low", "high")
        }

    def __len__(self) -> int:
        return self._planes["queries"].length

    @property
    def queries(self) -> torch.Tensor:
        """View ``[B, H, m, G, D]``."""
        return self._planes["queries"].rows

    @property
    def slots(self) -> torch.Tensor:
        """View ``[B, m]`` int64: where the queries were, -1 for what is no centroid in a row."""
        return self._planes["slots"].rows[:, 0]

    @property
    def ids(self) -> torch.Tensor:
        """``[B, H, m, rho]`` int32, -1 for none, unpacked: as big as it sounds."""
        return self.some_ids(slice(None))

    def some_ids(self, part: slice) -> torch.Tensor:
        """``[B, H, *, rho]`` int32: the lists of the centroids ``part``."""
        high = self._planes["high"].rows[:, :, part] if self._planes["high"].length else None
        return _unpack(self._planes["low"].rows[:, :, part], high)

    def append(
        self, queries: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, tokens: int
    ) -> None:
        """Add ``queries [B, H, m, G, D]`` of ``slots [B, m]`` with ``ids [B, H, m, <= rho]``.

        All ids are below ``tokens``.
        """
        self.widen(tokens)
        missing = self.width - ids.shape[-1]
        if missing:
            ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        norms = torch.linalg.vector_norm(queries.float(), dim=-1).clamp(min=1e-30)
        self._planes["queries"].append(queries)
        self._planes["inverse"].append(norms.reciprocal())
        self._planes["slots"].append(slots[:, None])
        self._planes["low"].append(_low(ids))
        if self._planes["high"].length or tokens > _NARROW:
            self._planes["high"].append(_high(ids))

    def widen(self, tokens: int) -> None:
        """Make room for slots below ``tokens``."""
        if tokens > _NARROW and len(self) and not self._planes["high"].length:
            zeros = torch.zeros_like(self._planes["low"].rows, dtype=torch.uint8)
            self._planes["high"].append(zeros)

    def similarity(self, query: torch.Tensor, dropped: int = 0) -> torch.Tensor:
        """``[B, H, Q, m]`` fp32 of ``query [B, H, Q, G, D]``; -inf for the ``dropped`` oldest."""
        found = centroid.similarity(query, self.queries, self._planes["inverse"].rows)
        gone = (self.slots < 0)[:, None, None]
        if dropped:
            gone = gone | (torch.arange(len(self), device=query.device) < dropped)
        return found.masked_fill(gone, float("-inf"))

    def take(self, index: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, c, rho]`` int32 lists of the centroids ``index [B, H, Q, c]``."""
        high = self._planes["high"].rows if self._planes["high"].length else None
        return centroid.take_lists(self._planes["low"].rows, high, index)

    def replace_ids(self, ids: torch.Tensor) -> None:
        """Put ``ids [B, H, m, rho]`` in the place of all."""
        high = self._planes["high"].length > 0
        for name, packed in (("low", _low(ids)), ("high", _high(ids))):
            self._planes[name] = GrowingRows(64)
            if name == "low" or high:
                self._planes[name].append(packed)

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        for plane in self._planes.values():
            plane.reorder(rows)

    def fork(self) -> Self:
        """A copy that shares what there is until it appends."""
        twin = type(self)(self.width)
        twin._planes = {name: plane.fork() for name, plane in self._planes.items()}
        return twin

    def nbytes(self) -> int:
        """Bytes of all tensors, spare room included."""
        return sum(plane.nbytes() for plane in self._planes.values())

    def list_nbytes(self) -> int:
        """Bytes of one list of one head and batch row."""
        return self.width * (3 if self._planes["high"].length else 2)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that restore it; empty for none."""
        return {
            name: plane.rows.contiguous() for name, plane in self._planes.items() if plane.length
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Become what was saved. KeyError names a missing tensor."""
        self.width = state["low"].shape[-1]
        for name in self._planes:
            self._planes[name] = GrowingRows(64)
            if name != "high" or name in state:
                self._planes[name].append(state[name])


def _low(ids: torch.Tensor) -> torch.Tensor:
    # Not by a cast alone: what a cast does to numbers out of range depends on the device.
    low = (ids + 1) & 0xFFFF
    return torch.where(low > 0x7FFF, low - 0x10000, low).to(torch.int16)


def _high(ids: torch.Tensor) -> torch.Tensor:
    return ((ids + 1) >> 16).to(torch.uint8)


def _unpack(low: torch.Tensor, high: torch.Tensor | None) -> torch.Tensor:
    ids = low.int() & 0xFFFF
    return (ids if high is None else ids | (high.int() << 16)) - 1
