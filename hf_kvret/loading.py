"""Start-up of the program ``hf-kvret`` while torch and transformers load, which takes seconds.

The package imports this module first. In the program it prints a notice to stderr, and Ctrl-C exits
with one line and no traceback. In any other program nothing happens.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# 128 plus the number of SIGINT, as in shells.
INTERRUPTED = 130
# What starts the program: its script, or ``python -m`` and one of the modules.
_SCRIPT, _MODULES = "hf-kvret", (["-m", "hf_kvret"], ["-m", "hf_kvret.cli"])


def loading_is_done() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    # Not an exception: imports of other packages might catch it. Not print: it may be what was
    # interrupted.
    os.write(2, f"\n{_SCRIPT}: interrupted\n".encode())
    os._exit(INTERRUPTED)


if Path(*sys.argv[:1]).name == _SCRIPT or sys.orig_argv[1:3] in _MODULES:
    print(f"{_SCRIPT}: loading ...", file=sys.stderr, flush=True)
    # Background jobs ignore SIGINT; leave that as it is.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
