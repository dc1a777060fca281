"""QueryBuffer: queries of the newest tokens, in a buffer that a captured step writes to."""

from __future__ import annotations

import torch

from hf_kvret.contracts.state import State, number, tensor


class QueryBuffer(State):
    """At most ``most`` queries ``[B, Hq, q, D]`` in the order in which they came.

    The next position is on the device, too, so that a decode step can be captured once and replayed
    (``replayed`` then counts on the host).

    Attributes:
        count: queries in the buffer.
    """

    count: int = number(0, saved=False)
    _rows: torch.Tensor | None = tensor(saved=False)
    _valid: torch.Tensor | None = tensor(saved=False)
    _next: torch.Tensor | None = tensor(saved=False, batched=False)

    def __init__(self, most: int) -> None:
        self.most = most

    def put(self, queries: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Add ``queries [B, Hq, q, D]``; ``valid [B, q]`` bool or None. There must be room."""
        if self._rows is None or self._next is None:
            batch, heads, _, dim = queries.shape
            self._rows = queries.new_empty(batch, heads, self.most, dim)
            self._next = torch.zeros(1, dtype=torch.long, device=queries.device)
        more, places = queries.shape[2], self._next
        if more > 1:
            places = places + torch.arange(more, device=places.device)
        self._rows.index_copy_(2, places, queries)
        if valid is not None and self._valid is None:
            shape = len(queries), self.most
            self._valid = torch.ones(shape, dtype=torch.bool, device=queries.device)
        if self._valid is not None:
            mask = self._valid.new_ones(len(queries), more) if valid is None else valid
            self._valid.index_copy_(1, places, mask)
        self._next.add_(more)
        self.count += more

    def replayed(self) -> None:
        """A captured ``put`` of one query was replayed."""
        self.count += 1

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Empty the buffer; returns its queries and their validity (None: all valid).

        Both are views that the next ``put`` overwrites. None if the buffer was empty.
        """
        if self._rows is None or self._next is None or not self.count:
            return None
        rows = self._rows[:, :, : self.count]
        valid = None if self._valid is None else self._valid[:, : self.count]
        self.count = 0
        self._next.zero_()
        return rows, valid
