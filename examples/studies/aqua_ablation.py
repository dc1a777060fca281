"""What AQUA-KV's predictors are worth. bits: perplexity of aqua, of HIGGS without predictors, of
round-to-nearest and KIVI-style codes, at 2, 3 and 4 bits (the paper's table 2). parts: other
predictors, bits of the first layer, sinks, RoPE, anchors, inputs of the predictors, at 2 bits
(tables 1 and 5). variance: what predictors explain, by layer (figure 2). It makes the artifacts
that it needs, from --calibration-text or from the start of --text, and reads text that none of
them has seen.

    python examples/studies/aqua_ablation.py --text wiki.test.raw --calibration-text novel.txt \\
        --json ablation.json --plot ablation.png
    python examples/studies/aqua_ablation.py --model needle --parts bits
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

import torch
from ablation import caches_option, made, not_here, parts_option
from aqua_tables import PLOTS, TABLES
from aqua_variants import EXPLAINED, Variant, ablation_variants, bit_variants
from calibrated import CalibratedAblation
from tqdm import tqdm

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.program.arguments import length, number, whole_number
from hf_kvret.lab.program.common_options import budget_option, context_option, count_option
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Cell
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache
from hf_kvret.models.compatibility import retrieval_layers, retrieval_shapes

PARTS = ("bits", "parts", "variance")
# The paper's 256 of 1024 numbers of a token's keys.
_RANK_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class AquaAblation(CalibratedAblation):
    """What AQUA-KV's predictors are worth."""

    name = "aqua-ablation"
    method = "aqua"
    example = "recent=128"
    chosen = (
        *("artifact", "revision", "bits", "first_bits", "group", "backbone", "predictor"),
        *("anchor_every", "sink"),
    )
    described = (
        *("windows", "step", "calibration_tokens", "calibration_length", "rank", "hidden"),
        *("mlp_steps", "ridge"),
    )
    # It looks at artifacts alone.
    apart = ("variance",)
    tables = TABLES
    plots = PLOTS
    smallest = (
        "--model needle --context 256 --windows 1 --parts bits,variance --step 16 "
        "--calibration-tokens 1K --calibration-length 256 --caches aqua:recent=16:flush=16"
    )

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
        if part == "variance":
            quality = self.artifact(EXPLAINED[name], subject)[1].quality
            return {"layers": [dict(one) for one in quality]}
        # A text that is too short is found before the work, not after it.
        windows = self.contexts(subject, part, cell["length"])
        variant, given = _variants(part)[name], choice.options
        assert isinstance(given, AquaConfig)
        if "dense_below" not in choice.name:
            given = given.replace(dense_below=0)
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


def _variants(part: str) -> dict[str, Any]:
    """The variants of a part by name."""
    if part == "variance":
        return dict(EXPLAINED)
    return ablation_variants() if part == "parts" else bit_variants()


def read_through(
    subject: Subject, choice: CacheChoice, windows: Sequence[torch.Tensor], step: int
) -> dict[str, Any]:
    """Perplexity over ``windows [n]``, alike in length, each read ``step`` tokens a forward pass.

    They are read from their start, so that a token attends to what the cache has made of those
    before it, as the paper has it; all but the first token of a window count. Returns ``ppl``,
    ``nats``, ``tokens``, ``window_nats`` of each window, ``seconds`` of all forward passes, and of
    the last window's end:

    ``bits`` that a number of a key or value takes in the cold part (``value_bits``), ``full_bits``
    that it takes in the model's dtype; ``held_ratio``, all bytes as a share of full keys and
    values, spare room and predictors included; ``predictor_bytes``.

    Raises:
        ValueError: nothing was cold; a step that the cache would not take as drafted tokens.
    """
    means, count, seconds = [], 0, 0.0
    for window in tqdm(windows, leave=False, unit="window", desc=choice.name):
        reader = Reader(subject.model, choice, len(window))
        reader.check_step(step)
        losses = _losses(reader, window, step)
        means.append(losses.double().mean().item())
        count += len(losses)
        seconds += reader.seconds
    usage = reader.usage()
    cache = reader.cache
    shared = cache.memory().shared if isinstance(cache, RetrievalCache) else 0
    nats = fmean(means)
    return {
        "ppl": math.exp(nats),
        "nats": nats,
        "tokens": count,
        "window_nats": means,
        "bits": value_bits(reader),
        "full_bits": 8 * subject.model.dtype.itemsize,
        "held_ratio": (usage.device_bytes + usage.host_bytes) / usage.full_bytes,
        "predictor_bytes": shared,
        "seconds": seconds,
    }


def value_bits(reader: Reader) -> float:
    """Bits that a number of a coded key or value takes, mean over layers; whole tokens alone.

    Of ours the rows as they are kept, with positions; of full attention its dtype. Windows of
    recent tokens don't count.

    Raises:
        ValueError: ours has nothing cold.
    """
    cache = reader.cache
    if isinstance(cache, RetrievalCache):
        held, numbers = 0, 0
        for layer in cache.retrieval_layers:
            kv = layer.kv
            if kv is None or kv.store is None or not kv.cold_len:
                regions_as = "smaller kv as aqua:recent=32:flush=32"
                raise ValueError(f"nothing was cold: take a longer --context, or {regions_as}")
            keys, values = kv.window.keys, kv.window.values
            # Beside these a store tells a few numbers about their making.
            held += sum(x.nbytes for x in kv.store.state_dict().values() if x.ndim >= 3)
            numbers += len(keys) * keys.shape[1] * kv.cold_len * (keys.shape[3] + values.shape[3])
        return 8 * held / numbers
    return 8.0 * reader.model.dtype.itemsize


def _losses(reader: Reader, window: torch.Tensor, step: int) -> torch.Tensor:
    """``[len(window) - 1]`` in nats."""
    found, last = [], None
    pieces = tqdm(window.split(step), leave=False, desc=reader.choice.name, mininterval=1)
    for tokens in pieces:
        new = reader.feed(tokens, keep=len(tokens))
        # The logits before a step foretell the first of its tokens, its own all others.
        foretold = new[:-1] if last is None else torch.cat([last, new[:-1]])
        truth = (tokens if last is not None else tokens[1:]).to(foretold.device)
        losses = torch.nn.functional.cross_entropy(foretold.float(), truth, reduction="none")
        found.append(losses.cpu())
        last = new[-1:]
    return torch.cat(found)


MEASUREMENT = AquaAblation

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
