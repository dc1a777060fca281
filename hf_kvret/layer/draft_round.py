"""DraftRound: what a layer does while tokens are drafted, verified and accepted.

Drafts retrieve, with a copy of the index where it learns from queries. The pass that verifies them
attends to all tokens and leaves its own rows. The index learns of those that are accepted, as if
they had come together.
"""

from __future__ import annotations

import torch

from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall


class DraftRound:
    """One round in one layer, whose tokens are ``kv``; passes draft from here on."""

    # A copy made in inference mode could not be written to outside of it.
    @torch.inference_mode(False)
    def __init__(self, kv: LayerKV) -> None:
        self._kv = kv
        self._start, self._index = kv.length, kv.index
        # The verifying pass leaves the queries and keys of its tokens here, and its call.
        self._pass: tuple[torch.Tensor, torch.Tensor, AttentionCall] | None = None
        kv.drafts = True
        if kv.index is not None and kv.index.hooks & {"on_forward", "after_search"}:
            kv.index = kv.index.fork()

    def end_drafts(self) -> None:
        """From here on passes verify, once the caller has dropped the drafts."""
        if self._kv.drafts:
            self._kv.index, self._kv.drafts = self._index, False

    def defer(self, query: torch.Tensor, key: torch.Tensor, call: AttentionCall) -> None:
        """Keep what the index would learn of a pass: queries and keys ``[B, H, n, Dk]``."""
        self._pass = query, key, call

    def learn(self, count: int) -> None:
        """Have the index learn of the first ``count`` tokens of the verifying pass.

        They are the newest ones now.
        """
        seen, self._pass = self._pass, None
        if seen is None or not count:
            return
        query, key, call = seen
        query, key = query[:, :, :count], key[:, :, :count]
        positions = None if call.positions is None else call.positions[:, :count]
        self._kv.on_forward(query, key, call.scoring.valid, positions, self._start)
        index, cold = self._kv.index, self._kv.cold(call.scoring)
        if index is not None and "after_search" in index.hooks and cold is not None:
            self._kv.ready_index(cold)
            self._kv.after_search(index.search(query, cold))
