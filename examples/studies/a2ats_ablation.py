"""What the parts of A2ATS are worth, and what they rest on. switches: recall of the exact top-k
with and without windowed RoPE and query-aware codebooks (the paper's table 2), and with windowed
RoPE and no codebooks. errors: score error of held-out text by layer (figure 3). alike: how alike
codebooks are that different inputs have of their own, before RoPE and after it (figure 1).
budget_of: whether KV heads choose, or their query heads and all attend to all (as published). It
makes the four artifacts that it needs, from --calibration-text or from the start of --text, and
measures on text that none of them has seen. Without --text the model reads documents of needles,
which is what --model needle speaks.

    python examples/studies/a2ats_ablation.py --text novel.txt --json a.json --plot a.png
    python examples/studies/a2ats_ablation.py --model needle --parts switches,errors
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from a2ats_parts import ExactKeysCache, likeness
from a2ats_tables import PLACES, PLOTS, SWITCHES, TABLES
from ablation import caches_option, distinct, made, main, parts_option
from calibrated import CalibratedAblation
from follower import Follower

from hf_kvret.calibration import CalibrationArtifact
from hf_kvret.calibration.a2ats import A2ATSCalibration
from hf_kvret.evaluation.arguments import budget, length, length_or_none, whole_number
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.common_options import budget_option, count_option
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.results import Cell
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.task import Choices
from hf_kvret.methods.a2ats import A2ATSCache, A2ATSConfig

PARTS = ("switches", "errors", "alike", "budget_of")
FULL_METHOD = "windowed, query-aware"
# A row beside those of the table, which shows what codewords cost and what windowed RoPE does.
EXACT_KEYS = "windowed, exact keys"
_OWNERS = ("head", "union")


@dataclass(frozen=True, kw_only=True)
class A2ATSAblation(CalibratedAblation):
    """What the parts of A2ATS are worth, and what they rest on."""

    name: ClassVar[str] = "a2ats-ablation"
    method: ClassVar[str] = "a2ats"
    example: ClassVar[str] = "recent=128"
    chosen: ClassVar[Sequence[str]] = ("artifact", "revision")
    instead: ClassVar[str] = "; --artifacts names the artifacts' folder"
    described: ClassVar[tuple[str, ...]] = (
        *("windows", "new_tokens", "step", "calibration_tokens", "calibration_length"),
        *("codewords", "rounds", "rope_window", "inputs", "input_tokens", "input_codewords"),
    )
    # What the artifacts and the inputs alone decide.
    apart: ClassVar[tuple[str, ...]] = ("errors", "alike")
    # A plain codebook that was made to compare with changes nothing else.
    ignored: ClassVar[tuple[str, ...]] = ("compare",)
    tables = TABLES
    plots = PLOTS

    caches: str | None = caches_option("a2ats")
    top_k: int | float = budget_option(0.06)
    parts: tuple[str, ...] = parts_option(PARTS)
    budgets: tuple[int | float, ...] = option(
        (0.03, 0.06, 0.12), "of the part budget_of", kind=distinct(budget)
    )
    uuid_tokens: int = option(8192, "of random UUIDs beside text", kind=length_or_none)
    codewords: int = count_option(1024, "of each KV head")
    rounds: int = option(30, "of k-means at most, for inputs too", kind=whole_number(0))
    rope_window: int = option(2048, "position that queries are seen at, b", kind=whole_number(0))
    inputs: int = option(3, "texts whose own codebooks are compared", kind=whole_number(2))
    input_tokens: int = option(4096, "of each", kind=length)
    # The paper has 4096 of some 32K tokens.
    input_codewords: int = count_option(512, "of each of their KV heads")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input_codewords > self.input_tokens:
            raise ValueError(
                f"--input-codewords {self.input_codewords} of --input-tokens {self.input_tokens}: "
                "no more than tokens"
            )
        for top_k in self.budgets:
            A2ATSConfig(top_k=top_k)

    def details(self) -> dict[str, Any]:
        return {**super().details(), "uuid_tokens": self.uuid_tokens if self.text else 0}

    def variants(self, part: str) -> Sequence[str]:
        return {
            "switches": [*SWITCHES, EXACT_KEYS],
            "errors": list(SWITCHES),
            "alike": list(PLACES),
            "budget_of": [f"{owner}, {budget}" for budget in self.budgets for owner in _OWNERS],
        }[part]

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        if any(cell["part"] == "alike" for cell in cells):
            self.pieces(subject, self.inputs, self.input_tokens)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, name = cell["part"], cell["variant"]
        if part == "errors":
            quality = self.artifact(name, subject).quality
            return {
                "layers": [{key: one[key] for key in ("layer", "score_error")} for one in quality]
            }
        if part == "alike":
            inputs = self.pieces(subject, self.inputs, self.input_tokens)
            sizes = {"codewords": self.input_codewords, "rounds": self.rounds}
            found = likeness(subject, inputs, rotated=PLACES[name], seed=self.seed, **sizes)
            return {"inputs": list(inputs), "layers": found}
        options: dict[str, Any] = {}
        if part == "budget_of":
            owner, top_k = name.split(", ")
            options = {"budget_of": owner, "top_k": int(top_k) if top_k.isdigit() else float(top_k)}
            name = FULL_METHOD
        # A text that is too short is found before the work, not after it.
        windows = self.contexts(subject, part, cell["length"])
        follower = Follower(subject, self._choice(name, subject, choice, options), self.method)
        for window in windows:
            follower.follow(window, cell["length"], self.pace)
        measured = follower.result()
        numbers = ("overlap", "mass", "best_mass", "equal", "read_ratio")
        return {**{name: measured[name] for name in numbers}, "layers": follower.layers()}

    def artifact(self, name: str, subject: Subject) -> CalibrationArtifact:
        """The artifact of a row of ``SWITCHES``, made where it is missing."""
        return self.find(_folder_name(name), self.calibration(name), subject)

    def calibration(self, name: str) -> A2ATSCalibration:
        """How it is learned; the other rows are what a plain codebook would be compared with."""
        space, aware, *_ = SWITCHES[name]
        return A2ATSCalibration(
            self.codewords,
            self.rope_window,
            self.rounds,
            space=space,
            query_aware=aware,
            compare=False,
            seed=self.seed,
        )

    def _choice(
        self, name: str, subject: Subject, given: CacheChoice, options: dict[str, Any]
    ) -> CacheChoice:
        """The cache ``given`` with the artifact of a row, and ``options`` on top."""
        row, kind = (FULL_METHOD, ExactKeysCache) if name == EXACT_KEYS else (name, A2ATSCache)
        self.artifact(row, subject)
        assert given.options is not None
        folder = str(self.path(_folder_name(row)))
        # Bars show the name; the path would fill them.
        return made(name, kind, given.options.replace(artifact=folder, **options))


def _folder_name(name: str) -> str:
    return name.replace(", ", "-")


STUDY = A2ATSAblation

if __name__ == "__main__":
    sys.exit(main(STUDY))
