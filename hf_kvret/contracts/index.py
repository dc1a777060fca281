"""The Index contract: which of the cold tokens matter for a query."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.state import State
from hf_kvret.contracts.store import AttentionResult, Store
from hf_kvret_kernels.host_step import HostSearch
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.paged import HostRows


class Scoring(NamedTuple):
    """A score is ``scale * q.k``, or ``softcap * tanh(scale * q.k / softcap)``.

    Attributes:
        valid: ``[B, n]`` bool, False for tokens that no query attends to; None: all are valid.
        scale: factor of the dot products before the softmax.
        softcap: or None. It keeps the order of tokens within a head, but changes comparisons
            between the heads of a group.
    """

    valid: torch.Tensor | None
    scale: float
    softcap: float | None = None

    def of(self, valid: torch.Tensor | None) -> Self:
        """The same scoring with another ``valid``."""
        return self._replace(valid=valid)

    def reordered(self, rows: torch.Tensor) -> Self:
        """The same scoring for the batch whose sequence b is the old one ``rows[b]``."""
        return self if self.valid is None else self.of(self.valid.index_select(0, rows))


@dataclass(frozen=True, eq=False)
class ColdTokens:
    """The cold tokens of a layer, and how a query is to be compared with them.

    Attributes:
        store: holds them; an index may read keys in it.
        scoring: ``valid [B, n]`` is False for padding, holes and sinks: never to be selected.
        budget: how many tokens a query selects, from 1 to n.
        mean: what those that a query does not select count by; None: they don't count.
        valid, scale, softcap: of ``scoring``.
    """

    store: Store
    scoring: Scoring
    budget: int
    mean: MeanToken | None = None

    valid: torch.Tensor = field(init=False)
    scale: float = field(init=False)
    softcap: float | None = field(init=False)

    def __post_init__(self) -> None:
        # Looked up several times in each step.
        for name in ("valid", "scale", "softcap"):
            object.__setattr__(self, name, getattr(self.scoring, name))

    def __len__(self) -> int:
        return self.valid.shape[1]

    @cached_property
    def host_rows(self) -> HostRows | None:
        """The store's rows where the compiled library reads them; None where it can't."""
        return self.store.host_rows()

    def begin(self, query: torch.Tensor, ids: torch.Tensor) -> Callable[[], AttentionResult]:
        """See ``Store.begin``."""
        return self.store.begin(query, ids, self.scale, self.softcap)


class SearchCost(NamedTuple):
    """Cost of one search, for reports.

    Attributes:
        candidates: tokens that are scored in full precision or reranked, for each query and head.
        nbytes: bytes of the index that are read.
        keys_read: keys that are read in the store, for each query and KV head.
    """

    candidates: int
    nbytes: int
    keys_read: int = 0


class Index(State):
    """Finds the few cold tokens that a query attends to. One per retrieval layer.

    A subclass must define ``add`` and ``search``. It declares its state as fields, see ``State``,
    which are then reordered, cropped, forked, saved and loaded with the cache.

    Tokens arrive in order and keep their token index, which is what ``search`` returns.
    Hooks do nothing by default: ``on_forward`` at each forward pass, ``on_prompt`` at long ones,
    ``on_reader`` where another layer reads the same keys, ``build`` at the end of a prompt,
    ``before_search`` and ``after_search``. An index keeps its state in preallocated tensors on the
    device, and decoding one token never synchronizes the host, unless a block left the window just
    before.

    Attributes:
        kv_heads: numbers of the layer's KV heads that this process holds; None: all of them.
        capture_obstacle: for an index that is not a ``CapturableIndex``, why its decode steps
            can't be captured in a CUDA graph, as the message says it.
        hooks: names of the hooks that a class has of its own, set for each subclass;
            ``host_search`` where it belongs to its ``search``, not to a replaced one.
    """

    kv_heads: range | None = None
    capture_obstacle: ClassVar[str] = ""
    hooks: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        hooks = ("on_forward", "on_prompt", "before_search", "after_search", "host_search")
        own = {name for name in hooks if getattr(cls, name) is not getattr(Index, name)}
        newest = next(base for base in cls.__mro__ if {"host_search", "search"} & vars(base).keys())
        if "host_search" not in vars(newest):
            own.discard("host_search")
        cls.hooks = frozenset(own)

    @abstractmethod
    def add(self, block: TokenBlock) -> None:
        """Add tokens that left the window. ``block.start`` is the number of tokens added before."""

    @abstractmethod
    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        """The tokens to attend to, for each query.

        Args:
            query: ``[B, Hq, Q, Dk]``, post-RoPE; Q > 1 for drafted tokens.
            cold: the tokens that were added, which of them are valid, and the budget.

        Returns:
            ``[B, Hkv, Q, budget]`` or ``[B, Hq, Q, budget]`` int32 token indices, each at most once
            a query, -1 where fewer than ``budget`` tokens are valid or survive the index's own
            pruning. With ``budget == n`` every valid token is selected: pruning stages must then
            keep all. Where a CPU reads the rows, ids of no token raise WrongIdError, a ValueError,
            which names the index; where a GPU does, they count as -1.
        """

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> HostSearch | None:
        """What the CPU library has to know to do ``search`` itself, in one call with all the rest.

        Arguments as of ``search``. None where it can't, as here: ``search`` is called before the
        rest. The library may choose others among tokens that matter equally, up to rounding; ids
        come in any order. A subclass that replaces ``search`` alone is served by that; one that
        replaces a method which ``search`` calls has to replace this one too.
        """
        return None

    def cost(self, n: int, budget: int) -> SearchCost:
        """Cost of a search for ``budget`` of ``n`` tokens; by default the whole index is read.

        Its candidates are asked for when cold tokens, budget or options have changed.
        """
        return SearchCost(n, self.nbytes())

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Called with the tokens of a forward pass, before they are added to the window.

        ``add`` gets them later, as a block, when they leave the window. A pass that starts before
        the end of the last one follows a crop.

        Args:
            queries: ``[B, Hq, q, Dk]``, post-RoPE; may be kept, must not be changed.
            keys: ``[B, Hkv, q, Dk]``, post-RoPE; the same.
            start: token index of the first of the q tokens.
            valid: ``[B, q]`` bool, False for padding; None when all are valid.
            positions: ``[B, q]`` integers, RoPE positions of the tokens; None where the model does
                not pass any.
        """

    def on_prompt(self, queries: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Called with the newest queries of a long pass, up to 64, before its tokens are added.

        ``queries`` and ``valid`` as of ``on_forward``. An index with this hook alone learns nothing
        of steps and drafts, so that no round of drafts needs a copy of it.
        """

    def on_reader(self, positions: torch.Tensor | None) -> None:
        """Called before a layer that reads the keys of this one searches for queries of its own.

        ``on_forward`` has seen the pass; ``positions [B, q]`` as there, of these queries, which may
        be the newest alone.
        """

    def is_stale(self, cold: ColdTokens) -> bool:
        """Whether ``build`` is to be called again before a search of ``cold``; asked each time."""
        return False

    def build(self, cold: ColdTokens) -> None:
        """Do the work that needs the whole prompt, with at least one cold token.

        Called once, and again where ``is_stale``. Runs before the first search, or earlier if the
        cache is forked or saved, so that no copy has to repeat it.
        """

    def before_search(self, cold: ColdTokens) -> None:
        """Called instead of ``build`` before each later search: rare upkeep, if any is due."""

    def after_search(self, ids: torch.Tensor) -> None:
        """Called while the selected rows are being read, for bookkeeping that can wait.

        ``ids`` as ``search`` returned them, or as the CPU library found them; not to be changed.
        """

    def set_options(self, options: Any) -> None:
        """Use other options from now on: those that a fork may change.

        By default replaces the attribute ``options``, if the index has one.
        """
        if hasattr(self, "options"):
            self.options = options

    def shared_nbytes(self) -> int:
        """Bytes shared by all caches of a process, such as calibrated tensors on the device."""
        return 0

    def stats(self) -> dict[str, Any]:
        """The method's own entries in ``cache.stats()``, plain numbers; may wait for the device."""
        return {}


class CapturableIndex:
    """Mixin of an index whose decode steps can be captured in a CUDA graph and replayed.

    For one token between two flushes, ``on_forward``, ``before_search``, ``search`` and
    ``after_search`` must launch the same work on the same memory each time: no host
    synchronization, no dependence on host numbers that change from step to step (such as ``start``
    of ``on_forward``), state changed in place. They run once, during capture; for every later step
    ``before_replay`` is called instead.
    """

    def before_capture(self) -> None:
        """A step is about to be captured: do pending work now, so that none falls into it."""

    def capture_failed(self) -> None:
        """The capture after ``before_capture`` failed, and the device did nothing.

        Undo the changes of host state made since then.
        """

    def before_replay(self) -> None:
        """A captured step is about to be replayed: do what its Python code would on the host.

        Not called for the first replay after a capture, whose Python code has just run.
        """


def blamed_on(index: Index, method: str, error: WrongIdError) -> WrongIdError:
    """``error``, saying that it was this method of ``index`` that named no token."""
    return error.by(f"the index {type(index).__name__}.{method}")


def capture_obstacle_of(index: Index | None) -> str | None:
    """Why decode steps of an index can't be captured in a CUDA graph; None: they can."""
    if index is None:
        return "a cache without an index reads its store in chunks, more of them as it grows"
    if isinstance(index, CapturableIndex):
        return None
    obstacle = f"the index {type(index).__name__} does not say that its steps can be captured"
    return index.capture_obstacle or obstacle
