"""``hf-kvret models``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import logging as transformers_logging

from hf_kvret.lab.coverage.record import Record, try_types
from hf_kvret.lab.coverage.scan import (
    ModelType,
    configured_type,
    default_type,
    scan,
    text_class,
    type_names,
)
from hf_kvret.lab.coverage.table import (
    details,
    lines,
    make_rows,
    markdown,
    stale_note,
    write_page,
)
from hf_kvret.lab.program.arguments import file_path
from hf_kvret.lab.program.help_text import HelpFormatter, example_lines
from hf_kvret.lab.program.hub_access import check_type, unknown_type
from hf_kvret.lab.program.options import add_options, option, read_options
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.saved.identity import printable


@dataclass(frozen=True)
class ModelsOptions:
    """The options of ``hf-kvret models``."""

    type: str | None = option(None, "one type with all that is known of it, by its default")
    json: bool = option(False, "print JSON instead")
    md: Path | None = option(
        None, "write the tables between the marks of this page", kind=file_path, metavar="FILE"
    )
    trials: Path | None = option(
        None,
        "decode with a small random model of each type that FILE lacks, or tried with another "
        "transformers or other code of hf_kvret, and keep the results there",
        kind=file_path,
        metavar="FILE",
        name="--try",
    )


def add_models_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``models`` to the program's commands."""
    parser = commands.add_parser(
        "models",
        help="list the types of models: served, and how that was tested, or refused, and why",
        description="List every type of transformers that generates text, by its default "
        "configuration: served, and how that was tested, or refused, and why.",
        epilog=example_lines(
            [
                "hf-kvret models --type gemma3",
                "hf-kvret models ./my-model",
                "hf-kvret models --try trials.json --md docs/models.md",
            ]
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", help="one model: a type, a folder with config.json, or a hub id"
    )
    add_options(parser, ModelsOptions)
    parser.set_defaults(
        run=lambda parsed: run_models(read_options(ModelsOptions, parsed), parsed.model)
    )


def run_models(options: ModelsOptions, model: str | None = None) -> int:
    """Print what is known of all types or of one; returns the exit status.

    Args:
        options: of the command line.
        model: a type, a folder with a configuration, or a hub id; None for what ``options`` say.

    Raises:
        ValueError: options that exclude each other, an unknown type, a page without a place for the
            tables, or a file of trials that can't go on.
        OSError: no such model, or the hub can't be reached.
    """
    if model and (options.type or options.trials):
        raise ValueError(f"{model!r} is one model: leave --type and --try out")
    if options.md and (model or options.type or options.json):
        raise ValueError("--md writes tables of all types: leave --type, --json and the model out")
    transformers_logging.set_verbosity_error()
    name = model or options.type
    types = scan() if name is None else [_find(name, anywhere=model is not None)]
    record = Record.read() if options.trials is None else _try(types, options.trials, bool(name))
    rows = make_rows(types, record)
    if name is None and (note := stale_note(rows, record)):
        print(note, file=sys.stderr)
    if options.md:
        write_page(options.md, markdown(rows, record))
        print(f"wrote {printable(str(options.md))}")
    elif options.json:
        entries = [row.as_dict() for row in rows]
        print(json.dumps(entries if name is None else entries[0], indent=1))
    elif name is None:
        print("\n".join(lines(rows, shutil.get_terminal_size().columns)))
    else:
        print(details(rows[0], record))
    return 0


def _find(name: str, *, anywhere: bool) -> ModelType:
    """A type of transformers; ``anywhere`` also what a folder or the hub has of that name."""
    if not anywhere or (name in CONFIG_MAPPING and not Path(name).exists()):
        if name in CONFIG_MAPPING and name not in type_names():
            with suppress(ValueError, TypeError, StrictDataclassError):
                one = configured_type(AutoConfig.for_model(name))
                # Why an encoder-decoder is refused, for instance.
                if not one.served:
                    return one
        return default_type(name)
    # A hub id is a name with at most an owner before it.
    is_path = name.startswith((".", "~", "/")) or name.endswith("/") or len(Path(name).parts) > 2
    if is_path and not Path(name).exists():
        raise FileNotFoundError(f"there is no folder {name!r}: give one with a config.json")
    check_type("MODEL", name)
    # A few old hub ids have no owner.
    if "/" not in name and not Path(name).exists() and not _is_cached(name):
        raise ValueError(f"{unknown_type(name)}; a hub id has an owner, as owner/name")
    try:
        config = AutoConfig.from_pretrained(name)
    except (StrictDataclassError, TypeError, KeyError, ArithmeticError) as error:
        raise ValueError(
            f"transformers can't read the configuration of {name!r} "
            f"({type(error).__name__}: {' '.join(str(error).split())}): correct its config.json"
        ) from error
    generates = config.model_type in type_names()
    return configured_type(config, partial(text_class, config.model_type) if generates else None)


def _is_cached(name: str) -> bool:
    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _try(types: list[ModelType], path: Path, again: bool) -> Record:
    """Try the types that are served, under a bar; ``again`` tries present trials too."""
    served = [each.name for each in types if each.served]
    bar = partial(tqdm, desc="trials", unit="type", disable=len(served) < 2)
    return try_types(served, path, again=again, report=tqdm.write, progress=bar)
