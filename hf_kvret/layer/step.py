"""A decode step of a layer: attention of a few queries to all that the layer holds.

The index names the cold tokens that matter to each query; the store attends to these where they
lie, the window to the newest ones and the attention sinks, and both are merged exactly. On a CPU
the compiled library does all of it in one call. Whoever counts or watches gets a ``StepRecord``
after the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch

from hf_kvret.contracts.index import ColdTokens, Index, blamed_on
from hf_kvret.contracts.pieces import piece_len
from hf_kvret.contracts.store import AttentionResult
from hf_kvret.layer.exact_attention import attend_cold, merge
from hf_kvret.layer.queries import AttentionCall, HeadGroups
from hf_kvret.layer.regions import Regions
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import PREFERRED
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.merge import Pieces
from hf_kvret_kernels.prompt_attention import prompt_pieces
from hf_kvret_kernels.relevance import count_ids
from hf_kvret_kernels.rest_tokens import RestTokens, rest_logits
from hf_kvret_kernels.step_attention import step_attention


class StepRecord(NamedTuple):
    """A step of a layer with cold tokens, for its subscribers.

    Attributes:
        number: of the layer in the model.
        regions: of the layer, after the step.
        query: ``[B, Hq, Q, Dk]`` of the search, folded where heads select in ``groups``.
        cold: the tokens that were searched.
        ids: ``[B, H, Q, K]`` int32 that the query attended to, -1 for none; None: all of them.
        groups: of the query heads of a KV head; None: they select together.
        lse: ``[B, Hq, Q]`` fp32 of all that was attended to, by the query's own heads; None where
            no subscriber needs it.
        means: that stood for what was not selected, for ``query``; None: nothing did.
    """

    number: int
    regions: Regions
    query: torch.Tensor
    cold: ColdTokens
    ids: torch.Tensor | None
    groups: HeadGroups | None = None
    lse: torch.Tensor | None = None
    means: RestTokens | None = None


class Subscriber(ABC):
    """Called with the record of every step of a layer.

    Attributes:
        capture_obstacle: why it can't be called in a captured step, whose Python code does not run
            again when it is replayed; None: all that it does is work of the device, or is counted.
    """

    capture_obstacle: ClassVar[str | None] = None

    def needs_lse(self, regions: Regions) -> bool:
        """Whether the record of the next step must have ``lse``; here never."""
        return False

    @abstractmethod
    def __call__(self, record: StepRecord) -> None:
        """Take in a step; what is raised breaks off the forward pass."""

    @abstractmethod
    def reset(self) -> None:
        """The layer forgets all tokens."""


@dataclass(frozen=True, eq=False)
class Search:
    """An index, and what it is asked; attributes as of ``StepRecord``."""

    query: torch.Tensor
    index: Index
    cold: ColdTokens
    groups: HeadGroups | None

    @classmethod
    def of(cls, regions: Regions, query: torch.Tensor, cold: ColdTokens) -> Search | None:
        """None where there is no index: all cold tokens are attended to."""
        index = regions.ready_index(cold)
        if index is None:
            return None
        size, groups = regions.config.select_heads, None
        if size is not None:
            groups = HeadGroups.of(size, regions.window.keys.shape[1], query.shape[1])
        return cls(query if groups is None else groups.fold(query), index, cold, groups)


class Result(NamedTuple):
    """What a step computes; attributes as of ``StepRecord``, ``out`` as of ``attend_step``."""

    out: torch.Tensor
    ids: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    means: RestTokens | None = None


def attend_step(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    subscribers: Sequence[Subscriber] = (),
    number: int = 0,
) -> torch.Tensor:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds.

    ``number`` of the layer in the model. Returns ``[B, Hq, Q, Dv]``, fp32 or the query's dtype.
    """
    cold = regions.cold(call.scoring)
    search = None if cold is None else Search.of(regions, query, cold)
    needs_lse = any([each.needs_lse(regions) for each in subscribers])
    result = None if needs_lse else _attend_on_host(regions, query, call, cold, search)
    if result is None:
        result = _attend_in_parts(regions, query, call, cold, search)
    if cold is not None:
        searching, groups = (query, None) if search is None else (search.query, search.groups)
        record = StepRecord(number, regions, searching, cold, result.ids, groups, *result[2:])
        for subscriber in subscribers:
            subscriber(record)
    return result.out


def _attend_on_host(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    cold: ColdTokens | None,
    search: Search | None,
) -> Result | None:
    """The step in one call of the compiled library.

    None where it is to be done part by part: on another device, without the library, within
    ``prefer``, in a capture, where heads in groups have sink logits of their own, without an index,
    and where the rows don't lie where the library reads them.
    """
    window = regions.window
    if not query.is_cpu or query.dtype != window.keys.dtype or window.place is not None:
        return None
    if PREFERRED.get() is not None or host_step.why_not():
        return None
    groups, chosen, position_queries = None, None, 1
    if cold is not None:
        rows = cold.host_rows
        if rows is None or search is None:
            return None
        groups, query = search.groups, search.query
        if groups is not None:
            if call.sink_logits is not None:
                return None
            # A group's queries see what those of any other group see at their position.
            position_queries = groups.count
        chosen = host_step.HostCold(
            rows, _host_search(search), cold.valid, cold.budget, regions.means(cold)
        )
    try:
        out, ids = host_step.run_step(
            query,
            window.on_host(call.scoring.valid),
            chosen,
            scale=call.scoring.scale,
            softcap=call.scoring.softcap,
            sink_logits=call.sink_logits,
            selected=regions.selected,
            dtype=query.dtype,
            position_queries=position_queries,
        )
    except WrongIdError as error:
        assert search is not None and chosen is not None, "only an index names tokens"
        given = isinstance(chosen.search, host_step.GivenIds)
        raise blamed_on(search.index, "search" if given else "host_search", error) from error
    if search is not None and search.index.looks_back:
        search.index.after_search(ids)
    return Result(out if groups is None else groups.unfold(out), ids)


def _host_search(search: Search) -> host_step.HostSearch:
    """What the library has to know to search; the ids where only the index can."""
    query, index, cold = search.query, search.index, search.cold
    if "search" not in vars(index) and _describes_own_search(type(index)):
        known = index.host_search(query, cold)
        if known is not None:
            return known
    return host_step.GivenIds(index.search(query, cold))


@cache
def _describes_own_search(kind: type[Index]) -> bool:
    """Whether ``host_search`` belongs to the ``search`` that is there, not to one it replaced."""
    names = ("host_search", "search")
    return next(name for base in kind.__mro__ for name in names if name in vars(base)) == names[0]


def _attend_in_parts(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    cold: ColdTokens | None,
    search: Search | None,
) -> Result:
    """The step, operation by operation."""
    if cold is None:
        return Result(_merged(regions, query, call, None)[0])
    if search is None:
        return Result(*_attend_all(regions, query, call, cold))
    try:
        return _attend_to_search(regions, query, call, search)
    except WrongIdError as error:
        raise blamed_on(search.index, "search", error) from error


def _attend_to_search(
    regions: Regions, query: torch.Tensor, call: AttentionCall, search: Search
) -> Result:
    searching, index, cold, groups = search.query, search.index, search.cold, search.groups
    ids = index.search(searching, cold)
    # First, so that a store elsewhere works while the device does all the rest.
    finish = cold.store.begin(searching, ids, cold.scale, cold.softcap)
    if index.looks_back:
        index.after_search(ids)
    means = _mean_tokens(regions, searching, ids, cold)
    # With one position to see and no logits of heads, groups stay queries up to the end.
    folded = groups is not None and query.shape[2] == 1 and call.sink_logits is None
    unfolds = groups is not None and not folded
    joins = isinstance(finish, Pieces) and not unfolds
    if means is not None and not joins:
        pieces = means.pieces()
        finish = partial(_joined, finish, (pieces.outs, pieces.lses))
    if groups is not None and unfolds:
        finish = partial(_unfolded, groups, finish)
    attending = searching if folded else query
    out, lse = _merged(
        regions, attending, call, finish, ids, means if joins else None, query.shape[2]
    )
    if groups is not None and folded:
        out, lse = groups.unfold(out), groups.unfold(lse)
    return Result(out, ids, lse, means)


def _merged(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    finish_cold: Callable[[], AttentionResult] | None,
    ids: torch.Tensor | None = None,
    means: RestTokens | None = None,
    positions: int | None = None,
) -> AttentionResult:
    """Attention to the window and to what ``finish_cold`` attends to; ``ids`` are counted.

    Only ``Pieces`` take ``means``. ``positions``: of the queries, where these are folded.
    """
    keys, values = regions.window.tokens()
    positions = positions or query.shape[2]
    # The query of one position sees all that is held; there may be room behind it.
    offset = keys.shape[2] - positions if positions > 1 else None
    options: dict[str, Any] = {
        "scale": call.scoring.scale,
        "causal_offset": offset,
        "valid": regions.window.validity(call.scoring.valid),
        "softcap": call.scoring.softcap,
    }
    if isinstance(finish_cold, Pieces):
        # Launched already: one launch more does all that is left.
        options |= {"sink_logits": call.sink_logits, "ids": ids, "selected": regions.selected}
        return step_attention(query, keys, values, finish_cold, **options, rest=means)
    near = prompt_pieces(query, keys, values, **options)
    parts = [(near.outs, near.lses)]
    if ids is not None:
        count_ids(ids, regions.selected)
    if finish_cold is not None:
        parts.append(finish_cold())
    return merge(parts, call.sink_logits, query.dtype)


def _attend_all(
    regions: Regions, query: torch.Tensor, call: AttentionCall, cold: ColdTokens
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Attention to all cold tokens, counted as selected: ``(out, None, lse)``."""
    window, queries = regions.window, query.shape[2]
    heads = window.keys.shape[1]
    length = piece_len(queries, window.keys, heads * window.row_dim)
    out, lse = _merged(regions, query, call, partial(attend_cold, query, cold, length))
    regions.selected.add_(cold.valid.sum() * heads * queries)
    return out, None, lse


def _mean_tokens(
    regions: Regions, query: torch.Tensor, ids: torch.Tensor, cold: ColdTokens
) -> RestTokens | None:
    """The means of all cold tokens, by blocks, with the weight of those that ids leave out."""
    means = regions.means(cold)
    if means is None:
        return None
    logits = rest_logits(query, means, ids, scale=cold.scale, softcap=cold.softcap)
    return RestTokens(logits, means.values)


def _joined(finish: Callable[[], AttentionResult], others: AttentionResult) -> AttentionResult:
    """The result of ``finish``, with other tokens."""
    return merge([finish(), others])


def _unfolded(groups: HeadGroups, finish: Callable[[], AttentionResult]) -> AttentionResult:
    """The result of ``finish`` for folded queries, for the queries as they were."""
    out, lse = finish()
    return groups.unfold(out), groups.unfold(lse)
