"""What it costs that query heads select together which share one KV head, as the heads of latent
attention do: caches that select so on their way through a text, and how far their logits are from
full attention's, at equal rows a selection and at equal rows of all selections together.

    python examples/studies/latent_heads.py --text wiki.test.raw --json a.json --plot a.png
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from ablation import CellResults, Plot, shown, values_option
from distances import NOTHING_COLD, DistanceStudy, Logits, cache_of, distance, follow

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.program.arguments import whole_number
from hf_kvret.lab.program.common_options import context_option, text_option
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.models.compatibility import is_latent

Search = Callable[[torch.Tensor, ColdTokens], torch.Tensor]


def counted(search: Search, heads: int, unions: list[tuple[float, float]]) -> Search:
    """A search that appends to ``unions`` the rows of a selection, and of all selections together.

    Means over queries, for the ``heads`` of one KV head and batches of one. Groups that select
    apart come to it as more queries, see ``core.head_groups``.
    """

    def search_and_count(query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        ids = search(query, cold)
        groups = -(-heads // query.shape[1])
        chosen = ids[0, 0].unflatten(0, (-1, groups)).long()
        marks = torch.zeros(*chosen.shape[:2], len(cold) + 1, dtype=torch.bool)
        marks.scatter_(-1, chosen.masked_fill(chosen < 0, len(cold)), True)
        marks = marks[..., :-1]
        union = marks.any(1).sum(-1).double().mean()
        unions.append((float(marks.sum(-1).double().mean()), float(union)))
        return ids

    return search_and_count


def follow_all(
    readers: Sequence[Reader], windows: Sequence[torch.Tensor], step: int, **changes: Any
) -> dict[str, Any]:
    """Go on from contexts to the ends of their windows; means as plain JSON values.

    As of ``distance``, with ``loss`` and ``full_loss``, the losses of the text's own next tokens,
    and ``rows`` of a selection, ``union`` of all of them, ``selections``, how many these are.

    Raises:
        ValueError: nothing was cold.
    """
    heads = readers[0].model.config.get_text_config(decoder=True).num_attention_heads
    unions: list[tuple[float, float]] = []

    def watch(cache: RetrievalCache) -> None:
        for layer in cache.retrieval_layers:
            assert layer.kv is not None
            # One index takes another search.
            index: Any = layer.kv.index
            index.search = counted(index.search, heads, unions)

    places: list[Logits] = []
    losses = []
    for start, window in zip(readers, windows, strict=True):
        _, logits = follow(start, window, step, watch, **changes)
        places.append(logits)
        after = window[start.length + 1 :, None]
        losses.append([float(-one[:-1].gather(-1, after).mean()) for one in logits])
    if not unions:
        raise ValueError(NOTHING_COLD)
    size = changes.get("select_heads") or heads
    return distance(places) | {
        "loss": fmean(ours for ours, _ in losses),
        "full_loss": fmean(full for _, full in losses),
        "rows": fmean(rows for rows, _ in unions),
        "union": fmean(union for _, union in unions),
        "selections": -(-heads // size),
    }


def _by_way(cells: CellResults) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Results by cache, length and heads a selection, with ascending rows."""
    ways: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell, result in cells:
        size = int(cell["variant"].split(", ")[0])
        heads = f"{size} (all)" if result["selections"] == 1 and size > 1 else str(size)
        ways.setdefault((cell["cache"], str(cell["length"]), heads), []).append(result)
    return {key: sorted(own, key=lambda one: one["rows"]) for key, own in ways.items()}


def _table(cells: CellResults) -> str:
    """A row for each number of rows a selection, then divergences at equal rows of the union."""
    ways, rows = _by_way(cells), []
    for key, own in ways.items():
        for one in own:
            loss = one["loss"] - one["full_loss"]
            numbers = (f"{one['rows']:.0f}", f"{one['union']:.0f}", f"{one['kl']:.4f}")
            rows.append([*key, *numbers, f"{one['equal']:.3f}", f"{loss:+.4f}"])
    named = ["cache", "context", "heads a selection"]
    table = markdown_table([*named, "rows", "union", "KL", "tokens equal", "loss - full's"], rows)
    unions = [
        count
        for count in (2**power for power in range(5, 13))
        if any(at(own, "union", "kl", count) is not None for own in ways.values())
    ]
    lines = [
        [*key, *(shown(at(own, "union", "kl", count), ".4f") for count in unions)]
        for key, own in ways.items()
    ]
    header = [*named, *(f"KL at {count} rows in all" for count in unions)]
    return f"{table}\n\n{markdown_table(header, lines)}" if unions else table


def at(results: list[dict[str, Any]], x: str, y: str, place: float) -> float | None:
    """``y`` where ``x`` is ``place``, between measured points, both logarithmic; else None."""
    points = sorted((one[x], one[y]) for one in results)
    for (low, first), (high, second) in pairwise(points):
        if low <= place <= high and min(first, second) > 0:
            part = math.log(place / low) / math.log(high / low)
            return math.exp((1 - part) * math.log(first) + part * math.log(second))
    return None


def _lines(x: str, label: str) -> Plot:
    def plot(path: Path, cells: CellResults) -> None:
        lines = {
            f"{cache}, {length}: {heads}": ([one[x] for one in own], [one["kl"] for one in own])
            for (cache, length, heads), own in _by_way(cells).items()
        }
        title = "divergence from full attention, by query heads a selection"
        plot_lines(path, lines, title=title, x=label, y="KL, nats", log_x=True, log_y=True)

    return plot


@dataclass(frozen=True, kw_only=True)
class LatentHeads(DistanceStudy):
    """What it costs that query heads select together which share one KV head."""

    name = "latent-heads"
    others = ("paris", "lrqk", "ctkvr")
    chosen = ("select_heads", "top_k")
    instead = ": --select-heads and --top-ks name them"
    tables = MappingProxyType({"tokens": _table})
    plots = MappingProxyType(
        {
            "tokens": _lines("union", "different rows of all selections"),
            "rows": _lines("rows", "rows a selection"),
        }
    )
    drawn = MappingProxyType({"rows": "tokens"})
    smallest = (
        "--text examples/notebooks/text.txt --context 512 --windows 1 --new-tokens 16 "
        "--top-ks 8,16 --select-heads 4,16 --caches flat:recent=16:flush=16"
    )

    model: str = option("reference-latent", "a folder, a hub id, or a model of ours")
    text: Path = text_option()
    context: tuple[int, ...] = context_option((4096, 8192), "tokens of a context")
    select_heads: tuple[int, ...] = values_option(
        (1, 4, 16), "query heads a selection", whole_number(1)
    )
    top_ks: tuple[int, ...] = values_option(
        (32, 64, 128, 256, 512, 1024), "rows a selection", whole_number(1)
    )

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return list(filter(self._serves, super().cells_of(caches)))

    def _serves(self, cell: Cell) -> bool:
        """Whether the cache selects in such groups; some can select for all heads alone."""
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
        return [f"{size}, {rows}" for size in self.select_heads for rows in self.top_ks]

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        length, windows = cell["length"], self.contexts(subject, cell["part"], cell["length"])
        cache, options = cache_of(subject, choice)
        if max(self.top_ks) >= length - options.sink - options.recent - options.flush:
            raise ValueError(
                f"--context {length}: --top-ks {max(self.top_ks)} leave nothing to choose; take "
                "longer contexts, or fewer rows"
            )
        size, rows = _size(cell), int(cell["variant"].split(", ")[1])
        if options.group_obstacle:
            # The lists of CTkvr are as long as its budget wants them.
            options = options.replace(top_k=rows)
        readers = self.read(subject, cell, cache, options, windows)
        heads = subject.model.config.get_text_config(decoder=True).num_attention_heads
        # Some methods take no other size than all.
        changes = {"top_k": rows, "select_heads": None if size >= heads else size}
        return follow_all(readers, windows, self.step, **changes)


def _size(cell: Cell) -> int:
    """Query heads a selection of a cell."""
    return int(cell["variant"].split(", ")[0])


MEASUREMENT = LatentHeads

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
