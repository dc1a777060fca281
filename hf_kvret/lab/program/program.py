"""How a program reads its words, shows its help and runs: a mistake or a signal prints one line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError

from hf_kvret.artifacts.files import CLIENT_ERROR
from hf_kvret.contracts.signals import interruptible
from hf_kvret.lab.program.options import add_options, read_options
from hf_kvret.lab.program.progress import only_our_bars
from hf_kvret.saved.identity import printable

# Of a batch queue's limit, docker stop, a shutdown, a terminal that is closed.
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
# A user, a file or the machine can be the cause of these; anything else is our own bug.
_MISTAKES = (
    *(ValueError, TypeError, OSError, RecursionError),
    # Packages for opponents, pictures or artifacts may be missing.
    *(ImportError, SafetensorError, MemoryError, torch.OutOfMemoryError),
)
# Multiples of these are written with a K and with GB, as they are on the command line.
_K, _GB = 1024, 10**9


class HelpFormatter(argparse.HelpFormatter):
    """Adds the default to the help of every option that has one.

    An option whose help says "default" is left as it is, and so are switches. A text of several
    lines is not wrapped.
    """

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        has_none = action.nargs == 0 or not action.option_strings or "default" in text
        if has_none or default in (None, argparse.SUPPRESS):
            return text
        return f"{text} (default: {shown_default(default).replace('%', '%%')})"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)


def shown_default(value: Any) -> str:
    """A default as one would type it: ``4K,16K``, ``0.1``, ``cpu``."""
    if isinstance(value, list | tuple):
        return ",".join(
            f"{one:g}" if isinstance(one, float) else shown_default(one) for one in value
        )
    if isinstance(value, int) and value >= 2 * _K and value % _K == 0:
        return f"{value // _K}K" if value % _GB else f"{value // _GB}GB"
    if isinstance(value, float):
        # A share of 1.0 is all, a count of 1 is one.
        return "1.0" if value == 1 else f"{value:g}"
    return str(value).strip()


def example_lines(examples: Sequence[str]) -> str:
    """An epilog with commands to copy, one a line."""
    return "\n  ".join(["examples:", *examples])


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    cls: type[Any],
    run: Callable[[Any], int],
    *,
    help: str,
    examples: Sequence[str] = (),
) -> None:
    """Add a command: its options are those of the dataclass ``cls``, which ``run`` is given.

    The docstring of ``cls`` is the text of the command's own help.
    """
    text, epilog = one_line(cls.__doc__), example_lines(examples) if examples else None
    parser = commands.add_parser(name, help=help, description=text, epilog=epilog)
    add_options(parser, cls)
    parser.set_defaults(run=lambda parsed: run(read_options(cls, parsed)))


def one_line(text: str | None) -> str:
    """A text without line breaks and blanks at their sides."""
    return " ".join((text or "").split())


class Parser(argparse.ArgumentParser):
    """A parser whose help shows defaults, and whose commands name their own usage in an error.

    argparse hands what a command doesn't know to the program, whose usage then says nothing of the
    options of that command. Sub-commands get this class from the parser they are added to.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, but an unknown argument ends the program: the list is empty."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def run_program(
    make_parser: Callable[[], argparse.ArgumentParser],
    arguments: Sequence[str] | None,
    kept: Callable[[argparse.Namespace], str],
    name: str = "hf-kvret",
) -> int:
    """Parse and call ``run`` of what was parsed; returns the exit status, 2 for a mistake.

    Ctrl-C on the command line gives status 130, and SIGTERM and SIGHUP do the same with theirs.
    Callers who pass ``arguments`` get the KeyboardInterrupt, which may be meant for them.

    Args:
        make_parser: its result sets ``run``, a function of what was parsed.
        arguments: None for those of the command line.
        kept: what an interrupted command leaves, as the end of a sentence, by what was parsed.
        name: the program's, before its parser is made.
    """
    hint = ""
    try:
        with interruptible(*_SIGNALS):
            parser = make_parser()
            name, options = parser.prog, parser.parse_args(arguments)
            hint = kept(options)
            with only_our_bars():
                return options.run(options)
    except KeyboardInterrupt as interrupt:
        if arguments is not None:
            raise
        # A progress bar may have left the cursor in the middle of a line.
        print(f"\n{name}: interrupted{hint}", file=sys.stderr)
        # As in shells.
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except (*_MISTAKES, CLIENT_ERROR) as error:
        reason = printable(" ".join(str(error).split())) or type(error).__name__
        print(f"{name}: error: {reason}", file=sys.stderr)
        return 2


def kept_results(options: argparse.Namespace) -> str:
    """Says whether an interrupted measurement can go on; see ``run_program``."""
    if options.json:
        return ": the same command goes on where it stopped"
    return ", and nothing is kept: with --json FILE the same command goes on"
