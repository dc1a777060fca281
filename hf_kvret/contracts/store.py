"""The Store contract: where the keys and values of cold tokens live."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.state import State, Tensors
from hf_kvret_kernels._dispatch import preferred
from hf_kvret_kernels.paged import HostRows
from hf_kvret_kernels.relevance import best_ids, host_rank
from hf_kvret_kernels.soft_cap import soft_cap_


@dataclass(frozen=True)
class FirstRows:
    """What is known of a layer's rows when its store is made.

    Attributes:
        device: of the queries.
        nbytes: bytes of the first block, or of a saved store.
        tokens: in it.
    """

    device: torch.device
    nbytes: int
    tokens: int

    @classmethod
    def of(cls, block: TokenBlock) -> FirstRows:
        """Those of a layer's first block."""
        return cls(block.keys.device, block.nbytes, len(block))


# ``out [B, Hq, Q, Dv]`` and ``lse [B, Hq, Q]`` fp32, the natural log of the denominator.
AttentionResult = tuple[torch.Tensor, torch.Tensor]
# Tokens in order: ``(first index, keys [B, Hkv, n, Dk], values [B, Hkv, n, Dv])``.
RowChunks = Iterator[tuple[int, torch.Tensor, torch.Tensor]]


class Store(State):
    """Keys and values of one layer's cold tokens, by token index. One per retrieval layer.

    What it holds it declares, see ``State``. Reordering and forking copy no rows.

    Attributes:
        below: finds the store of the retrieval layer below, for a store whose rows are made of
            that one's; None where there is none, or where it is empty. In a forward pass it has
            taken in the same tokens just before, and it forgets tokens after this one. Set by the
            cache, also in a fork.
        codes_rows: whether rows come back as other numbers than they were given.
    """

    below: Callable[[], Store | None] = staticmethod(lambda: None)
    codes_rows: ClassVar[bool] = False

    @property
    def over_bus(self) -> bool:
        """Whether the device reads the rows held in host memory, for reports."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Tokens held, the same for every sequence of the batch."""

    def expect(self, tokens: int) -> None:
        """About ``tokens`` will come, the first block is only the first of them; 0: it is all."""

    @abstractmethod
    def append(self, block: TokenBlock) -> None:
        """Take in ``block``, whose ``start`` is ``len(self)``. May copy asynchronously."""

    @abstractmethod
    def begin(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> Callable[[], AttentionResult]:
        """Start exact attention of each query over the tokens that its ids name.

        What the device does until the result is asked for runs at the same time where the rows are
        elsewhere. Only one ``begin`` may be under way, and the store must not change before its
        result is taken.

        Args:
            query: ``[B, Hq, Q, Dk]``.
            ids: ``[B, Hkv or Hq, Q, k]`` int32 token indices, -1 for none.
            scale: factor of the dot products.
            softcap: ``c`` of ``c * tanh(score / c)``, or None.

        Returns:
            What gives ``out [B, Hq, Q, Dv]`` fp32 and ``lse [B, Hq, Q]`` fp32 (natural log) on the
            query's device; a query without tokens has out 0 and lse -inf. ``Partials`` (of
            ``hf_kvret_kernels.merge``) give it, too: where the device's current stream has all its
            work already, they save the launch that would merge them.
        """

    def host_rows(self) -> HostRows | None:
        """The rows held, where the CPU library reads them as they lie; None, as here, where not."""
        return None

    def scores(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> torch.Tensor:
        """Attention logits ``[B, Hq, Q, k]`` fp32 of the keys that ids name, -inf for -1.

        Computed where ``begin`` computes; arguments are the same. Here, of keys that are
        fetched to the query's device.
        """
        heads = ids.shape[1]
        scores = []
        # One query after the other: many queries' keys could not be held at once.
        for one_query, one_ids in zip(query.split(1, dim=2), ids.split(1, dim=2), strict=True):
            keys = self.gather(one_ids.contiguous())[0].to(query.device)[:, :, 0]
            grouped = one_query.float().unflatten(1, (heads, -1)).squeeze(3)
            logits = grouped @ keys.float().transpose(-1, -2) * scale
            none = (one_ids < 0) | (one_ids >= len(self))
            logits = soft_cap_(logits, softcap).masked_fill_(none, float("-inf"))
            scores.append(logits.flatten(1, 2).unsqueeze(2))
        return torch.cat(scores, dim=2)

    def best(
        self,
        query: torch.Tensor,
        ids: torch.Tensor,
        count: int,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """The ``count`` most relevant of ids, in any order, then -1: ``[B, Hkv, Q, count]`` int32.

        A token is as relevant as the largest of the softmax weights, over the ids, that the query
        heads of its KV head give it. Computed where ``begin`` computes; arguments are the same.
        """
        scores = self.scores(query, ids, scale, softcap)
        if scores.is_cpu and preferred() is None:
            return host_rank(scores, ids, count)
        of_groups = scores.unflatten(1, (ids.shape[1], -1)).transpose(2, 3)
        best = best_ids(of_groups, ids, min(count, ids.shape[-1]))
        return torch.nn.functional.pad(best, (0, count - best.shape[-1]), value=-1)

    @abstractmethod
    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[B, H, Q, k, Dk]``, values ``[..., Dv]`` of ``ids [B, H, Q, k]``; 0 for -1."""

    @abstractmethod
    def chunks(self, chunk_len: int = 4096, stop: int | None = None) -> RowChunks:
        """Tokens in order: ``(first index, keys [B, Hkv, n, Dk], values [B, Hkv, n, Dv])``.

        Those before token index ``stop``; None: all. A store that makes all of them anyway may give
        later ones, too.
        """

    def key_chunks(self, chunk_len: int = 4096) -> Iterator[tuple[int, torch.Tensor]]:
        """The keys alone of all tokens in order: ``(first index, keys [B, Hkv, n, Dk])``."""
        # `map` holds no chunk while the next one is made, as a loop would.
        return map(lambda chunk: chunk[:2], self.chunks(chunk_len))

    def host_nbytes(self) -> int:
        """Those of ``nbytes()`` that lie in host memory. Rows shared with a fork count in both."""
        parts = (getattr(self, name) for name in self.fields)
        return sum(part.host_nbytes() for part in parts if isinstance(part, Store))

    def shared_nbytes(self) -> int:
        """Bytes of what all caches of a process share, as predictors on the device."""
        return 0

    def before_capture(self) -> None:
        """A step is about to be captured: the host waits until all rows have arrived.

        After it, and until the store changes, reading waits for no copy, and what reading makes
        once for the rows held is made.
        """

    @property
    def capture_obstacle(self) -> str | None:
        """Why decode steps can't be captured in a CUDA graph now, in words; None: they can.

        A captured step is replayed until the store changes: it waits for nothing outside of it,
        never asks the host, and leaves nothing behind but what it writes into tensors that were
        there before. Ask after an eager step has attended, and again when the store has changed.
        """
        return f"the store {type(self).__name__} does not say that its steps can be captured"

    def row_nbytes(self, plain: int) -> int:
        """Bytes of a token's key and value in one head; ``plain`` of them in the model's dtype."""
        return plain

    def stats(self) -> dict[str, Any]:
        """Plain numbers of the store's own, for ``cache.stats()``; may wait for the device."""
        return {}

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        """Fill an empty store with what ``state_dict`` gave, for queries on ``device``.

        That is rows in pages on the CPU, see ``saved_pages``, or ``keys [B, Hkv, n, Dk]`` and
        ``values [B, Hkv, n, Dv]`` (in place of these ``value_in_key``, where keys contain them), or
        nothing; of a store of coded rows, its codes, which only such a store takes.
        """
        in_key = int(state.get("value_in_key", 0))
        if PAGES in state:
            rows = state[PAGES].transpose(1, 2).flatten(2, 3)[:, :, : int(state["length"])]
            keys, values = rows.tensor_split([int(state["key_dim"])], dim=-1)
            state = {"keys": keys, "values": values}
        if state and "keys" not in state:
            raise ValueError(
                "the cache was saved with coded rows, which other stores can't take: load it with "
                "store='higgs' or 'higgs-host', and the bits that it was saved with"
            )
        if state:
            keys = state["keys"].to(device)
            values = keys[..., :in_key] if in_key else state["values"].to(device)
            self.append(TokenBlock(keys, values, start=0, value_in_key=in_key))


PAGES = "pages"
"""Name of saved rows as kernels read them: ``[B, n / page_len, Hkv, page_len, Dk + Dv]``.

Beside them stand ``length`` and ``key_dim``, and ``value_in_key`` where keys contain the values.
"""


def all_of(store: Store, chunks: RowChunks, stop: int | None = None) -> RowChunks:
    """``chunks``, which ``store.chunks(..., stop)`` gave; none is held while the next one is made.

    Raises:
        RuntimeError: they leave out tokens, or are not in order.
    """
    end, count = 0, len(store) if stop is None else min(stop, len(store))
    remedy = "it must give all tokens before stop, in order"
    for start, keys, values in chunks:
        if start != end:
            raise RuntimeError(
                f"{type(store).__name__}.chunks() gave slot {start} where slot {end} was next: "
                f"{remedy}"
            )
        end += keys.shape[2]
        yield start, keys, values
        del keys, values
    if end < count:
        raise RuntimeError(
            f"{type(store).__name__}.chunks() gave {end} of {count} tokens: {remedy}"
        )
