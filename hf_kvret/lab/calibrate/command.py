"""``hf-kvret calibrate METHOD`` and ``hf-kvret inspect``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.files import DESCRIPTION, check_no_foreign_artifact, find_folder
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.calibrate.study import Corpus, calibrate
from hf_kvret.lab.evaluate.needles import needle_documents
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.lab.evaluate.texts import cut, describe_file, random_uuids, read_text, token_ids
from hf_kvret.lab.program import options as common
from hf_kvret.lab.program.arguments import (
    DTYPES,
    check_device,
    file_path,
    length,
    length_or_none,
    number,
    share,
    whole_number,
)
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.program import add_command
from hf_kvret.lab.report.results import check_folder
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.methods.a2ats.learned import CODEWORD_DTYPES
from hf_kvret.methods.aqua.learned import BITS, GROUPS, SPACES
from hf_kvret.saved import description as caches
from hf_kvret.saved.identity import printable

_AQUA = AquaCalibration()


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of every method: a model, texts to learn from, and where the artifact goes.

    A subclass has those of its ``Calibration``, by the same names.
    """

    Calibration: ClassVar[type[Any]]
    summary: ClassVar[str]
    usual_uuid_tokens: ClassVar[int]

    model: str = option(
        help="a folder, a hub id, or a model of ours: reference, needle (documents of its own)"
    )
    text: Path | None = option(None, "text to learn from", kind=file_path, metavar="FILE")
    tokens: int = option(64 * 1024, "of text, held-out included", kind=length)
    uuid_tokens: int | None = option(
        None,
        "of random UUIDs beside text; 0 for none; 16K for a2ats and none for others if left out",
        kind=length_or_none,
    )
    length: int = option(4096, "most tokens of a sequence", kind=length)
    held_out: float = option(
        0.1, "share of the text that only measures quality", kind=share(zero=True)
    )
    name: str | None = option(
        None, "of the model in the artifact; default: its hub id or folder's name"
    )
    out: Path = option(help="folder of the artifact", kind=file_path, metavar="DIR")
    dtype: str = common.dtype_option()
    device: str = common.device_option()
    device_map: str | None = common.device_map_option()
    seed: int = common.seed_option(0)

    def __post_init__(self) -> None:
        """A mistake in the sources of text is named before the model is loaded."""
        if self.model == "needle" and (self.text or self.uuid_tokens is not None):
            raise ValueError(
                "--model needle learns from documents of its own language: leave --text and "
                "--uuid-tokens out"
            )
        if self.model != "needle" and self.text is None:
            raise ValueError("give --text FILE, a text to learn from")
        describe_file("--text", self.text)

    def calibration(self) -> Any:
        """The method's own part; ValueError for options that don't go together."""
        mine = {one.name for one in fields(self)}
        shared = [one.name for one in fields(self.Calibration) if one.name in mine]
        return self.Calibration(**{name: getattr(self, name) for name in shared})


@dataclass(frozen=True, kw_only=True)
class A2ATSOptions(CalibrateOptions):
    """Learn codebooks of each KV head from keys before RoPE, one for all inputs.

    Errors are counted as queries see them (A2ATS, equations 13 to 15).
    """

    Calibration: ClassVar[type[Any]] = A2ATSCalibration
    summary: ClassVar[str] = "codebooks of keys before RoPE"
    usual_uuid_tokens: ClassVar[int] = 16 * 1024

    codewords: int = common.count_option(4096, "of each KV head")
    codeword_dtype: str = option("bfloat16", "as they are saved", choices=CODEWORD_DTYPES)
    distance: int = option(2048, "b, of all tokens that are not local", kind=whole_number(0))
    rounds: int = option(300, "of k-means at most", kind=whole_number(0))
    space: str = option(
        "windowed", "rotated: for positions of three parts", choices=("windowed", "rotated")
    )


def anchor_bits(text: str) -> int | str:
    """A number of bits, or ``auto``; the parser compares it with its choices."""
    if text != "auto" and not text.isdecimal():
        choices = ", ".join(map(str, BITS))
        raise argparse.ArgumentTypeError(f"{text!r} is none of {choices} bits, and not auto")
    return text if text == "auto" else int(text)


@dataclass(frozen=True, kw_only=True)
class AquaOptions(CalibrateOptions):
    """Learn what predicts a layer's keys and values from those of the layer below.

    The cache keeps what is left, in few bits (AQUA-KV).
    """

    Calibration: ClassVar[type[Any]] = AquaCalibration
    summary: ClassVar[str] = "predictors of a layer's keys and values from those of the layer below"
    usual_uuid_tokens: ClassVar[int] = 0

    bits: int = option(
        _AQUA.bits,
        "of residuals, served unless a cache is given others; 16: not coded",
        choices=BITS,
    )
    first_bits: int | str = option(
        _AQUA.first_bits,
        "of the first layer; 16: left as it is; auto: 4 or 16, by the error",
        kind=anchor_bits,
        choices=(*BITS, "auto"),
    )
    group: int | None = option(
        None,
        "numbers that share a scale; default: as many as fit, up to 1024",
        kind=int,
        choices=GROUPS,
    )
    ridge: float = option(_AQUA.ridge, "in mean variances of an input", kind=number(0))
    sinks: int = option(_AQUA.sinks, "first tokens of a sequence, left out", kind=whole_number(0))
    space: str = option(_AQUA.space, "of keys, and RoPE", choices=SPACES)
    anchor_mean: bool = option(False, "take the mean off in the first layer")


def describe(artifact: CalibrationArtifact) -> str:
    """Method, model, data, options, sizes and digest."""
    model = artifact.model
    options = {name: value for name, value in artifact.options.items() if name != "layers"}
    layers = f", {len(artifact.quality)} layers" if artifact.quality else ""
    return "\n".join(
        printable(line)
        for line in [
            f"method   {artifact.method}{layers}",
            f"model    {model.name} ({model.facts.get('model_type')}, {model.sha256[:12]})",
            f"data     {_list(artifact.data)}",
            f"options  {_list(options)}",
            f"tensors  {len(artifact.tensors)}, {artifact.nbytes / 2**20:.2f} MiB",
            f"sha256   {artifact.sha256}",
        ]
    )


def quality_table(artifact: CalibrationArtifact) -> str:
    """A markdown table of the figures of quality, a line for each layer; a sentence for none."""
    if not artifact.quality:
        return "no figures of quality"
    names = list(dict.fromkeys(name for row in artifact.quality for name in row))
    rows = [[_cell(row.get(name)) for name in names] for row in artifact.quality]
    return markdown_table([name.replace("_", " ") for name in names], rows)


def verify(path: Path) -> list[str]:
    """Lines that say which cache and artifact the folder ``path`` holds, and what was checked.

    Every checksum is. Whether they fit a model shows when they are loaded.

    Raises:
        OSError: a file is missing, or can't be read.
        ValueError: damage, or nothing that can be verified.
    """
    lines = caches.verify_cache(path) if (path / caches.DESCRIPTION).exists() else []
    if _holds_artifact(path):
        artifact = CalibrationArtifact.from_pretrained(path)
        lines += [
            f"artifact {artifact.method} of {artifact.model.name}",
            f"tensors  {len(artifact.tensors)}, {artifact.nbytes / 2**20:.2f} MiB: whole",
            f"sha256   {artifact.sha256}",
        ]
    if not lines:
        raise ValueError(f"{path}: --verify checks folders with saved caches and artifacts")
    return [printable(line) for line in lines]


def _holds_artifact(path: Path) -> bool:
    """Whether an artifact, damaged perhaps, seems to be in ``path``.

    ``config.json`` is also what transformers calls the configuration of a model.
    """
    file = path / DESCRIPTION
    content = file.read_bytes() if file.is_file() else b""
    return b'"format_version"' in content or (file.exists() and b'"model_type"' not in content)


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_EXAMPLE = "--model MODEL --text novel.txt --out MODEL/"


def add_calibrate_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``calibrate`` with one sub-command a method, and ``inspect``, to the program."""
    parser = commands.add_parser(
        "calibrate",
        help="learn what a method must know about a model, and save or share it",
        description="Learn what a method must know about a model.",
    )
    methods = parser.add_subparsers(required=True, metavar="METHOD")
    for cls in (A2ATSOptions, AquaOptions):
        method = cls.Calibration.method
        add_command(
            methods,
            method,
            cls,
            run_calibrate,
            help=cls.summary,
            examples=[f"hf-kvret calibrate {method} {_EXAMPLE}{method}"],
        )
    add_command(
        commands,
        "inspect",
        InspectOptions,
        run_inspect,
        help="say what a calibration artifact is, or check what was saved",
    )


@dataclass(frozen=True)
class InspectOptions:
    """Say what a calibration artifact is: method, model, data, sizes and quality.

    With --verify, check every byte of the cache and the artifact there; status 2 says that
    something is damaged.
    """

    artifact: str = option(help="a folder or a hub id", name="artifact")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    verify: bool = option(False, "check what is saved there, byte by byte")


def run_calibrate(options: CalibrateOptions) -> int:
    """Calibrate as the command line says; print what was made."""
    calibration = options.calibration()
    check_folder("--out", options.out)
    check_no_foreign_artifact(options.out, calibration.method)
    check_device(options.device)
    place = DTYPES[options.dtype], options.device, options.device_map
    subject = load_subject(options.model, *place)
    corpus = make_corpus(options, subject)
    artifact = calibrate(subject.model, corpus, calibration, options.out, name=options.name)
    print(f"\n{describe(artifact)}\n\n{quality_table(artifact)}")
    print(f"\nwrote {printable(str(options.out))}")
    return 0


def make_corpus(options: CalibrateOptions, subject: Subject) -> Corpus:
    """The sequences of the command line.

    Raises:
        ValueError: a model without a tokenizer, too little text, or none left to hold out.
    """
    length, count = options.length, options.tokens
    description: dict[str, Any] = {"length": length, "seed": options.seed, "tokens": count}
    uuids: list[torch.Tensor] = []
    if subject.name == "needle":
        sequences = list(needle_documents(count, length, options.seed))
        description["documents"] = "needle language"
    else:
        tokenizer = subject.need_tokenizer("calibrate")
        assert options.text is not None, "options were checked"
        ids = token_ids(tokenizer, read_text(options.text))
        description["text"] = describe_file("--text", options.text)
        sequences = cut(ids, length, count, "--tokens")
        asked, usual = options.uuid_tokens, options.usual_uuid_tokens
        if uuid_count := usual if asked is None else asked:
            uuid_ids = random_uuids(uuid_count, tokenizer, options.seed)
            uuids = cut(uuid_ids, length, uuid_count, "--uuid-tokens")
            description["uuid_tokens"] = uuid_count
    held_out = 0
    if options.held_out:
        if len(sequences) < 2:
            raise ValueError(
                f"--held-out {options.held_out} of one sequence with {len(sequences[0])} tokens: "
                "it takes at least two sequences: give a shorter --length or --held-out 0"
            )
        # At least one sequence is held out, but never all.
        held_out = min(max(1, round(options.held_out * len(sequences))), len(sequences) - 1)
    # UUIDs come first, so that what is held out is the end of the text.
    return Corpus([*uuids, *sequences], held_out, {**description, "held_out_sequences": held_out})


def run_inspect(options: InspectOptions) -> int:
    """Print what an artifact is, or what is whole in a folder."""
    if options.verify:
        print("\n".join(verify(find_folder(options.artifact, revision=options.revision))))
        return 0
    artifact = CalibrationArtifact.from_pretrained(options.artifact, revision=options.revision)
    print(f"{describe(artifact)}\n\n{quality_table(artifact)}")
    return 0
