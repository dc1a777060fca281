"""What AQUA-KV's predictors are worth. bits: perplexity of aqua, and of HIGGS without predictors,
at 2, 3 and 4 bits (the paper's table 2). parts: predictors, bits of the first layer, sinks, RoPE
and calibration, at 2 bits (tables 1 and 5). variance: what predictors explain, by layer
(figures 2 and 5). depth: what two layers below explain beside one (table 5). pruned: perplexity
and first choices of H2O with AQUA-KV's rows (tables 3 and 12), with the artifact in the model's
own folder if there is one. It makes the artifacts that it needs, from --calibration-text or from
the start of --text, and reads text that none of them has seen.

    python examples/studies/aqua_ablation.py --text wiki.test.raw --calibration-text novel.txt \\
        --json ablation.json --plot ablation.png
    python examples/studies/aqua_ablation.py --model needle --parts bits
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from ablation import (
    CellResults,
    Plot,
    Table,
    caches_option,
    layers_of,
    layers_table,
    lines_of,
    made,
    parts_option,
    rows_tables,
    shown,
)
from calibrated import CalibratedAblation
from tqdm import tqdm

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.store import FirstRows
from hf_kvret.lab.calibrate.aqua import AquaCalibration, AquaStudy
from hf_kvret.lab.calibrate.runner import learn_at_once
from hf_kvret.lab.calibrate.study import Calibration, Carried, LayerFindings, Progress
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.program.arguments import length, number
from hf_kvret.lab.program.common_options import budget_option, context_option, count_option
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_groups, plot_lines
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache, AquaStore
from hf_kvret.methods.h2o import H2OConfig, H2OIndex
from hf_kvret.stores import PagedStore, StoreChoice
from hf_kvret_model_patches.rope import Rope

FULL, USUAL = "full", "aqua"
_SIDES = ("key", "value")
_SHARES = ("kept", "needed")
BITS = (2, 3, 4)
# Bits of the paper's table 1, which the ablations of this command use too.
_FEW = 2
# The share of cold tokens that H2O keeps in the part "pruned".
_KEPT = 0.2


@dataclass(frozen=True)
class Variant:
    """One row of a table.

    Attributes:
        learned: changes to the calibration of the artifact; None where nothing is predicted.
        cache: changes to the options of ``aqua``.
        other: another cache, as ``--caches`` names it; then there is neither of these.
        paper: perplexity of Llama 3.2 3B on WikiText-2 (tables 1 and 5); None where there is none.
    """

    learned: Mapping[str, Any] | None = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    other: str | None = None
    paper: float | None = None


_AQUA = Variant({"bits": _FEW}, {"bits": _FEW}, paper=7.03)
_FULL = Variant(None, other=FULL, paper=6.98)
_AGNOSTIC = {"bits": 16, "first_bits": 16}


def _changed(paper: float | None = None, *, cache: Any = None, **learned: Any) -> Variant:
    """The usual variant with its calibration, and maybe its cache, changed."""
    return Variant({"bits": _FEW, **learned}, {"bits": _FEW, **(cache or {})}, paper=paper)


ABLATIONS: dict[str, dict[str, Variant]] = {
    "first layer": {
        "16 bits": _changed(7.03, first_bits=16),
        "4 bits": _AQUA,
        "3 bits": _changed(7.03, first_bits=3),
        "2 bits": _changed(7.05, first_bits=2),
        "4 bits, mean taken off": _changed(anchor_mean=True),
    },
    "sinks": {
        "0": _changed(7.15, sinks=0, cache={"sink": 0}),
        "4": _AQUA,
        "64": _changed(7.01, sinks=64, cache={"sink": 64}),
    },
    "keys": {"before RoPE": _AQUA, "after RoPE": _changed(7.05, space="after")},
    "inputs": {
        "values from keys and values": _AQUA,
        "no predictors (HIGGS)": Variant(None, {"bits": _FEW, "predictor": "none"}, paper=7.47),
    },
    "calibrated": {
        "with 2 bits": _AQUA,
        "without a codec": _changed(7.13, cache={"first_bits": 4}, **_AGNOSTIC),
    },
}
"""By what is varied. The usual variant stands in each group, and is measured once."""

EXPLAINED: dict[str, Mapping[str, Any]] = {
    "exact": _AGNOSTIC,
    **{f"{bits} bits": {"bits": bits} for bits in reversed(BITS)},
}
"""By what predictors read: the layer below as it is, or as so many bits leave it."""

# Perplexities of Llama 3.1 8B (table 2).
PAPER_8B = {
    "full": 5.61,
    **{"aqua, 2 bits": 5.72, "aqua, 3 bits": 5.64, "aqua, 4 bits": 5.61},
    **{"higgs, 2 bits": 5.89, "higgs, 3 bits": 5.66, "higgs, 4 bits": 5.62},
    **{"kivi, 2 bits": 7.37, "kivi, 3 bits": 6.04, "kivi, 4 bits": 5.64},
}

PRUNED: dict[str, tuple[Mapping[str, Any], float]] = {
    "h2o": ({"bits": 16, "predictor": "none"}, 38.82),
    "h2o + higgs, 2 bits": ({"bits": 2, "predictor": "none"}, 37.02),
    "h2o + aqua, 2 bits": ({"bits": 2}, 38.43),
    "h2o + aqua, 3 bits": ({"bits": 3}, 38.76),
    "h2o + aqua, 4 bits": ({"bits": 4}, 38.85),
}
"""Options of ``PrunedCache``, and LongBench of Llama 3.2 3B (tables 3 and 12, 20% of tokens)."""


class DecodedRows(PagedStore):
    """The rows that AQUA-KV's codes decode to, decoded once.

    Args:
        codes: the store of the codes.
    """

    def __init__(self, codes: AquaStore) -> None:
        super().__init__(codes.memory)
        self.codes = codes
        codes.below = self._codes_below

    def append(self, block: TokenBlock) -> None:
        self.codes.append(block)
        ids = torch.arange(block.start, block.end, dtype=torch.int32, device=block.keys.device)
        ids = ids.expand(*block.keys.shape[:2], 1, -1)
        keys, values = (rows.squeeze(2) for rows in self.codes.gather(ids))
        super().append(TokenBlock(keys, values, block.start, value_in_key=block.value_in_key))

    def _codes_below(self) -> AquaStore | None:
        below = self.below()
        return below.codes if isinstance(below, DecodedRows) else None


class PrunedCache(AquaKVCache):
    """H2O chooses which tokens are attended to, of rows as AQUA-KV codes them (section 4.3).

    Their weights are counted by the reconstructed keys. Rows of evicted tokens stay in the store,
    and all are decoded once: it shows what both do to quality, and saves no memory.
    """

    @classmethod
    def make_store(
        cls, options: AquaConfig, layer: int, stores: StoreChoice, first: FirstRows
    ) -> DecodedRows:
        store = super().make_store(options, layer, stores, first)
        assert isinstance(store, AquaStore)
        return DecodedRows(store)

    @classmethod
    def make_index(cls, options: AquaConfig, layer: int) -> H2OIndex:  # type: ignore[override]
        """A new, empty index of heavy hitters, ``top_k`` of them for each KV head."""
        return H2OIndex(H2OConfig(sink=options.sink, max_draft=options.max_draft))


class TwoLayerStudy(AquaStudy):
    """Predictors read the two layers below, not one (table 5). No cache reads such predictors."""

    def finish(self, progress: Progress, carried: Carried | None = None) -> LayerFindings:
        findings = super().finish(progress, carried)
        older = {f"{name} below": (carried or {}).get(name) for name in _SIDES}
        kept = {name: x for name, x in older.items() if x is not None}
        return replace(findings, carried={**(findings.carried or {}), **kept})

    def _inputs(
        self, name: str, below: Carried, reconstructions: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        inputs, older = super()._inputs(name, below, reconstructions), below.get(f"{name} below")
        return inputs if older is None else [*inputs, older]


class TwoLayerCalibration(AquaCalibration):
    """Makes ``TwoLayerStudy``."""

    def study(self, layer: int, rope: Rope, device: torch.device) -> AquaStudy:
        return TwoLayerStudy(self, layer, rope, device)


def bit_variants() -> dict[str, Variant]:
    """The rows of table 2 by name, ``METHOD, N bits``."""
    results = {FULL: _FULL}
    for bits in BITS:
        results[f"{USUAL}, {bits} bits"] = Variant({"bits": bits}, {"bits": bits})
        results[f"higgs, {bits} bits"] = Variant(None, {"bits": bits, "predictor": "none"})
    return results


def ablation_variants() -> dict[str, Variant]:
    """The rows of table 1 by name: ``full``, ``aqua``, and ``GROUP: VARIANT`` of all others."""
    rows = {cell: ABLATIONS[group][name] for group, name, cell, _ in ablation_rows()}
    return {FULL: _FULL, USUAL: _AQUA, **rows}


def ablation_rows() -> list[tuple[str, str, str, float | None]]:
    """``(group, variant, name of its cell, paper's perplexity)``, the usual one in each group."""
    return [
        (group, name, USUAL if variant is _AQUA else f"{group}: {name}", variant.paper)
        for group, variants in ABLATIONS.items()
        for name, variant in variants.items()
    ]


# Shares of the rise in HIGGS's perplexity that are left, by the paper's table 2.
_PAPER_SHARES = "the paper: 10% on 3B, 39% on 8B, 35% on 70B"


def _by_place(cells: CellResults) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """By cache and length, then by variant."""
    places: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for cell, result in cells:
        places.setdefault((cell["cache"], cell["length"]), {})[cell["variant"]] = result
    return places


def _rise_of(found: dict[str, Any] | None, full: dict[str, Any] | None) -> float | None:
    """How much higher a perplexity is than that of full attention, as a share of it."""
    return None if found is None or full is None else found["ppl"] / full["ppl"] - 1


def _percent(found: dict[str, Any] | None, full: dict[str, Any] | None) -> float | None:
    rise = _rise_of(found, full)
    return None if rise is None else 100 * rise


def _shown_rise(found: dict[str, Any], full: dict[str, Any] | None) -> str:
    """The rise, with its standard error where there are several windows: they were all the same."""
    rise = _rise_of(found, full)
    if rise is None or full is None:
        return "-"
    pairs = zip(found["window_nats"], full["window_nats"], strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    if len(differences) < 2:
        return f"{rise:+.2%}"
    error = (1 + rise) * stdev(differences) / math.sqrt(len(differences))
    return f"{rise:+.2%} ± {error:.2%}"


def _bits_table(cells: CellResults) -> str:
    """The rows of table 2."""
    rows, lines = [], []
    for (cache, context), results in _by_place(cells).items():
        full = results.get(FULL)
        for name, result in results.items():
            method, _, bits = name.partition(", ")
            rise, published = _rise_of(result, full), PAPER_8B.get(name)
            share = _share(rise, _rise_of(results.get(f"higgs, {bits}"), full))
            width = bits.partition(" ")[0] or f"{result['full_bits']:g}"
            row = [cache, str(context), method, width, f"{result['bits']:.3f}"]
            row += [
                f"{result['held_ratio']:.1%}",
                f"{result['ppl']:.3f}",
                _shown_rise(result, full),
            ]
            paper = shown(published and published / PAPER_8B[FULL] - 1, "+.1%")
            rows.append([*row, shown(share, ".0%"), paper])
        for count in BITS:
            names = (f"{method}, {count} bits" for method in (USUAL, "higgs"))
            share = _share(*(_rise_of(results.get(name), full) for name in names))
            if share is not None and share <= 0:
                lines.append(f"{cache}, {context}: at {count} bits only higgs's perplexity rises.")
            elif share is not None:
                note = f" (aim: at most 40%; {_PAPER_SHARES})" if count == BITS[0] else ""
                lines.append(
                    f"{cache}, {context}: at {count} bits {USUAL}'s perplexity rises by "
                    f"{share:.0%} of what higgs's does{note}."
                )
    header = ["cache", "context", "method", "bits", "bits a value", "bytes / full K,V"]
    header += ["perplexity", "rise", "of higgs's", "rise in the paper, 8B"]
    return "\n\n".join([markdown_table(header, rows), *lines])


def _share(rise: float | None, of: float | None) -> float | None:
    """None where HIGGS costs nothing that could be saved."""
    return None if rise is None or of is None or of <= 0 else rise / of


def _parts_table(cells: CellResults) -> str:
    """The rows of tables 1 and 5."""
    rows = []
    for (cache, context), results in _by_place(cells).items():
        full = results.get(FULL)
        listed = [("full attention", "", FULL, 6.98), *ablation_rows()]
        known = {variant for _, _, variant, _ in listed}
        # Results of 0.1.0 have variants that are no longer there.
        for variant in sorted(results.keys() - known):
            group, _, name = variant.partition(": ")
            listed.append((group, name, variant, None))
        for group, name, variant, published in listed:
            result = results.get(variant)
            if result is None:
                continue
            name = f"{name} (usual)" if variant == USUAL else name
            size = f"{result['predictor_bytes'] / 2**10:.0f}"
            row = [cache, str(context), group, name, f"{result['bits']:.3f}", size]
            row += [f"{result['ppl']:.3f}", _shown_rise(result, full), shown(published, ".2f")]
            rows.append(row)
    header = ["cache", "context", "what", "how", "bits a value", "predictors, KiB"]
    return markdown_table([*header, "perplexity", "rise", "in the paper, 3B"], rows)


def _variance_tables(cells: CellResults) -> str:
    """Explained variance by layer (figure 5), and what is missed with predictors and without."""
    titles = {"key": "keys explained, layer", "value": "values explained, layer"}
    tables = [layers_table(title, _explained_by(cells, side)) for side, title in titles.items()]
    return "\n\n".join([*tables, layers_table("error, layer", _errors(cells), ".4f")])


def _pruned_table(cells: CellResults) -> str:
    """The rows of table 3."""
    rows = []
    for (cache, context), results in _by_place(cells).items():
        for name, result in results.items():
            row = [cache, str(context), name, *(shown(result.get(x), ".1%") for x in _SHARES)]
            row += [f"{result['ppl']:.3f}", _shown_rise(result, results.get(FULL))]
            rows.append([*row, f"{PRUNED[name][1] if name in PRUNED else 44.61:.2f}"])
    header = ["cache", "context", "method", "tokens that a head keeps", "rows that predictors need"]
    table = markdown_table([*header, "perplexity", "rise", "LongBench in the paper, 3B"], rows)
    return f"{table}\n\nAfter the context this table's tokens enter one a forward pass."


def _depth_tables(cells: CellResults) -> str:
    """What one layer below predicts, and two (table 5, "Inputs from layers")."""
    titles = {f"{side}_{x}": f"{side}s: {x}" for x in ("explained", "error") for side in _SIDES}
    return rows_tables(cells[0][1], titles)


def _explained_by(cells: CellResults, side: str) -> dict[str, dict[int, float]]:
    """By variant and layer. Results of 0.1.0 also vary what values alone are predicted from."""
    return {
        cell["variant"]: _figure(result, f"{side}_explained")
        for cell, result in cells
        if side == "value" or not cell["variant"].startswith("from ")
    }


def _errors(cells: CellResults) -> dict[str, dict[int, float]]:
    """Mean squares of what is missed, in units of the variance, at each number of bits."""
    results = {}
    for cell, result in cells:
        if cell["variant"].endswith(" bits"):
            for side in _SIDES:
                for name, figure in (("", "error"), (", nothing predicted", "error_unpredicted")):
                    title = f"{side}s, {cell['variant']}{name}"
                    results[title] = _figure(result, f"{side}_{figure}")
    return results


def _figure(result: dict[str, Any], name: str) -> dict[int, float]:
    layers = result["layers"]
    return {one["layer"]: one[name] for one in layers if one.get(name) is not None}


def _plot_bits(path: Path, cells: CellResults) -> None:
    """Rise of perplexity over the bits that a value really takes."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    places = _by_place(cells)
    for (cache, context), results in places.items():
        for name, result in results.items():
            rise = _rise_of(result, results.get(FULL))
            if name == FULL or rise is None:
                continue
            method = name.partition(", ")[0]
            line = f"{cache}, {context}: {method}" if len(places) > 1 else method
            xs, ys = lines.setdefault(line, ([], []))
            xs.append(result["bits"])
            # A logarithmic axis has no place for a fall.
            ys.append(100 * rise if rise > 0 else float("nan"))
    title, y = "AQUA-KV and others", "rise of perplexity, %"
    plot_lines(path, lines, title=title, x="bits a value", y=y, log_y=True)


def _plot_parts(path: Path, cells: CellResults) -> None:
    listed = [(f"{group}: {name}", variant) for group, name, variant, _ in ablation_rows()]
    measured = {cell["variant"] for cell, _ in cells}
    groups = [name for name, variant in listed if variant in measured]
    bars: dict[str, list[float | None]] = {}
    for (cache, context), results in _by_place(cells).items():
        rises = [results.get(variant) for _, variant in listed if variant in measured]
        bars[f"{cache}, {context}"] = [_percent(one, results.get(FULL)) for one in rises]
    plot_groups(path, groups, bars, title="AQUA-KV in 2 bits", y="rise of perplexity, %")


def _both_explained(cells: CellResults) -> dict[str, dict[int, float]]:
    return {
        f"{side}s, {variant}": shares
        for side in _SIDES
        for variant, shares in _explained_by(cells, side).items()
    }


TABLES: dict[str, Table] = {
    "bits": _bits_table,
    "parts": _parts_table,
    "variance": _variance_tables,
    "depth": _depth_tables,
    "pruned": _pruned_table,
}
PLOTS: dict[str, Plot] = {
    "bits": _plot_bits,
    "parts": _plot_parts,
    "variance": layers_of(
        _both_explained, "AQUA-KV: held-out tokens", "explained variance", high=1.0
    ),
    "depth": layers_of(
        lambda cells: lines_of(cells[0][1], "key_explained"), "AQUA-KV: keys", "explained variance"
    ),
}


PARTS = ("bits", "parts", "variance", "depth", "pruned")


@dataclass(frozen=True, kw_only=True)
class AquaAblation(CalibratedAblation):
    """What AQUA-KV's predictors are worth."""

    name = "aqua-ablation"
    method = "aqua"
    example = "recent=128"
    chosen = (*("artifact", "revision", "bits", "first_bits", "group", "predictor", "sink"),)
    described = ("windows", "step", "calibration_tokens", "calibration_length", "ridge")
    # They look at predictors alone.
    apart = ("variance", "depth")
    tables = TABLES
    plots = PLOTS
    smallest = (
        "--model needle --context 256 --windows 1 --parts bits,variance,depth,pruned --step 16 "
        "--new-tokens 8 "
        "--calibration-tokens 1K --calibration-length 256 --caches aqua:recent=16:flush=16"
    )

    caches: str | None = caches_option("aqua")
    top_k: int | float = budget_option(1.0)
    context: tuple[int, ...] = context_option((2048,), "tokens of a window")
    windows: int = count_option(3, "at most this many of each length")
    parts: tuple[str, ...] = parts_option(PARTS)
    new_tokens: int = count_option(128, "after a window, one a pass: of the part pruned")
    step: int = count_option(32, "tokens a forward pass, from the first one on")
    calibration_length: int = option(2048, "most tokens of a sequence", kind=length)
    ridge: float = option(AquaCalibration().ridge, "in mean variances of an input", kind=number(0))

    def details(self) -> dict[str, Any]:
        # Named where they are not the usual ones, so that other parts can be added to old results.
        usual = self.new_tokens == type(self).new_tokens
        return super().details() | ({} if usual else {"new_tokens": self.new_tokens})

    @property
    def usual(self) -> AquaCalibration:
        """Of all artifacts, before changes."""
        return AquaCalibration(ridge=self.ridge)

    def variants(self, part: str) -> Sequence[str]:
        return list(_variants(part))

    def asking(self, part: str, length: int) -> int:
        return length // 4

    def following(self, part: str) -> int:
        return self.new_tokens if part == "pruned" else 0

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, name = cell["part"], cell["variant"]
        if part == "variance":
            quality = self.artifact(EXPLAINED[name], subject)[1].quality
            return {"layers": [dict(one) for one in quality]}
        if part == "depth":
            return {"rows": self.depths(subject)}
        # A text that is too short is found before the work, not after it.
        windows = self.contexts(subject, part, cell["length"])
        base = choice.options
        assert isinstance(base, AquaConfig)
        if "dense_below" not in choice.name:
            base = base.replace(dense_below=0)
        if part == "pruned":
            chosen = self._pruned(name, subject, base)
            return read_through(subject, chosen, windows, 1, cell["length"])
        chosen = self._choice(_variants(part)[name], name, subject, base)
        return read_through(subject, chosen, windows, self.step)

    def depths(self, subject: Subject) -> dict[str, list[dict[str, Any]]]:
        """Figures by layer of predictors that read one layer or two, exact ones or in 2 bits."""
        learned: dict[str, Calibration] = {}
        for bits, name in ((16, "exact"), (_FEW, f"{_FEW} bits")):
            for layers, cls in (("1 layer", AquaCalibration), ("2 layers", TwoLayerCalibration)):
                calibration = cls(bits=bits, first_bits=max(4, bits), ridge=self.ridge)
                learned[f"{layers}, {name}"] = calibration
        found = learn_at_once(subject.model, self.corpus(subject), learned)
        return {
            name: [{"layer": layer, **one.quality} for layer, one in findings.items()]
            for name, findings in found.items()
        }

    def _pruned(self, name: str, subject: Subject, base: AquaConfig) -> CacheChoice:
        """Full attention, or a fifth of the cold tokens; predictors of the model's own artifact."""
        if name == FULL:
            return choose_cache(FULL, device=str(subject.device))
        options = {"top_k": _KEPT, **PRUNED[name][0]}
        if "predictor" not in options:
            folder = self.own_folder(subject) or self.artifact({"bits": _FEW}, subject)[0]
            options["artifact"] = str(folder)
        return made(name, PrunedCache, base.replace(**options))

    def artifact(
        self, changes: Mapping[str, Any], subject: Subject
    ) -> tuple[str, CalibrationArtifact]:
        """The folder of an artifact that was learned with ``changes``, and what is in it.

        Its name says what differs from the usual options.
        """
        learned, usual = replace(self.usual, **changes), self.usual.options()
        named = {field.name: getattr(learned, field.name) for field in fields(learned)}
        parts = [f"{name}-{value}" for name, value in named.items() if value != usual[name]]
        folder = "_".join(parts) or "usual"
        return str(self.path(folder)), self.find(folder, learned, subject)

    def _choice(
        self, variant: Variant, name: str, subject: Subject, base: AquaConfig
    ) -> CacheChoice:
        if variant.other is not None:
            return choose_cache(variant.other, device=str(subject.device))
        options: dict[str, Any] = dict(variant.cache)
        if variant.learned is not None:
            options["artifact"] = self.artifact(variant.learned, subject)[0]
        return made(name, AquaKVCache, base.replace(**options))


def _variants(part: str) -> dict[str, Any]:
    """The variants of a part by name."""
    if part in ("variance", "depth"):
        return dict(EXPLAINED) if part == "variance" else {"all rows": None}
    if part == "pruned":
        return {FULL: None, **PRUNED}
    return ablation_variants() if part == "parts" else bit_variants()


def read_through(
    subject: Subject,
    choice: CacheChoice,
    windows: Sequence[torch.Tensor],
    step: int,
    prompt_len: int = 0,
) -> dict[str, Any]:
    """Perplexity over ``windows [n]``, alike in length, each read ``step`` tokens a forward pass.

    They are read from their start, so that a token attends to what the cache has made of those
    before it, as the paper has it; all but the first token of a window count. With ``prompt_len``
    so many tokens enter at once, as a prompt, and those after it count. Returns ``ppl``,
    ``nats``, ``tokens``, ``window_nats`` of each window, ``seconds`` of all forward passes, and of
    the last window's end:

    ``bits`` that a number of a key or value takes in the cold part (``value_bits``), ``full_bits``
    that it takes in the model's dtype; ``held_ratio``, all bytes as a share of full keys and
    values, spare room and predictors included; ``predictor_bytes``. Of ``PrunedCache`` there are
    ``kept``, the share of cold tokens that a KV head still attends to, and ``needed``: that of rows
    which some head of the layer, or of one above it, does, as a row is predicted from those below.

    Raises:
        ValueError: nothing was cold; a step that the cache would not take as drafted tokens.
    """
    means, count, seconds = [], 0, 0.0
    for window in tqdm(windows, leave=False, unit="window", desc=choice.name):
        reader = Reader(subject.model, choice, len(window))
        reader.check_step(step)
        losses = _losses(reader, window, step, prompt_len)
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
        **(kept_shares(cache) if isinstance(cache, PrunedCache) else {}),
    }


def kept_shares(cache: PrunedCache) -> dict[str, float]:
    """``kept`` and ``needed`` of ``read_through``."""
    shares: dict[str, list[float]] = {name: [] for name in _SHARES}
    above: torch.Tensor | bool = False
    for layer in reversed(cache.retrieval_layers):
        assert layer.kv is not None and isinstance(layer.kv.index, H2OIndex)
        kept = layer.kv.index._scores.rows[:, :, : layer.kv.cold_len] > float("-inf")
        above = kept.any(1) | above
        shares["kept"].append(kept.double().mean().item())
        shares["needed"].append(above.double().mean().item())
    return {name: fmean(values) for name, values in shares.items()}


def value_bits(reader: Reader) -> float:
    """Bits that a number of a coded key or value takes, mean over layers; whole tokens alone.

    Of ours the rows as they are kept, with positions; of full attention its dtype. Windows of
    recent tokens don't count.

    Raises:
        ValueError: ours has nothing cold.
    """
    cache = reader.cache
    if isinstance(cache, RetrievalCache):
        stored_bytes, elements = 0, 0
        for layer in cache.retrieval_layers:
            kv = layer.kv
            if kv is None or kv.store is None or not kv.cold_len:
                remedy = "a smaller window as aqua:recent=32:flush=32"
                raise ValueError(f"nothing was cold: take a longer --context, or {remedy}")
            keys, values = kv.window.keys, kv.window.values
            # Beside these a store has a few figures about their making.
            stored_bytes += sum(x.nbytes for x in kv.store.state_dict().values() if x.ndim >= 3)
            elements += len(keys) * keys.shape[1] * kv.cold_len * (keys.shape[3] + values.shape[3])
        return 8 * stored_bytes / elements
    return 8.0 * reader.model.dtype.itemsize


def _losses(reader: Reader, window: torch.Tensor, step: int, prompt_len: int = 0) -> torch.Tensor:
    """``[len(window) - max(1, prompt_len)]`` in nats."""
    results = []
    last = reader.prefill(window[:prompt_len]) if prompt_len else None
    chunks = window[prompt_len:].split(step)
    for tokens in tqdm(chunks, leave=False, desc=reader.choice.name, mininterval=1):
        new = reader.feed(tokens, keep=len(tokens))
        # The logits before a step foretell the first of its tokens, its own all others.
        foretold = new[:-1] if last is None else torch.cat([last, new[:-1]])
        truth = (tokens if last is not None else tokens[1:]).to(foretold.device)
        losses = torch.nn.functional.cross_entropy(foretold.float(), truth, reduction="none")
        results.append(losses.cpu())
        last = new[-1:]
    return torch.cat(results)


MEASUREMENT = AquaAblation

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
