"""What the parts of A2ATS are worth, and what they rest on. switches: recall of the exact top-k
with and without windowed RoPE and query-aware codebooks (the paper's table 2), and with windowed
RoPE and no codebooks. errors: score error of held-out text by layer (figure 3). alike: how alike
codebooks are that different inputs have of their own, before RoPE and after it (figure 1). layers:
table 2's four rows in some --layers, with as many codewords as time allows, beside the artifact in
the model's own folder if there is one. It makes the four artifacts that it needs, from
--calibration-text or from the start of --text, and measures on text that none of them has seen.
Without --text the model reads documents of needles, which is what --model needle speaks.

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
    lines_of,
    made,
    parts_option,
    rows_tables,
    values_option,
)
from calibrated import CalibratedAblation
from follower import Follower
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Estimates, Scoring
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.k_means import k_means
from hf_kvret.lab.calibrate.runner import learn_at_once
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
from hf_kvret.methods.a2ats.learned import SPACES, LearnedLayer, learned_layer
from hf_kvret.models.compatibility import model_layers, retrieval_layers
from hf_kvret.observe.recall import Recall, exact_scores, measure_recall
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret_kernels import codebook
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.top_k import top_k
from hf_kvret_model_patches.decoders import decoder_of
from hf_kvret_model_patches.rope_check import check_rope
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


PARTS = ("switches", "errors", "alike", "layers")
FULL_METHOD = "windowed, query-aware"
# A row beside those of the table, which shows what codewords cost and what windowed RoPE does.
EXACT_KEYS = "windowed, exact keys"


# The finished artifact in the model's own folder, beside the rows that the study learns.
OWN = "the model's artifact"


def measure(quantizer: LearnedLayer, tokens: LayerTokens, length: int, budget: int) -> Recall:
    """How much of the exact top ``budget`` of the first ``length`` tokens codewords select.

    Each of the later queries selects by itself, for a KV head. The scale is the usual one.
    """
    keys, query = tokens.key[:, :, :length], tokens.query[:, :, length:]
    where, scale = torch.arange(tokens.key.shape[2])[None], query.shape[3] ** -0.5
    store = PagedStore(DeviceMemory(keys.device))
    store.append(TokenBlock(keys, keys, 0))
    table = quantizer.table(query, where[:, length:], scale, None)
    scores = codebook.lookup(table, quantizer.encode(keys, where[:, :length]))
    ids = top_k(group_relevance(scores, keys.shape[1]), budget)
    scoring = Scoring(torch.ones(1, length, dtype=torch.bool), scale, None)
    return measure_recall(query, ids, ColdTokens(store, scoring, budget))


# By name: space, query-aware, what the paper calls it, and its mean accuracy in table 2, of another
# model on other tasks.
SWITCHES: dict[str, tuple[str, bool, str, str]] = {
    "windowed, query-aware": ("windowed", True, "A2ATS", "86.6"),
    "windowed, plain": ("windowed", False, "WRoPE", "85.9"),
    "rotated, query-aware": ("rotated", True, "QAVQ", "81.1"),
    "rotated, plain": ("rotated", False, "Baseline", "81.4"),
}
PLACES = {"before RoPE": False, "after RoPE": True}
_FIGURES = ("overlap", "mass", "best_mass")
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


def _layers_tables(cells: CellResults) -> str:
    """The rows of table 2 layer by layer."""
    titles = {"overlap": "recall", "mass": "mass", "best_mass": "mass of the exact top-k"}
    titles["score_error"] = "score error"
    return "\n\n".join(
        rows_tables(result, {name: f"{titles[name]} at {cell['length']}" for name in titles})
        for cell, result in cells
    )


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
    "layers": _layers_tables,
}
PLOTS: dict[str, Plot] = {
    "switches": bars_of("A2ATS: codebooks", wrapped=True),
    "errors": layers_of(_errors, "A2ATS: held-out text", "score error", low=0.0),
    "alike": layers_of(_alike, "A2ATS: codebooks of different inputs", "mean largest cosine"),
    "layers": layers_of(lambda cells: lines_of(cells[0][1], "overlap"), "A2ATS", "recall"),
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
        *("codewords", "rounds", "distance", "inputs", "input_tokens", "input_codewords"),
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
        "--input-codewords 8 --layers 0,2 --caches a2ats:dense_below=0:recent=16:flush=16"
    )

    caches: str | None = caches_option("a2ats")
    top_k: int | float = budget_option(0.06)
    parts: tuple[str, ...] = parts_option(PARTS)
    uuid_tokens: int = option(8192, "of random UUIDs beside text", kind=length_or_none)
    codewords: int = count_option(1024, "of each KV head")
    rounds: int = option(30, "of k-means at most, for inputs too", kind=whole_number(0))
    distance: int = option(2048, "b, at which all tokens are seen", kind=whole_number(0))
    inputs: int = option(3, "texts whose own codebooks are compared", kind=whole_number(2))
    input_tokens: int = option(4096, "of each", kind=length)
    layers: tuple[int, ...] = values_option((), "of the part layers; default: all", whole_number(0))
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
        details = {**super().details(), "uuid_tokens": self.uuid_tokens if self.text else 0}
        return details | ({"layers": self.layers} if self.layers else {})

    def variants(self, part: str) -> Sequence[str]:
        return {
            "switches": [*SWITCHES, EXACT_KEYS],
            "errors": list(SWITCHES),
            "alike": list(PLACES),
            "layers": ["all rows"],
        }[part]

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        if any(cell["part"] == "alike" for cell in cells):
            self.pieces(subject, self.inputs, self.input_tokens)
        known = retrieval_layers(subject.model.config)
        if not set(self.layers) <= set(known):
            raise ValueError(f"--layers {self.layers}: the layers that retrieve are {known}")

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
        if part == "layers":
            return {"rows": self.rows_by_layer(subject, windows, cell["length"])}
        follower = Follower(subject, self._choice(name, subject, choice), self.method)
        for window in windows:
            follower.follow(window, cell["length"], self.pace)
        measured = follower.result()
        numbers = ("overlap", "mass", "best_mass", "equal", "read_ratio")
        return {**{name: measured[name] for name in numbers}, "layers": follower.layers()}

    def rows_by_layer(
        self, subject: Subject, windows: Sequence[torch.Tensor], length: int
    ) -> dict[str, list[dict[str, Any]]]:
        """Recall and score error of each row of table 2, and of the model's own artifact."""
        budget = self.top_k if isinstance(self.top_k, int) else max(1, int(self.top_k * length))
        quantizers = self._quantizers(subject)
        recalls: dict[tuple[str, int], list[Recall]] = {}

        def take(layer: int, tokens: LayerTokens) -> None:
            for name, own in quantizers.items():
                if layer in own:
                    recall = measure(own[layer][0], tokens, length, budget)
                    recalls.setdefault((name, layer), []).append(recall)

        for window in tqdm(windows, desc="measuring", leave=False):
            with torch.no_grad(), tap_attention(subject.model, take):
                decoder_of(subject.model)(window[None].to(subject.device), use_cache=False)
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in quantizers}
        for (name, layer), own in recalls.items():
            means = {key: fmean(getattr(one, key) for one in own) for key in _FIGURES}
            error = quantizers[name][layer][1]
            rows[name].append({"layer": layer, **means, "score_error": error})
        return rows

    def _quantizers(self, subject: Subject) -> dict[str, dict[int, tuple[LearnedLayer, Any]]]:
        """By row and layer the codewords, and their score error on held-out text."""
        model, device = subject.model, subject.device
        layers = self.layers or tuple(retrieval_layers(model.config))
        calibrations = {row: self.calibration(row) for row in SWITCHES}
        ropes = check_rope(model)
        results: dict[str, dict[int, tuple[LearnedLayer, Any]]] = {}
        learned = learn_at_once(model, self.corpus(subject), calibrations, layers)
        for row, findings in learned.items():
            results[row] = {}
            for layer, one in findings.items():
                space = SPACES[SWITCHES[row][0]](ropes[layer], self.distance)
                words, metric = one.tensors["codewords"], one.tensors["metric"]
                quantizer = LearnedLayer(words, metric, space).to(device)
                results[row][layer] = quantizer, one.quality["score_error"]
        if (folder := self.own_folder(subject)) is not None:
            artifact = CalibrationArtifact.from_pretrained(folder, method=self.method)
            errors = {one["layer"]: one["score_error"] for one in artifact.quality}
            results[OWN] = {n: (learned_layer(artifact, n, device), errors[n]) for n in layers}
        return results

    def artifact(self, name: str, subject: Subject) -> tuple[str, CalibrationArtifact]:
        """The folder of the artifact of a row of ``SWITCHES``, made where it is missing; and it."""
        folder = name.replace(", ", "-")
        return str(self.path(folder)), self.find(folder, self.calibration(name), subject)

    def calibration(self, name: str) -> A2ATSCalibration:
        """How it is learned; the other rows are what a plain codebook would be compared with."""
        space, aware, *_ = SWITCHES[name]
        options: dict[str, Any] = {"space": space, "query_aware": aware, "seed": self.seed}
        options["compare"] = False
        return A2ATSCalibration(self.codewords, self.distance, self.rounds, **options)

    def _choice(self, name: str, subject: Subject, base: CacheChoice) -> CacheChoice:
        """The cache ``base`` with the artifact of a row."""
        row, cls = (FULL_METHOD, ExactKeysCache) if name == EXACT_KEYS else (name, A2ATSCache)
        assert base.options is not None
        # Bars show the name; the path would fill them.
        return made(name, cls, base.options.replace(artifact=self.artifact(row, subject)[0]))


MEASUREMENT = A2ATSAblation

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
