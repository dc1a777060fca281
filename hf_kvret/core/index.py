"""The Index contract: which of the cold tokens matter for a query."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from hf_kvret.core.block import TokenBlock
from hf_kvret.core.contract import refuse_old_names
from hf_kvret.core.scoring import Scoring
from hf_kvret.core.state import State

if TYPE_CHECKING:
    from hf_kvret.core.store import Store
    from hf_kvret_kernels.host_step import HostSearch


@dataclass(frozen=True, eq=False)
class ColdTokens:
    """The cold tokens of a layer, and how a query is to be compared with them.

    Attributes:
        store: holds them; an index may read keys in it.
        scoring: ``valid [B, n]`` is False for padding, holes and sinks: never to be selected.
        budget: how many of them a query selects now, at least 1 and at most n.
    """

    store: Store
    scoring: Scoring
    budget: int

    def __len__(self) -> int:
        return self.valid.shape[1]

    @property
    def valid(self) -> torch.Tensor:
        """``[B, n]`` bool."""
        assert self.scoring.valid is not None, "sinks are never selected"
        return self.scoring.valid

    @property
    def scale(self) -> float:
        """See ``Scoring``."""
        return self.scoring.scale

    @property
    def softcap(self) -> float | None:
        """See ``Scoring``."""
        return self.scoring.softcap


class SearchCost(NamedTuple):
    """What one search takes, for reports.

    Attributes:
        candidates: tokens that are scored in full precision or reranked, for each query and head.
        nbytes: bytes of the index that are read.
        keys_read: keys that are read in the store, for each query and KV head.
    """

    candidates: int
    nbytes: int
    keys_read: int = 0


_REPLACED = {
    "observe": "add(block)",
    "extend": "add(block)",
    "select": "search(query, cold)",
    "watch": "on_forward(queries, keys, start, valid, positions)",
    "refresh": "before_search(cold)",
    "learn": "after_search()",
    "candidates": "cost(n, budget)",
    "keys_read": "cost(n, budget)",
    "select_nbytes": "cost(n, budget)",
    "positions": "RetrievalCache.needs_positions",
    "whole": "a cache whose make_index returns None",
    "settle": "before_capture() of the mixin CapturableIndex",
    "broke_off": "capture_failed() of the mixin CapturableIndex",
    "uncapturable": "the mixin CapturableIndex, or the attribute capture_obstacle",
}


class Index(State):
    """Finds the few cold tokens that a query attends to. One per retrieval layer.

    ``add`` and ``search`` must be there. What the index holds it declares, see ``State``: then it
    is reordered, cropped, forked, saved and loaded with the cache.

    Tokens arrive in order and keep their slot number, the number that ``search`` answers with.
    There are hooks that do nothing by default: ``on_forward`` at each forward pass, ``build`` at
    the end of a prompt, ``before_search`` and ``after_search``. An index keeps its
    state in preallocated tensors on the device and never synchronizes the host when one token is
    decoded, unless a block left the window just before.

    Attributes:
        capture_obstacle: why its decode steps can't be captured in a CUDA graph, in words; of an
            index that is no ``CapturableIndex``.

    Raises:
        TypeError: a subclass defines methods of the contract before this one.
    """

    capture_obstacle: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_old_names(cls, Index, _REPLACED, "docs/your-index.md and the changelog")

    @abstractmethod
    def add(self, block: TokenBlock) -> None:
        """Take in tokens that left the window. ``block.start`` is the number of tokens held."""

    @abstractmethod
    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        """The tokens to attend to, for each query.

        Args:
            query: ``[B, Hq, Q, Dk]``, post-RoPE; Q > 1 for drafted tokens.
            cold: the tokens that were added, which of them are valid, and the budget.

        Returns:
            ``[B, Hkv, Q, budget]`` or ``[B, Hq, Q, budget]`` int32 slots, each at most once a
            row, -1 where fewer than ``budget`` tokens are valid, or where an index that prunes
            knows fewer. With ``budget == n`` every valid token is selected: stages that prune
            must let all pass.
        """

    def host_search(self, cold: ColdTokens) -> HostSearch | None:
        """What the CPU library has to know to do ``search`` itself, in one call with all the rest.

        None where it can't, as here: ``search`` is called. It may choose others among tokens that
        matter equally, up to rounding; ids come in any order.
        """
        return None

    def cost(self, n: int, budget: int) -> SearchCost:
        """What a search for ``budget`` of ``n`` tokens takes; by default, all that is held."""
        return SearchCost(n, self.nbytes())

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """See the tokens of a forward pass before anything else is done with them.

        They are recent from then on and come as a block when they leave the window. A pass that
        starts below the end of the last one follows a crop.

        Args:
            queries: ``[B, Hq, q, Dk]``, post-RoPE; may be kept, must not be changed.
            keys: ``[B, Hkv, q, Dk]``, post-RoPE; the same.
            start: slot of the first of the q tokens.
            valid: ``[B, q]`` bool, False for padding; None when all are valid.
            positions: ``[B, q]`` integers, where the model's RoPE puts the tokens; None where the
                model does not tell.
        """

    def build(self, cold: ColdTokens) -> None:
        """Finish what needs the whole prompt. Called once, with at least one token held.

        That is before the first search, or earlier, when the cache is forked or saved, so that no
        copy has to do it again.
        """

    def before_search(self, cold: ColdTokens) -> None:
        """Called instead of ``build`` before each later search: rare upkeep, if any is due."""

    def after_search(self) -> None:
        """Called while the selected rows are being read: what a search leaves to be noted."""

    def set_options(self, options: Any) -> None:
        """Go on with other options, of those that a fork may change.

        Replaces the attribute ``options``, where an index has one.
        """
        if hasattr(self, "options"):
            self.options = options

    def shared_nbytes(self) -> int:
        """Bytes of what all caches of a process share, as calibrated tensors on the device."""
        return 0

    def stats(self) -> dict[str, Any]:
        """Plain numbers of the method's own, for ``cache.stats()``; may wait for the device."""
        return {}


class CapturableIndex:
    """Mixin of an index whose decode steps can be captured in a CUDA graph and replayed.

    They can where ``on_forward``, ``before_search``, ``search`` and ``after_search``, for one token
    between two flushes, launch the same work on the same memory each time: no host synchronization,
    no number of the host that changes from step to step (``start`` of ``on_forward`` does), state
    changed in place. They run once, to be captured; ``replayed`` stands for their other runs.
    """

    def before_capture(self) -> None:
        """A step is about to be captured: do now what would otherwise come due in one."""

    def capture_failed(self) -> None:
        """The capture after ``before_capture`` failed, and the device did nothing.

        What was noted on the host since then is to be undone.
        """

    def replayed(self) -> None:
        """A captured step was replayed: what its run in Python would have noted on the host."""


def capture_obstacle_of(index: Index | None) -> str | None:
    """Why decode steps of an index can't be captured in a CUDA graph; None: they can."""
    if index is None:
        return "a cache without an index reads its store in pieces, more of them as it grows"
    if isinstance(index, CapturableIndex):
        return None
    obstacle = f"the index {type(index).__name__} does not say that its steps can be captured"
    return index.capture_obstacle or obstacle
