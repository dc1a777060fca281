"""What the program ``hf-kvret`` does while torch and transformers load, which takes seconds.

The package imports this before them. Only in that program, it says on stderr to wait, and Ctrl-C
ends it in one line. In any other program nothing happens.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# 128 and the number of SIGINT, as shells have it.
INTERRUPTED = 130
# What starts the program: its script, or ``python -m`` and one of the modules.
_SCRIPT, _MODULES = "hf-kvret", (["-m", "hf_kvret"], ["-m", "hf_kvret.cli"])


def loading_is_done() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    # Other packages' imports may catch what is raised, and print may be what was interrupted.
    os.write(2, f"\n{_SCRIPT}: interrupted\n".encode())
    os._exit(INTERRUPTED)


if Path(*sys.argv[:1]).name == _SCRIPT or sys.orig_argv[1:3] in _MODULES:
    print(f"{_SCRIPT}: loading ...", file=sys.stderr, flush=True)
    # Jobs in the background ignore Ctrl-C; that stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
