"""What AQUA-KV's predictors are worth, and what its cache takes. bits: perplexity of aqua, of HIGGS
without predictors, of round-to-nearest and KIVI-style codes, and of transformers' quantized
caches where they are installed, at 2, 3 and 4 bits (the paper's table 2). parts: other
predictors, bits of the first layer, sinks, RoPE, anchors, inputs of the predictors, at 2 bits
(tables 1 and 5). variance: what predictors explain, by layer (figure 2). layers: what it costs
to code one layer alone. memory: bits a value at 131,072 tokens of the shapes of 8B and 70B, on
paper and of tensors. It makes the artifacts that it needs, from --calibration-text or from the
start of --text, and reads text that none of them has seen.

    python examples/studies/aqua_ablation.py --text wiki.test.raw --calibration-text novel.txt \\
        --json ablation.json --plot ablation.png
    python examples/studies/aqua_ablation.py --parts memory --memory-tokens 128K
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from ablation import caches_option, made, not_here, parts_option
from aqua_measures import PREDICTORS, measure, one_layer_each, read_through
from aqua_tables import PLOTS, TABLES, alone_table
from aqua_variants import ALONE, EXPLAINED, Variant, ablation_variants, bit_variants
from calibrated import CalibratedAblation
from study_tables import Found, of_part

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.evaluation.arguments import length, number, whole_number
from hf_kvret.evaluation.caches import CacheChoice, choose_cache
from hf_kvret.evaluation.common_options import budget_option, context_option, count_option
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.scripts import run_script
from hf_kvret.evaluation.subject import Subject
from hf_kvret.integration.compatibility import retrieval_layers, retrieval_shapes
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache
from hf_kvret.methods.aqua.calibrator import AquaCalibration

PARTS = ("bits", "parts", "variance", "layers", "memory")
# The paper's 256 of 1024 numbers of a token's keys.
_RANK_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class AquaAblation(CalibratedAblation):
    """What AQUA-KV's predictors are worth, and what its cache takes."""

    name = "aqua-ablation"
    method = "aqua"
    example = "recent=128"
    chosen = (
        *("artifact", "revision", "bits", "first_bits", "group", "backbone", "predictor"),
        *("anchor_every", "sink"),
    )
    described = (
        *("windows", "step", "calibration_tokens", "calibration_length", "rank", "hidden"),
        *("mlp_steps", "ridge", "memory_tokens", "memory_layers"),
    )
    # These look at artifacts, and at layers of random numbers.
    apart = ("variance", "memory")
    tables = TABLES
    plots = PLOTS

    caches: str | None = caches_option("aqua")
    top_k: int | float = budget_option(1.0)
    context: tuple[int, ...] = context_option((2048,), "tokens of a window")
    windows: int = count_option(3, "at most this many of each length")
    parts: tuple[str, ...] = parts_option(PARTS)
    new_tokens: int = not_here()
    step: int = count_option(32, "tokens a forward pass, from the first one on")
    calibration_length: int = option(2048, "most tokens of a sequence", kind=length)
    rank: int | None = option(
        None, "of reduced-rank predictors; default: a quarter of the keys", kind=whole_number(1)
    )
    hidden: int | None = option(
        None, "units of MLP predictors; default: twice their outputs", kind=whole_number(2)
    )
    mlp_steps: int = option(200, "of training; 1000 or more for a large one", kind=whole_number(0))
    ridge: float = option(AquaCalibration().ridge, "in mean variances of an input", kind=number(0))
    memory_tokens: int = option(16_384, "that fill layers of memory", kind=length)
    # The first, and one that is predicted.
    memory_layers: int = option(3, "of the shape of 8B and 70B", kind=whole_number(2))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            # Refused now rather than when the first such predictor is learned.
            replace(self.usual, rank=self.rank)

    @property
    def usual(self) -> AquaCalibration:
        """Of all artifacts, before changes."""
        return AquaCalibration(hidden=self.hidden, steps=self.mlp_steps, ridge=self.ridge)

    def variants(self, part: str) -> Sequence[str]:
        return list(_variants(part))

    def asking(self, part: str, length: int) -> int:
        return length // 4

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, name = cell["part"], cell["variant"]
        if part == "memory":
            return measure(name, self.memory_tokens, self.memory_layers)
        if part == "variance":
            quality = self.artifact(EXPLAINED[name], subject)[1].quality
            return {"layers": [dict(one) for one in quality]}
        # A text that is too short is found before the work, not after it.
        windows = self.contexts(subject, part, cell["length"])
        variant, given = _variants(part)[name], choice.options
        assert isinstance(given, AquaConfig)
        if "dense_below" not in choice.name:
            given = given.replace(dense_below=0)
        if part == "layers":
            return one_layer_each(subject, given.replace(**variant.cache), windows, self.step)
        chosen = self._choice(variant, name, subject, given)
        return read_through(subject, chosen, windows, self.step)

    def artifact(
        self, changes: Mapping[str, Any], subject: Subject
    ) -> tuple[str, CalibrationArtifact]:
        """The folder of an artifact that was learned with ``changes``, and what is in it.

        Its name says what differs from the usual options.
        """
        learned, usual = self.calibration(changes, subject), self.usual.options()
        named = {field.name: getattr(learned, field.name) for field in fields(learned)}
        parts = [f"{name}-{value}" for name, value in named.items() if value != usual[name]]
        folder = "_".join(parts) or "usual"
        return str(self.path(folder)), self.find(folder, learned, subject)

    def calibration(self, changes: Mapping[str, Any], subject: Subject) -> AquaCalibration:
        """How an artifact is learned, with sizes that fit the model.

        Anchors that are further apart than the model has layers are the first layer alone.
        """
        found = replace(self.usual, **changes)
        config = subject.model.config
        layers = len(retrieval_layers(config))
        if found.anchor_every is not None and found.anchor_every >= layers:
            found = replace(found, anchor_every=None)
        if found.predictor == "low_rank":
            widths = [shape.width for shape in retrieval_shapes(config).values()]
            usual = max(1, min(widths) // _RANK_SHARE)
            found = replace(found, rank=self.rank or usual)
        return found

    def _choice(
        self, variant: Variant, name: str, subject: Subject, given: AquaConfig
    ) -> CacheChoice:
        if variant.other is not None:
            return choose_cache(variant.other, device=str(subject.device))
        options: dict[str, Any] = dict(variant.cache)
        if variant.learned is not None:
            options["artifact"] = self.artifact(variant.learned, subject)[0]
        return made(name, AquaKVCache, given.replace(**options))

    @classmethod
    def sections(cls, results: Results) -> Mapping[str, Callable[[Found], str]]:
        # What a layer costs alone stands beside what predictors would find of it.
        explained = of_part(results, "variance")
        return {**cls.tables, "layers": partial(alone_table, explained=explained)}


def _variants(part: str) -> dict[str, Any]:
    """The variants of a part by name."""
    if part in ("variance", "memory"):
        return dict(EXPLAINED if part == "variance" else PREDICTORS)
    found = ablation_variants() if part == "parts" else bit_variants()
    return {name: found[name] for name in (ALONE if part == "layers" else found)}


MEASUREMENT = AquaAblation

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
