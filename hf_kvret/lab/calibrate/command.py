"""``hf-kvret calibrate METHOD`` and ``hf-kvret inspect``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.files import check_no_foreign_artifact
from hf_kvret.artifacts.hub import find_folder
from hf_kvret.lab.calibrate.command_options import METHODS, CalibrateOptions
from hf_kvret.lab.calibrate.inspection import describe, quality_table, verify
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.lab.calibrate.sources import (
    cut,
    dataset_loader,
    hub_text,
    needle_documents,
    random_uuids,
)
from hf_kvret.lab.calibrate.study import Corpus
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.lab.evaluate.texts import describe_file, read_text, token_ids
from hf_kvret.lab.program.arguments import DTYPES, check_device
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.program import add_command
from hf_kvret.lab.report import outputs
from hf_kvret.saved.identity import printable

_EXAMPLE = "--model MODEL --text novel.txt --out MODEL/"


def add_calibrate_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``calibrate`` with one sub-command a method, and ``inspect``, to the program."""
    parser = commands.add_parser(
        "calibrate",
        help="learn what a method must know about a model, and save or share it",
        description="Learn what a method must know about a model.",
    )
    methods = parser.add_subparsers(required=True, metavar="METHOD")
    for cls in METHODS:
        method = cls.Calibration.method
        add_command(
            methods,
            method,
            cls,
            run_calibrate,
            help=cls.summary,
            description=cls.description,
            examples=[f"hf-kvret calibrate {method} {_EXAMPLE}{method}"],
        )
    add_command(
        commands,
        "inspect",
        InspectOptions,
        run_inspect,
        help="say what a calibration artifact is, or check what was saved",
        description="Say what a calibration artifact is: method, model, data, sizes and quality. "
        "With --verify, check every byte of the cache and the artifact there; status 2 says that "
        "something is damaged.",
    )


@dataclass(frozen=True)
class InspectOptions:
    """The options of ``hf-kvret inspect``."""

    artifact: str = option(help="a folder or a hub id", name="artifact")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    verify: bool = option(False, "check what is saved there, byte by byte")


def run_calibrate(options: CalibrateOptions) -> int:
    """Calibrate as the command line says; print what was made."""
    calibration = options.calibration()
    outputs.check_folder("--out", options.out)
    check_no_foreign_artifact(options.out, calibration.method)
    check_sources(options)
    check_device(options.device)
    place = DTYPES[options.dtype], options.device, options.device_map
    subject = load_subject(options.model, *place)
    corpus = make_corpus(options, subject)
    artifact = calibrate(subject.model, corpus, calibration, options.out, name=options.name)
    print(f"\n{describe(artifact)}\n\n{quality_table(artifact)}")
    print(f"\nwrote {printable(str(options.out))}")
    return 0


def check_sources(options: CalibrateOptions) -> None:
    """Check the sources of text before the model is loaded.

    Raises:
        FileNotFoundError: no such ``--text``.
        ModuleNotFoundError: ``--dataset`` without ``datasets``.
        ValueError: no source or two; one, or UUIDs, for a model that makes its own documents.
    """
    if options.model == "needle":
        if options.text or options.dataset or options.uuid_tokens is not None:
            raise ValueError(
                "--model needle learns from documents of its own language: leave --text, "
                "--dataset and --uuid-tokens out"
            )
        return
    if bool(options.text) == bool(options.dataset):
        raise ValueError("give one of --text FILE and --dataset ID")
    if options.text:
        describe_file("--text", options.text)
    elif options.dataset:
        dataset_loader(options.dataset)


def make_corpus(options: CalibrateOptions, subject: Subject) -> Corpus:
    """The sequences of the command line, after ``check_sources``.

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
        if options.text:
            ids = token_ids(tokenizer, read_text(options.text))
            description["text"] = describe_file("--text", options.text)
        else:
            assert options.dataset is not None, "check_sources looked"
            ids = hub_text(options.dataset, count, tokenizer)
            description |= {
                "datasets": [options.dataset.partition(":")[0]],
                "dataset": options.dataset,
            }
        sequences = cut(ids, length, count, "--tokens")
        uuid_count = options.uuid_tokens
        if uuid_count is None:
            uuid_count = options.usual_uuid_tokens
        if uuid_count:
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
        path = find_folder(options.artifact, revision=options.revision)
        print("\n".join(verify(path)))
        return 0
    artifact = CalibrationArtifact.from_pretrained(options.artifact, revision=options.revision)
    print(f"{describe(artifact)}\n\n{quality_table(artifact)}")
    return 0
