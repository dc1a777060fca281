"""How closely a cache agrees with full attention: tokens, distributions, recall by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.reader import Reader, UsageSum, divergence, mean_by_layer, mean_recall
from hf_kvret.lab.evaluate.task import Task
from hf_kvret.lab.evaluate.texts import text_windows
from hf_kvret.lab.program.options import context_option, count_option, text_option
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.plots import plot_groups, plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import Columns, held, markdown_table, or_dash, share, table_of

# Drafts of a round that full attention would verify.
_DRAFTS = 16


@dataclass(frozen=True, kw_only=True)
class Agreement(Task):
    """Agreement with full attention on any text: tokens, distributions, recall by layer.

    Full attention goes on greedily from each context. The same tokens are then forced through
    the cache, and in a second run the cache goes on by itself. Contexts are read as generate
    reads a prompt, exactly, so the token that follows it is the same for all caches: it is fed
    first, and not counted.
    """

    name: ClassVar[str] = "agreement"
    summary: ClassVar[str] = "how closely a cache agrees with full attention on any text"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval agreement --text wiki.test.raw --context 4K --caches flat,paris",
    )

    text: Path = text_option()
    context: tuple[int, ...] = context_option((4096,), "tokens of a context")
    windows: int = count_option(4, "at most this many contexts of each length")
    new_tokens: int = count_option(64, "of each continuation, after its first one")

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [{"cache": cache, "length": n} for n in self.context for cache in caches]

    def check_length(self, length: int) -> None:
        self.contexts(length)
        super().check_length(length + self.new_tokens)

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        forced, free, firsts, kls, recalls, accepted = 0, 0, [], [], [], []
        used = UsageSum()
        contexts = self.contexts(cell["length"])
        for context in tqdm(contexts, leave=False, desc=choice.name, unit="context"):
            full, logits = self.full(context)
            reader = Reader(self.subject.model, choice, len(context) + self.new_tokens)
            begun = reader.prefill(context)
            reader.need_logits()
            follower = reader.branch()
            exact, given = in_turn(full.fork(), follower, logits, self.new_tokens)
            expected = exact.argmax(-1)
            equal = given.argmax(-1) == expected
            forced += int(equal.sum())
            accepted += _rounds(equal.tolist())
            kls.append(divergence(exact, given))
            first = self.new_tokens if equal.all() else int(equal.int().argmin())
            firsts.append(first)
            # Up to its first other token a free run is the forced one.
            if first == self.new_tokens:
                free += first
            else:
                own = torch.tensor(reader.answer(begun, 1 + self.new_tokens)[1:])
                free += int((own == expected).sum())
            recalls.append(follower.recalls())
            used.add(follower)
        tokens = len(contexts) * self.new_tokens
        layers = mean_by_layer(recalls)
        return {
            "contexts": len(contexts),
            "tokens": tokens,
            "forced_equal": forced / tokens,
            "free_equal": free / tokens,
            "first_divergence": firsts,
            "accepted": sum(accepted) / len(accepted),
            "kl_mean": float(torch.cat(kls).mean()),
            "kl_max": float(torch.cat(kls).max()),
            **mean_recall(layers),
            "layers": layers,
            **used.row("seconds_with_recall"),
        }

    def full(self, context: torch.Tensor) -> tuple[Reader, torch.Tensor]:
        """Full attention behind a context, and its logits ``[1, vocab]`` there.

        It is kept until another context is asked for: more would take the memory of a cache each.
        """
        key = tuple(context.tolist())
        if key not in self._fulls:
            self._fulls.clear()
            reader = Reader(self.subject.model, choose_cache("full"), len(key) + self.new_tokens)
            self._fulls[key] = reader, reader.prefill(context)
        return self._fulls[key]

    @cached_property
    def _fulls(self) -> dict[tuple[int, ...], tuple[Reader, torch.Tensor]]:
        return {}

    def contexts(self, length: int) -> list[torch.Tensor]:
        """The texts ``[length]`` that are read."""
        return text_windows(self.subject, self.name, self.text, length, self.windows)

    @classmethod
    def table(cls, results: Results) -> str:
        first = f"first other of {results.setup['new_tokens']}"
        columns: Columns = {
            "cache": lambda cell, row: cell["cache"],
            "context": lambda cell, row: str(cell["length"]),
            "tokens equal, forced": lambda cell, row: f"{row['forced_equal']:.2%}",
            "KL, mean": lambda cell, row: or_dash(row["kl_mean"], ".2e"),
            "KL, max": lambda cell, row: or_dash(row["kl_max"], ".2e"),
            first: lambda cell, row: f"{median(row['first_divergence']):g}",
            "tokens equal, free": lambda cell, row: f"{row['free_equal']:.2%}",
            "recall": lambda cell, row: share(row["overlap"]),
            "mass": lambda cell, row: share(row["mass"]),
            "best mass": lambda cell, row: share(row["best_mass"]),
            "cold rows read": lambda cell, row: or_dash(row["read_ratio"], ".2%"),
            "held / full K,V": lambda cell, row: held(row),
        }
        # Results of 0.1.0 don't have it.
        if any("accepted" in row for _, row in results):
            rounds = f"accepted of {_DRAFTS}"
            columns = {**columns, rounds: lambda cell, row: or_dash(row.get("accepted"), ".1f")}
        table = table_of(results, columns)
        by_layer = _layer_table(results)
        return f"{table}\n\n{by_layer}" if by_layer else table

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        new = results.setup["new_tokens"]
        lines = {
            f"{cell['cache']}, {cell['length']}": (
                [layer["layer"] for layer in row["layers"]],
                [layer["overlap"] for layer in row["layers"]],
            )
            for cell, row in results
            if row["layers"]
        }
        if lines:
            title = f"share of the exact top-k that is selected, {new} tokens"
            plot_lines(path, lines, title=title, x="layer", y="recall")
            return
        groups = list(dict.fromkeys(str(cell["length"]) for cell, _ in results))
        bars: dict[str, list[float | None]] = {}
        for cell, row in results:
            heights = bars.setdefault(cell["cache"], [None] * len(groups))
            heights[groups.index(str(cell["length"]))] = row["kl_mean"]
        plot_groups(path, groups, bars, title=f"KL(full || cache), {new} tokens", y="nats")


def in_turn(
    full: Reader, reader: Reader, logits: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Full attention's logits ``[count, vocab]`` and a cache's, in fp32 on the CPU.

    They are those behind each of full attention's greedy tokens, the first one from its ``logits
    [1, vocab]``. Both take a step in turn, so that a busy machine is as slow for both.
    """
    exact, given = [logits], []
    for _ in tqdm(range(count), leave=False, desc="forced", mininterval=1):
        token = exact[-1].argmax(-1).cpu()
        exact.append(full.feed(token))
        given.append(reader.feed(token).float().cpu())
    return torch.cat(exact[1:]).float().cpu(), torch.cat(given)


def _rounds(equal: list[bool]) -> list[int]:
    """Drafts that full attention would accept in each round of ``lossless`` that is whole.

    ``equal``: for each forced token, whether the cache would have drafted it.
    """
    accepted, start = [], 0
    while start + _DRAFTS <= len(equal):
        accepted.append([*equal[start : start + _DRAFTS], False].index(False))
        # The pass that verifies gives one token more.
        start += accepted[-1] + 1
    return accepted or [equal.index(False) if False in equal else len(equal)]


def _layer_table(results: Results) -> str:
    """Recall of each layer, a column for each cache and context; empty where nothing retrieved."""
    columns = {
        f"{cell['cache']}, {cell['length']}": {layer["layer"]: layer for layer in row["layers"]}
        for cell, row in results
        if row["layers"]
    }
    if not columns:
        return ""

    def figures(layer: dict[str, Any] | None) -> str:
        if layer is None:
            return "-"
        overlap, mass, best = (share(layer[name]) for name in ("overlap", "mass", "best_mass"))
        return f"{overlap}, {mass} of {best}"

    numbers = sorted({number for layers in columns.values() for number in layers})
    rows = [[str(n), *(figures(layers.get(n)) for layers in columns.values())] for n in numbers]
    return markdown_table(["layer: recall, mass of best", *columns], rows)
