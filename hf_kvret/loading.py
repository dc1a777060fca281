"""Tells the user of the program ``hf-kvret`` to wait: torch and transformers load for seconds.

The package imports this before them. In any other program it says nothing.
"""

import sys
from pathlib import Path

# What starts the program: its script, or ``python -m hf_kvret.cli``.
_SCRIPT, _MODULE = "hf-kvret", ["-m", "hf_kvret.cli"]

if Path(*sys.argv[:1]).name == _SCRIPT or sys.orig_argv[1:3] == _MODULE:
    print(f"{_SCRIPT}: loading ...", file=sys.stderr, flush=True)
