"""``hf-kvret serve``: transformers' server, which answers with a retrieval cache."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.utils.import_utils import is_accelerate_available, is_serve_available

from hf_kvret.contracts.signals import SIGNALS_WAIT
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.program.arguments import whole_number
from hf_kvret.lab.program.options import add_options, option, read_options
from hf_kvret.lab.program.program import example_lines
from hf_kvret.shelf import Shelf
from hf_kvret.stores.memory import check_folder

_OURS = ("--method", "--shelf", "--max-size", "--max-prompt")
_REFUSED = {
    "--continuous-batching": "paged attention has a cache of its own, and nothing is retrieved",
    "--compile": "it would use transformers' static cache",
    "--non-blocking": "the server would go on without the cache",
}


@dataclass(frozen=True)
class ServeOptions:
    """The options of ``hf-kvret serve`` that are ours."""

    method: str = option("paris", "of all requests, and its options after colons")
    shelf: Path | None = option(
        None,
        "keep prompts there, so that what requests have in common is read once",
        kind=Path,
        metavar="DIR",
    )
    max_size: str | None = option(
        None, "of the shelf (default: half of what its disk has for it)", metavar="SIZE"
    )
    max_prompt: int | None = option(
        None,
        "tokens; a longer prompt is refused (default, and at most: the model's positions)",
        kind=whole_number(1),
        metavar="N",
    )


def add_serve_parser(commands: Any) -> None:
    """Add ``serve`` to the program's commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API, with a retrieval cache",
        description="Run `transformers serve` with a retrieval cache for every request. What "
        "follows the model is for transformers, see `transformers serve --help`. A request's own "
        "generation_config may set the budget.",
        epilog=example_lines(
            ["hf-kvret serve --method paris:top_k=512 --shelf shelf MODEL --port 8000"]
        ),
    )
    add_options(parser, ServeOptions)
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="MODEL ...",
        help="a folder or a hub id, and more for transformers",
    )
    parser.set_defaults(
        run=lambda parsed: run_serve(parsed.arguments, read_options(ServeOptions, parsed))
    )


def run_serve(arguments: Sequence[str], options: ServeOptions) -> int:
    """Serve until the process is ended; returns the exit status.

    Args:
        arguments: of `transformers serve`.
        options: ours.

    Raises:
        ModuleNotFoundError: the packages of a server are missing.
        ValueError: no model, no cache of ours, or an option that would leave it unused.
    """
    words = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not is_serve_available() or not is_accelerate_available():
        raise ModuleNotFoundError("serve needs a server: pip install 'transformers[serving]'")
    if not words or words[0].startswith("-"):
        raise ValueError("name the model: hf-kvret serve [our options] MODEL [transformers' own]")
    for word in words[1:]:
        name = word.partition("=")[0]
        if name in _OURS:
            raise ValueError(f"{name} is hf-kvret's: put it in front of {words[0]}")
        if name in _REFUSED:
            raise ValueError(f"{name}: {_REFUSED[name]}; leave it out, or use `transformers serve`")
    choice = choose_cache(options.method)
    if choice.options is None:
        raise ValueError(
            f"--method {options.method}: name a cache of hf-kvret, or use `transformers serve`"
        )
    if choice.options.disk is not None:
        check_folder(choice.options.disk)
    # They import fastapi, which is no requirement of the program.
    import typer
    from transformers.cli.serve import Serve

    from hf_kvret.commands.serve_requests import ServedCache, answering_with

    defaults = asdict(type(choice.options)())
    values = asdict(choice.options)
    chosen = {name: value for name, value in values.items() if value != defaults[name]}
    place: Shelf | str | None = None
    if options.shelf is not None:
        shelf = Shelf(options.shelf, options.max_size)
        shelf.check_writable()
        place = str(options.shelf) if options.max_size is None else shelf
    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    cache = ServedCache(choice.method, chosen, place)
    SIGNALS_WAIT.last = 0
    with answering_with(cache, options.max_prompt):
        try:
            app(args=words, prog_name="hf-kvret serve MODEL")
        except SystemExit as end:
            # It ends so whatever happens, also with help and wrong options.
            if end.code == 128 + signal.SIGINT:
                raise KeyboardInterrupt(SIGNALS_WAIT.last or signal.SIGINT) from None
            return int(end.code or 0)
    return 0
