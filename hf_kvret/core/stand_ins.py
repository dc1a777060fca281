"""What stands in the attention for the cold tokens that a query does not select."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hf_kvret.core.estimates import unknown_logits, valid_logits
from hf_kvret.core.head_groups import HeadGroups
from hf_kvret.core.index import ColdTokens, Estimates, Index
from hf_kvret.core.regions import Regions
from hf_kvret.core.sampling import priority_sample, uniforms
from hf_kvret.core.store import AttentionResult
from hf_kvret.core.window import Window
from hf_kvret.integration.compatibility import AttentionShape
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.rest_tokens import RestTokens, rest_logits


@dataclass(eq=False)
class LayerOfModel:
    """Which layer of the model this is, for what is estimated of its heads.

    Attributes:
        number: in the model.
        shape: of the whole layer's heads, of which tensor parallelism gives each process a part;
            None: not known.
        log_factors: ``[heads]`` fp32 of the whole layer's query heads, to be added to the logs of
            estimates; None: 0.
    """

    number: int = 0
    shape: AttentionShape | None = None
    log_factors: torch.Tensor | None = None
    _moved: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def first_head(self, heads: int) -> int:
        """Number in the layer of the first of the ``heads`` KV heads that are here."""
        shape = self.shape
        if shape is None or heads == shape.kv_heads or not torch.distributed.is_initialized():
            return 0
        return torch.distributed.get_rank() % (shape.kv_heads // heads) * heads

    def factors(self, heads: int, query_heads: int, device: torch.device) -> torch.Tensor | None:
        """The part of ``log_factors`` that is of these heads, ``[query_heads]`` on ``device``."""
        if self.log_factors is None:
            return None
        if device not in self._moved:
            # Kept out of inference mode, where it could not be used outside of it.
            with torch.inference_mode(False):
                self._moved[device] = self.log_factors.to(device)
        first = self.first_head(heads) * (query_heads // heads)
        return self._moved[device][first : first + query_heads]


@dataclass(frozen=True, eq=False)
class Search:
    """A step's search, for whom and among what.

    Attributes:
        regions: of the layer.
        query: ``[B, Hq, Q, Dk]``, folded where heads select in ``groups``.
        index: that searches.
        cold: the tokens that it searches.
        layer: of the model.
        groups: of the query heads of a KV head; None: they select together.
    """

    regions: Regions
    query: torch.Tensor
    index: Index
    cold: ColdTokens
    layer: LayerOfModel
    groups: HeadGroups | None

    @property
    def group_count(self) -> int:
        """Groups that select apart, which are queries at one position."""
        return 1 if self.groups is None else self.groups.count


class LeftOut(NamedTuple):
    """What is left out, as logs of sums ``[B, Hq, Q]`` fp32 of exponentiated logits.

    Attributes:
        known: of tokens that have estimates, by these.
        others: of tokens that have none.
    """

    known: torch.Tensor
    others: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """Of both."""
        return torch.logaddexp(self.known, self.others)


class StandIn:
    """Nothing stands for tokens that are not selected; subclasses say otherwise.

    In the order of a step: ``chosen``, ``part``, ``tokens``, ``weight``.
    """

    def chosen(
        self, search: Search, estimates: Estimates, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the queries attend to, of ``ids [B, H, Q, K]``, and the logs of its weights."""
        return ids, None

    def part(self, search: Search, ids: torch.Tensor) -> AttentionResult | None:
        """What is read of the store for it, before the step attends to ``ids``."""
        return None

    def tokens(
        self,
        search: Search,
        ids: torch.Tensor,
        estimates: Estimates | None,
        left_out: LeftOut | None,
    ) -> RestTokens | None:
        """Tokens that stand for it; the last two are None where nobody asked the index."""
        return None

    def weight(
        self, part: AttentionResult | None, tokens: RestTokens | None, left_out: LeftOut
    ) -> torch.Tensor | None:
        """``[B, Hq, Q]`` fp32, the log of its weight in the attention; None: 0."""
        return None if tokens is None else tokens.logits.logsumexp(-1)


class MeanTokens(StandIn):
    """The means of all cold tokens, by blocks, weigh as their own logits say."""

    def tokens(
        self,
        search: Search,
        ids: torch.Tensor,
        estimates: Estimates | None,
        left_out: LeftOut | None,
    ) -> RestTokens:
        """One for each block."""
        cold = search.cold
        means = search.regions.rest_sums(cold).means()
        logits = rest_logits(search.query, means, ids, scale=cold.scale, softcap=cold.softcap)
        return RestTokens(logits, means.values)


class MeanOfLeftOut(StandIn):
    """The mean of just what is left out, for which the selected rows are read again."""

    def part(self, search: Search, ids: torch.Tensor) -> AttentionResult:
        """The attention to it."""
        return search.regions.rest_sums(search.cold).left_out(search.query, ids, search.cold)

    def weight(
        self, part: AttentionResult | None, tokens: RestTokens | None, left_out: LeftOut
    ) -> torch.Tensor | None:
        """That of the part."""
        return None if part is None else part[1]


class EstimatedToken(StandIn):
    """The mean of all cold tokens weighs as the index estimates, corrected by learned factors."""

    def tokens(
        self,
        search: Search,
        ids: torch.Tensor,
        estimates: Estimates | None,
        left_out: LeftOut | None,
    ) -> RestTokens:
        """One."""
        assert left_out is not None, "the index was asked"
        factors = _log_factors(search)
        known = left_out.known if factors is None else left_out.known + factors
        means = search.regions.rest_sums(search.cold).joint_means()
        return RestTokens(torch.logaddexp(known, left_out.others).unsqueeze(-1), means.values)


class SampledTokens(StandIn):
    """A sample of the tokens that have estimates, and the mean of all for the others."""

    def chosen(
        self, search: Search, estimates: Estimates, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sample, of as many tokens, in place of ``ids``."""
        batch, heads, queries, count = ids.shape
        logits, slots = valid_logits(estimates, search.cold), estimates.ids
        device = logits.device
        of_slots = torch.arange(len(search.cold), device=device) if slots is None else slots
        own = search.regions.window.keys.shape[1]
        row = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        first = search.layer.first_head(own) * (heads // own)
        head = torch.arange(heads, device=device) + first
        apart = search.group_count
        place = query_places(search.regions.window, queries // apart).repeat_interleave(apart)
        group = torch.arange(apart, device=device).repeat(queries // apart)
        parts = row, head.view(-1, 1, 1), place.view(-1, 1), group.view(-1, 1), of_slots
        draws = uniforms(search.layer.number, *parts)
        places, weights = priority_sample(group_relevance(logits, heads), draws, count)
        if slots is not None:
            taken = slots.gather(-1, places.clamp(min=0).long())
            places = taken.masked_fill(places < 0, -1)
        return places, weights

    def tokens(
        self,
        search: Search,
        ids: torch.Tensor,
        estimates: Estimates | None,
        left_out: LeftOut | None,
    ) -> RestTokens:
        """One for the tokens without estimates."""
        assert estimates is not None, "the index was asked"
        means = search.regions.rest_sums(search.cold).joint_means()
        unknown = unknown_logits(search.query, estimates, search.cold, means)
        return RestTokens(unknown.unsqueeze(-1), means.values)

    def weight(
        self, part: AttentionResult | None, tokens: RestTokens | None, left_out: LeftOut
    ) -> torch.Tensor | None:
        """Sampled tokens weigh for those that were not."""
        return left_out.total


STAND_INS: Mapping[str | None, StandIn] = {
    None: StandIn(),
    "mean": MeanTokens(),
    "left_out": MeanOfLeftOut(),
    "index": EstimatedToken(),
    "sample": SampledTokens(),
}
"""By the values of the option ``rest``."""


def query_places(window: Window, queries: int) -> torch.Tensor:
    """``[queries]`` int64 on the device: slots of the newest tokens, also in a captured step."""
    if window.place is not None:
        return window.place.column + (window.start - window.sink)
    device = window.keys.device
    return torch.arange(window.end - queries, window.end, device=device)


def _log_factors(search: Search) -> torch.Tensor | None:
    """``[B, Hq, Q]`` fp32 for the query, folded as it is; None where nothing was learned."""
    query, groups = search.query, search.groups
    heads = search.regions.window.keys.shape[1]
    own = query.shape[1] if groups is None else heads * groups.query_heads
    factors = search.layer.factors(heads, own, query.device)
    if factors is None:
        return None
    queries = query.shape[2] // search.group_count
    spread = factors.view(1, -1, 1, 1).expand(len(query), own, queries, 1)
    return (spread if groups is None else groups.fold(spread)).squeeze(-1)
