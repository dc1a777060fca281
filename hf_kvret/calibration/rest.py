"""How much a method's estimates of what is left out are off, by query head: ``calibrate rest``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.calibration.rest_factors import METHOD, MOST_LOG, TENSOR
from hf_kvret.calibration.study import Calibration, LayerFindings, LayerStudy, Progress
from hf_kvret.core.estimates import exact_left_out, left_out_logits
from hf_kvret.core.exact_attention import attend_cold, attend_dense
from hf_kvret.core.head_groups import HeadGroups
from hf_kvret.core.index import ColdTokens, Index
from hf_kvret.core.layer import RetrievalLayer
from hf_kvret.core.merge import merge
from hf_kvret.core.regions import Regions
from hf_kvret.core.scoring import Scoring
from hf_kvret.evaluation.caches import TEXT_OPTIONS, choose_cache
from hf_kvret.integration.latent import ModuleHeads
from hf_kvret_model_patches.rope import Rope
from hf_kvret_model_patches.taps import LayerTokens

# Share of a sequence that is read as a prompt, tokens of a pass from there on, and how many passes
# there are for one whose queries are looked at.
_PROMPT, _PASS_LEN, _EVERY = 0.75, 16, 4
_LEAST_LEN = 64
# Logs of factors that are tried.
_STEP = 0.125


@dataclass(frozen=True)
class RestCalibration(Calibration):
    """Factors of the weight that ``rest="index"`` gives to what is left out.

    Of each query head the one with which the attention comes closest to full attention, by the sum
    of squared errors over queries. The true weight would be the estimated one, or nearly; but the
    mean value is not the mean of what is left out as it is weighted, so that less of it is better.

    Attributes:
        cache: a method and its options, as ``"paris:top_k=0.03"``. Factors depend little on the
            budget, but they do.
        model: whose layers are studied; None before ``of_model``.
    """

    method: ClassVar[str] = METHOD

    cache: str = "paris:top_k=0.03"
    model: PreTrainedModel | None = None

    def __post_init__(self) -> None:
        choice = choose_cache(self.cache)
        if choice.options is None:
            raise ValueError(
                f"cache={self.cache!r}: it retrieves nothing; choose flat, paris, lrqk or a2ats"
            )
        # What can't estimate says so here, before the texts are read.
        _studied(choice.options)

    def of_model(self, model: PreTrainedModel) -> RestCalibration:
        """The same, for a model; ValueError for a cache that does not serve it."""
        made = replace(self, model=model)
        made.new_cache().check_model(model)
        return made

    def new_cache(self) -> RetrievalCache:
        """An empty cache of the method, with its options."""
        assert self.model is not None, "of_model comes first"
        made = choose_cache(self.cache).make(self.model.config, 1)
        assert isinstance(made, RetrievalCache), "others are refused"
        return type(made)(self.model.config, _studied(made.options))

    def check(self, lengths: Sequence[int]) -> None:
        super().check(lengths)
        options = choose_cache(self.cache).options
        assert options is not None, "others are refused"
        least = max(_LEAST_LEN, int((options.recent + options.sink + 1) / _PROMPT) + _PASS_LEN)
        if max(lengths) < least:
            raise ValueError(
                f"sequences of up to {max(lengths)} tokens, but recent={options.recent} leaves "
                f"nothing cold in those below {least}: give a longer --length, or a smaller recent"
            )

    def study(self, layer: int, rope: Rope, device: torch.device) -> FactorStudy:
        return FactorStudy(self, layer)

    def options(self) -> dict[str, Any]:
        choice = choose_cache(self.cache)
        assert choice.options is not None, "others are refused"
        names = ("top_k", "sink", "recent", "flush", "select_heads")
        own = {name: getattr(choice.options, name) for name in names}
        # What the text names, but for where something lies.
        named = [x for x in choice.name.split(":")[1:] if x.partition("=")[0] not in TEXT_OPTIONS]
        return {"cache": choice.method, **own, "named": ":".join(named)}


class FactorStudy(LayerStudy):
    """Goes through each sequence as a cache does, and compares its attention with full attention.

    The findings are ``log_factors [Hq]`` fp32. Figures are of held-out sequences: ``log_ratio``,
    the mean of the logs of true weights over estimated ones; and the root of the squared errors of
    the attention over its squares, ``alone`` where nothing stands for what is left out,
    ``estimated`` with the weight that the index estimates, and ``corrected`` with the factors.
    """

    def __init__(self, options: RestCalibration, layer: int) -> None:
        self.options, self.layer = options, layer
        # By held_out, [n, Hq, m] each: see ``_numbers``.
        self._numbers: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    @property
    def work(self) -> int:
        return 1

    def add(self, tokens: LayerTokens, held_out: bool) -> None:
        length = tokens.key.shape[2]
        prompt = int(_PROMPT * length)
        layer = self.options.new_cache().layers[self.layer]
        assert isinstance(layer, RetrievalLayer), "the runner studies those"
        layer.lazy_initialization(tokens.key[:, :, :0], tokens.value[:, :, :0])
        regions = layer.regions
        assert regions is not None
        scale = tokens.query.shape[-1] ** -0.5 if tokens.scale is None else tokens.scale
        scoring = Scoring(None, scale, tokens.softcap)
        heads = None if tokens.latent is None else ModuleHeads(tokens.latent)
        places = tokens.position_ids
        if places is None and layer.needs_positions:
            places = torch.arange(length, device=tokens.key.device)[None]
        for number, start in enumerate([0, *range(prompt, length, _PASS_LEN)]):
            part = slice(start, prompt if number == 0 else min(start + _PASS_LEN, length))
            query, keys, values = (
                side[:, :, part] for side in (tokens.query, tokens.key, tokens.value)
            )
            query = query if heads is None else heads.absorb(query)
            positions = None if places is None else places[:, part]
            regions.on_forward(query, keys, None, positions)
            if number == 0:
                regions.take_prompt(keys, values, None)
                continue
            regions.take_step(keys, values, None)
            cold = regions.cold(scoring)
            if cold is None:
                continue
            index = regions.ready_index(cold)
            if index is not None and number % _EVERY == 0:
                numbers = _numbers(regions, index, query, cold)
                # Nothing is left out of a context that the budget covers.
                if bool(numbers.isfinite().all()):
                    self._numbers[held_out].append(numbers.cpu())

    def finish(self, progress: Progress, carried: object = None) -> LayerFindings:
        if not self._numbers[False]:
            raise ValueError(
                f"cache={self.options.cache!r}: no query of layer {self.layer} left anything out; "
                "give longer sequences (--length) or a smaller top_k"
            )
        numbers = torch.cat(self._numbers[False], dim=-1)
        steps = torch.arange(-MOST_LOG, MOST_LOG + _STEP, _STEP, dtype=torch.double)
        errors = torch.stack([_error(numbers, step).sum(-1) for step in steps])
        factors = steps[errors.argmin(0)]
        quality: dict[str, float | int | str | None] = {
            "mean_factor": float(factors.exp().mean()),
        }
        if self._numbers[True]:
            numbers = torch.cat(self._numbers[True], dim=-1)
            whole = numbers[4].sum()
            quality["log_ratio"] = float(numbers[5].mean())
            for name, shift in (
                ("alone", torch.tensor(-math.inf)), ("estimated", torch.tensor(0.0)),
                ("corrected", factors[:, None]),
            ):  # fmt: skip
                quality[name] = float((_error(numbers, shift).sum() / whole).sqrt())
        progress(1)
        return LayerFindings({TENSOR: factors.float()}, {}, quality)


def _numbers(regions: Regions, index: Index, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
    """``[6, Hq, Q]`` fp64 that say how far attention is from full attention, by the rest's weight.

    With the out ``o`` of what is attended to, ``f`` of full attention and ``m`` the mean value: the
    logit of the rest's estimated share, ``(o - f).(m - o)``, ``|m - o|^2``, ``|o - f|^2``,
    ``|f|^2``, and the log of the true weight over the estimated one.
    """
    window, config = regions.window, regions.config
    groups = HeadGroups.of(config.select_heads, window.keys.shape[1], query.shape[1])
    searching = query if groups is None else groups.fold(query)
    ids = index.search(searching, cold)
    estimates = index.estimate(searching, cold)
    config.check_estimates(estimates is not None)
    assert estimates is not None, "others are refused"
    means = regions.rest_sums(cold).joint_means()
    estimated = torch.logaddexp(*left_out_logits(searching, estimates, ids, cold, means))
    exact = exact_left_out(searching, ids, cold)
    found = cold.store.attend(searching, ids, cold.scale, cold.softcap)
    index.after_search(ids)
    if groups is not None:
        estimated, exact = groups.unfold(estimated), groups.unfold(exact)
        found = groups.unfold(found[0]), groups.unfold(found[1])
    keys, values = window.tokens()
    offset = keys.shape[2] - query.shape[2]
    near = attend_dense(query, keys, values, cold.scoring.of(window.validity(None)), offset)
    attended, lse = merge([near, found])
    full, _ = merge([near, attend_cold(query, cold, len(cold))])
    mean = means.values.repeat_interleave(query.shape[1] // means.values.shape[1], dim=1)
    error, way = (attended - full).double(), (mean - attended).double()
    squares = (error * way, way * way, error * error, full.double().square())
    rows = [(estimated - lse).double(), *(x.sum(-1) for x in squares), (exact - estimated).double()]
    return torch.stack(rows)[:, 0]


def _error(numbers: torch.Tensor, log_factor: torch.Tensor) -> torch.Tensor:
    """``[Hq, m]``: squared errors of the attention with a factor, of what ``_numbers`` gave."""
    share = (numbers[0] + log_factor).sigmoid()
    return numbers[3] + 2 * share * numbers[1] + share * share * numbers[2]


def _studied(options: Any) -> Any:
    """Options of the cache that is studied: rows as they are, on the device, no short contexts."""
    return options.replace(
        rest="index", rest_artifact=None, rest_revision=None, rest_artifact_sha256=None,
        rest_blocks=None, dense_below=0, store="device", device_budget=None, track_recall=False,
    )  # fmt: skip
