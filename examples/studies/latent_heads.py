"""What it costs that query heads select together which share one KV head, as the heads of latent
attention do. mass: of the exact scores of each layer, the share of attention that selections
hold, at equal rows a selection and at equal rows of all selections together; for the model's
heads, and for heads that have nothing in common: the same, each with the tokens in an order of its
own. tokens: caches that select so on their way through a text, and how far their logits are from
full attention's.

    python examples/studies/latent_heads.py --text wiki.test.raw --json a.json --plot a.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablation import Ablation, caches_option, made, parts_option, values_option
from head_caches import follow_all, read_contexts
from head_tables import DRAWN, PLOTS, TABLES
from shared_heads import APART, REAL, masses

from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.arguments import whole_number
from hf_kvret.evaluation.caches import CacheChoice, choose_cache
from hf_kvret.evaluation.common_options import context_option, count_option, text_option
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.reader import Reader
from hf_kvret.evaluation.recording import read_layers
from hf_kvret.evaluation.results import Cell
from hf_kvret.evaluation.scripts import run_script
from hf_kvret.evaluation.subject import Subject
from hf_kvret.integration.compatibility import is_latent

PARTS = ("mass", "tokens")


@dataclass(frozen=True, kw_only=True)
class LatentHeads(Ablation):
    """What it costs that query heads select together which share one KV head."""

    name = "latent-heads"
    method = "flat"
    others = ("paris", "lrqk", "ctkvr")
    example = "recent=128"
    chosen = ("select_heads", "top_k")
    instead = ": --select-heads and --top-ks name them"
    described = ("windows", "new_tokens", "step")
    tables = TABLES
    plots = PLOTS
    drawn = DRAWN

    model: str = option("reference-latent", "a folder, a hub id, or a model of ours")
    caches: str | None = caches_option("flat")
    text: Path = text_option()
    context: tuple[int, ...] = context_option((4096, 8192), "tokens of a context")
    windows: int = count_option(2, "at most this many contexts of each length")
    parts: tuple[str, ...] = parts_option(PARTS)
    select_heads: tuple[int, ...] = values_option(
        (1, 4, 16), "query heads a selection", whole_number(1)
    )
    top_ks: tuple[int, ...] = values_option(
        (32, 64, 128, 256, 512, 1024), "rows a selection", whole_number(1)
    )
    # Contexts that were read by a cache, for all its variants.
    _read: dict[tuple[Any, ...], list[Reader]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        # Exact scores are the same for all caches; some of them can't select in groups.
        return [
            cell
            for cell in super().cells_of(caches)
            if (cell["cache"] == caches[0] if cell["part"] == "mass" else self._serves(cell))
        ]

    def _serves(self, cell: Cell) -> bool:
        options = choose_cache(cell["cache"]).options
        assert options is not None
        return not options.group_obstacle or _size(cell) == max(self.select_heads)

    def check_contexts(self, cells: Sequence[Cell], subject: Subject) -> None:
        super().check_contexts(cells, subject)
        if not is_latent(subject.model.config):
            raise ValueError(
                f"--model {subject.name}: {subject.model.config.model_type} has no latent "
                "attention, whose query heads share one KV head; leave --model out"
            )

    def variants(self, part: str) -> Sequence[str]:
        if part == "mass":
            return [REAL, APART]
        return [f"{size}, {rows}" for size in self.select_heads for rows in self.top_ks]

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        length, windows = cell["length"], self.contexts(subject, cell["part"], cell["length"])
        cache = choice.make(subject.model.config, 1)
        assert isinstance(cache, RetrievalCache)
        options = cache.options
        if "dense_below" not in choice.name:
            options = options.replace(dense_below=0)
        if max(self.top_ks) >= length - options.sink - options.recent - options.flush:
            raise ValueError(
                f"--context {length}: --top-ks {max(self.top_ks)} leave nothing to choose; take "
                "longer contexts, or fewer rows"
            )
        if cell["part"] == "mass":
            layers = (read_layers(subject.model, window) for window in windows)
            return masses(
                layers,
                self.new_tokens,
                (options.sink, options.recent),
                self.select_heads,
                self.top_ks,
                apart=cell["variant"] == APART,
            )
        size, rows = _size(cell), int(cell["variant"].split(", ")[1])
        if options.group_obstacle:
            # The lists of CTkvr are as long as its budget wants them.
            options = options.replace(top_k=rows)
        key = (cell["cache"], length, options.top_k)
        if key not in self._read:
            # The lengths before are done.
            for old in [old for old in self._read if old[1] != length]:
                del self._read[old]
            begun = made(cell["cache"], type(cache), options)
            self._read[key] = read_contexts(subject, begun, windows, length)
        heads = subject.model.config.get_text_config(decoder=True).num_attention_heads
        # Some methods take no other size than all.
        changes = {"top_k": rows, "select_heads": None if size >= heads else size}
        return follow_all(self._read[key], windows, self.step, **changes)


def _size(cell: Cell) -> int:
    """Query heads a selection of a cell of ``tokens``."""
    return int(cell["variant"].split(", ")[0])


MEASUREMENT = LatentHeads

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
