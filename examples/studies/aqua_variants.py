"""AQUA-KV's variants, its baselines, and how each is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FULL, USUAL = "full", "aqua"
BITS = (2, 3, 4)
# Of the paper's table 1, and what the ablations of this command are made with.
_FEW = 2


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
    "predictors": {
        "linear": _AQUA,
        "MLP": _changed(7.03, predictor="mlp"),
        "reduced rank": _changed(7.22, predictor="low_rank"),
        "linear, 4 bits (GPTQ)": _changed(7.03, predictor_bits=4),
    },
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
    "anchors": {
        "first layer": _AQUA,
        **{f"every {n} layers": _changed(anchor_every=n) for n in (8, 4, 2)},
    },
    "inputs": {
        "values from keys and values": _AQUA,
        "values from keys": _changed(7.04, value_inputs="keys"),
        "values from values": _changed(7.04, value_inputs="values"),
        "no predictor of values": _changed(7.06, value_inputs="none"),
        "no predictor of keys": _changed(7.50, key_inputs="none"),
        "no predictors (HIGGS)": Variant(None, {"bits": _FEW, "predictor": "none"}, paper=7.47),
    },
    "calibrated": {
        "with 2 bits": _AQUA,
        "without a codec": _changed(7.13, cache={"first_bits": 4}, **_AGNOSTIC),
    },
    "codec": {
        "HIGGS": _AQUA,
        "round-to-nearest": _changed(10.90, backbone="minmax", cache={"backbone": "minmax"}),
        "round-to-nearest, after RoPE": _changed(
            10.33, backbone="minmax", space="after", cache={"backbone": "minmax"}
        ),
    },
}
"""By what is varied. The usual variant stands in each group, and is measured once."""

EXPLAINED: dict[str, Mapping[str, Any]] = {
    "exact": _AGNOSTIC,
    **{f"{bits} bits": {"bits": bits} for bits in reversed(BITS)},
    "from keys": {"bits": _FEW, "value_inputs": "keys"},
    "from values": {"bits": _FEW, "value_inputs": "values"},
}
"""By what predictors read: the layer below as it is, or as so many bits leave it; and for values
which of the two, from 2 bits."""

_BACKBONES = {"higgs": "higgs", "round-to-nearest": "minmax", "kivi": "kivi"}
# Perplexities of Llama 3.1 8B (table 2).
PAPER_8B = {
    "full": 5.61,
    **{"aqua, 2 bits": 5.72, "aqua, 3 bits": 5.64, "aqua, 4 bits": 5.61},
    **{"higgs, 2 bits": 5.89, "higgs, 3 bits": 5.66, "higgs, 4 bits": 5.62},
    **{"kivi, 2 bits": 7.37, "kivi, 3 bits": 6.04, "kivi, 4 bits": 5.64},
}


def bit_variants() -> dict[str, Variant]:
    """The rows of table 2 by name, ``METHOD, N bits``."""
    found = {FULL: _FULL}
    for bits in BITS:
        found[f"{USUAL}, {bits} bits"] = Variant({"bits": bits}, {"bits": bits})
        for name, backbone in _BACKBONES.items():
            cache = {"bits": bits, "predictor": "none", "backbone": backbone}
            found[f"{name}, {bits} bits"] = Variant(None, cache)
    return found


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
