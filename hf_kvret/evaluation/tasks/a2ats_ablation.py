"""What the parts of A2ATS are worth, and what they rest on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from hf_kvret.calibration.a2ats import A2ATSCalibration
from hf_kvret.evaluation.a2ats_artifacts import EXACT_KEYS, FULL_METHOD, SWITCHES, Artifacts
from hf_kvret.evaluation.a2ats_exact import with_exact_keys
from hf_kvret.evaluation.a2ats_report import (
    PLACES,
    ablation_pictures,
    ablation_tables,
    plot_ablation,
)
from hf_kvret.evaluation.a2ats_study import follow, likeness
from hf_kvret.evaluation.arguments import (
    budget,
    file_path,
    length,
    length_or_none,
    lengths,
    names,
    several,
    whole_number,
)
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.reader import check_positions
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.stretches import Pace
from hf_kvret.evaluation.study_artifacts import artifact_folder
from hf_kvret.evaluation.study_texts import Texts
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.task import Choices, Task, lengths_of
from hf_kvret.methods.a2ats import A2ATSCache, A2ATSConfig

PARTS = ("switches", "errors", "alike", "budget_of")
_OWNERS = ("head", "union")
# What the artifacts and the inputs alone decide; it is the same for every cache.
_WITHOUT_CACHE = ("errors", "alike")
_CHOSEN = ("artifact", "revision")


@dataclass(frozen=True)
class Inputs:
    """Inputs whose own codebooks are compared.

    Attributes:
        count: of texts.
        tokens: of each.
        codewords: of each codebook; the paper has 4096 of some 32K tokens.
    """

    count: int
    tokens: int
    codewords: int

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"--inputs {self.count}: at least 2, they are compared")
        if not 1 <= self.codewords <= self.tokens:
            raise ValueError(
                f"--input-codewords {self.codewords} of --input-tokens {self.tokens}: at least 1, "
                "and no more than tokens"
            )


@dataclass(frozen=True, kw_only=True)
class A2ATSAblation(Task):
    """What the parts of A2ATS are worth, and what they rest on."""

    name: ClassVar[str] = "a2ats-ablation"
    summary: ClassVar[str] = "what each part of A2ATS is worth"
    description: ClassVar[str] = (
        "What the parts of A2ATS are worth, and what they rest on. switches: recall of the "
        "exact top-k with and without windowed RoPE and query-aware codebooks (the paper's "
        "table 2), and with windowed RoPE and no codebooks. errors: score error of held-out "
        "text by layer (figure 3). alike: how alike codebooks are that different inputs have of "
        "their own, before RoPE and after it (figure 1). budget_of: whether KV heads choose, or "
        "their query heads and all attend to all (as published). The command makes the four "
        "artifacts that it needs, from --calibration-text or from the start of --text, and "
        "measures on text that none of them has seen. Without --text the model reads documents "
        "of needles, which is what --model needle speaks."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval a2ats-ablation --text novel.txt --json ablation.json --plot ablation.png",
        "hf-kvret eval a2ats-ablation --model needle --parts switches,errors",
    )

    texts: Texts
    artifacts: Artifacts
    inputs: Inputs
    lengths: tuple[int, ...]
    windows: int
    parts: tuple[str, ...]
    budgets: tuple[int | float, ...]
    pace: Pace
    retrieval: dict[str, Any]

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(
                f"unknown part {', '.join(unknown) or '(none named)'}: choose among "
                f"{', '.join(PARTS)}"
            )
        if self.windows < 1:
            raise ValueError(f"--windows {self.windows}: at least 1")
        if not self.budgets or len(set(self.budgets)) < len(self.budgets):
            raise ValueError(f"--budgets {self.budgets}: different values, at least one")
        for top_k in self.budgets:
            A2ATSConfig(top_k=top_k)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(caches="a2ats", top_k=0.06)
        add = parser.add_argument
        add("--text", type=file_path, metavar="FILE", help="default: documents of needles")
        add("--lengths", type=lengths, default=[4096], help="tokens of a context")
        add("--windows", type=int, default=1, help="at most this many contexts of each length")
        add("--parts", type=names, default=list(PARTS), help=f"default: all of {', '.join(PARTS)}")
        add("--new-tokens", type=int, default=128, help="that are measured")
        add("--step", type=int, default=8, help="tokens a forward pass")
        add(
            "--budgets",
            type=several(budget),
            default=(0.03, 0.06, 0.12),
            help="of the part budget_of",
        )
        add(
            "--artifacts",
            type=file_path,
            metavar="DIR",
            help="keep the four artifacts here, or find them; default: a folder named after --json",
        )
        add(
            "--calibration-text",
            type=file_path,
            metavar="FILE",
            help="learn from this; default: the start of --text, contexts begin after it",
        )
        add("--calibration-tokens", type=length, default="32K", help="the last tenth is held out")
        add("--calibration-length", type=length, default="4K", help="most tokens of a sequence")
        add("--uuid-tokens", type=length_or_none, default="8K", help="of random UUIDs beside text")
        add("--codewords", type=whole_number(1), default=1024, help="of each KV head")
        add("--rounds", type=whole_number(0), default=30, help="of k-means at most, for inputs too")
        add(
            "--rope-window",
            type=whole_number(0),
            default=2048,
            help="position that queries are seen at, b",
        )
        add("--inputs", type=int, default=3, help="texts whose own codebooks are compared")
        add("--input-tokens", type=length, default="4K", help="of each")
        add("--input-codewords", type=int, default=512, help="of each of their KV heads")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        given = options
        texts = Texts(
            given.text,
            given.calibration_text,
            given.calibration_tokens,
            given.uuid_tokens,
            given.calibration_length,
            given.seed,
        )
        calibration = A2ATSCalibration(
            given.codewords, given.rope_window, given.rounds, seed=given.seed
        )
        folder = artifact_folder(given)
        # One stretch, rounded up to whole steps.
        whole = -(-given.new_tokens // max(1, given.step)) * max(1, given.step)
        return cls(
            texts,
            Artifacts(folder, texts, calibration),
            Inputs(given.inputs, given.input_tokens, given.input_codewords),
            tuple(given.lengths),
            given.windows,
            tuple(given.parts),
            given.budgets,
            Pace(given.new_tokens, whole, given.step),
            {"top_k": given.top_k, "store": given.store},
        )

    def setup(self) -> dict[str, Any]:
        learned = self.artifacts.options
        return {
            **self.texts.describe(),
            "windows": self.windows,
            "new_tokens": self.pace.count,
            "step": self.pace.step,
            "codewords": learned.codewords,
            "rounds": learned.rounds,
            "rope_window": learned.window,
            "inputs": self.inputs.count,
            "input_tokens": self.inputs.tokens,
            "input_codewords": self.inputs.codewords,
        }

    def cells(self, caches: Sequence[str]) -> list[Cell]:
        for cache in caches:
            _check_cache(cache)
        variants = {
            "switches": [*SWITCHES, EXACT_KEYS],
            "errors": list(SWITCHES),
            "alike": list(PLACES),
            "budget_of": [f"{owner}, {budget}" for budget in self.budgets for owner in _OWNERS],
        }
        found: list[Cell] = []
        for part in self.parts:
            if part in _WITHOUT_CACHE:
                found += [
                    {"cache": caches[0], "part": part, "variant": name} for name in variants[part]
                ]
            else:
                found += [
                    {"cache": cache, "part": part, "variant": name, "length": length}
                    for length in self.lengths
                    for name in variants[part]
                    for cache in caches
                ]
        return found

    def check(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        for count in lengths_of(cells):
            size = count + self.pace.count
            self.texts.contexts(subject, size, self.pace.count, self.windows)
            check_positions(subject.model, size)
        if any(cell["part"] == "alike" for cell in cells):
            self.texts.inputs(subject, self.inputs.count, self.inputs.tokens)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, name = cell["part"], cell["variant"]
        if part == "errors":
            quality = self.artifacts.find(name, subject).quality
            return {
                "layers": [
                    {"layer": one["layer"], "score_error": one["score_error"]} for one in quality
                ]
            }
        if part == "alike":
            return self._alike(PLACES[name], subject)
        options: dict[str, Any] = {}
        if part == "budget_of":
            owner, budget = name.split(", ")
            options, name = {"budget_of": owner, "top_k": budget}, FULL_METHOD
        exact = name == EXACT_KEYS
        length = cell["length"]
        # A text that is too short is found before the work, not after it.
        windows = self.texts.contexts(
            subject, length + self.pace.count, self.pace.count, self.windows
        )
        row = FULL_METHOD if exact else name
        chosen = self.artifacts.choice(row, subject, choice.name, self.retrieval, **options)
        chosen = with_exact_keys(chosen) if exact else chosen
        return follow(subject, chosen, windows, length, self.pace)

    def _alike(self, rotated: bool, subject: Subject) -> dict[str, Any]:
        inputs = self.texts.inputs(subject, self.inputs.count, self.inputs.tokens)
        learned = self.artifacts.options
        layers = likeness(
            subject,
            inputs,
            self.inputs.codewords,
            rotated=rotated,
            rounds=learned.rounds,
            seed=learned.seed,
        )
        return {"inputs": list(inputs), "layers": layers}

    @classmethod
    def table(cls, results: Results) -> str:
        return ablation_tables(results)

    @classmethod
    def folders(cls, options: argparse.Namespace) -> dict[str, Path]:
        folder = artifact_folder(options)
        return {} if folder is None else {"--artifacts": folder}

    @classmethod
    def pictures(cls, path: Path) -> list[Path]:
        return ablation_pictures(path)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """One picture a part: ``path``, and ``NAME-PART.png`` for the parts after the first."""
        plot_ablation(path, results)


def _check_cache(cache: str) -> None:
    """ValueError for another cache than a2ats, or with an artifact."""
    name, *options = (part.strip() for part in cache.split(":"))
    if name != A2ATSCache.name:
        raise ValueError(
            f"--caches {cache}: a2ats-ablation takes a2ats apart, so name a2ats alone, with "
            "options where wanted, as a2ats:recent=128"
        )
    for option in (part.partition("=")[0] for part in options):
        if option in _CHOSEN:
            raise ValueError(
                f"--caches {cache}: a2ats-ablation makes its artifacts itself, leave {option} out; "
                "--artifacts names their folder"
            )
