"""A page that shows which tokens of a document each word of an answer retrieved.

    pip install -c constraints.txt ".[app]" && python examples/app.py

It serves 127.0.0.1 alone and asks no other host for anything, but for a model of the hub that is
named and not there yet. See docs/app.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Read when huggingface_hub is imported.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

from app_parts.reading import CACHES, Limits
from app_parts.session import Choices, Desk
from app_parts.uploads import size_text

from hf_kvret.lab.evaluate.bundled import default_model
from hf_kvret.lab.evaluate.subject import load_subject
from hf_kvret.lab.program.arguments import (
    DTYPES,
    budget,
    check_device,
    device_name,
    length,
    whole_number,
)
from hf_kvret.options.config import byte_count

# Where Gradio keeps uploads, which its environment may say.
_HARMLESS = ("GRADIO_TEMP_DIR",)


def make_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description="Ask about a document, and see what each word of the answer retrieved."
    )
    add, limits = parser.add_argument, Limits()
    most = "most {} (default: {})".format
    add(
        "--model",
        default=default_model(),
        metavar="NAME_OR_PATH",
        help="needle, reference, a folder or a hub id (default: %(default)s)",
    )
    add("--dtype", choices=DTYPES, default="float32", help="of the model (default: %(default)s)")
    add("--device", type=device_name, default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--cache", choices=CACHES, default="paris", help="to begin with (default: %(default)s)")
    add("--top-k", type=_budget, default="64", help="tokens to retrieve, 64 or a share as 0.02")
    add("--port", type=whole_number(1, 65_535), help="default: the first free one from 7860 on")
    add(
        "--max-upload",
        type=_size,
        default=limits.upload,
        metavar="5MB",
        help=most("bytes of a document", size_text(limits.upload)),
    )
    add(
        "--max-tokens",
        type=length,
        default=limits.tokens,
        metavar="32K",
        help=most("tokens of a document", f"{limits.tokens:,}"),
    )
    add(
        "--new-tokens",
        type=length,
        default=limits.answer,
        metavar="32",
        help=most("tokens of an answer", limits.answer),
    )
    add(
        "--shelf",
        type=Path,
        metavar="DIR",
        help="a folder that keeps what was read (default: none)",
    )
    add("--plain", action="store_true", help="leave out the tokenizer's chat template")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C. Returns the exit status."""
    options = make_parser().parse_args(arguments)
    if importlib.util.find_spec("gradio") is None:
        print('the app needs gradio: pip install -c constraints.txt ".[app]"', file=sys.stderr)
        return 1
    limits = Limits(upload=options.max_upload, tokens=options.max_tokens, answer=options.new_tokens)
    try:
        check_device(options.device)
        subject = load_subject(options.model, DTYPES[options.dtype], options.device)
        choices = Choices(options.cache, options.top_k, limits, options.plain, options.shelf)
        desk = Desk(subject, choices)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    close_environment()
    # This takes seconds, and a mistake is named without it.
    from app_parts.server import serve

    try:
        serve(desk, options.port)
    except OSError as error:
        print(f"--port {options.port}: {error}", file=sys.stderr)
        return 1
    return 0


def close_environment() -> None:
    """Drop Gradio's settings and turn its analytics off, before Gradio is imported.

    They could serve folders, other machines, or pages of other sites, and some have no argument
    that overrides them: an empty ``allowed_paths`` falls back to ``GRADIO_ALLOWED_PATHS``.
    """
    for name in list(os.environ):
        if name.startswith("GRADIO_") and name not in _HARMLESS:
            del os.environ[name]
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"


def _budget(text: str) -> str:
    budget(text)
    return text


def _size(text: str) -> int:
    try:
        return byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
