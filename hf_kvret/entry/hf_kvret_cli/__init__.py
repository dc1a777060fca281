"""The program ``hf-kvret`` as far as it needs no torch: its help, and words that are no command.

A package of its own, because whoever imports one below ``hf_kvret`` imports torch and transformers
first, which takes seconds. ``tests/test_cli.py`` holds what it prints to the whole parser's.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# 128 plus the number of SIGINT, as in shells.
_INTERRUPTED = 130

_DESCRIPTION = (
    "Caches for Hugging Face transformers that look up the tokens a query attends to: a demo, a "
    "choice for your text, tasks and benchmarks, and calibration."
)
_VERSION = "show the versions of hf-kvret, torch and transformers, and the CPU kernels"
_COMMANDS = {
    "demo": "ask questions about a long document, with the bundled model",
    "selftest": "check that kernels, stores and methods compute here what they should",
    "read": "read a document once and keep it on a shelf",
    "ask": "ask a question to a document on a shelf",
    "shelf": "list, check or remove what is on a shelf",
    "serve": "serve a model over an OpenAI-compatible API, with a retrieval cache",
    "tune": "find the cheapest cache that agrees with full attention on your text",
    "eval": "measure caches on tasks: answers, perplexity, agreement with full attention",
    "bench": "measure the time of caches on models of true shape with random weights",
    "calibrate": "learn what a method must know about a model, and save or share it",
    "inspect": "say what a calibration artifact is, or check what was saved",
    "models": "say which models are served, and why others are refused",
    "fits": "what each cache would hold where, and whether it fits; loads nothing",
}


def main() -> int:
    """Run the command of ``sys.argv``; returns the exit status."""
    words = sys.argv[1:]
    first = words[0] if words else ""
    asks_version = len(first) > 2 and "--version".startswith(first)
    if first not in _COMMANDS and not asks_version:
        # Prints help or an error, and ends the program.
        make_parser().parse_args(words)
    print("hf-kvret: loading ...", file=sys.stderr, flush=True)
    with _one_line_at_ctrl_c():
        from hf_kvret.cli import main as run
    return run()


@contextmanager
def _one_line_at_ctrl_c() -> Iterator[None]:
    """Ctrl-C in the body ends the program with one line, not with a trace through torch."""
    usual = signal.getsignal(signal.SIGINT)
    # Background jobs ignore SIGINT, which stays as it is.
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _leave(*_: object) -> None:
    # It raises nothing, as imports of other packages might catch that, and it does not print, as a
    # print may be what was interrupted.
    os.write(2, b"\nhf-kvret: interrupted\n")
    os._exit(_INTERRUPTED)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the program with the names of its commands alone."""
    parser = argparse.ArgumentParser(prog="hf-kvret", description=_DESCRIPTION)
    parser.add_argument("--version", action="store_true", help=_VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in _COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser
