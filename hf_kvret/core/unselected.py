"""What a step attends to of the cold tokens, and how much of the attention it leaves out."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvret.core.counters import LayerCounters
from hf_kvret.core.estimates import exact_left_out, left_out_logits
from hf_kvret.core.head_groups import HeadGroups
from hf_kvret.core.index import Estimates, Index, makes_estimates
from hf_kvret.core.regions import Regions
from hf_kvret.core.stand_ins import STAND_INS, LeftOut, Search
from hf_kvret.core.store import AttentionResult
from hf_kvret_kernels.rest_tokens import RestTokens

MEASURED_STEPS = 16
"""With ``warn_lost_mass`` alone, one step in so many asks the index for estimates."""


class Choice(NamedTuple):
    """What the queries of a step attend to, and what was looked up for what they leave out.

    Attributes:
        ids: ``[B, H, Q, K]`` int32 of what they attend to.
        log_weights: of these, fp32; None: 0.
        part: that stands for what is left out, read with the same store; None: nothing, or tokens.
        estimates: of the index; None where nobody asks, or it has none.
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


def estimates_wanted(regions: Regions, index: Index | None, counters: LayerCounters) -> bool:
    """Whether a step asks ``index`` for estimates.

    For a warning alone one step in ``MEASURED_STEPS`` is enough, as on a CPU the estimates take
    much longer than the step. A captured step is always the same, so it always asks.
    """
    config = regions.config
    if config.rest_kind.estimates or (config.track_recall and makes_estimates(index)):
        return True
    if config.warn_lost_mass is None:
        return False
    return regions.window.place is not None or counters.steps % MEASURED_STEPS == 0


def choose(search: Search, wants_estimates: bool) -> Choice:
    """Search, and what has to be read of the store before the step attends.

    Raises:
        ValueError: estimates are needed and the index gives none.
    """
    config = search.regions.config
    stand_in = STAND_INS[config.rest]
    ids = search.index.search(search.query, search.cold)
    estimates = search.index.estimate(search.query, search.cold) if wants_estimates else None
    if estimates is None:
        if wants_estimates:
            config.check_estimates(False)
        return Choice(ids, None, stand_in.part(search, ids))
    ids, log_weights = stand_in.chosen(search, estimates, ids)
    exact = exact_left_out(search.query, ids, search.cold) if config.track_recall else None
    return Choice(ids, log_weights, stand_in.part(search, ids), estimates, exact)


def stand_ins(search: Search, choice: Choice) -> tuple[RestTokens | None, Lost | None]:
    """Tokens that stand for what is left out, and how much that is, where estimates were made."""
    regions, cold, ids, estimates = search.regions, search.cold, choice.ids, choice.estimates
    stand_in = STAND_INS[regions.config.rest]
    if estimates is None:
        return stand_in.tokens(search, ids, None, None), None
    means = regions.rest_sums(cold).joint_means()
    left_out = LeftOut(*left_out_logits(search.query, estimates, ids, cold, means))
    tokens = stand_in.tokens(search, ids, estimates, left_out)
    weight = stand_in.weight(choice.part, tokens, left_out)
    return tokens, Lost(left_out.total, weight, choice.exactly_lost)
