"""How a program runs: a user's mistake prints one line, not a trace, and so does a signal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

import torch
from safetensors import SafetensorError

from hf_kvret.artifacts.hub import CLIENT_ERROR
from hf_kvret.contracts.signals import interruptible
from hf_kvret.lab.program.progress import only_our_bars
from hf_kvret.saved.identity import printable

# Of a batch queue's limit, docker stop, a shutdown, a terminal that is closed.
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
# A user, a file or the machine can be the cause of these; anything else is our own bug.
_MISTAKES = (
    ValueError,
    TypeError,
    OSError,
    ModuleNotFoundError,
    RecursionError,
    SafetensorError,
    MemoryError,
    torch.OutOfMemoryError,
)


class Parser(argparse.ArgumentParser):
    """A parser whose commands name their own usage where an option is unknown.

    argparse hands what a command doesn't know to the program, whose usage then says nothing of the
    options of that command. Sub-commands get this class from the parser they are added to.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, but an unknown argument ends the program: the list is empty."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def run_program(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    kept: Callable[[argparse.Namespace], str],
) -> int:
    """Parse and call ``run`` of what was parsed; returns the exit status, 2 for a mistake.

    Ctrl-C on the command line gives status 130, and SIGTERM and SIGHUP do the same with theirs.
    Callers who pass ``arguments`` get the KeyboardInterrupt, which may be meant for them.

    Args:
        parser: sets ``run``, a function of what was parsed.
        arguments: None for those of the command line.
        kept: what an interrupted command leaves, as the end of a sentence.
    """
    options = parser.parse_args(arguments)
    try:
        with interruptible(*_SIGNALS), only_our_bars():
            return options.run(options)
    except KeyboardInterrupt as interrupt:
        if arguments is not None:
            raise
        # A progress bar may have left the cursor in the middle of a line.
        print(f"\n{parser.prog}: interrupted{kept(options)}", file=sys.stderr)
        # As in shells.
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except (*_MISTAKES, CLIENT_ERROR) as error:
        reason = printable(" ".join(str(error).split())) or type(error).__name__
        print(f"{parser.prog}: error: {reason}", file=sys.stderr)
        return 2


def kept_results(options: argparse.Namespace) -> str:
    """Says whether an interrupted measurement can go on; see ``run_program``."""
    if options.json:
        return ": the same command goes on where it stopped"
    return ", and nothing is kept: with --json FILE the same command goes on"
