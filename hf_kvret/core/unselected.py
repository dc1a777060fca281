"""What a step attends to of the cold tokens, and what stands for the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hf_kvret.core.estimates import exact_left_out, left_out_logits, unknown_logits, valid_logits
from hf_kvret.core.head_groups import HeadGroups
from hf_kvret.core.index import ColdTokens, Estimates, Index, makes_estimates
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


class Choice(NamedTuple):
    """What the queries of a step attend to, and what was looked up for what they leave out.

    Attributes:
        ids: ``[B, H, Q, K]`` int32 of what they attend to.
        log_weights: of these, fp32; None: 0.
        part: that stands for what is left out, read with the same store; None: nothing, or tokens.
        estimates: of the index; None where nobody asks.
        exactly_lost: ``[B, Hq, Q]`` fp32, the log of the sum of the exponentiated logits of what is
            left out, where ``track_recall`` and estimates are there.
    """

    ids: torch.Tensor
    log_weights: torch.Tensor | None = None
    part: AttentionResult | None = None
    estimates: Estimates | None = None
    exactly_lost: torch.Tensor | None = None


class Lost(NamedTuple):
    """How much of the attention is left out, as logs of sums ``[B, Hq, Q]`` fp32 of exponentials.

    Attributes:
        estimated: by the index.
        stand_in: of what stands for it in the attention; None: nothing does.
        exact: from all keys; None where nobody asks.
    """

    estimated: torch.Tensor
    stand_in: torch.Tensor | None
    exact: torch.Tensor | None

    def unfolded(self, groups: HeadGroups) -> Lost:
        """The same by the query's own heads, where heads select in ``groups``."""
        stand_in, exact = (None if x is None else groups.unfold(x) for x in self[1:])
        return Lost(groups.unfold(self.estimated), stand_in, exact)

    def shares(self, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Shares ``[B, Hq, Q]`` of the attention, 0 to 1: estimated and, where known, exact.

        ``lse [B, Hq, Q]`` is of all that was attended to, with what stands for the others.
        """
        near = lse
        if self.stand_in is not None:
            near = lse + torch.log1p(-(self.stand_in - lse).clamp(max=0.0).exp())
        # NaN where there is nothing to attend to.
        estimated = (self.estimated - near).sigmoid().nan_to_num(nan=0.0)
        if self.exact is None:
            return estimated, None
        return estimated, (self.exact - near).sigmoid().nan_to_num(nan=0.0)


def estimates_wanted(regions: Regions, index: Index | None) -> bool:
    """Whether a step asks ``index`` for estimates."""
    config = regions.config
    return config.uses_estimates or (config.track_recall and makes_estimates(index))


def choose(
    regions: Regions,
    query: torch.Tensor,
    index: Index,
    cold: ColdTokens,
    layer: LayerOfModel,
    groups: HeadGroups | None,
) -> Choice:
    """Search, and what has to be read of the store before the step attends.

    ``query [B, Hq, Q, Dk]`` is folded where heads select in ``groups``.

    Raises:
        ValueError: estimates are needed and the index gives none.
    """
    config = regions.config
    ids = index.search(query, cold)
    part = None
    if config.rest == "left_out":
        part = regions.rest_sums(cold).left_out(query, ids, cold)
    if not estimates_wanted(regions, index):
        return Choice(ids, None, part)
    estimates = index.estimate(query, cold)
    config.check_estimates(estimates is not None)
    assert estimates is not None, "others are refused"
    log_weights = None
    if config.rest == "sample":
        ids, log_weights = _sampled(regions, estimates, ids, cold, layer, groups)
    exact = exact_left_out(query, ids, cold) if config.track_recall else None
    return Choice(ids, log_weights, part, estimates, exact)


def stand_ins(
    regions: Regions,
    query: torch.Tensor,
    choice: Choice,
    cold: ColdTokens,
    layer: LayerOfModel,
    groups: HeadGroups | None,
) -> tuple[RestTokens | None, Lost | None]:
    """Tokens that stand for what is left out, and how much that is, where estimates were made."""
    rest, tokens = regions.config.rest, None
    ids, estimates = choice.ids, choice.estimates
    if rest == "mean":
        means = regions.rest_sums(cold).means()
        logits = rest_logits(query, means, ids, scale=cold.scale, softcap=cold.softcap)
        tokens = RestTokens(logits, means.values)
    if estimates is None:
        return tokens, None
    means = regions.rest_sums(cold).joint_means()
    known, others = left_out_logits(query, estimates, ids, cold, means)
    lost = torch.logaddexp(known, others)
    stand_in = lost if rest in ("index", "sample") else None
    if rest == "index":
        factors = _log_factors(regions, query, layer, groups)
        if factors is not None:
            stand_in = torch.logaddexp(known + factors, others)
        assert stand_in is not None, "it was set above"
        tokens = RestTokens(stand_in.unsqueeze(-1), means.values)
    elif rest == "sample":
        unknown = unknown_logits(query, estimates, cold, means)
        tokens = RestTokens(unknown.unsqueeze(-1), means.values)
    elif choice.part is not None:
        stand_in = choice.part[1]
    elif tokens is not None:
        stand_in = tokens.logits.logsumexp(-1)
    return tokens, Lost(lost, stand_in, choice.exactly_lost)


def _sampled(
    regions: Regions,
    estimates: Estimates,
    found: torch.Tensor,
    cold: ColdTokens,
    layer: LayerOfModel,
    groups: HeadGroups | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample in place of the ids ``found``, and the logs of its weights."""
    batch, heads, queries, count = found.shape
    logits, slots = valid_logits(estimates, cold), estimates.ids
    of_slots = torch.arange(len(cold), device=logits.device) if slots is None else slots
    own = regions.window.keys.shape[1]
    device = logits.device
    row = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    head = torch.arange(heads, device=device) + layer.first_head(own) * (heads // own)
    apart = 1 if groups is None else groups.count
    place = query_places(regions.window, queries // apart).repeat_interleave(apart)
    group = torch.arange(apart, device=device).repeat(queries // apart)
    draws = uniforms(
        layer.number, row, head.view(-1, 1, 1), place.view(-1, 1), group.view(-1, 1), of_slots
    )
    places, weights = priority_sample(group_relevance(logits, heads), draws, count)
    if slots is not None:
        taken = slots.gather(-1, places.clamp(min=0).long())
        places = taken.masked_fill(places < 0, -1)
    return places, weights


def query_places(window: Window, queries: int) -> torch.Tensor:
    """``[queries]`` int64 on the device: slots of the newest tokens, also in a captured step."""
    if window.place is not None:
        return window.place.column + (window.start - window.sink)
    device = window.keys.device
    return torch.arange(window.end - queries, window.end, device=device)


def _log_factors(
    regions: Regions, query: torch.Tensor, layer: LayerOfModel, groups: HeadGroups | None
) -> torch.Tensor | None:
    """``[B, Hq, Q]`` fp32 for ``query``, folded as it is; None where nothing was learned."""
    heads = regions.window.keys.shape[1]
    own = query.shape[1] if groups is None else heads * groups.query_heads
    factors = layer.factors(heads, own, query.device)
    if factors is None:
        return None
    queries = query.shape[2] // (1 if groups is None else groups.count)
    spread = factors.view(1, -1, 1, 1).expand(len(query), own, queries, 1)
    return (spread if groups is None else groups.fold(spread)).squeeze(-1)
