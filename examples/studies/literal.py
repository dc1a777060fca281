"""A2ATS and AQUA-KV beside renderings of their papers, on a model's own queries, keys and values.

``literal_a2ats`` and ``literal_aqua`` were written from the papers alone. selection: which tokens
A2ATS finds with exact keys, with the rendering's codebooks and with the library's. text: its
perplexity after a context. rows: what AQUA-KV's predictors explain, and the errors of its rows.
stream: its perplexity over a window that is read from its start, as in the paper.

    python examples/studies/literal.py --model smollm2 --text wiki.test.raw \\
        --calibration-text novel.txt --json literal.json
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as once, cached_property
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any, NamedTuple

import literal_a2ats as a2ats
import literal_aqua as aqua
import torch
import torch.nn.functional as F
from ablation import Ablation, CellResults, Plot, layers_of, lines_of, made, not_here, parts_option
from tqdm import tqdm
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.files import DESCRIPTION
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration, k_means, query_metric
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.study import Corpus, calibrate
from hf_kvret.lab.calibrate.taps import LayerTokens, before_rope, tap_attention
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.measurement import run_script
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.texts import cut, describe_file, read_text, token_ids
from hf_kvret.lab.program.arguments import file_path, length
from hf_kvret.lab.program.options import count_option, option, text_option
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table, or_dash
from hf_kvret.methods.a2ats import A2ATSCache, A2ATSConfig
from hf_kvret.methods.a2ats.learned import KeySpace, LearnedLayer, learned_layer
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache
from hf_kvret.models.compatibility import retrieval_layers
from hf_kvret_kernels.higgs.naive import grid_points
from hf_kvret_model_patches.rope import Rope

FULL, EXACT, LITERAL, LIBRARY, HIGGS = "full", "exact keys", "literal", "library", "HIGGS alone"
VARIANTS = {
    "selection": (EXACT, LITERAL, LIBRARY),
    "text": (FULL, EXACT, LITERAL, LIBRARY),
    "rows": (LITERAL, LIBRARY),
    "stream": (FULL, LITERAL, LIBRARY, HIGGS),
}
# Columns of the tables by layer, with their forms.
FIGURES = {
    "selection": {"rank": ".1f", "error": ".4f", "recall": ".3f", "mass": ".3f", "best": ".3f"},
    "rows": dict.fromkeys(("key explained", "value explained", "key error", "value error"), ".4f"),
}
# The rank of keys is the number of dims with this share of their variance.
_ENERGY = 0.9
_MEASURED_LAYERS = 3
_CPU = torch.device("cpu")


class Layer(NamedTuple):
    """What a layer makes of a text before RoPE: ``[Hq, n, D]``, twice ``[Hkv, n, D]``, fp32."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def group(self, head: int) -> torch.Tensor:
        """The queries ``[G, n, D]`` of the heads that read KV head number ``head``."""
        return self.queries.unflatten(0, (len(self.keys), -1))[head]


def read_layers(
    model: PreTrainedModel, ids: torch.Tensor, ropes: dict[int, Rope]
) -> dict[int, Layer]:
    """The layers in ``ropes`` in a pass over ``ids [n]``."""
    layers: dict[int, Layer] = {}

    def take(number: int, tokens: LayerTokens) -> None:
        if number in ropes:
            before = (before_rope(x, ropes[number]) for x in (tokens.query, tokens.key))
            layers[number] = Layer(*(x[0].float().cpu().clone() for x in (*before, tokens.value)))

    with torch.no_grad(), tap_attention(model, take):
        model.get_decoder()(ids[None].to(model.device), use_cache=False)
    return layers


def joined(x: torch.Tensor) -> torch.Tensor:
    """``[n, H * D]`` of ``[H, n, D]``."""
    return x.transpose(0, 1).flatten(1)


def rank_of(keys: torch.Tensor) -> float:
    """Dims that have 90% of the variance of ``keys [n, D]``."""
    values = torch.linalg.eigvalsh(keys.double().T.cov()).flip(0)
    return 1.0 + float((values.cumsum(0) < _ENERGY * values.sum()).sum())


class Codebook(NamedTuple):
    """Codewords ``[c, d]`` of a KV head before RoPE, and the factor ``[d, d]`` of its metric."""

    words: torch.Tensor
    factor: torch.Tensor


def codebooks_of(learned: LearnedLayer) -> list[Codebook]:
    """The library's by KV head: its words lie in the space of the metric."""
    pairs = zip(learned.words.float(), learned.metric, strict=True)
    solve = torch.linalg.solve_triangular
    return [Codebook(solve(m, words, upper=False, left=False), m) for words, m in pairs]


def figures_of(exact: torch.Tensor, scores: torch.Tensor) -> dict[str, float]:
    """Share of the exact top 3% that ``scores [n]`` find, and of the mass outside the window."""
    count = max(1, int(a2ats.TOP_K_RATIO * len(exact)))
    window, best = (a2ats.select(exact, k) for k in (0, count))
    own = a2ats.select(scores, count)
    mass = exact.masked_fill(window, -torch.inf).softmax(-1)
    recall = (best & own & ~window).sum() / (best & ~window).sum()
    return {
        "recall": float(recall),
        "mass": float(mass[own].sum()),
        "best": float(mass[best].sum()),
    }


def literal_attention(
    codebooks: Mapping[int, Sequence[Codebook | None]],
    ropes: Mapping[int, Rope],
    first: int,
    top_k: int,
) -> Callable[..., tuple[torch.Tensor, None]]:
    """A function for ``AttentionInterface``: A2ATS for the queries from position ``first`` on.

    Each query head selects ``top_k`` tokens, and those of a group attend to what any of them has
    selected: 3% each make the 6% of table 1. The 64 recent tokens are those before the query's own.
    None in place of a codebook stands for exact keys.
    """

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, **more: Any) -> Any:
        count, scaling, number = query.shape[2], more["scaling"], module.layer_idx
        recent = a2ats.RECENT_TOKENS + 1
        distances = torch.arange(count)[:, None] - torch.arange(count)
        visible = (distances >= 0) & (distances < (more.get("sliding_window") or count))
        out = F.scaled_dot_product_attention(
            query, key, value, visible, scale=scaling, enable_gqa=True
        )
        if number not in codebooks:
            return out.transpose(1, 2), None
        inv_freq = ropes[number].inv_freq
        queries, keys = (before_rope(x, ropes[number])[0] for x in (query, key))
        groups = queries.unflatten(0, (len(keys), -1))
        for head, book in enumerate(codebooks[number]):
            own_keys = keys[head]
            near = own_keys if book is None else book.words[a2ats.encode(own_keys, *book)]
            for position in range(first, count):
                asking, seen = groups[head, :, position], slice(position + 1)
                scores = a2ats.windowed_query(asking, inv_freq) @ near[seen].T
                mask = torch.stack([a2ats.select(one, top_k, recent) for one in scores]).any(0)
                for n, one in enumerate(asking, start=head * len(asking)):
                    exact = a2ats.rotary_scores(one, position, own_keys[seen], inv_freq)
                    out[0, n, position] = a2ats.attend(exact, value[0, head, seen], mask, scaling)
        return out.transpose(1, 2), None

    return attend


def losses_of(logits: torch.Tensor, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats of ``truth [n]``, and the first choices of ``logits [n, vocab]``."""
    return F.cross_entropy(logits.float(), truth, reduction="none"), logits.argmax(-1)


def _figures_table(cells: CellResults) -> str:
    forms = FIGURES[cells[0][0]["part"]]
    rows = []
    for cell, result in cells:
        layers = result["rows"][cell["variant"]]
        lines = [[x[name] for x in layers if x.get(name) is not None] for name in forms]
        means = (fmean(line) if line else None for line in lines)
        figures = (or_dash(mean, form) for mean, form in zip(means, forms.values(), strict=True))
        rows.append([cell["variant"], str(cell.get("length", "-")), *figures])
    return markdown_table([cells[0][0]["part"], "tokens", *forms], rows)


def _text_table(cells: CellResults) -> str:
    full = {cell["length"]: x["nats"] for cell, x in cells if cell["variant"] == FULL}
    rows = []
    for cell, x in cells:
        rise = math.expm1(x["nats"] - full.get(cell["length"], math.nan))
        figures = f"{math.exp(x['nats']):.3f}", f"{rise:+.2%}", f"{x['equal']:.1%}"
        rows.append([cell["variant"], str(cell["length"]), *figures])
    title = cells[0][0]["part"]
    return markdown_table([title, "tokens", "perplexity", "rise", "tokens equal"], rows)


def _by_layer(figure: str, y: str) -> Plot:
    """A picture of a figure, a line for each variant."""

    def lines(cells: CellResults) -> dict[str, dict[int, float]]:
        return {name: line for _, x in cells for name, line in lines_of(x, figure).items()}

    return layers_of(lines, "", y)


@dataclass(frozen=True, kw_only=True)
class Literal(Ablation):
    """A2ATS and AQUA-KV beside renderings of their papers."""

    name = "literal"
    described = ("calibration_tokens", "calibration_length", "codewords", "rounds", "heads", "step")
    apart = ("rows",)
    tables = MappingProxyType(
        {part: _figures_table if part in FIGURES else _text_table for part in VARIANTS}
    )
    plots = MappingProxyType(
        {
            "selection": _by_layer("recall", "recall of the exact top 3%"),
            "rows": _by_layer("key explained", "variance of keys explained"),
        }
    )
    smallest = (
        f"--text {__file__} --calibration-text {a2ats.__file__} --context 300 --new-tokens 4 "
        "--calibration-tokens 1K --rounds 5 --calibration-length 256 --codewords 32 --step 64"
    )

    caches: str | None = not_here(FULL)
    store: str = not_here("device")
    top_k: int | float = not_here(a2ats.TOP_K_RATIO)
    windows: int = not_here(1)
    parts: tuple[str, ...] = parts_option(VARIANTS)
    new_tokens: int = count_option(64, "after a context, that A2ATS is measured on")
    step: int = count_option(8, "tokens a forward pass of the part stream")
    calibration_text: Path = text_option("learn from this")
    calibration_tokens: int = option(16_384, "the last tenth is held out", kind=length)
    calibration_length: int = option(2048, "most tokens of a sequence", kind=length)
    codewords: int = count_option(a2ats.CODEWORDS, "of a KV head")
    rounds: int = count_option(300, "of k-means, at most")
    heads: int = count_option(8, "KV heads of a layer whose codebooks are compared, at most")
    artifacts: Path | None = option(
        None, "where the library's artifacts are kept, or found", kind=file_path, metavar="DIR"
    )

    def details(self) -> dict[str, Any]:
        text = describe_file("--calibration-text", self.calibration_text)
        return {**super().details(), "calibration_text": text}

    def variants(self, part: str) -> Sequence[str]:
        return VARIANTS[part]

    def following(self, part: str) -> int:
        return 0 if part == "stream" else self.new_tokens

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        part, variant = cell["part"], cell["variant"]
        if part == "selection":
            return {"rows": {variant: self._selection(cell["length"])[variant]}}
        if part == "rows":
            return {"rows": {variant: self._rows_figures(variant)}}
        measure = self._after if part == "text" else self._through
        nats, choices = measure(cell["length"], variant)
        _, best = measure(cell["length"], FULL)
        equal = float((choices == best).double().mean())
        return {"nats": float(nats.double().mean()), "equal": equal, "tokens": len(nats)}

    @cached_property
    def _ropes(self) -> dict[int, Rope]:
        config = self.subject.model.config
        return {layer: Rope.of(config, layer) for layer in retrieval_layers(config)}

    @cached_property
    def _corpus(self) -> Corpus:
        tokenizer, most = self.subject.need_tokenizer(self.name), self.calibration_length
        ids = token_ids(tokenizer, read_text(self.calibration_text))
        sequences = cut(ids, most, self.calibration_tokens, "--calibration-tokens")
        return Corpus(sequences, max(1, len(sequences) // 10), {})

    @once  # noqa: B019 - a study lives as long as its process
    def _artifact(self, method: str) -> tuple[str, CalibrationArtifact]:
        """The library's, learned from the same texts, and its folder."""
        folder = (self.artifacts or Path(mkdtemp(prefix="hf-kvret-artifacts-"))) / method
        if not (folder / DESCRIPTION).is_file():
            codebooks = A2ATSCalibration(codewords=self.codewords, rounds=self.rounds)
            learner = AquaCalibration() if method == "aqua" else codebooks
            calibrate(self.subject.model, self._corpus, learner, folder)
        return str(folder), CalibrationArtifact.from_pretrained(folder, method=method)

    @cached_property
    def _codebooks(self) -> dict[int, list[tuple[Codebook, Codebook]]]:
        """The rendering's and the library's by KV head, of three layers, from first to last."""
        places = torch.linspace(0, len(self._ropes) - 1, min(_MEASURED_LAYERS, len(self._ropes)))
        ropes = dict(list(self._ropes.items())[int(place)] for place in places)
        sequences = self._corpus.sequences[: -self._corpus.held_out]
        texts = [read_layers(self.subject.model, x, ropes) for x in tqdm(sequences, "reading")]
        return {n: self._learn([text[n] for text in texts], n) for n in tqdm(ropes, "codebooks")}

    def _learn(self, texts: Sequence[Layer], number: int) -> list[tuple[Codebook, Codebook]]:
        rope, pairs = self._ropes[number], []
        for head in tqdm(range(min(self.heads, len(texts[0].keys))), "heads", leave=False):
            keys = torch.cat([text.keys[head] for text in texts])
            queries = torch.cat([text.group(head).flatten(0, 1) for text in texts])
            far = a2ats.windowed_query(queries, rope.inv_freq)
            literal = a2ats.build_codebook(keys, far, self.codewords, self.rounds)
            factor = query_metric((far.double().T @ far.double())[None])[0]
            words = k_means(keys @ factor, self.codewords, rounds=self.rounds, seed=0)
            library = LearnedLayer(words.bfloat16(), factor, KeySpace(rope, 0))
            pairs.append((Codebook(*literal), codebooks_of(library)[0]))
        return pairs

    @once  # noqa: B019
    def _selection(self, length: int) -> dict[str, list[dict[str, float]]]:
        """Figures by variant and layer, means over KV heads, query heads and queries."""
        ids = self.contexts(self.subject, "selection", length)[0]
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS["selection"]}
        layers = read_layers(self.subject.model, ids, {n: self._ropes[n] for n in self._codebooks})
        for number, pairs in tqdm(self._codebooks.items(), "selections", leave=False):
            layer = layers[number]
            heads = [self._of_head(layer, head, number, *x) for head, x in enumerate(pairs)]
            for name in rows:
                own = [x for of_head in heads for x in of_head[name]]
                means = {key: fmean(x[key] for x in own) for key in own[0]}
                rows[name].append({"layer": number, **means})
        return rows

    def _of_head(
        self, layer: Layer, head: int, number: int, *books: Codebook
    ) -> dict[str, list[dict[str, float]]]:
        """By variant a row for each of the last queries, and each query head."""
        keys, inv_freq = layer.keys[head], self._ropes[number].inv_freq
        near = (keys, *(book.words[a2ats.encode(keys, *book)] for book in books))
        own = [{"rank": rank_of(keys)}, *({"error": a2ats.codebook_error(keys, *x)} for x in books)]
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS["selection"]}
        scaling = self.subject.model.get_decoder().layers[number].self_attn.scaling
        for queries in layer.group(head):
            for position in range(len(keys) - self.new_tokens, len(keys)):
                query, seen = queries[position], slice(position + 1)
                exact = a2ats.rotary_scores(query, position, keys[seen], inv_freq) * scaling
                far = a2ats.windowed_query(query, inv_freq)
                for name, rendered, more in zip(rows, near, own, strict=True):
                    rows[name].append(figures_of(exact, rendered[seen] @ far) | more)
        return rows

    @once  # noqa: B019
    def _after(self, length: int, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of the tokens behind a context; the rendering has the library's codebooks."""
        model, ids = self.subject.model, self.contexts(self.subject, "text", length)[0]
        text, truth = model.config.get_text_config(decoder=True), ids[length:]
        top_k = max(1, int(a2ats.TOP_K_RATIO * length))
        if variant == LIBRARY:
            union = top_k * (text.num_attention_heads // text.num_key_value_heads)
            learned = {"artifact": self._artifact("a2ats")[0], "top_k": union}
            options = A2ATSConfig.from_options(preset="paper", **learned)
            reader = Reader(model, made(variant, A2ATSCache, options), len(ids))
            first = reader.prefill(ids[:length])
            steps = tqdm(ids[length:-1].split(1), variant, leave=False)
            return losses_of(torch.cat([first, *map(reader.feed, steps)]), truth)
        books: dict[int, list[Codebook | None]] = {}
        if variant != FULL:
            books = {n: [None] * text.num_key_value_heads for n in self._ropes}
        if variant == LITERAL:
            artifact = self._artifact("a2ats")[1]
            books = {n: [*codebooks_of(learned_layer(artifact, n, _CPU))] for n in self._ropes}
        before = model.config._attn_implementation
        function = literal_attention(books, self._ropes, length, top_k)
        AttentionInterface.register("literal", function)
        model.set_attn_implementation("literal")
        with torch.no_grad():
            logits = model(ids[None, :-1], logits_to_keep=len(truth), use_cache=False).logits[0]
        model.set_attn_implementation(before)
        return losses_of(logits, truth)

    @once  # noqa: B019
    def _through(self, length: int, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of a window's tokens but the first."""
        ids, pairs = self.contexts(self.subject, "stream", length)[0], []
        feed = self._literal_feed() if variant == LITERAL else self._reader(variant, length).feed
        chunks = zip(ids[:-1].split(self.step), ids[1:].split(self.step), strict=True)
        for tokens, truth in tqdm(list(chunks), variant, leave=False):
            pairs.append(losses_of(feed(tokens, len(tokens)), truth))
        nats, choices = (torch.cat(x) for x in zip(*pairs, strict=True))
        return nats, choices

    def _reader(self, variant: str, length: int) -> Reader:
        """Of full attention, or of the library's rows with predictors or without."""
        model = self.subject.model
        if variant == FULL:
            return Reader(model, choose_cache(FULL, device="cpu"), length)
        learned = {"predictor": "none"}
        if variant == LIBRARY:
            learned = {"artifact": self._artifact("aqua")[0]}
        options = AquaConfig.from_options(preset="paper", bits=aqua.BITS, **learned)
        return Reader(model, made(variant, AquaKVCache, options), length)

    def _literal_feed(self) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """As ``Reader.feed``; buffers that are full after a pass are encoded in place."""
        model, encoded = self.subject.model, aqua.SINK_TOKENS
        cache = DynamicCache(config=model.config)

        def feed(tokens: torch.Tensor, keep: int) -> torch.Tensor:
            nonlocal encoded
            with torch.no_grad():
                logits = model(tokens[None], past_key_values=cache, logits_to_keep=keep).logits[0]
            stop = aqua.compressed_tokens(cache.get_seq_length()).stop
            if stop > encoded:
                self._encode(cache, torch.arange(encoded, stop))
                encoded = stop
            return logits

        return feed

    def _encode(self, cache: DynamicCache, tokens: torch.Tensor) -> None:
        """Replace ``tokens`` of a cache by what AQUA-KV reconstructs, from the first layer up."""
        held = {number: cache.layers[number] for number in self._ropes}
        part = slice(int(tokens[0]), int(tokens[-1]) + 1)
        exact = []
        for n, rope in self._ropes.items():
            keys = rope.unrotate(held[n].keys[:, :, part], tokens)
            exact.append((joined(keys[0]), joined(held[n].values[0, :, part])))
        for (n, rope), rows in zip(self._ropes.items(), self._rebuilt(exact), strict=True):
            heads = held[n].keys.shape[1]
            keys, values = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in rows)
            held[n].keys[:, :, part] = rope.rotate(keys[None], tokens)
            held[n].values[:, :, part] = values

    @cached_property
    def _rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values ``[n, width]`` by layer, of all texts without their first tokens."""
        model, sequences = self.subject.model, self._corpus.sequences
        rows: dict[int, list[tuple[torch.Tensor, ...]]] = {n: [] for n in self._ropes}
        for ids in tqdm(sequences, "reading"):
            for n, layer in read_layers(model, ids, self._ropes).items():
                both = (joined(x)[aqua.SINK_TOKENS :] for x in (layer.keys, layer.values))
                rows[n].append(tuple(both))
        sides = (zip(*of_layer, strict=True) for of_layer in rows.values())
        return [(torch.cat(keys), torch.cat(values)) for keys, values in sides]

    @cached_property
    def _held_out(self) -> int:
        """Where the rows begin that are not learned from."""
        texts = self._corpus.sequences[: -self._corpus.held_out]
        return sum(len(ids) - aqua.SINK_TOKENS for ids in texts)

    @cached_property
    def _codecs(self) -> tuple[aqua.Higgs, aqua.Higgs]:
        """Of all layers, and of the first; grids are the library's, signs are others."""
        generator, width = torch.Generator().manual_seed(self.seed), self._rows[0][0].shape[1]
        signs = torch.randint(0, 2, (aqua.group_size(width),), generator=generator).double() * 2 - 1
        bits = aqua.BITS, aqua.FIRST_LAYER_BITS
        usual, first = (aqua.Higgs(grid_points(x, _CPU).double(), signs) for x in bits)
        return usual, first

    @cached_property
    def _predictors(self) -> list[tuple[aqua.Linear, aqua.Linear]]:
        part = slice(self._held_out)
        learned = [(keys[part], values[part]) for keys, values in self._rows]
        return aqua.calibrate(learned, *self._codecs)

    def _rebuilt(self, layers: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return aqua.reconstruct(layers, self._predictors, *self._codecs)

    def _rows_figures(self, variant: str) -> list[dict[str, Any]]:
        """Figures of held-out rows by layer."""
        if variant == LIBRARY:
            quality = self._artifact("aqua")[1].quality
            return [{name.replace("_", " "): x for name, x in row.items()} for row in quality]
        layers = [tuple(x[self._held_out :] for x in pair) for pair in self._rows]
        rebuilt, rows = self._rebuilt(layers), []
        for index, number in enumerate(self._ropes):
            below, own = rebuilt[index - 1], rebuilt[index]
            inputs = below[0], torch.cat([below[1], own[0]], dim=-1)
            row: dict[str, Any] = {"layer": number}
            for side, x, near in zip(("key", "value"), layers[index], own, strict=True):
                missed = (x - near).square().sum(-1).mean()
                row[f"{side} error"] = float(missed / x.var(0, correction=0).sum())
            for n, side in enumerate(("key", "value") if index else ()):
                x = layers[index][n]
                missed = (x - self._predictors[index - 1][n](inputs[n])).var(0, correction=0).sum()
                row[f"{side} explained"] = 1.0 - float(missed / x.var(0, correction=0).sum())
            rows.append(row)
        return rows


MEASUREMENT = Literal

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
