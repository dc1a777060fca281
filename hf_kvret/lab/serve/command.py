"""``hf-kvret serve``: transformers' server, which answers with a retrieval cache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers.utils.import_utils import is_serve_available

from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.program.help_text import HelpFormatter, example_lines
from hf_kvret.shelf import Shelf

_PAGED = "--continuous-batching"


def add_serve_parser(commands: Any) -> None:
    """Add ``serve`` to the program's commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API, with a retrieval cache",
        description="Run `transformers serve` with a retrieval cache for every request. What "
        "follows the model is for transformers, see `transformers serve --help`. A request's own "
        "generation_config may name another cache and set its budget.",
        epilog=example_lines(
            ["hf-kvret serve --method paris:top_k=512 --shelf shelf MODEL --port 8000"]
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--method",
        help="of requests that name no cache, and its options after colons; the one that the "
        "model's generation config names unless given, else paris",
    )
    parser.add_argument(
        "--shelf",
        type=Path,
        metavar="DIR",
        help="keep prompts there, so that what requests have in common is read once",
    )
    parser.add_argument("--max-size", default="200GB", help="of the shelf (default: %(default)s)")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="MODEL ...",
        help="a folder or a hub id, and more for transformers",
    )
    parser.set_defaults(
        run=lambda parsed: run_serve(parsed.arguments, parsed.method, parsed.shelf, parsed.max_size)
    )


def run_serve(
    arguments: Sequence[str],
    method: str | None = None,
    shelf: Path | None = None,
    max_size: str = "200GB",
) -> int:
    """Serve until the process is ended; returns 0.

    Args:
        arguments: of `transformers serve`.
        method: of requests that name no cache, with options after colons; None: that of the
            model's generation config, else paris.
        shelf: folder for prompts, or None.
        max_size: of the shelf.

    Raises:
        ModuleNotFoundError: the packages of a server are missing.
        ValueError: no cache of ours, or paged attention, which has a cache of its own.
    """
    if not is_serve_available():
        raise ModuleNotFoundError("serve needs a server: pip install 'transformers[serving]'")
    if _PAGED in arguments:
        raise ValueError(
            f"{_PAGED}: paged attention has a cache of its own, and nothing would be retrieved; "
            "leave it out, or use `transformers serve`"
        )
    choice = choose_cache(method or "paris")
    if choice.options is None:
        raise ValueError(
            f"--method {method}: name a cache of hf-kvret, or use `transformers serve`"
        )
    # They import fastapi, which is no requirement of the program.
    import typer
    from transformers.cli.serve import Serve

    from hf_kvret.lab.serve.requests import ServedCache, answering_with

    usual = asdict(type(choice.options)())
    options = {name: x for name, x in asdict(choice.options).items() if x != usual[name]}
    place = None if shelf is None else Shelf(shelf, max_size)
    served = ServedCache(choice.method, options, place, yields=method is None)
    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    with answering_with(served):
        app(args=list(arguments), prog_name="hf-kvret serve", standalone_mode=False)
    return 0
