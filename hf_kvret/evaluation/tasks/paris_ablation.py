"""What each part of ParisKV is worth, and how it holds up along a generation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.arguments import file_path, lengths, names, number, several, whole_number
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.contexts import describe_file, text_windows
from hf_kvret.evaluation.following import full_choices
from hf_kvret.evaluation.paris_report import ablation_pictures, ablation_tables, plot_ablation
from hf_kvret.evaluation.paris_variants import (
    DRIFT,
    SHIPPED,
    SWITCHES,
    drifting,
    switched,
    with_ratio,
)
from hf_kvret.evaluation.reader import Reader, check_positions
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.stretches import (
    Pace,
    mean_of,
    mean_stretches,
    text_source,
    walk,
)
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.task import Choices, Task
from hf_kvret.methods.paris import ParisConfig

PARTS = ("switches", "ratios", "drift")


@dataclass(frozen=True, kw_only=True)
class ParisAblation(Task):
    """What each part of ParisKV is worth: recall of the exact top-k without it."""

    name: ClassVar[str] = "paris-ablation"
    summary: ClassVar[str] = "what each part of ParisKV is worth"
    description: ClassVar[str] = (
        "What each part of ParisKV is worth: recall of the exact top-k without it. switches: "
        "one part off at a time, at --ratio candidates. ratios: recall against the share of "
        "candidates, at each length (the paper's figure 9). drift: recall along --drift-tokens "
        "after the shortest length, beside clusters that were learnt from the prompt (figures 1 "
        "and 10). All variants follow the same text, after each context."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval paris-ablation --text novel.txt --lengths 4K,8K,16K --plot ablation.png",
    )

    text: Path
    then: Path | None
    lengths: tuple[int, ...]
    windows: int
    parts: tuple[str, ...]
    ratio: float
    ratios: tuple[float, ...]
    clusters: int
    pace: Pace
    drift: Pace

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(
                f"unknown part {', '.join(unknown) or '(none named)'}: choose among "
                f"{', '.join(PARTS)}"
            )
        if self.windows < 1 or self.clusters < 1:
            raise ValueError(
                f"--windows {self.windows}, --clusters {self.clusters}: at least 1 each"
            )
        for ratio in (self.ratio, *self.ratios):
            if not 0 < ratio <= 1:
                raise ValueError(f"candidate ratio {ratio:g}: above 0 and at most 1")

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        # The paper's budget, and the only method that there is something to take away from.
        parser.set_defaults(caches="paris", top_k=100)
        parser.add_argument(
            "--text", type=file_path, required=True, metavar="FILE", help="contexts are cut from it"
        )
        parser.add_argument(
            "--then",
            type=file_path,
            metavar="FILE",
            help="another text that the drift part goes on with after the context",
        )
        parser.add_argument(
            "--lengths", type=lengths, default=[4096, 8192, 16384], help="tokens of a context"
        )
        parser.add_argument(
            "--windows", type=int, default=1, help="at most this many contexts of each length"
        )
        parser.add_argument("--parts", type=names, default=list(PARTS), help="default: all")
        parser.add_argument(
            "--ratio",
            type=number(0, 1),
            default=0.1,
            help="share of candidates of switches and drift",
        )
        parser.add_argument(
            "--ratios",
            type=several(number(0, 1)),
            default=(0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
            help="of the second",
        )
        parser.add_argument("--new-tokens", type=int, default=128, help="that are measured")
        parser.add_argument(
            "--drift-tokens", type=whole_number(1), default=2048, help="of the drift part"
        )
        parser.add_argument("--every", type=int, default=128, help="drift tokens a number")
        parser.add_argument("--step", type=int, default=8, help="tokens a forward pass")
        parser.add_argument(
            "--clusters", type=int, default=256, help="learnt by the opponents, for each KV head"
        )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        new = options.new_tokens
        # One stretch, rounded up to whole steps.
        whole = -(-new // max(1, options.step)) * max(1, options.step)
        return cls(
            options.text,
            options.then,
            tuple(options.lengths),
            options.windows,
            tuple(options.parts),
            options.ratio,
            tuple(options.ratios),
            options.clusters,
            Pace(new, whole, options.step),
            Pace(options.drift_tokens, options.every, options.step),
        )

    def setup(self) -> dict[str, Any]:
        return {
            "text": describe_file("--text", self.text),
            "then": describe_file("--then", self.then),
            "windows": self.windows,
            "ratio": self.ratio,
            "clusters": self.clusters,
            "new_tokens": self.pace.count,
            "drift_tokens": self.drift.count,
            "every": self.drift.every,
            "step": self.drift.step,
        }

    def cells(self, caches: Sequence[str]) -> list[Cell]:
        others = [cache for cache in caches if cache.split(":")[0].strip() != "paris"]
        if others:
            raise ValueError(
                f"--caches {', '.join(others)}: paris-ablation takes paris apart, so name paris "
                "alone, with options where wanted, as paris:center=false"
            )
        names = {
            "switches": (SHIPPED, *SWITCHES),
            "ratios": tuple(f"{ratio:g}" for ratio in self.ratios),
            "drift": tuple(DRIFT),
        }
        return [
            {"cache": cache, "part": part, "variant": name, "length": length}
            for part in self.parts
            for length in (self.lengths if part != "drift" else (min(self.lengths),))
            for name in names[part]
            for cache in caches
        ]

    def check(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check(cells, subject, choices)
        for cell in {(cell["length"], cell["part"] == "drift"): cell for cell in cells}.values():
            (window, *_) = self._texts(cell, subject)
            check_positions(subject.model, len(window))

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        length, drifts = cell["length"], cell["part"] == "drift"
        pace = self.drift if drifts else self.pace
        variant = self._variant(cell, subject, choice)
        windows = self._texts(cell, subject)
        samples, read, cold, candidates, seconds = [], 0, 0, 0, 0.0
        for window in windows:
            reader = Reader(subject.model, variant, len(window))
            logits = reader.prefill(window[:length])[-1]
            done = walk(reader, logits, text_source(window[length:], pace.step), pace)
            samples.append(done.compared(full_choices(subject.model, window, start=length)))
            read, cold, seconds = (
                read + done.rows_read,
                cold + done.rows_cold,
                seconds + done.seconds,
            )
            candidates += done.candidates
        stretches = mean_stretches(samples)
        if not cold:
            raise ValueError(
                f"--lengths {length}: nothing was cold; take a longer one, or smaller regions as "
                "paris:dense_below=0:recent=64:flush=64"
            )
        names = ("overlap", "mass", "best_mass", "equal")
        return {
            **{name: mean_of(stretches, name) for name in names},
            "stretches": stretches,
            "candidate_ratio": candidates / cold,
            "read_ratio": read / cold,
            "seconds_with_recall": seconds,
        }

    def _texts(self, cell: Cell, subject: Subject) -> list[torch.Tensor]:
        """Contexts of the text with what follows them."""
        drifts = cell["part"] == "drift"
        count = self.drift.count if drifts else self.pace.count
        then = self.then if drifts else None
        return text_windows(
            subject, self.name, self.text, cell["length"], count, self.windows, then
        )

    def _variant(self, cell: Cell, subject: Subject, choice: CacheChoice) -> CacheChoice:
        """The variant of the cache that the command line names."""
        given = choice.make(subject.model.config, 1)
        assert isinstance(given, RetrievalCache) and isinstance(given.options, ParisConfig)
        if cell["part"] == "switches":
            return switched(cell["variant"], given.options, self.ratio)
        if cell["part"] == "ratios":
            return with_ratio(given.options, float(cell["variant"]))
        return drifting(cell["variant"], given.options, self.ratio, self.clusters)

    @classmethod
    def table(cls, results: Results) -> str:
        return ablation_tables(results)

    @classmethod
    def pictures(cls, path: Path) -> list[Path]:
        return ablation_pictures(path)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """One picture a part: ``path``, and ``NAME-PART.png`` for the parts after the first."""
        plot_ablation(path, results)
