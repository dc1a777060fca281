"""What the parts of A2ATS are worth, and what they rest on. switches: recall of the exact top-k
with and without windowed RoPE and query-aware codebooks (the paper's table 2), and with windowed
RoPE and no codebooks. errors: score error of held-out text by layer (figure 3). alike: how alike
codebooks are that different inputs have of their own, before RoPE and after it (figure 1). It
makes the four artifacts that it needs, from --calibration-text or from the start of --text, and
measures on text that none of them has seen. Without --text the model reads documents of needles,
which is what --model needle speaks.

    python examples/studies/a2ats_ablation.py --text novel.txt --json a.json --plot a.png
    python examples/studies/a2ats_ablation.py --model needle --parts switches,errors
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from ablation import (
    CellResults,
    Plot,
    Table,
    bars_of,
    by_length,
    caches_option,
    layers_of,
    layers_table,
    made,
    parts_option,
)
from calibrated import CalibratedAblation
from follower import Follower
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.contracts.index import ColdTokens, Estimates
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.k_means import k_means
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.task import Choices
from hf_kvret.lab.program.arguments import length, length_or_none, whole_number
from hf_kvret.lab.program.common_options import budget_option, count_option
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table, share
from hf_kvret.methods.a2ats import A2ATSCache, A2ATSConfig, A2ATSIndex
from hf_kvret.models.compatibility import model_layers
from hf_kvret.observe.recall import exact_scores
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.top_k import top_k
from hf_kvret_model_patches.decoders import decoder_of
from hf_kvret_model_patches.taps import LayerTokens, tap_attention


class ExactKeysIndex(A2ATSIndex):
    """Scores each token with its key in the space of the artifact, instead of its codeword.

    What A2ATS would select if its codewords lost nothing. It holds all keys once more, and every
    selection reads them.
    """

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        assert len(self._codes) >= start, "passes come in order"
        self._codes.put(self._on(keys.device).space.keys(keys, positions), start)
        self._positions = positions

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        scores = self.estimate(query, cold).logits
        return top_k(group_relevance(scores, self._codes.rows.shape[1]), cold.budget)

    def estimate(self, query: torch.Tensor, cold: ColdTokens) -> Estimates:
        keys = self._codes.rows[:, :, : len(cold)]
        seen = self._on(query.device).space.queries(query, self._positions)
        scores = exact_scores(seen, keys, cold.scale, cold.softcap)
        return Estimates(scores.masked_fill(~cold.valid[:, None, None], float("-inf")))


class ExactKeysCache(A2ATSCache):
    """``A2ATSCache`` with exact keys; KV heads choose. Of its artifact only the space counts."""

    @classmethod
    def make_index(cls, options: A2ATSConfig, layer: int) -> ExactKeysIndex:
        """A new, empty index for the model layer number ``layer``."""
        return ExactKeysIndex(options, layer)


def likeness(
    subject: Subject,
    inputs: Mapping[str, torch.Tensor],
    *,
    codewords: int,
    rotated: bool,
    rounds: int,
    seed: int,
) -> list[dict[str, Any]]:
    """For each layer with full attention its number and ``alike``, a matrix over the inputs.

    Each of the ``inputs``, token ids ``[n]`` by name, has plain codebooks of its own, one a KV
    head; numbers are means over KV heads. Keys after RoPE are learned from where ``rotated``, else
    those before it.
    """
    books = [_codebooks(subject, ids, codewords, rotated, rounds, seed) for ids in inputs.values()]
    results = []
    for layer in books[0]:
        rows = [
            [float(similarity(one[layer], other[layer]).mean()) for other in books] for one in books
        ]
        results.append({"layer": layer, "alike": rows})
    return results


def similarity(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``[H]`` fp32 from -1 to 1: how alike two codebooks are (A2ATS, equation 7).

    The cosine of a codeword with the nearest one of the other codebook, mean over the codewords of
    both; 1 for the same words in any order and of any length.

    Both are ``[H, C, D]``, any float dtype; C may differ.
    """
    one, other = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (first, second))
    results = []
    # Head by head: all of them would take much more memory.
    for words, others in zip(one, other, strict=True):
        cosines = words @ others.T
        results.append((cosines.amax(1).mean() + cosines.amax(0).mean()) / 2)
    return torch.stack(results)


def _codebooks(
    subject: Subject, ids: torch.Tensor, codewords: int, rotated: bool, rounds: int, seed: int
) -> dict[int, torch.Tensor]:
    """``[H, C, D]`` on the CPU by layer; learned while the model runs, so that keys aren't held."""
    model = subject.model
    kinds = model_layers(model.config)
    full = [layer for layer, kind in enumerate(kinds) if type(kind) is DynamicLayer]
    books: dict[int, torch.Tensor] = {}
    with tqdm(total=len(full), desc="codebooks", unit="layer", leave=False) as bar:

        def take(layer: int, tokens: LayerTokens) -> None:
            if layer in full:
                keys = (tokens.key if rotated else tokens.key_before)[0].float()
                books[layer] = k_means(keys, codewords, rounds=rounds, seed=seed)[0].cpu()
                bar.update(1)

        with torch.no_grad(), tap_attention(model, take):
            decoder_of(model)(ids[None].to(model.device), use_cache=False)
    return dict(sorted(books.items()))


PARTS = ("switches", "errors", "alike")
FULL_METHOD = "windowed, query-aware"
# A row beside those of the table, which shows what codewords cost and what windowed RoPE does.
EXACT_KEYS = "windowed, exact keys"


# By name: space, query-aware, what the paper calls it, and its mean accuracy in table 2, of another
# model on other tasks.
SWITCHES: dict[str, tuple[str, bool, str, str]] = {
    "windowed, query-aware": ("windowed", True, "A2ATS", "86.6"),
    "windowed, plain": ("windowed", False, "WRoPE", "85.9"),
    "rotated, query-aware": ("rotated", True, "QAVQ", "81.1"),
    "rotated, plain": ("rotated", False, "Baseline", "81.4"),
}
PLACES = {"before RoPE": False, "after RoPE": True}
_KINDS = ("recall", "mass", "tokens equal", "rows read")


def _switches_table(cells: CellResults) -> str:
    """The rows of table 2."""
    columns, rows = by_length(cells, _KINDS)
    wide = []
    for (cache, name), figures in rows.items():
        *_, method, paper = SWITCHES.get(name, ("-", "-"))
        wide.append([cache, name, method, *figures, paper])
    header = ["cache", "codebooks", "in the paper", *columns, "paper's accuracy, table 2"]
    return f"{markdown_table(header, wide)}\n\n{_recall_table(cells)}"


def _recall_table(cells: CellResults) -> str:
    """Recall of each layer that retrieved."""
    recalls_of = {
        (cell["cache"], cell["variant"], str(cell["length"])): {
            one["layer"]: one["overlap"] for one in result["layers"]
        }
        for cell, result in cells
    }
    layers = sorted({layer for recalls in recalls_of.values() for layer in recalls})
    rows = [
        [*key, *(share(recalls.get(layer)) for layer in layers)]
        for key, recalls in recalls_of.items()
    ]
    columns = (f"layer {layer}" for layer in layers)
    return markdown_table(["cache", "recall, codebooks", "context", *columns], rows)


def _errors_table(cells: CellResults) -> str:
    """Score errors by layer (figure 3), and in how many layers query-aware codebooks win."""
    errors = _errors(cells)
    wins = [
        _wins(f"{space}: query-aware codebooks miss less than plain ones", aware, plain)
        for space in dict.fromkeys(name.split(", ")[0] for name in errors)
        if (aware := errors.get(f"{space}, query-aware")) is not None
        and (plain := errors.get(f"{space}, plain")) is not None
    ]
    return "\n\n".join([layers_table("score error, layer", errors, ".4f"), *wins])


def _errors(cells: CellResults) -> dict[str, dict[int, float]]:
    """Errors by variant and layer; a layer whose held-out keys don't vary has none."""
    return {
        cell["variant"]: {
            one["layer"]: one["score_error"]
            for one in result["layers"]
            if one["score_error"] is not None
        }
        for cell, result in cells
    }


def _wins(claim: str, lower: dict[int, float], higher: dict[int, float]) -> str:
    shared = lower.keys() & higher.keys()
    number = sum(lower[layer] < higher[layer] for layer in shared)
    return f"{claim} in {number} of {len(shared)} layers."


def _alike_table(cells: CellResults) -> str:
    """How alike codebooks of different inputs are, by layer (figure 1)."""
    lines = _alike(cells)
    wins = []
    for pair in dict.fromkeys(name.split(": ")[1] for name in lines):
        before, after = (lines.get(f"{place}: {pair}") for place in PLACES)
        if before is not None and after is not None:
            claim = f"{pair}: codebooks are more alike before RoPE than after it"
            wins.append(_wins(claim, after, before))
    return "\n\n".join([layers_table("alike, layer", lines), *wins])


def _alike(cells: CellResults) -> dict[str, dict[int, float]]:
    """By ``PLACE: KIND / KIND`` and layer, the mean over the pairs of inputs of these types."""
    lines: dict[str, dict[int, float]] = {}
    for cell, result in cells:
        types = [name.rstrip(" 0123456789") for name in result["inputs"]]
        for layer in result["layers"]:
            pairs: dict[str, list[float]] = {}
            for number, row in enumerate(layer["alike"]):
                for other in range(number + 1, len(row)):
                    pairs.setdefault(f"{types[number]} / {types[other]}", []).append(row[other])
            for pair, values in pairs.items():
                lines.setdefault(f"{cell['variant']}: {pair}", {})[layer["layer"]] = fmean(values)
    return lines


TABLES: dict[str, Table] = {
    "switches": _switches_table,
    "errors": _errors_table,
    "alike": _alike_table,
}
PLOTS: dict[str, Plot] = {
    "switches": bars_of("A2ATS: codebooks", wrapped=True),
    "errors": layers_of(_errors, "A2ATS: held-out text", "score error", low=0.0),
    "alike": layers_of(_alike, "A2ATS: codebooks of different inputs", "mean largest cosine"),
}


@dataclass(frozen=True, kw_only=True)
class A2ATSAblation(CalibratedAblation):
    """What the parts of A2ATS are worth, and what they rest on."""

    name = "a2ats-ablation"
    method = "a2ats"
    example = "recent=128"
    chosen = ("artifact", "revision")
    described = (
        *("windows", "new_tokens", "step", "calibration_tokens", "calibration_length"),
        *("codewords", "rounds", "rope_window", "inputs", "input_tokens", "input_codewords"),
    )
    # What the artifacts and the inputs alone decide.
    apart = ("errors", "alike")
    # A plain codebook that was made to compare with changes nothing else.
    ignored = ("compare",)
    tables = TABLES
    plots = PLOTS
    smallest = (
        "--model needle --context 256 --windows 1 --new-tokens 16 --calibration-tokens 1K "
        "--calibration-length 256 --codewords 8 --rounds 2 --inputs 2 --input-tokens 128 "
        "--input-codewords 8 --caches a2ats:dense_below=0:recent=16:flush=16"
    )

    caches: str | None = caches_option("a2ats")
    top_k: int | float = budget_option(0.06)
    parts: tuple[str, ...] = parts_option(PARTS)
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

    def details(self) -> dict[str, Any]:
        return {**super().details(), "uuid_tokens": self.uuid_tokens if self.text else 0}

    def variants(self, part: str) -> Sequence[str]:
        return {
            "switches": [*SWITCHES, EXACT_KEYS],
            "errors": list(SWITCHES),
            "alike": list(PLACES),
        }[part]

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        if any(cell["part"] == "alike" for cell in cells):
            self.pieces(subject, self.inputs, self.input_tokens)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, name = cell["part"], cell["variant"]
        if part == "errors":
            quality = self.artifact(name, subject)[1].quality
            return {
                "layers": [{key: one[key] for key in ("layer", "score_error")} for one in quality]
            }
        if part == "alike":
            inputs = self.pieces(subject, self.inputs, self.input_tokens)
            sizes = {"codewords": self.input_codewords, "rounds": self.rounds}
            result = likeness(subject, inputs, rotated=PLACES[name], seed=self.seed, **sizes)
            return {"inputs": list(inputs), "layers": result}
        # A text that is too short is found before the work, not after it.
        windows = self.contexts(subject, part, cell["length"])
        follower = Follower(subject, self._choice(name, subject, choice), self.method)
        for window in windows:
            follower.follow(window, cell["length"], self.pace)
        measured = follower.result()
        numbers = ("overlap", "mass", "best_mass", "equal", "read_ratio")
        return {**{name: measured[name] for name in numbers}, "layers": follower.layers()}

    def artifact(self, name: str, subject: Subject) -> tuple[str, CalibrationArtifact]:
        """The folder of the artifact of a row of ``SWITCHES``, made where it is missing; and it."""
        folder = name.replace(", ", "-")
        return str(self.path(folder)), self.find(folder, self.calibration(name), subject)

    def calibration(self, name: str) -> A2ATSCalibration:
        """How it is learned; the other rows are what a plain codebook would be compared with."""
        space, aware, *_ = SWITCHES[name]
        options: dict[str, Any] = {"space": space, "query_aware": aware, "seed": self.seed}
        options["compare"] = False
        return A2ATSCalibration(self.codewords, self.rope_window, self.rounds, **options)

    def _choice(self, name: str, subject: Subject, base: CacheChoice) -> CacheChoice:
        """The cache ``base`` with the artifact of a row."""
        row, cls = (FULL_METHOD, ExactKeysCache) if name == EXACT_KEYS else (name, A2ATSCache)
        assert base.options is not None
        # Bars show the name; the path would fill them.
        return made(name, cls, base.options.replace(artifact=self.artifact(row, subject)[0]))


MEASUREMENT = A2ATSAblation

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
