"""Each paper's assumption, tested on a model's own queries, keys and values while it reads texts.

ctkvr: cosines of queries by distance (figure 2). lrqk: energy of queries, keys and scores in few
dimensions (figure 3). a2ats: codebooks of two texts (figure 1). aqua: what other layers, tokens and
keys tell of keys and values (figures 2, 4, 5). paris: centroids of the prompt's keys on later keys,
beside codes that learn nothing (figure 1).

    python examples/studies/assumptions.py --model smollm2 --text wiki.test.raw --context 4K
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from ablation import Ablation, CellResults, layers_of, layers_table, not_here, parts_option
from transformers import PreTrainedModel

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.lab.calibrate.a2ats import k_means
from hf_kvret.lab.calibrate.aqua import Rows, fit_linear, predict
from hf_kvret.lab.calibrate.taps import LayerTokens, before_rope, tap_attention
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.measurement import run_script
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.program.arguments import whole_number
from hf_kvret.lab.program.options import option
from hf_kvret.lab.report.results import Cell
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.methods.paris.index import ParisIndex
from hf_kvret.models.compatibility import retrieval_layers
from hf_kvret.observe.recall import exact_scores
from hf_kvret_kernels import paris
from hf_kvret_model_patches.rope import Rope

AFTER, BEFORE = "after RoPE", "before RoPE"
DISTANCES = (1, 4, 16, 64, 256, 1024)
# These are shares of the head dim. LRQK's usual rank is a quarter.
RANKS = {"1/8": 8, "1/4": 4, "1/2": 2}
# Caches keep these tokens apart, and their keys are unlike all others.
_SINKS = 4
# Queries that scores are of, and the share of keys that each of them shares with others.
_LAST, _TOP = 64, 0.06
_TOKENS_PER_CODEWORD, _ROUNDS = 8, 20
# Tokens before that AQUA is asked about.
_BACK = 3

Layer = Mapping[str, torch.Tensor]
"""``queries after RoPE [Hq, n, D]``, the same before it, ``keys [Hkv, n, D]`` alike, ``values``."""
Texts = Sequence[Sequence[Layer]]
"""The layers of each text; queries of the first one only, as they take most of the memory."""
Numbers = dict[str, float]


def read_layers(model: PreTrainedModel, ids: torch.Tensor, queries: bool) -> list[Layer]:
    """What every layer that retrieves made of ``ids [n]``, sinks left out, fp32 on the CPU."""
    layers: dict[int, Layer] = {}

    def take(layer: int, tokens: LayerTokens) -> None:
        if tokens.latent is not None:
            raise ValueError(f"layer {layer} has latent attention: take a model with keys a head")
        rotated = {"keys": tokens.key} | ({"queries": tokens.query} if queries else {})
        x = {f"{name} {AFTER}": one for name, one in rotated.items()} | {"values": tokens.value}
        rope = Rope.of(model.config, layer)
        x |= {f"{name} {BEFORE}": before_rope(one, rope) for name, one in rotated.items()}
        layers[layer] = {name: one[0, :, _SINKS:].float().cpu().clone() for name, one in x.items()}

    with torch.no_grad(), tap_attention(model, take):
        model.get_decoder()(ids[None].to(model.device), use_cache=False)
    return [layers[layer] for layer in retrieval_layers(model.config)]


def query_cosines(texts: Texts, number: int, place: str) -> Numbers:
    """Mean cosines of queries by distance, and how they go with shared keys (CTkvr, figure 2).

    ``correlation`` is that of the cosine of two queries of a head with the share of their exact
    top-k that they have in common, over pairs of the last quarter's; mean over heads.
    """
    layer = texts[0][number]
    queries = torch.nn.functional.normalize(layer[f"queries {place}"], dim=-1)
    count, first = queries.shape[1], 3 * queries.shape[1] // 4
    steps = [step for step in DISTANCES if step < count]
    means = {str(n): float((queries[:, n:] * queries[:, :-n]).sum(-1).mean()) for n in steps}
    chosen = torch.linspace(first, count - 1, 2 * _LAST).long()
    asking, keys = layer[f"queries {AFTER}"][None, :, chosen], layer[f"keys {AFTER}"][None]
    scores = exact_scores(asking, keys[:, :, :first], 1.0)[0]
    best = scores.topk(int(_TOP * first), dim=-1).indices
    marks = torch.zeros_like(scores).scatter_(-1, best, 1.0)
    one, other = torch.triu_indices(len(chosen), len(chosen), offset=1)
    pairs = [(x @ x.mT)[:, one, other] for x in (queries[:, chosen], marks)]
    correlations = [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(*pairs, strict=True)]
    return means | {"correlation": float(torch.stack(correlations).mean())}


def energies(texts: Texts, number: int, place: str) -> Numbers:
    """Shares of the squared singular values that the first r have (LRQK, figure 3).

    The mean key moves all scores of a query alike, so that scores are shown without it, too.
    """
    queries, keys = (texts[0][number][f"{name} {place}"].double() for name in ("queries", "keys"))
    centered = keys - keys.mean(1, keepdim=True)
    grams = {"queries": queries.mT @ queries, "keys": keys.mT @ keys}
    values, vectors = torch.linalg.eigh(grams["queries"])
    root = vectors * values.clamp(min=0.0).sqrt()[:, None] @ vectors.mT
    for name, gram in (("scores", grams["keys"]), ("scores, no mean", centered.mT @ centered)):
        grams[name] = root @ gram.repeat_interleave(len(queries) // len(keys), dim=0) @ root
    results = {}
    for name, gram in grams.items():
        squares = torch.linalg.eigvalsh(gram).clamp(min=0.0).flip(-1)
        shares = squares.cumsum(-1) / squares.sum(-1, keepdim=True)
        for title, part in RANKS.items():
            results[f"{name}, {title}"] = float(shares[:, squares.shape[-1] // part - 1].mean())
    return results


def shared_codebooks(texts: Texts, number: int, place: str) -> Numbers:
    """How well codewords of one text's keys serve another's (A2ATS, figure 1).

    ``alike`` is equation 7; ``own`` and ``other`` are squared errors of the last text's keys over
    their variance, with codewords of their own and with those of the first text.
    """
    first, last = (texts[n][number][f"keys {place}"] for n in (0, -1))
    count = first.shape[1] // _TOKENS_PER_CODEWORD
    books = [k_means(keys, count, rounds=_ROUNDS, seed=0) for keys in (first, last)]
    variance = last.var(1, correction=0).sum(-1)
    errors = [(last - coded(last, book)).square().sum(-1).mean(-1) / variance for book in books]
    other, own = (float(error.mean()) for error in errors)
    return {"alike": float(similarity(*books).mean()), "own": own, "other": other}


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


def coded(keys: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """The codeword of ``codebook [H, C, D]`` nearest to each of ``keys [H, n, D]``."""
    closeness = keys @ codebook.mT - codebook.square().sum(-1).unsqueeze(1) / 2
    return codebook.gather(1, closeness.argmax(-1, keepdim=True).expand_as(keys))


def explained(texts: Texts, number: int, name: str) -> Numbers:
    """Shares of the variance of a layer's keys or values that linear maps explain (AQUA, figure 2).

    Maps are fitted on all texts but the last, and measured on it. Keys are those before RoPE.
    """

    def rows(layers: Sequence[Layer], below: int, back: int, of: str) -> torch.Tensor:
        x = layers[number - below][f"keys {BEFORE}" if of == "keys" else of].transpose(0, 1)
        return x.flatten(1)[_BACK - back : len(x) - back]

    other = "values" if name == "keys" else "keys"
    # Each input is so many layers below, so many tokens before, keys or values.
    sources = {
        "layer -1": [(1, 0, name)],
        "layer -2": [(2, 0, name)],
        "both": [(1, 0, name), (2, 0, name)],
        "token -1": [(0, 1, name)],
        "tokens -1 to -3": [(0, back, name) for back in range(1, _BACK + 1)],
        f"own {other}": [(0, 0, other)],
        f"layer -1, own {other}": [(1, 0, name), (0, 0, other)],
    }
    results, targets = {}, [rows(text, 0, 0, name) for text in texts]
    for title, source in sources.items():
        if max(below for below, *_ in source) <= number:
            inputs = [torch.cat([rows(text, *one) for one in source], dim=1) for text in texts]
            learned = Rows([torch.cat(inputs[:-1])], torch.cat(targets[:-1]), torch.device("cpu"))
            missed = targets[-1] - predict(fit_linear(learned, ridge=1e-3), inputs[-1])
            variance = targets[-1].var(0, correction=0).sum()
            results[title] = 1.0 - float(missed.square().sum(-1).mean() / variance)
    return results


def drift(texts: Texts, number: int, place: str) -> Numbers:
    """Errors of scores by codes, on a text's first half and on its second (ParisKV, figure 1).

    Centroids are learned from every second key of the first half ("of prompt"), or of both ("of
    all"); ParisKV's factors are of the first half. The keys between them are measured: variances
    of what is missed, relative to the exact scores', means over the last queries.
    """
    keys, queries = (texts[0][number][f"{name} {place}"][None] for name in ("keys", "queries"))
    half, queries = keys.shape[2] // 2, queries[:, :, -_LAST:]
    exact, estimates = exact_scores(queries, keys, 1.0), {}
    for name, end in (("prompt", half), ("all", 2 * half)):
        count = half // (2 * _TOKENS_PER_CODEWORD)
        book = k_means(keys[0, :, :end:2].contiguous(), count, rounds=_ROUNDS, seed=0)
        estimates[f"centroids of {name}"] = exact_scores(queries, coded(keys[0], book)[None], 1.0)
    index = ParisIndex(ParisConfig())
    for start, part in ((0, keys[:, :, :half]), (half, keys[:, :, half:])):
        index.add(TokenBlock(part, part, start))
    means = index.state_dict()["means"].repeat_interleave(index._block_len, dim=2)
    decoded = paris.decode(index._codes(), paris.magnitude_levels())
    estimates["ParisKV"] = exact_scores(index.rotate(queries), decoded, 1.0)
    estimates["ParisKV"] += exact_scores(queries, means[:, :, : 2 * half], 1.0)
    results = {}
    for name, estimate in estimates.items():
        for title, those in (("prompt", slice(1, half, 2)), ("later", slice(half + 1, None, 2))):
            shares = (estimate - exact)[..., those].var(-1) / exact[..., those].var(-1)
            results[f"{name}, {title} keys"] = float(shares.mean())
    return results


PLACES = (AFTER, BEFORE)
PARTS: dict[str, tuple[Callable[[Texts, int, str], Numbers], tuple[str, ...], str]] = {
    "ctkvr": (query_cosines, PLACES, "cosine of two queries"),
    "lrqk": (energies, PLACES, "share of the energy"),
    "a2ats": (shared_codebooks, PLACES, "cosine of codebooks, errors of keys"),
    "aqua": (explained, ("keys", "values"), "variance explained"),
    "paris": (drift, (AFTER,), "error of scores"),
}
"""By part what measures a layer, its variants, and what its numbers are."""


def _lines(cells: CellResults) -> dict[str, dict[int, float]]:
    """By variant and name of a number its values by layer."""
    lines: dict[str, dict[int, float]] = {}
    for cell, row in cells:
        for layer, numbers in enumerate(row["layers"]):
            for name, value in numbers.items():
                lines.setdefault(f"{cell['variant']}: {name}", {})[layer] = value
    return lines


def _drawn(cells: CellResults) -> dict[str, dict[int, float]]:
    """The lines of all variants, or of the first where there would be too many."""
    lines = _lines(cells)
    return lines if len(lines) <= 2 * len(DISTANCES) else _lines(cells[:1])


def _tables(cells: CellResults) -> str:
    """A table a variant: a row a layer, and the means."""
    tables = []
    for cell, row in cells:
        title = f"{cell['part']}: {PARTS[cell['part']][2]}, {cell['variant']}"
        lines = {name.partition(": ")[2]: line for name, line in _lines([(cell, row)]).items()}
        tables.append(layers_table(f"{title}, {cell['length']} tokens; layer", lines))
    return "\n\n".join(tables)


@dataclass(frozen=True, kw_only=True)
class Assumptions(Ablation):
    """What the five papers assume of queries, keys and values, on a model's own."""

    name = "assumptions"
    described = ("windows",)
    tables = MappingProxyType(dict.fromkeys(PARTS, _tables))
    plots = MappingProxyType({part: layers_of(_drawn, part, y) for part, (*_, y) in PARTS.items()})
    smallest = f"--text {__file__} --context 300 --windows 2"

    caches: str | None = not_here("full")
    store: str = not_here("device")
    top_k: int | float = not_here(_TOP)
    windows: int = option(3, "texts of a length, the last to measure on", kind=whole_number(2))
    parts: tuple[str, ...] = parts_option(PARTS)
    new_tokens: int = not_here()
    step: int = not_here(1)
    # The texts of the last length are kept, for all parts.
    _read: dict[int, Texts] = field(default_factory=dict, init=False, repr=False, compare=False)

    def variants(self, part: str) -> Sequence[str]:
        return PARTS[part][1]

    def contexts(self, subject: Subject, part: str, length: int) -> list[torch.Tensor]:
        texts = super().contexts(subject, part, length)
        if len(texts) < self.windows:
            raise ValueError(
                f"--windows {self.windows}: --text has {len(texts)} of {length} tokens"
            )
        return texts

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        model, length, measure = self.subject.model, cell["length"], PARTS[cell["part"]][0]
        if length not in self._read:
            self._read.clear()
            windows = enumerate(self.contexts(self.subject, "", length))
            self._read[length] = [read_layers(model, ids, n == 0) for n, ids in windows]
        texts = self._read[length]
        return {"layers": [measure(texts, n, cell["variant"]) for n in range(len(texts[0]))]}


MEASUREMENT = Assumptions

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
