"""What AQUA-KV's predictors are worth, and what its cache takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from hf_kvret.calibration.aqua import AquaCalibration
from hf_kvret.evaluation.aqua_artifacts import Artifacts
from hf_kvret.evaluation.aqua_layers import one_layer_each
from hf_kvret.evaluation.aqua_memory import PREDICTORS, measure
from hf_kvret.evaluation.aqua_perplexity import read_through
from hf_kvret.evaluation.aqua_plots import ablation_pictures, plot_ablation
from hf_kvret.evaluation.aqua_report import ablation_tables
from hf_kvret.evaluation.aqua_variants import (
    ALONE,
    EXPLAINED,
    Variant,
    ablation_variants,
    bit_variants,
)
from hf_kvret.evaluation.arguments import file_path, length, lengths, names, number, whole_number
from hf_kvret.evaluation.caches import CacheChoice, choose_cache
from hf_kvret.evaluation.reader import check_positions
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.study_artifacts import artifact_folder
from hf_kvret.evaluation.study_texts import Texts
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.task import Choices, Task, lengths_of
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache

PARTS = ("bits", "parts", "variance", "layers", "memory")
# These measure caches; the others look at artifacts, and at layers of random numbers.
_READING = ("bits", "parts", "layers")
_CHOSEN = (
    "artifact",
    "revision",
    "bits",
    "first_bits",
    "group",
    "backbone",
    "predictor",
    "anchor_every",
    "sink",
)


@dataclass(frozen=True, kw_only=True)
class AquaAblation(Task):
    """What AQUA-KV's predictors are worth, and what its cache takes."""

    name: ClassVar[str] = "aqua-ablation"
    summary: ClassVar[str] = "what AQUA-KV's predictors are worth, beside other quantized caches"
    description: ClassVar[str] = (
        "What AQUA-KV's predictors are worth, and what its cache takes. bits: perplexity of "
        "aqua, of HIGGS without predictors, of round-to-nearest and KIVI-style codes, and of "
        "transformers' quantized caches where they are installed, at 2, 3 and 4 bits (the "
        "paper's table 2). parts: other predictors, bits of the first layer, sinks, RoPE, "
        "anchors, inputs of the predictors, at 2 bits (tables 1 and 5). variance: what "
        "predictors explain, by layer (figure 2). layers: what it costs to code one layer "
        "alone. memory: bits a value at 131,072 tokens of the shapes of 8B and 70B, on paper "
        "and of tensors. The command makes the artifacts that it needs, from --calibration-text "
        "or from the start of --text, and reads text that none of them has seen."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret eval aqua-ablation --text wiki.test.raw --calibration-text novel.txt --json "
        "ablation.json --plot ablation.png",
        "hf-kvret eval aqua-ablation --parts memory --memory-tokens 128K",
    )

    texts: Texts
    artifacts: Artifacts
    lengths: tuple[int, ...]
    windows: int
    step: int
    parts: tuple[str, ...]
    memory_tokens: int
    memory_layers: int
    retrieval: dict[str, Any]

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(
                f"unknown part {', '.join(unknown) or '(none named)'}: choose among "
                f"{', '.join(PARTS)}"
            )
        if self.windows < 1 or self.step < 1:
            raise ValueError(f"--windows {self.windows}, --step {self.step}: at least 1 each")
        if self.memory_layers < 2:
            raise ValueError(
                f"--memory-layers {self.memory_layers}: at least 2, the first and one that is "
                "predicted"
            )

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        usual = AquaCalibration()
        parser.set_defaults(caches="aqua", top_k=1.0)
        add = parser.add_argument
        add("--text", type=file_path, metavar="FILE", help="default: documents of needles")
        add("--lengths", type=lengths, default=[2048], help="tokens of a window")
        add("--windows", type=int, default=3, help="at most this many of each length")
        add("--step", type=int, default=32, help="tokens a forward pass, from the first one on")
        add("--parts", type=names, default=list(PARTS), help=f"default: all of {', '.join(PARTS)}")
        add(
            "--artifacts",
            type=file_path,
            metavar="DIR",
            help="keep the artifacts here, or find them; default: a folder named after --json",
        )
        add(
            "--calibration-text",
            type=file_path,
            metavar="FILE",
            help="learn from this; default: the start of --text, windows begin after it",
        )
        add("--calibration-tokens", type=length, default="32K", help="the last tenth is held out")
        add("--calibration-length", type=length, default="2K", help="most tokens of a sequence")
        add(
            "--rank",
            type=whole_number(1),
            help="of reduced-rank predictors; default: a quarter of the keys",
        )
        add(
            "--hidden",
            type=whole_number(2),
            help="units of MLP predictors; default: twice their outputs",
        )
        add(
            "--mlp-steps",
            type=whole_number(0),
            default=200,
            help="of training; 1000 or more for a large one",
        )
        add("--ridge", type=number(0), default=usual.ridge, help="in mean variances of an input")
        add("--memory-tokens", type=length, default="16K", help="that fill layers of memory")
        add("--memory-layers", type=int, default=3, help="of the shape of 8B and 70B")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        given = options
        texts = Texts(
            given.text,
            given.calibration_text,
            given.calibration_tokens,
            0,
            given.calibration_length,
            given.seed,
        )
        calibration = AquaCalibration(hidden=given.hidden, steps=given.mlp_steps, ridge=given.ridge)
        if given.rank is not None:
            # Refused now rather than when the first such predictor is learned.
            replace(calibration, rank=given.rank)
        folder = artifact_folder(given)
        return cls(
            texts,
            Artifacts(folder, texts, calibration, given.rank),
            tuple(given.lengths),
            given.windows,
            given.step,
            tuple(given.parts),
            given.memory_tokens,
            given.memory_layers,
            {"top_k": given.top_k, "store": given.store, "dense_below": 0},
        )

    def setup(self) -> dict[str, Any]:
        learned = self.artifacts.options
        described = self.texts.describe()
        # There are no UUIDs here.
        del described["uuid_tokens"]
        return {
            **described,
            "windows": self.windows,
            "step": self.step,
            "rank": self.artifacts.rank,
            "hidden": learned.hidden,
            "mlp_steps": learned.steps,
            "ridge": learned.ridge,
            "memory_tokens": self.memory_tokens,
            "memory_layers": self.memory_layers,
        }

    def cells(self, caches: Sequence[str]) -> list[Cell]:
        for cache in caches:
            _check_cache(cache)
        found: list[Cell] = []
        for part in self.parts:
            names = list(_variants(part))
            if part in _READING:
                found += [
                    {"cache": cache, "part": part, "variant": name, "length": length}
                    for length in self.lengths
                    for cache in caches
                    for name in names
                ]
            else:
                found += [{"cache": caches[0], "part": part, "variant": name} for name in names]
        return found

    def check(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        if self.texts.text is not None:
            subject.need_tokenizer(self.name)
        for count in lengths_of(cells):
            self.texts.contexts(subject, count, count // 4, self.windows)
            check_positions(subject.model, count)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, name = cell["part"], cell["variant"]
        if part == "memory":
            return measure(name, self.memory_tokens, self.memory_layers)
        if self.texts.text is not None:
            subject.need_tokenizer(self.name)
        if part == "variance":
            return {"layers": [dict(one) for one in self._quality(name, subject)]}
        length = cell["length"]
        # A text that is too short is found before the work, not after it.
        windows = self.texts.contexts(subject, length, length // 4, self.windows)
        variant = _variants(part)[name]
        if part == "layers":
            options = self._given(subject, choice.name).replace(**variant.cache)
            return one_layer_each(subject, options, windows, self.step)
        chosen = self._choice(variant, name, subject, choice.name)
        return read_through(subject, chosen, windows, self.step)

    def _quality(self, name: str, subject: Subject) -> Sequence[Any]:
        return self.artifacts.find(EXPLAINED[name], subject).quality

    def _choice(self, variant: Variant, name: str, subject: Subject, cache: str) -> CacheChoice:
        if variant.other is not None:
            return choose_cache(variant.other, device=str(subject.device))
        options: dict[str, Any] = dict(variant.cache)
        if variant.learned is not None:
            self.artifacts.find(variant.learned, subject)
            options["artifact"] = str(self.artifacts.path(variant.learned, subject))
        chosen = self._given(subject, cache).replace(**options)
        return CacheChoice(
            name,
            lambda config, capacity: AquaKVCache(config=config, options=chosen),
            options=chosen,
        )

    def _given(self, subject: Subject, cache: str) -> AquaConfig:
        """The options that ``--caches`` names, with this command's."""
        given = choose_cache(cache, self.retrieval, str(subject.device)).options
        assert isinstance(given, AquaConfig)
        return given

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


def _variants(part: str) -> dict[str, Any]:
    """The variants of a part by name."""
    if part == "bits":
        return dict(bit_variants())
    if part == "parts":
        return dict(ablation_variants())
    if part == "layers":
        return {name: bit_variants()[name] for name in ALONE}
    return dict(EXPLAINED if part == "variance" else PREDICTORS)


def _check_cache(cache: str) -> None:
    """ValueError for another cache than aqua, or with options that the variants choose."""
    name, *options = (part.strip() for part in cache.split(":"))
    if name != AquaKVCache.name:
        raise ValueError(
            f"--caches {cache}: aqua-ablation brings the others itself, so name aqua alone, with "
            "options where wanted, as aqua:recent=128"
        )
    for option in (part.partition("=")[0] for part in options):
        if option in _CHOSEN:
            raise ValueError(
                f"--caches {cache}: aqua-ablation chooses {option} itself, leave it out; "
                "--artifacts names the artifacts' folder"
            )
