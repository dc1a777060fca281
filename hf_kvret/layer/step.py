"""A decode step of a layer: attention of a few queries to all that the layer holds.

The index names the cold tokens that matter to each query; the store attends to these where they
lie, the window to the newest ones and the attention sinks, and both are merged exactly. On a CPU
the compiled library does all of it in one call; elsewhere each of it is an operation. Subscribers,
who count and watch, get a ``StepRecord`` after the step.

With ``select_every=k`` the first layer of each k selects; the others take its token indices of the
same step, and attend to their own rows of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, ClassVar, NamedTuple

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import (
    CapturableIndex,
    ColdTokens,
    Index,
    Scoring,
    SearchCost,
    blamed_on,
)
from hf_kvret.contracts.store import AttentionResult
from hf_kvret.layer.exact_attention import attend_cold, merge
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.stores.chunks import chunk_len
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import PREFERRED
from hf_kvret_kernels.host_step import HostSearch, PackedStep
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.prompt_attention import prompt_partials
from hf_kvret_kernels.relevance import count_ids
from hf_kvret_kernels.step_attention import step_unchecked


class StepRecord(NamedTuple):
    """A step of a layer with cold tokens, for its subscribers.

    Attributes:
        number: of the layer in the model.
        kv: of the layer, after the step.
        query: ``[B, Hq, Q, Dk]`` of the search.
        call: of the attention.
        cold: the tokens that were searched.
        ids: ``[B, H, Q, K]`` int32 that the query attended to, -1 for none; None: all of them.
    """

    number: int
    kv: LayerKV
    query: torch.Tensor
    call: AttentionCall
    cold: ColdTokens
    ids: torch.Tensor | None


class Subscriber(ABC):
    """Called with the record of every step of a layer.

    Attributes:
        capture_obstacle: why it can't be called in a captured step, whose Python code does not run
            again when it is replayed; None: all that it does is work of the device, or is counted.
    """

    capture_obstacle: ClassVar[str | None] = None

    @abstractmethod
    def __call__(self, record: StepRecord) -> None:
        """Take in a step; what is raised breaks off the forward pass."""

    @abstractmethod
    def reset(self) -> None:
        """The layer forgets all tokens."""


@dataclass
class LayerCounters(Subscriber):
    """Counts since the layer was made; a subscriber of every retrieval layer.

    Attributes:
        steps: with cold tokens.
        queries: in these.
        candidates: tokens scored closely, summed over batch, heads and queries.
        cold_rows: rows there were to choose from, summed alike.
    """

    steps: int = 0
    queries: int = 0
    candidates: int = 0
    cold_rows: int = 0
    # Candidates of one query and head, and what their number depends on.
    _candidates: int = field(default=0, init=False)
    _key: tuple[object, ...] = field(default=(), init=False)
    # Searches of the newest step, and the rows of each.
    _newest: tuple[int, int] = field(default=(0, 0), init=False)

    def __call__(self, record: StepRecord) -> None:
        """Count a step."""
        query, cold, ids = record.query, record.cold, record.ids
        batch, _, queries, _ = query.shape
        kv, count = record.kv, cold.valid.shape[1]
        self.steps += 1
        self.queries += queries
        if ids is None:
            self.cold_rows += count * batch * kv.window.keys.shape[1] * queries
            return
        searches = batch * ids.shape[1] * queries
        self.cold_rows += count * searches
        key = kv.config, kv.changes, cold.budget
        if key != self._key:
            # Without an index the model's own named them.
            cost = None if kv.index is None else kv.index.cost(count, cold.budget)
            self._key, self._candidates = key, 0 if cost is None else cost.candidates
        self.candidates += self._candidates * searches
        self._newest = searches, count

    def count_again(self) -> None:
        """Count a step of one query that is like the newest one."""
        searches, count = self._newest
        self.steps += 1
        self.queries += 1
        self.cold_rows += count * searches
        self.candidates += self._candidates * searches

    def reset(self) -> None:
        """Start again at 0."""
        self.set((0, 0, 0, 0))

    def numbers(self) -> tuple[int, ...]:
        """The counts."""
        return self.steps, self.queries, self.candidates, self.cold_rows

    def set(self, numbers: tuple[int, ...]) -> None:
        """Restore the counts from ``numbers()``."""
        self.steps, self.queries, self.candidates, self.cold_rows = numbers


# The output of ``attend_step``, and the ids of a ``StepRecord``.
Result = tuple[torch.Tensor, torch.Tensor | None]


def attend_step(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    subscribers: Sequence[Subscriber] = (),
    number: int = 0,
) -> torch.Tensor:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds.

    ``number`` of the layer in the model. Returns ``[B, Hq, Q, Dv]``, fp32 or the query's dtype.
    """
    cold = kv.cold(call.scoring)
    # Without an index all cold tokens are attended to.
    index = None if cold is None else kv.ready_index(cold)
    before = kv.host_cold
    result = _attend_on_host(kv, query, call, cold, index)
    if result is not None and before is not None and kv.host_cold is before:
        kv.next_step = _pack_next(kv, query, call, subscribers)
    if result is None and cold is not None and index is not None:
        result = _attend_by_search(kv, query, call, cold, index)
    elif result is None:
        result = _attend_to_all(kv, query, call, cold), None
    out, ids = result
    if cold is not None:
        record = StepRecord(number, kv, query, call, cold, ids)
        for subscriber in subscribers:
            subscriber(record)
    return out


def _attend_on_host(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    cold: ColdTokens | None,
    index: Index | None,
) -> Result | None:
    """The step in one call of the compiled library.

    None where it is to be done by operations: on another device, without the library, within
    ``prefer``, in a capture, without an index, and where the rows don't lie where the library reads
    them.
    """
    window = kv.window
    if not query.is_cpu or query.dtype != window.keys.dtype or window.capture is not None:
        return None
    library = host_step.library() if PREFERRED.get() is None else None
    if library is None:
        return None
    host_cold = None
    if cold is not None:
        rows = cold.host_rows
        if rows is None or index is None:
            return None
        describes = "host_search" in index.hooks and "search" not in vars(index)
        search = index.host_search(query, cold) if describes else None
        # The ids, where only the index can search.
        search = search or host_step.GivenIds(index.search(query, cold))
        valid, host_cold = cold.valid, kv.host_cold
        same = host_cold is not None and host_cold.search is search and host_cold.valid is valid
        # An index may give a search again that it has changed.
        if host_cold is None or not same or host_cold.packed[0] is not search.packed:
            host_cold = host_step.HostCold(rows, search, valid, cold.budget, cold.mean)
            kv.host_cold = host_cold
    try:
        near = window.on_host(call.scoring.valid)
        scores = call.scoring.scale, call.scoring.softcap, call.sink_logits
        out, ids = host_step.run_unchecked(
            library, query, near, host_cold, scores, kv.selected, query.dtype
        )
    except WrongIdError as error:
        assert index is not None and host_cold is not None, "only an index names tokens"
        method = "search" if isinstance(host_cold.search, host_step.GivenIds) else "host_search"
        raise blamed_on(index, method, error) from error
    if index is not None and "after_search" in index.hooks:
        kv.after_search(ids)
    return out, ids


def attend_again(
    kv: LayerKV,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    subscribers: Sequence[Subscriber],
) -> torch.Tensor | None:
    """Take in a token, and ``attend_step`` where it does as the step before.

    Between two flushes a step of a layer whose index learns nothing from it does the same on the
    same memory, one column further. To see that takes less than to find out anew what to do.
    Environment variables that choose the library or its instruction set are read again only after
    a flush.

    Args:
        kv: of the layer.
        query: ``[B, Hq, 1, Dk]``, of a plain layer without padding and sink logits.
        key: ``[B, Hkv, 1, Dk]``, not taken in yet; ``value [B, Hkv, 1, Dv]``.
        scoring: of the call.
        subscribers: of the layer.

    Returns:
        ``[B, 1, Hq, Dv]``; None, and nothing was done, where this step is unlike the one before.
    """
    step, window, index, cold = kv.next_step, kv.window, kv.index, kv.cold(scoring)
    kv.next_step = None
    if step is None or index is None or cold is None or "search" in vars(index):
        return None
    length = window.sink + window.length + key.shape[2]
    fits = key.shape[2] == 1 and length <= window.capacity
    if not fits or kv.step_flushes() or PREFERRED.get() is not None:
        return None
    parts = _parts(kv, cold, index.host_search(query, cold), subscribers)
    if step.form != _form(query) or not all(map(is_, step.parts, parts)):
        return None
    out = step.run(query, key, value, length)
    if out is not None:
        kv.next_step = step
        window.length += 1
        for each in subscribers:
            if isinstance(each, LayerCounters):
                each.count_again()
    return out


def _pack_next(
    kv: LayerKV, query: torch.Tensor, call: AttentionCall, subscribers: Sequence[Subscriber]
) -> PackedStep | None:
    """For ``attend_again`` after a step of ``query``; None where the next one may be unlike it."""
    index, host_cold, scoring, library = kv.index, kv.host_cold, call.scoring, host_step.library()
    cold = None if scoring.valid is not None else kv.cold(scoring)
    if cold is None or host_cold is None or index is None or library is None:
        return None
    learns = kv.watches or not index.hooks.isdisjoint(("before_search", "after_search"))
    unlike = query.shape[2] > 1 or call.sink_logits is not None or call.heads.makes_rows
    # Subscribers other than the counters look at each step.
    counts = [type(each) for each in subscribers] == [LayerCounters]
    if learns or unlike or not counts or not kv.window.sinks_full:
        return None
    near, scores = kv.window.on_host(None), (scoring.scale, scoring.softcap, None)
    step = PackedStep(library, query, near, host_cold, scores, kv.selected)
    step.form, step.parts = _form(query), _parts(kv, cold, host_cold.search, subscribers)
    return step


def _form(query: torch.Tensor) -> tuple[object, ...]:
    """What must be equal in steps that are alike."""
    return query.shape, query.dtype, torch.get_num_threads()


def _parts(
    kv: LayerKV, cold: ColdTokens, search: HostSearch | None, subscribers: Sequence[Subscriber]
) -> tuple[object, ...]:
    """What stays in its place as long as steps are alike."""
    window = kv.window
    held = kv.config, kv.index, kv.host_cold, kv.selected, window.host, window.keys
    packed = None if search is None else search.packed
    return (*held, kv.drafts, window.capture, cold, search, packed, subscribers)


def _attend_by_search(
    kv: LayerKV, query: torch.Tensor, call: AttentionCall, cold: ColdTokens, index: Index
) -> Result:
    """The step operation by operation, each a kernel of the device or its twin in plain torch.

    The order lets them overlap: a store that works elsewhere begins first, and the window is
    launched before its result is needed.
    """
    try:
        ids = index.search(query, cold)
        finish = cold.begin(query, ids)
        if "after_search" in index.hooks:
            kv.after_search(ids)
        if isinstance(finish, Partials):
            # Launched already: one launch more does all that is left.
            new = kv.window.take_new()
            out, _ = step_unchecked(
                query,
                *kv.window.tokens(),
                finish,
                **_window_arguments(kv, query, call),
                sink_logits=call.sink_logits,
                ids=ids,
                selected=kv.selected,
                out_dtype=query.dtype,
                new=new,
                mean=cold.mean,
            )
        else:
            count_ids(ids, kv.selected)
            parts = [_attend_to_window(kv, query, call), finish()]
            if cold.mean is not None:
                parts.append(cold.mean.attend(query, ids, cold.scale, cold.softcap))
            out, _ = merge(parts, call.sink_logits, query.dtype)
        return out, ids
    except WrongIdError as error:
        raise blamed_on(index, "search", error) from error


def _attend_to_all(
    kv: LayerKV, query: torch.Tensor, call: AttentionCall, cold: ColdTokens | None
) -> torch.Tensor:
    """Attention to the window, which is launched first, and to all cold tokens."""
    parts = [_attend_to_window(kv, query, call)]
    if cold is not None:
        window, queries = kv.window, query.shape[2]
        heads = window.keys.shape[1]
        length = chunk_len(queries, window.keys, heads * window.row_dim)
        parts.append(attend_cold(query, cold, length))
        kv.selected.add_(cold.valid.sum() * heads * queries)
    return merge(parts, call.sink_logits, query.dtype)[0]


def _attend_to_window(kv: LayerKV, query: torch.Tensor, call: AttentionCall) -> AttentionResult:
    arguments = _window_arguments(kv, query, call)
    near = prompt_partials(query, *kv.window.tokens(), **arguments)
    return near.outs, near.lses


def _window_arguments(kv: LayerKV, query: torch.Tensor, call: AttentionCall) -> dict[str, Any]:
    """How queries see the window."""
    window, scoring, queries = kv.window, call.scoring, query.shape[2]
    # One query sees all that is held; there may be room behind it.
    offset = window.tokens()[0].shape[2] - queries if queries > 1 else None
    return {
        "scale": scoring.scale,
        "causal_offset": offset,
        "valid": window.validity(scoring.valid),
        "softcap": scoring.softcap,
    }


class Lender(Subscriber):
    """A subscriber of a layer that selects: it keeps the tokens for the layers that borrow them.

    Attributes:
        number: of the layer in the model.
        ids: ``[B, H, Q, K]`` int32 of the newest step, as ``Index.search`` returns them; None: no
            step was taken.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.ids: torch.Tensor | None = None

    def __call__(self, record: StepRecord) -> None:
        self.ids = record.ids

    def reset(self) -> None:
        self.ids = None


class BorrowedIndex(CapturableIndex, Index):
    """Names what the layer of ``lender`` selected in the same step, and holds nothing itself."""

    def __init__(self, lender: Lender) -> None:
        self.lender = lender

    def add(self, block: TokenBlock) -> None:
        """Nothing: the lender's layer has an index of the same tokens."""

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        ids = self.lender.ids
        assert ids is not None, "the lender's layer stands below, and has the same tokens"
        # Layers may lie on several devices.
        return ids.to(query.device)

    def cost(self, n: int, budget: int) -> SearchCost:
        """Nothing is scored, and nothing read."""
        return SearchCost(0, 0)

    def stats(self) -> dict[str, Any]:
        """The number of the layer that selects."""
        return {"selected_by": self.lender.number}
