"""Perplexity of long text that goes through a cache step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.reader import Reader, UsageSum
from hf_kvret.lab.evaluate.task import Task
from hf_kvret.lab.evaluate.texts import text_windows
from hf_kvret.lab.program.arguments import share
from hf_kvret.lab.program.options import context_option, count_option, option, text_option
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.plots import plot_lines, series
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import Columns, held, or_dash, over_full, table_of, with_step


@dataclass(frozen=True, kw_only=True)
class Perplexity(Task):
    """Perplexity of long text, fed through the cache step by step.

    Each window of the text is read up to --prefill in one pass; the rest is fed --step tokens
    at a time, and only these count. A single forward pass over the window gives the same number
    for full attention.
    """

    name: ClassVar[str] = "ppl"
    summary: ClassVar[str] = "perplexity of long text fed step by step"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval ppl --text wiki.test.raw --context 4K --windows 8 --caches full,flat,paris",
    )

    text: Path = text_option("WikiText-2 raw test, or any")
    context: tuple[int, ...] = context_option((4096,), "window sizes in tokens")
    windows: int = count_option(8, "at most this many of each size")
    prefill: float = option(0.5, "share read in one pass", kind=share())
    step: int = count_option(
        1, "tokens a forward pass, up to max_draft (32), and one for caches that learn from queries"
    )

    def __post_init__(self) -> None:
        if min(self.context) < 8:
            raise ValueError(f"--context {min(self.context)}: a window needs at least 8 tokens")

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [{"cache": cache, "length": n} for n in self.context for cache in caches]

    def check_cells(self, cells: Sequence[Cell]) -> None:
        super().check_cells(cells)
        for choice in self.choices.values():
            Reader(self.subject.model, choice, 0).check_step(self.step)

    def check_length(self, length: int) -> None:
        self._windows(length)
        super().check_length(length)

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        windows = self._windows(cell["length"])
        total, tokens, used = 0.0, 0, UsageSum()
        for window in tqdm(windows, leave=False, unit="window"):
            reader, losses = self._read(choice, window)
            total, tokens = total + losses.double().sum().item(), tokens + len(losses)
            used.add(reader)
        return {
            "ppl": math.exp(total / tokens),
            "nats": total / tokens,
            "tokens": tokens,
            "windows": len(windows),
            **used.row(),
        }

    def _windows(self, length: int) -> list[torch.Tensor]:
        return text_windows(self.subject, self.name, self.text, length, self.windows)

    def _read(self, choice: CacheChoice, window: torch.Tensor) -> tuple[Reader, torch.Tensor]:
        """The reader at the end of the window, and the losses ``[tokens that count]`` in nats."""
        reader = Reader(self.subject.model, choice, len(window))
        start = max(1, int(self.prefill * len(window)))
        logits, losses = reader.prefill(window[:start]), []
        reader.need_logits()
        for place in tqdm(
            range(start, len(window), self.step), leave=False, desc=choice.name, mininterval=1
        ):
            step = window[place : place + self.step]
            # The last logits foretell the first of these tokens, the new ones all others.
            new = reader.feed(step, keep=len(step))
            predicted = torch.cat([logits[-1:], new[:-1]])
            losses.append(
                torch.nn.functional.cross_entropy(
                    predicted.float(), step.to(predicted.device), reduction="none"
                ).cpu()
            )
            logits = new
        return reader, torch.cat(losses)

    @classmethod
    def table(cls, results: Results) -> str:
        def nats_over_full(cell: Cell, row: dict[str, Any]) -> str:
            return or_dash(over_full(results, cell, row, "nats"), "+.4f")

        columns: Columns = {
            "cache": lambda cell, row: cell["cache"],
            "window": lambda cell, row: str(cell["length"]),
            "perplexity": lambda cell, row: or_dash(row["ppl"], ".3f"),
            "nats over full": nats_over_full,
            "cold rows read": lambda cell, row: or_dash(row["read_ratio"], ".2%"),
            "device / full K,V": lambda cell, row: f"{row['device_bytes'] / row['full_bytes']:.1%}",
            "held / full K,V": lambda cell, row: held(row),
            "tokens": lambda cell, row: str(row["tokens"]),
        }
        return with_step(table_of(results, columns), results)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        lines = series((cell["cache"], cell["length"], row["ppl"]) for cell, row in results)
        title, x = results.setup["text"], "window, tokens"
        plot_lines(path, lines, title=title, x=x, y="perplexity", log_x=True)
