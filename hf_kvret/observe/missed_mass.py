"""Missed mass: the share of the attention that a step leaves out, as its index estimates it."""

from __future__ import annotations

import warnings

import torch

from hf_kvret.contracts.index import ColdTokens, Estimates, makes_estimates
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.record import StepRecord, Subscriber
from hf_kvret.layer.retrieved import RetrievedTokens
from hf_kvret.observe.recall import exact_scores, slot_marks
from hf_kvret.options.config import RetrievalConfig
from hf_kvret_kernels.mean_tokens import BlockMeans

MEASURED_STEPS = 16
"""With ``warn_lost_mass`` alone, one step in so many asks the index for estimates."""


class MissedMass(Subscriber):
    """Sums up the share of the attention that a layer leaves out; a subscriber where options ask.

    Args:
        exact: also measure the exact share at every step, which reads all keys (``track_recall``).
        warning: asked after each step of the cache's last layer; None for other layers.
    """

    asks_for_lse = True

    def __init__(self, exact: bool, warning: MissedMassWarning | None = None) -> None:
        self.exact, self.warning = exact, warning
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self._steps, self._changes = 0, -1
        self._totals: list[torch.Tensor | None] = [None, None]
        if self.warning is not None:
            self.warning.reset()

    @property
    def measured(self) -> torch.Tensor | None:
        """``[2]`` fp64: the sum of the estimated shares, and their number; None: there are none."""
        return self._totals[0]

    def needs_lse(self, kv: LayerKV) -> bool:
        """Whether the next step is measured.

        For a warning alone one in ``MEASURED_STEPS`` is enough, as on a CPU the estimates take
        much longer than the step. A captured step is always the same, so it is always measured.
        """
        if self.exact:
            return makes_estimates(kv.index)
        return kv.window.capture is not None or self._steps % MEASURED_STEPS == 0

    def __call__(self, record: StepRecord) -> None:
        """Measure a step that has its ``lse``.

        Raises:
            ValueError: a warning needs estimates, and the index made none.
        """
        self._steps += 1
        measured = record.lse is not None and record.ids is not None
        if measured:
            self._measure(record)
        if self.warning is not None:
            # Reading the sum waits for the device, which only a flush may do.
            flushed, self._changes = record.kv.changes != self._changes, record.kv.changes
            if flushed or (measured and record.query.is_cpu):
                self.warning.look()

    def _measure(self, record: StepRecord) -> None:
        _, kv, query, cold, ids, groups, lse, means = record
        assert kv.index is not None and ids is not None and lse is not None, "see __call__"
        estimates = kv.index.estimate(query, cold)
        if estimates is None:
            kv.config.check_estimates(False)
            return
        mean = kv.block_sums(cold).joint_means()
        logs = [torch.logaddexp(*missed_logits(query, estimates, ids, cold, mean))]
        if self.exact:
            logs.append(exactly_missed_logits(query, ids, cold))
        means_lse = None if means is None else means.logits.logsumexp(-1)
        if groups is not None:
            logs = [groups.unfold(log) for log in logs]
            means_lse = None if means_lse is None else groups.unfold(means_lse)
        for number, shares in enumerate(missed_shares(logs, lse, means_lse)):
            total = self._totals[number]
            if total is None:
                # Steps write to it in and out of inference mode.
                with torch.inference_mode(False):
                    total = torch.zeros(2, dtype=torch.double, device=shares.device)
                self._totals[number] = total
            total[:1].add_(shares.sum(dtype=torch.double))
            total[1:].add_(shares.numel())

    def mean(self, exact: bool = False) -> float | None:
        """The mean of the shares; None: not measured. May wait for the device."""
        total = self._totals[exact]
        amount, count = (0.0, 0.0) if total is None else total.tolist()
        return amount / count if count else None


class MissedMassWarning:
    """Warns once of a cache that leaves out more of the attention than its options allow.

    Attributes:
        layers: what its layers miss, by their numbers.
        prompts: tokens that they read with ``prompt="retrieve"``, likewise.
    """

    def __init__(self, options: RetrievalConfig) -> None:
        self._options = options
        self.layers: dict[int, MissedMass] = {}
        self.prompts: dict[int, RetrievedTokens] = {}
        self.reset()

    def reset(self) -> None:
        """Allow the next warning."""
        self._is_done = False

    def look(self) -> None:
        """Warn if the mean share that a layer missed is above ``warn_lost_mass``."""
        limit = self._options.warn_lost_mass
        if limit is None or self._is_done:
            return
        lost = {number: read.lost_mass() or 0.0 for number, read in self.prompts.items()}
        worst = max(lost, key=lambda number: lost[number])
        if lost[worst] > limit:
            self._is_done = True
            warnings.warn(
                f"layer {worst} left out {lost[worst]:.0%} of the attention of a prompt's probes, "
                f"more than warn_lost_mass={limit}: raise top_k of the option prompt, or take "
                "prompt='exact'",
                stacklevel=2,
            )
            return
        shares = {number: layer.mean() or 0.0 for number, layer in self.layers.items()}
        worst = max(shares, key=lambda number: shares[number])
        if shares[worst] <= limit:
            return
        self._is_done = True
        more = "" if self._options.rest else ", or let rest='mean' stand for what is left out"
        above = sum(share > limit for share in shares.values())
        warnings.warn(
            f"layer {worst} leaves out {shares[worst]:.0%} of its attention, as its index "
            f"estimates it; {above} of {len(shares)} layers leave out more than "
            f"warn_lost_mass={limit}: raise top_k={self._options.top_k}{more}",
            stacklevel=2,
        )


def missed_shares(
    logs: list[torch.Tensor], lse: torch.Tensor, means_lse: torch.Tensor | None
) -> list[torch.Tensor]:
    """Shares of the attention, 0 to 1, of tokens that were left out; all ``[B, Hq, Q]`` fp32.

    Args:
        logs: logs of the sums of their exponentiated logits.
        lse: of all that was attended to.
        means_lse: the part of it that stood for them; None: nothing did.
    """
    if means_lse is not None:
        lse = lse + torch.log1p(-(means_lse - lse).clamp(max=0.0).exp())
    # A query with nothing to attend to gives NaN.
    return [(log - lse).sigmoid().nan_to_num(nan=0.0) for log in logs]


def missed_logits(
    query: torch.Tensor,
    estimates: Estimates,
    ids: torch.Tensor,
    cold: ColdTokens,
    means: BlockMeans,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logs of the sums of the exponentiated logits that are left out, ``[B, Hq, Q]`` fp32 each.

    First of those that have estimates, by these; then of the others, which all have the logit of
    the mean key. -inf where there are none.

    Args:
        query: ``[B, Hq, Q, Dk]``.
        estimates: of the cold tokens, for these queries.
        ids: ``[B, H, Q, K]`` int32 that the queries attend to, -1 for none.
        cold: the tokens.
        means: of all of them, one of each KV head.
    """
    heads = ids.shape[1]
    valid = cold.valid[:, None, None]
    # Ids of -1 go to an element more, which counts as selected.
    excluded = slot_marks(ids, len(cold))
    excluded[..., -1:].fill_(True)
    excluded[..., :-1].logical_or_(~valid)
    if estimates.ids is None:
        excluded = excluded[..., :-1]
    else:
        columns = estimates.ids.long().masked_fill(estimates.ids < 0, len(cold))
        excluded = excluded.gather(-1, columns)
    logits = estimates.logits.unflatten(1, (heads, -1))
    logits = logits.masked_fill(excluded.unsqueeze(2), float("-inf"))
    selected = (ids >= 0).sum(-1)
    free = (valid.sum(-1) - selected).unsqueeze(2) - (logits > float("-inf")).sum(-1)
    scores = exact_scores(query, means.keys, cold.scale, cold.softcap)[..., 0]
    others = scores + free.flatten(1, 2).clamp(min=0).log()
    return logits.logsumexp(-1).flatten(1, 2), others


def exactly_missed_logits(query: torch.Tensor, ids: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
    """What both of ``missed_logits`` estimate together, ``[B, Hq, Q]`` fp32. Reads all keys."""
    heads, batch = ids.shape[1], len(query)
    excluded = slot_marks(ids, len(cold))[..., :-1] | ~cold.valid[:, None, None]
    sums = query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    for start, keys in cold.store.key_chunks():
        scores = exact_scores(query, keys.to(query.device), cold.scale, cold.softcap)
        part = excluded[..., start : start + keys.shape[2]].unsqueeze(2)
        scores = scores.view(batch, heads, -1, *scores.shape[2:]).masked_fill(part, float("-inf"))
        sums = torch.logaddexp(sums, scores.logsumexp(-1).flatten(1, 2))
    return sums
