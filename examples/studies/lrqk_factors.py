"""How good LRQK's factors are, on queries and keys of a real model.

python examples/studies/lrqk_factors.py --model needle --plot factors.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from ablation import Ablation, caches_option, distinct, main, not_here, parts_option
from lrqk_layers import LayerStudy
from lrqk_tables import factor_pictures, factor_tables, plot_factors
from lrqk_variants import VARIANTS
from tqdm import tqdm

from hf_kvret.evaluation.arguments import whole_number
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.common_options import (
    budget_option,
    count_option,
    lengths_option,
    text_option,
)
from hf_kvret.evaluation.contexts import describe_file
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.recording import read_layers
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.task import Choices
from hf_kvret.methods.lrqk import LRQKConfig

# Options of the cache that count here; variants choose the others, or nothing depends on them.
_COUNT = ("top_k", "recency", "half_life", "iterations", "penalty", "seed")


@dataclass(frozen=True, kw_only=True)
class LRQKFactors(Ablation):
    """How good LRQK's factors are: what low-rank proxies miss of the scores of a real model."""

    name: ClassVar[str] = "lrqk-factors"
    summary: ClassVar[str] = "how good LRQK's low-rank factors are"
    description: ClassVar[str] = (
        "How good LRQK's factors are: what low-rank proxies miss of the scores of a real model. "
        "A text is read once; queries and keys of every retrieval layer are kept in fp32, so "
        "take up to some 8K tokens. For each rank, proxies are made in several ways "
        "(--variants). Their relative error over all queries and keys is exact. Recall of the "
        "exact top-k is that of the last --queries, each among all tokens before it. Without "
        "--text the model reads a document of needles with questions at its end, which is what "
        "--model needle speaks."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "python examples/studies/lrqk_factors.py --model needle --plot factors.png",
        "python examples/studies/lrqk_factors.py --model reference --text novel.txt --lengths 2K",
    )
    method: ClassVar[str] = "lrqk"
    example: ClassVar[str] = "iterations=4"
    chosen: ClassVar[Sequence[str]] = tuple(
        one.name for one in fields(LRQKConfig) if one.name not in _COUNT
    )
    instead: ClassVar[str] = (
        f": --ranks and --variants say it, or nothing here depends on it; what counts: "
        f"{', '.join(_COUNT)}"
    )

    caches: str | None = caches_option("lrqk")
    top_k: int | float = budget_option(100)
    text: Path | None = text_option("default: a document of needles", required=False)
    lengths: tuple[int, ...] = lengths_option((2048,), "tokens of the text")
    windows: int = not_here(1)
    parts: tuple[str, ...] = not_here(("",))
    new_tokens: int = not_here()
    step: int = not_here()
    ranks: tuple[int, ...] = option(
        (8, 16, 32, 48, 64), "left out above the head dim", kind=distinct(whole_number(1))
    )
    variants: tuple[str, ...] = parts_option(VARIANTS)
    queries: int = count_option(64, "newest tokens of the text that select")
    # Queries and keys of the last text, for the cells about it.
    _read: dict[int, list[LayerStudy]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def check(self) -> None:
        if self.store != "device":
            raise ValueError(
                f"--store {self.store}: lrqk-factors stores nothing, leave the option out"
            )
        super().check()

    def details(self) -> dict[str, Any]:
        text = describe_file("--text", self.text)
        return {"text": text or "document of needles", "queries": self.queries}

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        self.check_caches(caches)
        # Lengths come first, so that each text is read once for all that is asked about it.
        return [
            {"cache": cache, "length": length, "variant": variant, "rank": rank}
            for length in self.lengths
            for cache in caches
            for variant in self.variants
            for rank in self.ranks
        ]

    def asking(self, part: str, length: int) -> int:
        return self.queries

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        for cell in cells:
            self._top_k(cell["length"], choices[cell["cache"]])

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        """The numbers of one cell; ``layers`` leaves out those with a head dim below the rank.

        Raises:
            ValueError: a text too short for the budget, or one that this model can't read.
        """
        length, rank = cell["length"], cell["rank"]
        top_k, options = self._top_k(length, choice)
        variant, studies = VARIANTS[cell["variant"]], self._studies(length, subject)
        largest = max(study.dim for study in studies)
        if min(self.ranks) > largest:
            raise ValueError(
                f"--ranks {','.join(map(str, self.ranks))}: all are above the head dim {largest}"
            )
        fitting = [study for study in studies if rank <= study.dim]
        found = []
        for study in tqdm(fitting, desc="layers", leave=False):
            quality = study.judge(variant.approximate(study, rank, options), top_k)
            found.append({"layer": study.layer, **quality})
        return {"top_k": top_k, "layers": found}

    def _top_k(self, length: int, choice: CacheChoice) -> tuple[int, LRQKConfig]:
        """How many tokens a query selects, and the options of the cache."""
        assert isinstance(choice.options, LRQKConfig)
        top_k = choice.options.budget(length)
        if top_k >= length - self.queries:
            raise ValueError(
                f"--lengths {length}: --queries {self.queries} and --top-k {top_k} leave nothing "
                "to choose; take a longer text, or less of them"
            )
        return top_k, choice.options

    def _studies(self, length: int, subject: Subject) -> list[LayerStudy]:
        if length not in self._read:
            self._read.clear()
            (text,) = self.contexts(subject, "", length)
            self._read[length] = [
                LayerStudy(**vars(layer), last=self.queries)
                for layer in read_layers(subject.model, text)
            ]
        return self._read[length]

    @classmethod
    def table(cls, results: Results) -> str:
        return factor_tables(results)

    @classmethod
    def pictures(cls, path: Path) -> list[Path]:
        return factor_pictures(path)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Errors over rank to ``path``, recall over rank to ``NAME-recall`` beside it."""
        plot_factors(path, results)


STUDY = LRQKFactors

if __name__ == "__main__":
    sys.exit(main(STUDY))
