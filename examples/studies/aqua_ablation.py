"""What AQUA-KV's predictors are worth. bits: perplexity of aqua, and of HIGGS without predictors,
at 2, 3 and 4 bits (the paper's table 2). parts: predictors, bits of the first layer, sinks, RoPE
and calibration, at 2 bits (tables 1 and 5). variance: what predictors explain, by layer
(figures 2 and 5). depth: what two layers below explain beside one (table 5). pruned: perplexity
and first choices of H2O with AQUA-KV's rows (tables 3 and 12), with the artifact in the model's
own folder if there is one. It makes the artifacts that it needs, from --calibration-text or from
the start of --text, and reads text that none of them has seen.

    python examples/studies/aqua_ablation.py --text wiki.test.raw --calibration-text novel.txt \\
        --json ablation.json --plot ablation.png
    python examples/studies/aqua_ablation.py --model needle --parts bits
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from ablation import Ablation, caches_option, check_needles, made, needle_tokens, parts_option
from aqua_variants import (
    EXPLAINED,
    FEW_BITS,
    FULL,
    PLOTS,
    PRUNED,
    SHARES,
    SIDES,
    TABLES,
    Variant,
    ablation_variants,
    bit_variants,
)
from tqdm import tqdm

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.files import DESCRIPTION
from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.store import FirstRows
from hf_kvret.lab.calibrate.aqua import AquaCalibration, AquaStudy
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.sources import cut, needle_documents
from hf_kvret.lab.calibrate.study import Carried, Corpus, LayerFindings, Progress
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.texts import describe_file, read_text, token_ids
from hf_kvret.lab.program.arguments import file_path, length, number
from hf_kvret.lab.program.options import (
    budget_option,
    context_option,
    count_option,
    option,
    text_option,
)
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Cell
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache, AquaStore
from hf_kvret.methods.h2o import H2OConfig, H2OIndex
from hf_kvret.stores import PagedStore, StoreChoice
from hf_kvret_model_patches.rope import Rope

# The share of cold tokens that H2O keeps in the part "pruned".
_KEPT = 0.2
# This share of the calibration's text is held out for figures of quality.
_HELD_OUT = 0.1
# Contexts have other seeds than the calibration.
_CONTEXTS = 1_000


class DecodedRows(PagedStore):
    """The rows that AQUA-KV's codes decode to, decoded once.

    Args:
        codes: the store of the codes.
    """

    def __init__(self, codes: AquaStore) -> None:
        super().__init__(codes.memory)
        self.codes = codes
        codes.below = self._codes_below

    def append(self, block: TokenBlock) -> None:
        self.codes.append(block)
        ids = torch.arange(block.start, block.end, dtype=torch.int32, device=block.keys.device)
        ids = ids.expand(*block.keys.shape[:2], 1, -1)
        keys, values = (rows.squeeze(2) for rows in self.codes.gather(ids))
        super().append(TokenBlock(keys, values, block.start, value_in_key=block.value_in_key))

    def _codes_below(self) -> AquaStore | None:
        below = self.below()
        return below.codes if isinstance(below, DecodedRows) else None


class PrunedCache(AquaKVCache):
    """H2O chooses which tokens are attended to, of rows as AQUA-KV codes them (section 4.3).

    Their weights are counted by the reconstructed keys. Rows of evicted tokens stay in the store,
    and all are decoded once: it shows what both do to quality, and saves no memory.
    """

    @classmethod
    def make_store(
        cls, options: AquaConfig, layer: int, stores: StoreChoice, first: FirstRows
    ) -> DecodedRows:
        store = super().make_store(options, layer, stores, first)
        assert isinstance(store, AquaStore)
        return DecodedRows(store)

    @classmethod
    def make_index(cls, options: AquaConfig, layer: int) -> H2OIndex:  # type: ignore[override]
        """A new, empty index of heavy hitters, ``top_k`` of them for each KV head."""
        return H2OIndex(H2OConfig(sink=options.sink, max_draft=options.max_draft))


class TwoLayerStudy(AquaStudy):
    """Predictors read the two layers below, not one (table 5). No cache reads such predictors."""

    def finish(self, progress: Progress, carried: Carried | None = None) -> LayerFindings:
        findings = super().finish(progress, carried)
        older = {f"{name} below": (carried or {}).get(name) for name in SIDES}
        kept = {name: x for name, x in older.items() if x is not None}
        return replace(findings, carried={**(findings.carried or {}), **kept})

    def _inputs(
        self, name: str, below: Carried, reconstructions: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        inputs, older = super()._inputs(name, below, reconstructions), below.get(f"{name} below")
        return inputs if older is None else [*inputs, older]


class TwoLayerCalibration(AquaCalibration):
    """Makes ``TwoLayerStudy``."""

    def study(self, layer: int, rope: Rope, device: torch.device) -> AquaStudy:
        return TwoLayerStudy(self, layer, rope, device)


@dataclass(frozen=True, kw_only=True)
class AquaAblation(Ablation):
    """What AQUA-KV's predictors are worth.

    It makes the artifacts that it needs; tokens of the calibration never come in a context. Without
    ``calibration_text`` the first ``calibration_tokens`` of ``text`` are learned from, and contexts
    begin after them. Documents of needles have other seeds than the calibration's.
    """

    name = "aqua-ablation"
    method = "aqua"
    example = "recent=128"
    chosen = (*("artifact", "revision", "bits", "first_bits", "group", "predictor", "sink"),)
    instead = "; --artifacts names the artifacts' folder"
    described = ("windows", "step", "calibration_tokens", "calibration_length", "ridge")
    # They look at predictors alone.
    apart = ("variance", "depth")
    tables = TABLES
    plots = PLOTS
    smallest = (
        "--model needle --context 256 --windows 1 --parts bits,variance,depth,pruned --step 16 "
        "--new-tokens 8 "
        "--calibration-tokens 1K --calibration-length 256 --caches aqua:recent=16:flush=16"
    )

    caches: str | None = caches_option("aqua")
    top_k: int | float = budget_option(1.0)
    context: tuple[int, ...] = context_option((2048,), "tokens of a window")
    windows: int = count_option(3, "at most this many of each length")
    parts: tuple[str, ...] = parts_option(TABLES)
    new_tokens: int = count_option(128, "after a window, one a pass: of the part pruned")
    step: int = count_option(32, "tokens a forward pass, from the first one on")
    artifacts: Path | None = option(
        None,
        "keep the artifacts here, or find them; default: they are gone in the end",
        kind=file_path,
        metavar="DIR",
    )
    calibration_text: Path | None = text_option(
        "learn from this; default: the start of --text, contexts begin after it", required=False
    )
    calibration_tokens: int = option(32_768, "the last tenth is held out", kind=length)
    calibration_length: int = option(2048, "most tokens of a sequence", kind=length)
    ridge: float = option(AquaCalibration().ridge, "in mean variances of an input", kind=number(0))

    def __post_init__(self) -> None:
        if self.calibration_text is not None and self.text is None:
            raise ValueError(
                f"--calibration-text {self.calibration_text}: give --text too, the contexts to "
                "measure on come from it"
            )
        if self.text is not None and self.calibration_text == self.text:
            raise ValueError(
                f"--calibration-text {self.text} is --text, too: leave it out, and contexts begin "
                "after the tokens that are learned from"
            )

    @cached_property
    def _learned(self) -> dict[str, CalibrationArtifact]:
        return {}

    @cached_property
    def _temporary(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="hf-kvret-artifacts-")

    def check_cells(self, cells: Sequence[Cell]) -> None:
        # Caches are not tried: their artifacts may not be there yet.
        self.check_contexts(cells, self.subject)

    def artifact_sha256(self, cache: str) -> str | None:
        """A variant has its own, which ``artifact`` checks."""
        return None

    def details(self) -> dict[str, Any]:
        other = describe_file("--calibration-text", self.calibration_text)
        usual = "the start of --text" if self.text else "needle language"
        # Named where they are not the usual ones, so that other parts can be added to old results.
        is_usual = self.new_tokens == type(self).new_tokens
        more = {} if is_usual else {"new_tokens": self.new_tokens}
        return {**super().details(), "calibration_text": other or usual, **more}

    def variants(self, part: str) -> Sequence[str]:
        return list(_variants(part))

    def asking(self, part: str, length: int) -> int:
        return length // 4

    def following(self, part: str) -> int:
        return self.new_tokens if part == "pruned" else 0

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        subject, part, name = self.subject, cell["part"], cell["variant"]
        if part == "variance":
            quality = self.artifact(EXPLAINED[name], subject)[1].quality
            return {"layers": [dict(one) for one in quality]}
        if part == "depth":
            return {"rows": self.depths(subject)}
        # A text that is too short is found before the work, not after it.
        windows = self.contexts(subject, part, cell["length"])
        base = choice.options
        assert isinstance(base, AquaConfig)
        if "dense_below" not in choice.name:
            base = base.replace(dense_below=0)
        if part == "pruned":
            chosen = self._pruned(name, subject, base)
            return read_through(subject, chosen, windows, 1, cell["length"])
        chosen = self._choice(_variants(part)[name], name, subject, base)
        return read_through(subject, chosen, windows, self.step)

    def depths(self, subject: Subject) -> dict[str, list[dict[str, Any]]]:
        """Figures by layer of predictors that read one layer or two, exact ones or in 2 bits."""
        corpus, rows = self.corpus(subject), {}
        for bits, name in ((16, "exact"), (FEW_BITS, f"{FEW_BITS} bits")):
            for layers, cls in (("1 layer", AquaCalibration), ("2 layers", TwoLayerCalibration)):
                calibration = cls(bits=bits, first_bits=max(4, bits), ridge=self.ridge)
                place = Path(self._temporary.name, "depths")
                learned = calibrate(subject.model, corpus, calibration, place)
                rows[f"{layers}, {name}"] = [dict(row) for row in learned.quality]
        return rows

    def _pruned(self, name: str, subject: Subject, base: AquaConfig) -> CacheChoice:
        """Full attention, or a fifth of the cold tokens; predictors of the model's own artifact."""
        if name == FULL:
            return choose_cache(FULL, device=str(subject.device))
        options = {"top_k": _KEPT, **PRUNED[name][0]}
        if "predictor" not in options:
            own = Path(subject.model.config._name_or_path) / self.method
            is_there = (own / DESCRIPTION).is_file()
            learned = own if is_there else self.artifact({"bits": FEW_BITS}, subject)[0]
            options["artifact"] = str(learned)
        return made(name, PrunedCache, base.replace(**options))

    def artifact(
        self, changes: Mapping[str, Any], subject: Subject
    ) -> tuple[str, CalibrationArtifact]:
        """The folder of an artifact that was learned with ``changes``, and what is in it.

        Its name says what differs from the usual options. What is there is used where it was made
        of the same model, text and options, and refused with a ValueError otherwise.
        """
        usual = AquaCalibration(ridge=self.ridge)
        calibration, options = replace(usual, **changes), usual.options()
        learned = {field.name: getattr(calibration, field.name) for field in fields(calibration)}
        parts = [f"{name}-{value}" for name, value in learned.items() if value != options[name]]
        name = "_".join(parts) or "usual"
        folder = (self.artifacts or Path(self._temporary.name)).absolute() / name
        if name not in self._learned:
            self._learned[name] = self._find(folder, calibration, subject)
        return str(folder), self._learned[name]

    def _find(
        self, folder: Path, calibration: AquaCalibration, subject: Subject
    ) -> CalibrationArtifact:
        corpus, model = self.corpus(subject), subject.model
        if not (folder / DESCRIPTION).is_file():
            tqdm.write(f"calibrating: {folder}", file=sys.stderr)
            return calibrate(model, corpus, calibration, folder)
        result = CalibrationArtifact.from_pretrained(folder, method=calibration.method)
        result.check(model.config)
        result.check_weights(model)
        previous = {**result.options, **result.data}
        changed = [
            f"{key} was {previous.get(key)!r}, now {value!r}"
            for key, value in (calibration.options() | corpus.description).items()
            if previous.get(key) != value
        ]
        if changed:
            raise ValueError(
                f"{folder} holds an artifact of another calibration ({'; '.join(changed)}): give "
                "another --artifacts, or delete that folder"
            )
        return result

    def _choice(
        self, variant: Variant, name: str, subject: Subject, base: AquaConfig
    ) -> CacheChoice:
        if variant.other is not None:
            return choose_cache(variant.other, device=str(subject.device))
        options: dict[str, Any] = dict(variant.cache)
        if variant.learned is not None:
            options["artifact"] = self.artifact(variant.learned, subject)[0]
        return made(name, AquaKVCache, base.replace(**options))

    def corpus(self, subject: Subject) -> Corpus:
        """What is learned from, with its end held out.

        Raises:
            ValueError: too little text, or none and another language than that of needles.
        """
        tokens, most = self.calibration_tokens, self.calibration_length
        description: dict[str, Any] = {"tokens": tokens, "length": most, "seed": self.seed}
        description["dtype"] = str(subject.model.dtype).removeprefix("torch.")
        path = self.calibration_text or self.text
        if path is None:
            check_needles(subject)
            sequences = list(needle_documents(tokens, most, self.seed))
            description["documents"] = "needle language"
        else:
            ids = token_ids(subject.need_tokenizer(self.name), read_text(path))
            sequences = cut(ids, most, tokens, "--calibration-tokens")
            description["text"] = describe_file("--text", path)
        if len(sequences) < 2:
            raise ValueError(
                f"--calibration-tokens {tokens} in sequences of --calibration-length {most}: at "
                "least two, one of them measures errors; take shorter ones"
            )
        held_out = max(1, round(_HELD_OUT * len(sequences)))
        description["held_out_sequences"] = held_out
        return Corpus(sequences, held_out, description)

    def contexts(self, subject: Subject, part: str, length: int) -> list[torch.Tensor]:
        size, count = length + self.following(part), self.windows
        if self.text is None:
            check_needles(subject)
            asking, first = self.asking(part, length), self.seed + _CONTEXTS
            return [needle_tokens(size, asking, seed) for seed in range(first, first + count)]
        ids = self._unseen(subject)
        result = min(count, len(ids) // size)
        if not result:
            raise ValueError(
                f"--text {self.text} has {len(ids)} tokens beside those of the calibration, fewer "
                f"than the {size} of a context: give a shorter --context, fewer "
                "--calibration-tokens, or a longer text"
            )
        return list(ids[: result * size].view(result, size))

    def _unseen(self, subject: Subject) -> torch.Tensor:
        """The tokens of ``text`` without those that are learned from, BOS in front."""
        assert self.text is not None
        tokenizer = subject.need_tokenizer(self.name)
        ids = token_ids(tokenizer, read_text(self.text))
        if self.calibration_text is not None:
            return ids
        bos = 0 if tokenizer.bos_token_id is None else 1
        return torch.cat([ids[:bos], ids[self.calibration_tokens :]])


def _variants(part: str) -> dict[str, Any]:
    """The variants of a part by name."""
    if part in ("variance", "depth"):
        return dict(EXPLAINED) if part == "variance" else {"all rows": None}
    if part == "pruned":
        return {FULL: None, **PRUNED}
    return ablation_variants() if part == "parts" else bit_variants()


def read_through(
    subject: Subject,
    choice: CacheChoice,
    windows: Sequence[torch.Tensor],
    step: int,
    prompt_len: int = 0,
) -> dict[str, Any]:
    """Perplexity over ``windows [n]``, alike in length, each read ``step`` tokens a forward pass.

    They are read from their start, so that a token attends to what the cache has made of those
    before it, as the paper has it; all but the first token of a window count. With ``prompt_len``
    so many tokens enter at once, as a prompt, and those after it count. Returns ``ppl``,
    ``nats``, ``tokens``, ``window_nats`` of each window, ``seconds`` of all forward passes, and of
    the last window's end:

    ``bits`` that a number of a key or value takes in the cold part (``value_bits``), ``full_bits``
    that it takes in the model's dtype; ``held_ratio``, all bytes as a share of full keys and
    values, spare room and predictors included; ``predictor_bytes``. Of ``PrunedCache`` there are
    ``kept``, the share of cold tokens that a KV head still attends to, and ``needed``: that of rows
    which some head of the layer, or of one above it, does, as a row is predicted from those below.

    Raises:
        ValueError: nothing was cold; a step that the cache would not take as drafted tokens.
    """
    means, count, seconds = [], 0, 0.0
    for window in tqdm(windows, leave=False, unit="window", desc=choice.name):
        reader = Reader(subject.model, choice, len(window))
        reader.check_step(step)
        losses = _losses(reader, window, step, prompt_len)
        means.append(losses.double().mean().item())
        count += len(losses)
        seconds += reader.seconds
    usage = reader.usage()
    cache = reader.cache
    shared = cache.memory().shared if isinstance(cache, RetrievalCache) else 0
    nats = fmean(means)
    return {
        "ppl": math.exp(nats),
        "nats": nats,
        "tokens": count,
        "window_nats": means,
        "bits": value_bits(reader),
        "full_bits": 8 * subject.model.dtype.itemsize,
        "held_ratio": (usage.device_bytes + usage.host_bytes) / usage.full_bytes,
        "predictor_bytes": shared,
        "seconds": seconds,
        **(kept_shares(cache) if isinstance(cache, PrunedCache) else {}),
    }


def kept_shares(cache: PrunedCache) -> dict[str, float]:
    """``kept`` and ``needed`` of ``read_through``."""
    shares: dict[str, list[float]] = {name: [] for name in SHARES}
    above: torch.Tensor | bool = False
    for layer in reversed(cache.retrieval_layers):
        assert layer.kv is not None and isinstance(layer.kv.index, H2OIndex)
        kept = layer.kv.index._scores.rows[:, :, : layer.kv.cold_len] > float("-inf")
        above = kept.any(1) | above
        shares["kept"].append(kept.double().mean().item())
        shares["needed"].append(above.double().mean().item())
    return {name: fmean(values) for name, values in shares.items()}


def value_bits(reader: Reader) -> float:
    """Bits that a number of a coded key or value takes, mean over layers; whole tokens alone.

    Of ours the rows as they are kept, with positions; of full attention its dtype. Windows of
    recent tokens don't count.

    Raises:
        ValueError: ours has nothing cold.
    """
    cache = reader.cache
    if isinstance(cache, RetrievalCache):
        stored_bytes, elements = 0, 0
        for layer in cache.retrieval_layers:
            kv = layer.kv
            if kv is None or kv.store is None or not kv.cold_len:
                remedy = "a smaller window as aqua:recent=32:flush=32"
                raise ValueError(f"nothing was cold: take a longer --context, or {remedy}")
            keys, values = kv.window.keys, kv.window.values
            # Beside these a store has a few figures about their making.
            stored_bytes += sum(x.nbytes for x in kv.store.state_dict().values() if x.ndim >= 3)
            elements += len(keys) * keys.shape[1] * kv.cold_len * (keys.shape[3] + values.shape[3])
        return 8 * stored_bytes / elements
    return 8.0 * reader.model.dtype.itemsize


def _losses(reader: Reader, window: torch.Tensor, step: int, prompt_len: int = 0) -> torch.Tensor:
    """``[len(window) - max(1, prompt_len)]`` in nats."""
    results = []
    last = reader.prefill(window[:prompt_len]) if prompt_len else None
    chunks = window[prompt_len:].split(step)
    for tokens in tqdm(chunks, leave=False, desc=reader.choice.name, mininterval=1):
        new = reader.feed(tokens, keep=len(tokens))
        # The logits before a step foretell the first of its tokens, its own all others.
        foretold = new[:-1] if last is None else torch.cat([last, new[:-1]])
        truth = (tokens if last is not None else tokens[1:]).to(foretold.device)
        losses = torch.nn.functional.cross_entropy(foretold.float(), truth, reduction="none")
        results.append(losses.cpu())
        last = new[-1:]
    return torch.cat(results)


MEASUREMENT = AquaAblation

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
