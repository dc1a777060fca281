"""What it gives that the cold tokens which a query does not select count as one more token: how far
a cache's logits are from full attention's on its way through a text, at equal rows read.

    python examples/studies/rest_tokens.py --text wiki.test.raw --json rest.json --plot rest.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablation import Ablation, caches_option, made, parts_option, values_option
from head_caches import read_contexts
from rest_distances import follow
from rest_tables import DRAWN, PLOTS, TABLES

from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.arguments import number
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.common_options import context_option, count_option, text_option
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.reader import Reader
from hf_kvret.evaluation.results import Cell
from hf_kvret.evaluation.scripts import run_script
from hf_kvret.evaluation.subject import Subject

OFF = "nothing"
"""What stands for the rest where nothing does."""


def rest_options(name: str) -> dict[str, Any]:
    """Options of a cache for what stands for the rest, as ``--rests`` names it."""
    blocks = int(name) if name.isdigit() else None
    return {"rest": None if name == OFF else "mean", "rest_blocks": blocks}


def _known(name: str) -> str:
    if name not in (OFF, "mean") and not (name.isdigit() and int(name)):
        raise argparse.ArgumentTypeError(
            f"{name!r}: choose {OFF}, mean, or tokens of a mean, as 512"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class RestTokens(Ablation):
    """What it gives that tokens which are not selected count."""

    name = "rest-tokens"
    method = "flat"
    others = ("paris", "lrqk", "ctkvr", "a2ats")
    example = "recent=128"
    chosen = ("rest", "rest_blocks", "top_k")
    instead = ": --rests and --shares name them"
    described = ("windows", "new_tokens", "step")
    tables = TABLES
    plots = PLOTS
    drawn = DRAWN

    model: str = option("reference", "a folder, a hub id, or a model of ours")
    caches: str | None = caches_option("flat")
    text: Path | None = text_option("default: documents of needles", required=False)
    context: tuple[int, ...] = context_option((4096,), "tokens of a context")
    windows: int = count_option(2, "at most this many contexts of each length")
    parts: tuple[str, ...] = parts_option(("tokens",))
    rests: tuple[str, ...] = values_option(
        (OFF, "mean", "512"),
        "what stands for the rest: nothing, mean, or cold tokens of a mean",
        _known,
    )
    shares: tuple[float, ...] = values_option(
        (0.01, 0.03, 0.06, 0.12), "rows read, as shares of the cold ones", number(0.0, 1.0)
    )
    # Contexts that were read by a cache, for all its variants.
    _read: dict[tuple[Any, ...], list[Reader]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def variants(self, part: str) -> Sequence[str]:
        return [f"{share:g}, {rest}" for share in self.shares for rest in self.rests]

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        length, windows = cell["length"], self.contexts(subject, cell["part"], cell["length"])
        cache = choice.make(subject.model.config, 1)
        assert isinstance(cache, RetrievalCache)
        options = cache.options
        if "dense_below" not in choice.name:
            options = options.replace(dense_below=0)
        share, rest = cell["variant"].split(", ")
        # The lists of CTkvr are as long as its budget wants them.
        top_k = float(share) if cell["cache"].startswith("ctkvr") else None
        key = (cell["cache"], length, top_k)
        if key not in self._read:
            # The caches and lengths before are done.
            for old in [old for old in self._read if old[:2] != key[:2]]:
                del self._read[old]
            if top_k is not None:
                options = options.replace(top_k=top_k)
            begun = made(cell["cache"], type(cache), options)
            self._read[key] = read_contexts(subject, begun, windows, length)
        changes = {"top_k": float(share), **rest_options(rest)}
        return follow(self._read[key], windows, self.step, **changes)


MEASUREMENT = RestTokens

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
